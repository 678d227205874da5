"""The analyzer on real ranks: its parts add up, and waiting for a straggler is never called communication."""

import time

import pytest
import torch
from tests.spans import recorded, span
from torch import nn

import microparallel as mp
from microparallel.analyze.step_timing import median_of, time_of_step, time_steps
from microparallel.errors import UsageError
from microparallel.models import FullMLP, cross_entropy
from microparallel.program import Broadcast

DELAY = 0.5  # seconds: a straggler's, long beside all that a busy machine adds by itself


class Slow(nn.Module):
    """A model that keeps one rank busy."""

    def __init__(self, rank, model):
        super().__init__()
        self.rank = rank
        self.model = model

    def forward(self, inputs):
        if self.rank == 1:
            time.sleep(DELAY)
        return self.model(inputs)


def batch(rank, samples=8):
    torch.manual_seed(rank)
    return torch.randn(samples, 8), torch.randint(2, (samples,))


def build(seed=0):
    torch.manual_seed(seed)
    return FullMLP(8, 4)


def as_numbers(timing):
    names = ("forward", "backward", "optimizer", "communicating", "waiting", "other", "hidden", "step")
    return [{name: getattr(rank, name) for name in names} for rank in timing.ranks], timing


def time_one(comms, wrap, strategy, slow=False, **options):
    model = build()
    model = Slow(comms.rank, model) if slow else model
    wrapped = mp.DataParallel(model, comms) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    analyzer = mp.analyze.DDPPerformanceAnalyzer(comms, comms.device)
    inputs, targets = batch(comms.rank, 8 + comms.rank)
    begun = time.perf_counter()
    timing = analyzer.time_step(wrapped, inputs, targets, optimizer, cross_entropy, strategy, **options)
    around = time.perf_counter() - begun
    return timing, around, analyzer.analyze_communication_overhead(), [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("wrap", "strategy"), [(True, "auto"), (False, "auto"), (False, "naive")])
def test_parts_of_every_rank_add_up_to_the_step(any_pool, wrap, strategy):
    results = any_pool.run(time_one, 2, wrap, strategy)
    timing, _, overhead, _ = results[0]
    assert results[1][0].ranks == timing.ranks  # all ranks have the same numbers
    for rank in timing.ranks:
        total = rank.computing + rank.communicating + rank.waiting + rank.other
        assert total == pytest.approx(timing.total, rel=0.02)
        assert min(rank.forward, rank.backward, rank.optimizer) > 0 and rank.other >= -1e-9
    means = (timing.forward, timing.backward, timing.optimizer, timing.communication_exposed, timing.waiting)
    assert sum(means) + timing.other == pytest.approx(timing.total, rel=0.02)
    assert timing.total <= max(around for _, around, _, _ in results)
    assert timing.samples == 17 and timing.samples_per_second == pytest.approx(17 / timing.total)
    assert overhead.step == timing.total and overhead.calls >= 1
    assert overhead.bytes >= sum(parameter.nbytes for parameter in build().parameters())


def test_the_step_is_a_real_one(pool):
    """Weights afterwards are those of one process on the whole batch."""
    *_, weights = pool.run(time_one, 2, False, "auto")[0]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [batch(rank, 8 + rank) for rank in range(2)]
    inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    for mine, theirs in zip(model.parameters(), weights, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize(("wrap", "strategy"), [(True, "auto"), (False, "naive")])
def test_waiting_for_a_straggler_is_never_called_communication(any_pool, wrap, strategy):
    timing, _, overhead, _ = any_pool.run(time_one, 2, wrap, strategy, slow=True)[0]
    quick, slow = timing.ranks
    assert slow.forward >= DELAY
    assert quick.waiting > DELAY / 2 > quick.communicating  # it waits for what takes so long: the other's forward
    assert slow.waiting < DELAY / 2
    assert overhead.waiting_share > overhead.exposed_share
    # From the events themselves: whatever lies before the last rank's arrival is no communication.
    events = timing.trace.events
    for event in events:
        if event.kind == "collective" and event.rank == 0:
            together = [other.asked for other in events if other.kind == "collective" and other.number == event.number]
            # The root of a broadcast may be done before the others come; all other collectives need everybody.
            last = min(max(together), event.end) if isinstance(event.op, Broadcast) else max(together)
            assert event.start == last


def test_what_is_said_after_the_last_step_is_no_step():
    step = [span(0, "forward", "f", 0, 2), span(0, "optimizer", "S", 2, 3)]
    after = span(0, "collective", "all_reduce", 3, 4, step=1, group=(0,))
    assert len(time_steps(recorded(1, [*step, after]), 1)) == 1


def test_several_steps_give_the_median_one(pool):
    timing, *_ = pool.run(time_one, 2, True, "auto", steps=3)[0]
    assert len(timing.every) == 3 and timing.total == sorted(timing.every)[1]
    assert {event.step for event in timing.trace.events} <= {0, 1, 2} and len(timing.trace.steps) == 1


def test_barriers_stand_beside_what_really_happens(pool):
    timing, *_ = pool.run(time_one, 2, True, "auto", slow=True, barriers=True)[0]
    assert timing.phases is not None and timing.with_barriers is not None
    # Rank 0 computes forward in no time, but between barriers it seems to take as long as the straggler's.
    assert timing.ranks[0].forward < DELAY / 2 < timing.phases.forward
    assert any(event.name == "barrier()" for event in timing.with_barriers.trace.events)
    assert not any(event.name == "barrier()" for event in timing.trace.events)


def time_pipeline(comms):
    pipe = mp.Pipeline(build(), comms, "gpipe", 4, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    analyzer = mp.analyze.DDPPerformanceAnalyzer(comms)
    with pytest.raises(UsageError, match="interwoven"):
        analyzer.time_step(pipe, *batch(0), optimizer, barriers=True)
    return analyzer.time_step(pipe, *batch(0), optimizer, steps=2)


def test_a_pipeline_has_parts_too(pool):
    timing = pool.run(time_pipeline, 2)[0]
    names = {event.name for event in timing.trace.events}
    assert {"F0.0", "B0.3", "F1.3"} <= names
    for rank in timing.ranks:
        assert rank.computing + rank.communicating + rank.waiting + rank.other == pytest.approx(timing.total, rel=0.02)
        assert min(rank.forward, rank.backward, rank.optimizer) > 0


def time_any_step(comms):
    model = torch.nn.Linear(8, 2)

    def step():
        model(torch.ones(4, 8)).sum().backward()
        comms.all_reduce(torch.ones(8))

    return mp.analyze.DDPPerformanceAnalyzer(comms).time_steps(step, lambda: 4, steps=3)


def test_any_step_can_be_timed_even_one_without_an_optimizer(pool):
    timing = pool.run(time_any_step, 2)[0]
    assert len(timing.every) == 3 and timing.samples == 8
    assert [event.kind for event in timing.trace.by_rank[0]] == ["forward", "backward", "collective"]


def estimates(comms):
    analyzer = mp.analyze.DDPPerformanceAnalyzer(comms)
    return [
        analyzer.estimate_communication("ring", 40_000),
        analyzer.estimate_communication("tree", 40_000, world_size=64),
        analyzer.estimate_communication("ring", 4_000_000, world_size=64),
    ]


def test_estimates_for_any_algorithm_size_and_world_beside_the_measured_time(pool):
    here, elsewhere, larger = pool.run(estimates, 2)[0]
    assert here.measured is not None and here.measured > 0 and here.seconds > 0
    assert elsewhere.measured is None and elsewhere.seconds > 0
    assert larger.seconds > elsewhere.seconds or larger.latency > 0
    assert here.latency == elsewhere.latency == larger.latency


def alone(comms):
    analyzer = mp.analyze.DDPPerformanceAnalyzer(comms)
    messages = []
    for call in (
        analyzer.analyze_communication_overhead,
        lambda: analyzer.estimate_communication("ring", 100),
        lambda: analyzer.time_step(build(), *batch(0), None, cross_entropy, "dpp"),
        lambda: analyzer.time_step(build(), *batch(0), None, cross_entropy, steps=0),
    ):
        with pytest.raises(UsageError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_is_refused_with_a_reason(pool):
    nothing, one_rank, strategy, steps = pool.run(alone, 1)[0]
    assert "time some steps first" in nothing
    assert "at least 2" in one_rank
    assert "'dpp'" in strategy and "naive" in strategy
    assert "steps=0" in steps


def test_time_before_the_first_event_counts_as_other():
    trace = recorded(1, [span(0, "forward", "forward", 1, 3), span(0, "backward", "backward", 3, 6)])
    timing = time_of_step(trace, 10, took=6)
    assert (timing.forward, timing.backward, timing.other, timing.total) == (2, 3, 1, 6)
    assert timing.samples_per_second == pytest.approx(10 / 6)
    assert str(timing).startswith("6.00 s: forward 2.00 s, backward 3.00 s, exposed communication 0 s")


def test_a_step_of_a_longer_trace_begins_where_the_last_one_ended():
    events = [span(0, "forward", "f", start, start + 2, step=number) for number, start in enumerate((0, 3, 10))]
    timings = time_steps(recorded(1, events), 1)
    assert [timing.total for timing in timings] == [2, 3, 7]
    assert [timing.other for timing in timings] == [0, 1, 5]
    assert median_of(timings).total == 3


def test_a_batch_that_is_not_full_is_no_usual_step():
    trace = recorded(1, [span(0, "forward", "f", 0, 2)])
    steps = [time_of_step(trace, samples, took) for samples, took in ((8, 3), (8, 4), (8, 9), (2, 2), (2, 2))]
    assert (median_of(steps).total, median_of(steps).samples, len(median_of(steps).every)) == (4, 8, 5)


def test_an_empty_trace_is_refused():
    with pytest.raises(UsageError, match="no events"):
        time_of_step(recorded(1, []), 1)
