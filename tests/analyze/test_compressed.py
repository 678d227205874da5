"""Would compressed gradients help? Asked of steps that were simulated with known costs, and of real ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.spans import recorded, span

from microparallel.analyze.bottleneck import find_bottleneck
from microparallel.analyze.codecs import codecs_for, measure_codecs
from microparallel.analyze.compressed import Codec, compressed_steps, gradient_sums, link_of
from microparallel.collectives import Round, payload
from microparallel.program import Bucket
from microparallel.schedules import build, data_parallel_step
from microparallel.schedules.replicas import with_sums
from microparallel.simulator import Costs, simulate
from microparallel.simulator.fitted import fit_step
from microparallel.topology import Link

SIZE = 4_000_000  # bytes of gradients
SLOW, FAST = Link(1e-3, 8e-8), Link(5e-6, 1e-10)  # 100 Mbit/s, and the memory of a machine


def codec(method, seconds=0.0, left_alone=0.0):
    name = method.replace(":", "-")
    return Codec(method, name, payload(name, SIZE), SIZE, seconds, left_alone)


CODECS = [codec("bf16", 0.002), codec("int8", 0.01), codec("topk:0.01", 0.015), codec("randomk:0.01", 0.9)]


def costs(link, backward=0.02, buckets=1):
    """All stages together compute for three times as long as `backward`; gradients are shared evenly by buckets."""
    return Costs(
        forward=backward / 2 / buckets,
        backward_input=backward / 2 / buckets,
        backward_weight=backward / 2 / buckets,
        optimizer=0.001,
        latency=link.latency,
        seconds_per_byte=link.seconds_per_byte,
        bytes_per_value=lambda value: SIZE / buckets if isinstance(value, Bucket) else 8,
    )


def trace_of(link, backward=0.02, buckets=1, ranks=2, overlap=False, algorithms="auto"):
    program = data_parallel_step(buckets, ranks, loss=True, overlap=overlap, algorithms=algorithms)
    return simulate(program, costs(link, backward, buckets))


def compressions(verdict):
    return {change.name: change for change in verdict.changes if change.name.startswith("compress ")}


# ── advice ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_over_a_slow_link_the_method_is_advised_that_the_simulator_finds_fastest():
    found = find_bottleneck(trace_of(SLOW), codecs=CODECS)
    assert found.kind == "communication"
    assert found.advice == found.compression
    assert found.advice.name == "compress topk:0.01" and "compress gradients with topk:0.01" in found.advice.advice
    by_simulation = trace_of(SLOW, algorithms="topk-0.01").makespan + 0.015
    assert found.advice.seconds == pytest.approx(by_simulation, rel=1e-3)
    assert found.advice.speed == pytest.approx(trace_of(SLOW).makespan / by_simulation, rel=1e-3)
    assert list(compressions(found)) == [f"compress {one.method}" for one in CODECS]
    assert compressions(found)["compress randomk:0.01"].speed < 1  # fewest bytes, but here it takes long to encode


def test_over_a_fast_link_no_method_is_advised():
    found = find_bottleneck(trace_of(FAST), codecs=CODECS)
    assert found.compression is None
    assert found.advice is None or "compress" not in found.advice.advice
    assert len(compressions(found)) == len(CODECS) and all(one.speed < 1.02 for one in compressions(found).values())


def test_what_is_hidden_behind_backward_needs_no_compression():
    """Eight buckets of half a megabyte take 40 ms each; but for the last, backward is longer than all of them."""
    hidden = trace_of(SLOW, backward=20.0, buckets=8, overlap=True)
    assert sum(event.duration for event in hidden.events if event.kind == "collective" and not event.rank) > 0.3
    found = find_bottleneck(hidden, codecs=CODECS)
    assert found.kind == "compute" and found.compression is None
    exposed = find_bottleneck(trace_of(SLOW, backward=0.1, buckets=8, overlap=True), codecs=CODECS)
    assert exposed.compression is not None and exposed.compression.name == "compress topk:0.01"


def test_advice_depends_on_what_encoding_takes():
    """Without compression the sum takes 322 ms; two percent of the step are the least that counts."""
    step = trace_of(SLOW)
    saved = step.makespan - trace_of(SLOW, algorithms="bf16").makespan
    threshold = step.makespan * (1 - 1 / 1.02)
    just, hardly = codec("bf16", saved - threshold * 1.1), codec("bf16", saved - threshold * 0.9)
    assert find_bottleneck(step, codecs=[just]).compression is not None
    assert find_bottleneck(step, codecs=[hardly]).compression is None


def test_a_step_that_something_else_bounds_is_told_of_compression_too():
    found = find_bottleneck(trace_of(SLOW), codecs=CODECS, took=2.0)  # most of it is in no event
    assert found.kind == "other" and "data ahead" in found.advice.advice
    assert found.compression is not None and found.compression.name == "compress topk:0.01"


def test_what_is_compressed_or_not_summed_is_not_compressed_again():
    assert not compressions(find_bottleneck(trace_of(SLOW, algorithms="bf16"), codecs=CODECS))
    assert not compressions(find_bottleneck(trace_of(SLOW)))  # nothing is known about this machine
    alone = recorded(1, [span(0, "forward", "forward", 0, 1), span(0, "backward", "backward", 1, 2)])
    assert not compressions(find_bottleneck(alone, codecs=CODECS)) and codecs_for(alone) == ()
    sharded = simulate(data_parallel_step(2, 2, level=1), costs(SLOW))
    assert not compressions(find_bottleneck(sharded, codecs=CODECS))


def test_replicas_of_a_pipeline_are_simulated_too():
    program = with_sums(build("1f1b", 2, 4), 2)
    times = Costs(
        latency=1e-3,
        seconds_per_byte=8e-8,
        forward=0.001,
        backward_input=0.001,
        backward_weight=0.001,
        bytes_per_value=lambda value: SIZE if isinstance(value, Bucket) else 1000,
    )
    found = find_bottleneck(simulate(program, times), codecs=CODECS)
    assert found.compression is not None and found.compression.speed > 3


# ── the simulated step ──────────────────────────────────────────────────────────────────────────────────────────────


@given(
    st.sampled_from(["bf16", "int8", "sign", "topk:0.1", "randomk:0.1", "topk:0.1+bf16"]),
    st.integers(1, 4),
    st.integers(2, 4),
    st.booleans(),
    st.floats(1e-5, 1e-2),
    st.floats(1e-9, 1e-6),
)
def test_a_step_is_compressed_as_data_parallel_does_it(method, buckets, ranks, overlap, latency, seconds_per_byte):
    """There and back: the recorded plain step, compressed here, takes as long as the compressed program itself."""
    link = Link(latency, seconds_per_byte)
    plain = fit_step(trace_of(link, buckets=buckets, ranks=ranks, overlap=overlap))
    [(_, compressed)] = compressed_steps(plain, [codec(method)])
    whole = trace_of(link, buckets=buckets, ranks=ranks, overlap=overlap, algorithms=method.replace(":", "-"))
    assert compressed.makespan == pytest.approx(whole.makespan, rel=2e-3)


def test_small_tensors_that_are_left_alone_cost_a_message_of_their_own():
    plain = fit_step(trace_of(SLOW))
    [(_, without), (_, left)] = compressed_steps(plain, [codec("topk:0.01"), codec("topk:0.01", left_alone=0.1)])
    more = 2 * SLOW.latency + 0.1 * SIZE * SLOW.seconds_per_byte - 0.1 * 0.02 * SIZE * SLOW.seconds_per_byte
    assert left.makespan - without.makespan == pytest.approx(more, rel=0.01)


def test_sums_of_one_size_cannot_tell_what_a_message_costs():
    """Then a measured link says it; without one, all of the time counts as bandwidth."""
    program = data_parallel_step(1, 2)
    plain = fit_step(simulate(program, costs(SLOW)))
    assert link_of(plain) is None and sum(gradient_sums(plain).values()) == SIZE
    truth = simulate(data_parallel_step(1, 2, algorithms="topk-0.01"), costs(SLOW)).makespan
    [(_, told)] = compressed_steps(plain, [codec("topk:0.01")], SLOW)
    [(_, guessed)] = compressed_steps(plain, [codec("topk:0.01")])
    assert told.makespan == pytest.approx(truth, rel=1e-3) and guessed.makespan < truth


# ── what encoding costs ─────────────────────────────────────────────────────────────────────────────────────────────


def test_codecs_send_what_their_programs_say():
    shapes = [(64, 64), (64,), (32, 64)]
    found = {one.method: one for one in measure_codecs(shapes, 3, torch.device("cpu"))}
    assert list(found) == ["bf16", "int8", "sign", "topk:0.01", "randomk:0.01", "powersgd:2", "topk:0.01+bf16"]
    size = 4 * (64 * 64 + 32 * 64)
    for method, one in found.items():
        assert one.bytes == size and one.seconds > 0 and one.left_alone == pytest.approx(64 * 4 / (size + 64 * 4))
        if method != "powersgd:2":
            assert one.rounds == payload(one.name, size)
    assert found["powersgd:2"].rounds == (Round("sum", 4 * 2 * (64 + 32)), Round("sum", 4 * 2 * (64 + 64)))
    assert found["powersgd:2"].algorithm(size + 64 * 4) == "powersgd-2-sum-768-sum-1024"


def test_of_large_gradients_a_part_is_measured_and_small_ones_are_left_alone(monkeypatch):
    monkeypatch.setattr("microparallel.analyze.codecs._MOST", 2000)
    for shapes, measured in [([(100, 40)], 2000), ([(40, 40), (40, 40)], 1600), ([(3, 5000)], 2000)]:
        found = measure_codecs(shapes, 2, torch.device("cpu"))
        assert {one.bytes for one in found} == {4 * measured}
        whole = 4 * sum(rows * columns for rows, columns in shapes)
        assert all(one.scale(whole) == pytest.approx(whole / 4 / measured) for one in found)
    assert measure_codecs([(8, 8), (8,)], 2, torch.device("cpu")) == ()


def test_of_a_recorded_step_only_the_size_is_known():
    found = codecs_for(trace_of(SLOW))
    assert "powersgd:2" not in {one.method for one in found} and {one.bytes for one in found} == {SIZE}
