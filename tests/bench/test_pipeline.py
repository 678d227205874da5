"""A small benchmark of pipelines on real ranks, and what is made of its numbers."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from microparallel.bench.engine import transport_of
from microparallel.bench.pipeline import (
    TORCH_SCHEDULES,
    Apart,
    Measurements,
    Method,
    OurPipeline,
    Timing,
    TorchPipeline,
    TracedSteps,
    bench_pipelines,
)
from microparallel.bench.pipeline_costs import SavedBytes, StagesAlone, StageTimes, kinds_in
from microparallel.bench.pipeline_report import report_on
from microparallel.bench.settings import PipelineSettings
from microparallel.errors import UsageError
from microparallel.schedules import PIPELINES, build
from microparallel.simulator import simulate
from microparallel.trace.parts import Shares

SMALL = PipelineSettings(depth=4, width=8, batch=8, microbatches=4, steps=2)


def bench(comms, settings):
    told = []
    measurements = bench_pipelines(comms, settings, lambda *news: told.append(news))
    return transport_of(comms), measurements, told


def test_every_schedule_is_measured_on_all_ranks_alike_beside_torch_s_own(any_pool):
    (transport, first, told), other = any_pool.run(bench, 2, SMALL)
    assert other[:2] == (transport, first)
    on_a_gpu = transport == "cuda"
    assert first.wrong is None and set(first.refused) <= ({"zbv", "dualpipev"} if on_a_gpu else set())
    device = "cuda" if on_a_gpu else "cpu"
    assert (first.ranks, first.transport, first.device, first.microbatches) == (2, transport, device, 4)
    timings = {timing.method: timing for timing in first.timings}
    torchs = [name for name in TORCH_SCHEDULES if name not in first.refused]
    expected = [Method(name) for name in PIPELINES] + [Method(name, by_torch=True) for name in torchs]
    expected += [Method("gpipe", again=True), Method("gpipe", by_torch=True, again=True)] if on_a_gpu else []
    assert list(timings) == expected
    assert all(len(timing.seconds) == 2 and min(timing.seconds) > 0 for timing in first.timings)
    assert all(max(timing.apart.loss, timing.apart.gradient) < 1e-5 for timing in first.timings)
    assert told == [(0.0, "mlp", 0), (0.5, "mlp", 1), (1.0, "mlp", 2)]
    for name, seen in first.traced.items():
        assert seen.activations == seen.activations_of_program, name
        assert 0 < seen.bubble < 1
        assert all(one.computing + one.communicating + one.waiting == pytest.approx(1) for one in seen.shares)
    microbatch = 3 * 2 * 8 * 4  # bytes that stage 0 saves: what enters it and two results, of two samples
    saved = {name: timings[Method(name)].saved_bytes[0] for name in ("naive", "gpipe", "1f1b", "zb-h1")}
    assert saved == {"naive": microbatch, "gpipe": 4 * microbatch, "1f1b": 2 * microbatch, "zb-h1": 2 * microbatch}
    assert timings[Method("gpipe", by_torch=True)].saved_bytes == timings[Method("gpipe")].saved_bytes


def test_in_bfloat16_results_are_compared_without_rounding(pool):
    settings = dataclasses.replace(SMALL, schedules=("gpipe", "1f1b"), dtype="bfloat16", steps=1)
    _, measurements, _ = pool.run(bench, 2, settings)[0]
    assert measurements.wrong is None and measurements.dtype_of_model == "bfloat16"
    assert set(measurements.in_float64) == {"gpipe", "1f1b", "torch's ScheduleGPipe", "torch's Schedule1F1B"}
    assert all(timing.apart.gradient < 1e-12 for timing in measurements.timings)
    assert any("elsewhere in bfloat16" in note for note in report_on(measurements).notes)


def test_what_is_measured_of_the_stages_is_what_the_schedules_do(pool):
    settings = dataclasses.replace(SMALL, schedules=("naive", "1f1b", "zb-h1", "dualpipev"), with_torch=False)
    _, measurements, _ = pool.run(bench, 2, settings)[0]
    times = {name: seen.stage_times for name, seen in measurements.traced.items()}
    assert [timing.method.by_torch for timing in measurements.timings] == [False] * 4
    assert times["1f1b"] == times["zb-h1"] != times["naive"]  # there, ranks compute one after another
    assert times["1f1b"].homes == (0, 1) and times["dualpipev"].homes == (0, 1, 1, 0)
    for one in times["1f1b"], times["dualpipev"]:
        assert min(one.forward + one.backward + one.backward_input + one.backward_weight) > 0
    assert min(times["naive"].backward) > 0 and times["naive"].backward_input == (0, 0)


def test_a_gpt_and_an_uneven_batch_on_three_ranks(pool):
    size = {"model": "gpt", "depth": 1, "width": 32, "batch": 5}
    settings = dataclasses.replace(SMALL, **size, schedules=("gpipe", "1f1b", "naive"), microbatches=3, steps=1)
    _, measurements, _ = pool.run(bench, 3, settings)[0]
    assert measurements.wrong is None
    assert [timing.method.label for timing in measurements.timings] == ["gpipe", "1f1b", "naive"]
    assert set(measurements.refused) == {"gpipe", "1f1b"}  # torch takes micro-batches of one size
    assert "of one size" in report_on(measurements).notes[0]


def test_what_torch_refuses_is_left_out_with_its_reason(pool):
    settings = dataclasses.replace(SMALL, schedules=("zbv", "dualpipev"), microbatches=2, steps=1)
    _, measurements, _ = pool.run(bench, 2, settings)[0]
    assert [timing.method.label for timing in measurements.timings] == [
        "zbv", "dualpipev", "torch's ScheduleZBVZeroBubble"]  # fmt: skip
    assert "at least as many microbatches" in measurements.refused["dualpipev"]
    rows = {row.label: row for row in report_on(measurements).rows}
    assert rows["dualpipev"].ratio_to_torch is None and rows["zbv"].ratio_to_torch > 0


def test_a_single_rank_sends_nothing(pool):
    [(_, measurements, _)] = pool.run(bench, 1, dataclasses.replace(SMALL, schedules=("1f1b", "zbv")))
    assert measurements.wrong is None and len(measurements.timings) == 4


def groups_of_torch_s_own(comms):
    backends = []

    class Spy(pipelining.PipelineStage):
        def __init__(self, *arguments, group):
            backends.append(dist.get_backend(group))
            super().__init__(*arguments, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelining, "PipelineStage", Spy)
        bench_pipelines(comms, dataclasses.replace(SMALL, schedules=("1f1b",), steps=1))
    return backends


def test_torch_s_own_runs_on_gloo_beside_ours(warm_ranks):
    assert warm_ranks.run(groups_of_torch_s_own, 2, transport="shm") == [["gloo"], ["gloo"]]


# ── order ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def order_of_steps(comms):
    stepped = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (OurPipeline, TorchPipeline, StagesAlone):

            def step(self, honest=kind.step):
                stepped.append(type(self).__name__)
                honest(self)

            patch.setattr(kind, "step", step)
        bench_pipelines(comms, dataclasses.replace(SMALL, schedules=("1f1b",), steps=1))
    return stepped


def test_schedules_take_turns_and_each_round_begins_with_another(pool):
    rounds = [
        ["OurPipeline", "TorchPipeline", "StagesAlone"],
        ["TorchPipeline", "StagesAlone", "OurPipeline"],
        ["StagesAlone", "OurPipeline", "TorchPipeline"],
    ]
    expected = [name for names in rounds for name in names for _ in range(2)]  # a step that does not count goes before
    memory = ["OurPipeline", "TorchPipeline"]
    assert pool.run(order_of_steps, 2)[0] == expected + memory


# ── wrong results ───────────────────────────────────────────────────────────────────────────────────────────────────


def bench_with_a_fault(comms, fault):
    """Let one schedule do something wrong."""

    def spoil(ours):
        if fault == "loss":
            ours._loss = 2 * ours._loss
        elif "layers.2.bias" in ours.parameters:
            gradient = ours.parameters["layers.2.bias"].grad
            gradient.mul_({"twice": 2, "left out": 0, "nan": torch.nan}[fault])

    def with_a_fault(honest):
        def step(self):
            result = honest(self)
            if self.method.schedule == "zb-h1":
                spoil(self)
            return result

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in ("step", "traced_step"):
            patch.setattr(OurPipeline, name, with_a_fault(getattr(OurPipeline, name)))
        return bench_pipelines(comms, dataclasses.replace(SMALL, schedules=("1f1b", "zb-h1"), steps=1))


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("twice", "the gradient of layers.2.bias is 1 of its size from"),
        ("left out", "the gradient of layers.2.bias is 1 of its size from"),
        ("nan", "the gradient of layers.2.bias is inf"),
        ("loss", "its loss is 1 of its size from"),
    ],
)
def test_a_wrong_result_names_schedule_and_parameter(pool, fault, problem):
    first, second = pool.run(bench_with_a_fault, 2, fault)
    assert first == second
    assert first.wrong.method == "zb-h1" and first.wrong.problem.startswith(f"computed something wrong: {problem}")


def with_little_memory(comms):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("microparallel.bench.engine.available_memory", lambda: 10_000)
        with pytest.raises(UsageError, match=r"8 schedules .* fewer --schedules"):
            bench_pipelines(comms, SMALL)


def test_models_that_do_not_fit_into_memory_are_refused(pool):
    pool.run(with_little_memory, 2)


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_saved_for_backward_counts_until_it_is_freed():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    tensor = 8 * 4 * 4
    with SavedBytes(model.parameters()) as saved:
        for _ in range(2):
            model(torch.randn(8, 4)).sum().backward()
        assert saved.most == 3 * tensor  # the input, and each ReLU's result, which the layer after it saves too
        outputs = [model(torch.randn(8, 4)) for _ in range(2)]
        assert saved.most == 6 * tensor
        del outputs
        model(torch.randn(8, 4))
    assert saved.most == 6 * tensor and saved._now == 0


# ── reports ─────────────────────────────────────────────────────────────────────────────────────────────────────────

TIMES = StageTimes((0, 1), (0.010, 0.010), (0.020, 0.020), (0.0, 0.009), (0.020, 0.012))


def measurements(**changes):
    medians = {Method("1f1b"): 0.160, Method("zb-h1"): 0.155, Method("1f1b", by_torch=True): 0.200}
    timings = [
        Timing(method, tuple(factor * seconds for factor in (1.2, 0.5, 1, 0.9, 3)), (300, 400), Apart(0, 1e-7, "a"))
        for method, seconds in medians.items()
    ]
    shares = (Shares(0.8, 0.1, 0.1), Shares(0.7, 0.2, 0.1))
    traced = {name: TracedSteps(0.3, shares, (2, 1), (2, 1), TIMES) for name in ("1f1b", "zb-h1")}
    given = Measurements(2, 2, 2, "shm", "cpu", "mlp", "4 layers", 4, tuple(timings), traced, {})
    return dataclasses.replace(given, **changes)


def test_the_report_works_everything_out():
    report = report_on(measurements())
    assert [row.label for row in report.rows] == ["1f1b", "torch's Schedule1F1B", "zb-h1"]
    ours, torchs, split = report.rows
    assert (ours.seconds, ours.fastest, ours.slowest) == pytest.approx((0.160, 0.080, 0.480))
    assert (ours.lower_quartile, ours.upper_quartile) == pytest.approx((0.144, 0.192))
    assert ours.ideal_seconds == pytest.approx((4 + 2 - 1) * 0.030)  # one micro-batch after another, and the ramp
    assert ours.ratio_to_ideal == pytest.approx(0.160 / 0.150) and torchs.ratio_to_ideal == pytest.approx(0.2 / 0.15)
    assert ours.ratio_to_torch == pytest.approx(0.8) and split.ratio_to_torch is None
    assert ours.ideal_bubble == pytest.approx(1 / 5) and torchs.bubble is None and torchs.shares is None
    assert report.formula.compute_seconds == pytest.approx(0.120) and report.formula.seconds == pytest.approx(0.150)
    assert report.formula.ratios == pytest.approx({"1f1b": 0.160 / 0.150})
    assert report.zero_bubble.measured == pytest.approx((0.155, 0.160))
    assert report.zero_bubble.simulated[0] == simulate(build("zb-h1", 2, 4), TIMES.costs).makespan
    assert report.notes == []


def test_a_whole_backward_takes_its_own_time_and_not_that_of_its_halves():
    assert kinds_in([build("1f1b", 2, 4)]) == {"F", "B"}
    assert kinds_in([build("zb-h1", 2, 4)]) == {"F", "I", "W"} and len(kinds_in([build("dualpipev", 2, 4)])) == 4
    trace = simulate(
        build("dualpipev", 2, 4), StageTimes((0, 1, 1, 0), *((seconds,) * 4 for seconds in (1, 10, 3, 5))).costs
    )
    ops = [event for events in trace.compute for event in events if event.duration]
    spent = {str(event.op)[0] + "&" * ("&" in str(event.op)): event.duration for event in ops}
    assert spent == {"F": 1, "B": 10, "I": 3, "W": 5, "F&": 11}


def test_what_a_reader_must_know_is_said():
    few = tuple(dataclasses.replace(timing, seconds=timing.seconds[:1]) for timing in measurements().timings)
    traced = measurements().traced
    traced = traced | {"zb-h1": dataclasses.replace(traced["zb-h1"], activations=(3, 1))}
    given = measurements(timings=few, ranks_here=4, traced=traced, refused={"zb-h1": "it is Monday"})
    words = ("torch refuses zb-h1: it is Monday", "zb-h1 held", "mlp: 1 step of each method", "4 ranks share 2 cores")
    notes = report_on(given).notes
    assert len(notes) == len(words) and all(note.startswith(word) for note, word in zip(notes, words, strict=True))
