"""Predictions: by hand where they can be, and on real ranks that they are made at all."""

import pytest

import microparallel as mp
from microparallel.bench.calibration import Curve, MessageTimes, RankTimes
from microparallel.bench.pipeline_costs import StageTimes
from microparallel.bench.predict import Prediction, bench_predictions, predict_ddp, predict_naive, predict_pipeline
from microparallel.bench.settings import PREDICTED, PredictSettings
from microparallel.errors import RankFailed
from microparallel.schedules import build
from microparallel.simulator import Costs, simulate
from microparallel.trace.parts import parts


def flat(seconds):
    return Curve(((8, seconds), (1000, seconds)))


# Two parameters, the second of which gets its gradient first.
WORK = RankTimes(forward=2, arrivals=(4, 2), backward=5, packing=0, optimizer=1)
SIZES = [600, 400]


def messages(in_place=1.0, queued=1.0, message=0.0):
    return MessageTimes(flat(in_place), flat(queued), flat(message))


def test_a_curve_is_a_line_between_what_was_measured():
    curve = Curve(((100, 1.0), (200, 3.0), (400, 4.0)))
    assert [curve.at(size) for size in (0, 100, 150, 200, 300, 400, 600)] == [1, 1, 2, 3, 3.5, 4, 5]
    assert Curve(((100, 1.0),)).at(10**9) == 1


def sizes(fitted):
    return [size for _, size in fitted.collectives.values()]


def test_naive_takes_all_of_it_one_after_another():
    """Forward, backward, the small message, two all-reduces, the optimizer."""
    assert predict_naive([WORK, WORK], SIZES, messages(0.5, 2)).makespan == pytest.approx(2 + 5 + 0.5 + 2 * 2 + 1)


def test_naive_waits_for_the_slower_rank():
    slow = RankTimes(forward=4, arrivals=(4, 2), backward=5, packing=0, optimizer=1)
    assert predict_naive([WORK, slow], SIZES, messages(0.5, 2)).makespan == pytest.approx(4 + 5 + 0.5 + 2 * 2 + 1)


def test_ddp_hides_what_backward_leaves_time_for():
    buckets = [[1], [0]]
    hidden = predict_ddp([WORK, WORK], buckets, SIZES, messages(1.5), overlap=True)
    # the first bucket leaves at 2 of the backward; the second at 4, and ends at 5.5
    assert hidden.makespan == pytest.approx(2 + 5.5 + 1)
    between = predict_ddp([WORK, WORK], buckets, SIZES, messages(1.5), overlap=False)
    assert between.makespan == pytest.approx(2 + 5 + 2 * 1.5 + 1)
    together = predict_ddp([WORK, WORK], [[1, 0]], SIZES, messages(1.5), overlap=True)
    assert together.makespan == pytest.approx(2 + 5.5 + 1) and sizes(together) == [1000]


def test_packing_gradients_counts():
    packed = RankTimes(forward=2, arrivals=(4, 2), backward=5, packing=1, optimizer=1)
    buckets = [[1], [0]]
    assert predict_ddp([packed] * 2, buckets, SIZES, messages(0), overlap=False).makespan == pytest.approx(
        2 + 5 + 1 + 1
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("message", [0.0, 0.25])
def test_a_pipeline_is_its_program_with_the_times_of_its_stages(schedule, message):
    stages = StageTimes((0, 1), (1.0, 2.0), (2.0, 3.0), (1.0, 1.5), (1.0, 1.5))
    program = build(schedule, 2, 4)
    costs = Costs(forward=(1, 2), backward_input=(1, 1.5), backward_weight=(1, 1.5), latency=message)
    found = predict_pipeline(program, stages, 1000, messages(message=message))
    assert found.makespan == pytest.approx(simulate(program, costs).makespan)


def test_a_prediction_is_a_trace_with_the_parts_that_were_predicted():
    fitted = predict_ddp([WORK, WORK], [[1], [0]], SIZES, messages(1.5), overlap=True)
    prediction = Prediction("ddp", fitted.makespan, (8.0, 9.0, 10.0), fitted)
    assert prediction.median == 9 and prediction.error == pytest.approx(8.5 / 9 - 1)
    trace = prediction.trace
    assert [event.kind for event in trace.by_rank[0] if event.duration] == [
        *("forward", "backward", "collective", "backward", "backward", "collective", "optimizer")
    ]
    assert trace.simulated and trace.bytes_sent == [1000, 1000]  # a ring of two sends each byte once
    for one in parts(trace):
        assert (one.forward, one.backward, one.optimizer) == (2, 5, 1)
        assert one.communicating == pytest.approx(0.5) and one.hidden == pytest.approx(2.5)
    program = build("1f1b", 2, 2)
    pipeline = predict_pipeline(program, StageTimes((0, 1), (1, 1), (2, 2), (1, 1), (1, 1)), 8, messages())
    names = {event.name for event in Prediction("1f1b", 1, (1,), pipeline).trace.events}
    assert {"F0.0", "B1.1", ">A0.0@1", "<A0.0@0"} <= names


SMALL = PredictSettings(methods=PREDICTED, depth=4, width=8, batch=8, microbatches=4, bucket_cap_mb=0.0002, steps=2)


def bench(comms, settings):
    told = []
    return bench_predictions(comms, settings, lambda *news: told.append(news)), told


def test_all_methods_are_predicted_and_measured_alike_on_all_ranks(any_pool):
    (first, told), (other, _) = any_pool.run(bench, 2, SMALL)
    assert first == other
    assert tuple(row.method for row in first.rows) == PREDICTED
    for row in first.rows:
        assert row.seconds > 0 and len(row.measured) == 2 and row.error > -1
        assert row.trace.ranks == 2 and row.trace.events
    assert len(first.work) == 2 and len(first.work[0].arrivals) == 8
    assert told[0][0] == 0 and told[-1][0] == 1
    ddp = first.rows[1].fitted
    assert len(sizes(ddp)) > 1 and sum(sizes(ddp)) == sum(
        parameter.nbytes for parameter in mp.models.FullMLP(8, 4, out_features=8).parameters()
    )


def test_a_gpt_is_predicted_too(pool):
    settings = PredictSettings(
        methods=("ddp", "1f1b"), model="gpt", depth=1, width=32, batch=4, microbatches=2, steps=1
    )
    found, _ = pool.run(bench, 2, settings)[0]
    assert all(row.seconds > 0 for row in found.rows)


def test_one_rank_is_refused(pool):
    with pytest.raises(RankFailed, match="at least 2"):
        pool.run(bench, 1, SMALL)
