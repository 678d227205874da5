"""A small benchmark on real ranks, and what is made of its numbers."""

import dataclasses

import pytest
import torch

import microparallel as mp
from microparallel.performance.all_reduce_bench import Measurements, Settings, Timing, WrongSum, bench_all_reduce
from microparallel.performance.all_reduce_report import bus_bandwidth, report_on
from microparallel.performance.rounds import ADD, TORCH, Case, Rounds

ALGORITHMS = ("naive", "ring", "tree")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
def test_every_method_is_measured_at_every_size_on_all_ranks_alike(pool, dtype):
    settings = Settings(ALGORITHMS, sizes=(80_000, 8), dtype=dtype, repeats=2)
    first, second = pool.run(bench_all_reduce, 2, settings)
    assert first == second
    assert first.wrong is None
    assert (first.ranks, first.transport, first.device, first.dtype) == (2, "gloo", "cpu", dtype)
    assert [(timing.method, timing.size) for timing in first.timings] == [
        (method, size) for size in (8, 80_000) for method in (TORCH, *ALGORITHMS, ADD)
    ]
    assert all(len(timing.seconds) == 2 and min(timing.seconds) > 0 for timing in first.timings)


def with_progress(comms, settings):
    told = []
    measurements = bench_all_reduce(comms, settings, lambda *news: told.append(news))
    return told, measurements


def test_a_budget_in_seconds_gives_at_least_a_few_repeats(pool):
    told, measurements = pool.run(with_progress, 2, Settings(ALGORITHMS, sizes=(4_000, 8_000), seconds=0.2))[0]
    calls = {(timing.method, timing.size): len(timing.seconds) for timing in measurements.timings}
    assert min(calls.values()) >= 1 and calls[TORCH, 4_000] >= 5 and calls[TORCH, 8_000] >= 5
    fractions = [fraction for fraction, _, _ in told]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] <= 1
    assert {(size, repeats) for _, size, repeats in told} >= {(4_000, 0), (4_000, 1), (8_000, 0), (8_000, 5)}


def break_ring_on_rank_1(comms):
    honest = comms.all_reduce

    def all_reduce(tensor, op="sum", algorithm="auto"):
        honest(tensor, op, algorithm)
        if algorithm == "ring" and comms.rank == 1 and tensor.numel() == 1000:
            tensor[17] += 1
        return tensor

    comms.all_reduce = all_reduce
    return bench_all_reduce(comms, Settings(ALGORITHMS, sizes=(400, 4_000, 40_000), repeats=2))


def test_a_wrong_sum_ends_the_run_and_names_method_size_and_rank(pool):
    for measurements in pool.run(break_ring_on_rank_1, 3):
        assert measurements.wrong == WrongSum("ring", 4_000, rank=1)
        assert {timing.size for timing in measurements.timings} == {400, 4_000}


def with_little_memory(comms):
    with pytest.MonkeyPatch.context() as patch:  # 2 ranks × 5 tensors of 350 KB need 3.5 MB, 2 × 4 only 2.8 MB
        patch.setattr("microparallel.performance.all_reduce_bench.available_memory", lambda: 3_000_000)
        return bench_all_reduce(comms, Settings(("all-to-all", "ring"), sizes=(4_000, 350_000), repeats=1))


def test_what_does_not_fit_into_memory_is_left_out_with_the_reason(pool):
    timings = {(timing.method, timing.size): timing for timing in pool.run(with_little_memory, 2)[0].timings}
    assert timings["all-to-all", 4_000].seconds and timings["ring", 350_000].seconds
    assert not timings["all-to-all", 350_000].seconds
    assert "memory" in timings["all-to-all", 350_000].left_out


def order_of_calls(comms):
    called = []
    honest = comms.all_reduce

    def all_reduce(tensor, op="sum", algorithm="auto"):
        called.extend([algorithm] if algorithm != "auto" else [])
        return honest(tensor, op, algorithm)

    comms.all_reduce = all_reduce
    rounds = Rounds(comms, ["ring", "tree"], Case(comms, 400, torch.float32))
    rounds.warm_up()
    rounds.one_more()
    rounds.end("tree")
    rounds.one_more()
    return called, rounds.counted, rounds.seconds


def test_methods_take_turns_and_a_slow_one_is_left_out_of_the_rest(pool):
    called, counted, seconds = pool.run(order_of_calls, 2)[0]
    assert called == ["ring", "tree", "tree", "ring", "ring"]  # the second round begins with the second method
    assert counted == 2
    assert len(seconds["ring"]) == 2 and len(seconds["tree"]) == 1


def contributions(comms):
    case = Case(comms, 4 * 25_000, torch.float32)
    case.refill()
    mine = case.tensor.clone()
    comms.all_reduce(case.tensor)
    right = case.is_right()
    case.tensor[24_999] += 1
    return mine, right, case.is_right()


def test_the_exact_sum_is_known_and_one_wrong_number_is_seen(pool):
    results = pool.run(contributions, 3)
    for _, right, still_right in results:
        assert right and not still_right
    first, second, _ = (mine for mine, _, _ in results)
    assert not torch.equal(first, second)
    thirds = first.chunk(3)
    assert not torch.equal(thirds[0][:8000], thirds[1][:8000])  # a slice in the wrong place is seen


def measurements(ranks=4, **changes):
    """Times as if a message cost 1 ms + 1 ns a byte, and adding 0.1 ns a byte."""
    timings = []
    for size in (10_000, 10_000_000):
        timings.append(Timing(TORCH, size, (2e-3, 1e-3, 3e-3)))
        for name in ALGORITHMS:
            program = mp.collectives.build(name, ranks)
            costs = mp.Costs(latency=1e-3, seconds_per_byte=1e-9, add_seconds_per_byte=1e-10, bytes_per_value=size)
            timings.append(Timing(name, size, (mp.simulate(program, costs).makespan,) * 5))
        timings.append(Timing(ADD, size, (size * 1e-10,) * 5))
    plain = Measurements(ranks, ranks, 8, "gloo", "cpu", "float32", tuple(timings))
    return dataclasses.replace(plain, **changes)


def test_the_report_works_everything_out():
    report = report_on(measurements())
    rows = {(row.algorithm, row.size): row for row in report.rows}
    torch_row, ring = rows[TORCH, 10_000], rows["ring", 10_000_000]
    assert (torch_row.seconds, torch_row.fastest, torch_row.slowest) == (2e-3, 1e-3, 3e-3)
    assert (torch_row.lower_quartile, torch_row.upper_quartile) == (1.5e-3, 2.5e-3)
    assert torch_row.ratio_to_torch == 1 and torch_row.messages_sent is None and torch_row.predicted_seconds is None
    assert ring.seconds == pytest.approx(6e-3 + 15e-3 + 0.75e-3)
    assert ring.algorithm_bandwidth == pytest.approx(10e6 / ring.seconds)
    assert ring.bus_bandwidth == pytest.approx(1.5 * ring.algorithm_bandwidth)
    assert ring.messages_sent == [6] * 4 and ring.bytes_sent == pytest.approx([15e6] * 4)
    assert ring.ratio_to_torch == pytest.approx(ring.seconds / 2e-3)
    assert ring.predicted_over_measured == pytest.approx(1)
    assert report.costs.latency == pytest.approx(1e-3) and report.typical_factor == pytest.approx(1)
    assert rows["naive", 10_000].messages_sent == [3, 1, 1, 1]


def test_the_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_bandwidth(8e9, 1.0, ranks=4) == 8e9 * 1.5
    assert bus_bandwidth(8e9, 2.0, ranks=2) == 4e9
    assert bus_bandwidth(8e9, 1.0, ranks=1) == 0


def test_what_was_left_out_or_called_too_few_times_is_said():
    plain = measurements()
    timings = [timing for timing in plain.timings if (timing.method, timing.size) != ("naive", 10_000_000)]
    timings.append(Timing("naive", 10_000_000, (), "it needs 9.9 GB of memory"))
    report = report_on(dataclasses.replace(plain, timings=tuple(timings), cores=2))
    assert "naive at 10 MB was left out: it needs 9.9 GB of memory" in report.notes
    assert any(note.startswith("at 10 KB torch was called 3×") for note in report.notes)
    assert any("4 ranks share 2 cores" in note for note in report.notes)
    left_out = next(row for row in report.rows if row.left_out)
    assert left_out.seconds is None and left_out.predicted_seconds is not None


def test_one_size_is_measured_but_not_fitted():
    plain = measurements()
    small = tuple(timing for timing in plain.timings if timing.size == 10_000)
    report = report_on(dataclasses.replace(plain, timings=small))
    assert report.costs is None and report.typical_factor is None
    assert any("two sizes" in note for note in report.notes)
    assert all(row.seconds for row in report.rows)
