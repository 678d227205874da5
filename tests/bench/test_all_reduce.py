"""A small benchmark on real ranks, and what is made of its numbers."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from tests.conftest import ON_ONE_GPU

import microparallel as mp
from microparallel.bench.all_reduce import (
    ADD,
    BOUND,
    BOUND_IN_PLACE,
    CUDA,
    SHM,
    SHM_IN_PLACE,
    TORCH,
    TORCH_ON_CUDA,
    TORCH_ON_NCCL,
    TORCH_ON_SHM,
    Case,
    Measurements,
    MemoryBudget,
    Method,
    Timing,
    bench_all_reduce,
    methods_for,
    rounds_of,
    tensors_needed,
    time_call,
    touch_in_place,
    touch_ordinary,
)
from microparallel.bench.all_reduce_report import bus_bandwidth, report_on
from microparallel.bench.engine import AGAIN, Call, Rounds, Wrong, transport_of
from microparallel.bench.gpu_use import Gpu
from microparallel.bench.settings import AllReduceSettings
from microparallel.topology.hosts import MIXED

ALGORITHMS = ("naive", "ring", "tree")
WITHOUT_ALGORITHMS = {
    "gloo": (TORCH,),
    "shm": (TORCH, TORCH_ON_SHM, SHM, SHM_IN_PLACE, BOUND, BOUND_IN_PLACE),
    "cuda": (TORCH, TORCH + AGAIN, TORCH_ON_CUDA, CUDA, CUDA + AGAIN, BOUND),
}
WITHOUT_ALGORITHMS[MIXED] = WITHOUT_ALGORITHMS["shm"]


def bench_where_it_is(comms, settings):
    return transport_of(comms), bench_all_reduce(comms, settings)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
def test_every_method_is_measured_at_every_size_on_all_ranks_alike(any_pool, dtype):
    settings = AllReduceSettings(algorithms=ALGORITHMS, sizes=(80_000, 8), dtype=dtype, repeats=2, with_nccl=False)
    (transport, first), (_, second) = any_pool.run(bench_where_it_is, 2, settings)
    assert first == second
    assert first.wrong is None
    device = "cuda" if transport == "cuda" else "cpu"
    assert (first.ranks, first.transport, first.device, first.dtype) == (2, transport, device, dtype)
    assert [(timing.method, timing.size) for timing in first.timings] == [
        (method, size) for size in (8, 80_000) for method in (*WITHOUT_ALGORITHMS[transport], *ALGORITHMS, ADD)
    ]
    assert all(len(timing.seconds) == 2 and min(timing.seconds) > 0 for timing in first.timings)


def test_algorithms_may_be_left_out_and_a_single_rank_has_no_bound(warm_ranks):
    for ranks in (1, 3):
        [measurements, *_] = warm_ranks.run(
            bench_all_reduce, ranks, AllReduceSettings(algorithms=(), sizes=(4_000,), repeats=1)
        )
        methods = [timing.method for timing in measurements.timings]
        assert methods == [TORCH, TORCH_ON_SHM, SHM, SHM_IN_PLACE, *([BOUND, BOUND_IN_PLACE] if ranks > 1 else []), ADD]
        assert measurements.transport == "shm"
        report = report_on(measurements)
        assert not any("fitted" in note for note in report.notes)  # nobody asked for that
        assert (report.rows[-1].share_of_bound is not None) == (ranks > 1)


def who_does_what(comms):
    groups, backends = [], []

    def all_reduce(tensor, group):
        groups.append(group)
        backends.append(dist.get_backend(group))

    case = Case(comms, 4_000, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.all_reduce", all_reduce)
        with methods_for(comms, ["ring"]) as methods:
            for method in methods:
                method.meet()
                method.call(method.tensors_of(case)[0], case)
    with pytest.raises(ValueError, match="not initialized"):  # torch has forgotten it: it was closed
        dist.get_backend(groups[0])
    return backends, [method.name for method in methods if method.tensors_of(case) is case.shared]


def test_torch_s_own_runs_on_gloo_beside_ours(warm_ranks):
    backends, in_place = warm_ranks.run(who_does_what, 2, transport="shm")[0]
    assert backends == ["gloo", "gloo", "microparallel"]  # the first to meet, so that no connection has to wake up
    assert in_place == [SHM_IN_PLACE]


def bytes_touched(comms, touch):
    """Count what is added and copied, by standing in for the tensors."""
    counts = {"add": 0, "copy": 0}

    class Counted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), named=None):
            for kind in counts:
                if function.__name__ == f"{kind}_":
                    counts[kind] += arguments[0].numel() * arguments[0].element_size()
            return super().__torch_function__(function, types, arguments, named or {})

    case = Case(comms, 4 * 3_000, torch.float32)
    case.scratch = case.scratch.as_subclass(Counted)
    kept = case.contribution.clone(), case.expected.clone()
    touch(comms.rank, comms.world_size, case.tensors[0].as_subclass(Counted), case)
    assert torch.equal(case.contribution, kept[0]) and torch.equal(case.expected, kept[1])
    return counts


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_bound_touches_what_an_all_reduce_must(warm_ranks, ranks):
    size, others = 12_000, 12_000 * (ranks - 1) // ranks
    for touch, copied in ((touch_in_place, others), (touch_ordinary, others + size)):
        for counts in warm_ranks.run(bytes_touched, ranks, touch, transport="shm"):
            assert counts == {"add": others, "copy": copied}


def with_progress(comms, settings):
    told = []
    measurements = bench_all_reduce(comms, settings, lambda *news: told.append(news))
    return told, measurements


def test_a_budget_in_seconds_gives_at_least_a_few_repeats(pool):
    told, measurements = pool.run(
        with_progress, 2, AllReduceSettings(algorithms=ALGORITHMS, sizes=(4_000, 8_000), seconds=0.2)
    )[0]
    calls = {(timing.method, timing.size): len(timing.seconds) for timing in measurements.timings}
    assert min(calls.values()) >= 1 and calls[TORCH, 4_000] >= 5 and calls[TORCH, 8_000] >= 5
    fractions = [fraction for fraction, _, _ in told]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] <= 1
    assert {(size, repeats) for _, size, repeats in told} >= {("4 KB", 0), ("4 KB", 1), ("8 KB", 0), ("8 KB", 5)}


def break_ring_on_rank_1(comms):
    honest = comms.all_reduce

    def all_reduce(tensor, op="sum", algorithm="auto"):
        honest(tensor, op, algorithm)
        if algorithm == "ring" and comms.rank == 1 and tensor.numel() == 1000:
            tensor[17] += 1
        return tensor

    comms.all_reduce = all_reduce
    return bench_all_reduce(comms, AllReduceSettings(algorithms=ALGORITHMS, sizes=(400, 4_000, 40_000), repeats=2))


def test_a_wrong_sum_ends_the_run_and_names_method_size_and_rank(pool):
    for measurements in pool.run(break_ring_on_rank_1, 3):
        assert measurements.wrong == Wrong("ring", "gave a wrong sum on rank 1, at 4 KB")
        assert {timing.size for timing in measurements.timings} == {400, 4_000}


def with_little_memory(comms):
    with pytest.MonkeyPatch.context() as patch:  # 2 ranks × 5 tensors of 350 KB need 3.5 MB, 2 × 4 only 2.8 MB
        patch.setattr("microparallel.bench.engine.available_memory", lambda: 3_000_000)
        return bench_all_reduce(
            comms, AllReduceSettings(algorithms=("gather-add", "ring"), sizes=(4_000, 350_000), repeats=1)
        )


def test_what_does_not_fit_into_memory_is_left_out_with_the_reason(pool):
    measured = pool.run(with_little_memory, 2, transport="gloo")[0]
    timings = {(timing.method, timing.size): timing for timing in measured.timings}
    assert timings["gather-add", 4_000].seconds and timings["ring", 350_000].seconds
    assert not timings["gather-add", 350_000].seconds
    assert "memory" in timings["gather-add", 350_000].left_out


def order_of_calls(comms):
    called = []
    honest = comms.all_reduce

    def all_reduce(tensor, op="sum", algorithm="auto"):
        called.extend([algorithm] if algorithm != "auto" else [])
        return honest(tensor, op, algorithm)

    comms.all_reduce = all_reduce
    with methods_for(comms, ["ring", "tree"]) as methods:  # torch's own comes before them, and add after
        rounds = rounds_of(comms, methods[1:3], Case(comms, 400_000, torch.float32))
        rounds.warm_up()
        rounds.one_more()
        rounds.end(methods[2])
        rounds.one_more()
    return called, rounds.counted, {method.name: seconds for method, seconds in rounds.seconds.items()}


def test_methods_take_turns_and_a_slow_one_is_left_out_of_the_rest(pool):
    called, counted, seconds = pool.run(order_of_calls, 2, transport="gloo")[0]
    assert called == ["ring", "tree", "tree", "ring", "ring"]  # the second round begins with the second method
    assert counted == 2
    assert len(seconds["ring"]) == 2 and len(seconds["tree"]) == 1


def calls_of_a_turn(comms, size):
    seen = []
    method = Method("seen", lambda tensor, _: (seen.append(tensor.data_ptr()), comms.all_reduce(tensor)), comms.barrier)
    call = time_call(method, Case(comms, size, torch.float32))
    return call.right, len(seen), len(set(seen))


def test_small_calls_are_made_in_a_row_each_on_a_tensor_of_its_own(any_pool):
    assert any_pool.run(calls_of_a_turn, 2, 64_000)[1] == (True, 10, 10)
    assert any_pool.run(calls_of_a_turn, 2, 1_000_000)[1] == (True, 1, 1)


def wrong_once(comms):
    calls = []

    def fail_late(tensor, _):
        comms.all_reduce(tensor)
        calls.append(tensor)
        tensor[0] += len(calls) == 5

    return time_call(Method("wrong", fail_late, comms.barrier), Case(comms, 400, torch.float32)).right


def test_one_wrong_sum_in_a_row_is_seen(any_pool):
    assert any_pool.run(wrong_once, 2) == [False, False]


def made_up_calls(comms, cores):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("microparallel.bench.engine.available_cores", lambda: cores)
        methods = [Method("together", None, None), Method("alone", None, None, alone=True)]
        calls = Rounds(comms, methods, lambda _: Call(1.0 + comms.rank, 3.0, True)).one_more()
        return {method.name: seconds for method, seconds in calls.items()}


def test_ranks_that_share_cores_alone_take_as_long_as_their_work(any_pool):
    assert any_pool.run(made_up_calls, 2, 1)[1] == {"together": 2.0, "alone": 6.0}  # of 3 + 3 seconds of work
    assert any_pool.run(made_up_calls, 2, 4)[1] == {"together": 2.0, "alone": 3.0}


def contributions(comms):
    case = Case(comms, 4 * 25_000, torch.float32)
    tensor = case.shared[0]
    case.refill(tensor)
    mine = tensor.clone()
    comms.all_reduce(tensor)
    right = case.is_right(tensor)
    tensor[24_999] += 1
    return mine, right, case.is_right(tensor)


def test_the_exact_sum_is_known_and_one_wrong_number_is_seen(any_pool):
    results = any_pool.run(contributions, 3)
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


def over_shared_memory(ranks=4):
    """The same, had messages gone over shared memory: gloo's and the bounds' times must not change what is fitted."""
    plain = measurements(ranks)
    timings = list(plain.timings)
    for size in (10_000, 10_000_000):
        timings += [Timing(method, size, (8e-4,) * 5) for method in (TORCH_ON_SHM, SHM)]
        timings += [Timing(SHM_IN_PLACE, size, (4e-4,) * 5)]
        timings += [Timing(BOUND, size, (6e-4,) * 5), Timing(BOUND_IN_PLACE, size, (5e-4,) * 5)]
    timings.sort(key=lambda timing: timing.size)
    return dataclasses.replace(plain, timings=tuple(timings), transport="shm")


def test_what_goes_through_shared_memory_is_compared_with_what_memory_allows():
    report = report_on(over_shared_memory())
    rows = {(row.algorithm, row.size): row for row in report.rows}
    shares = {name: rows[name, 10_000].share_of_bound for name in (TORCH, TORCH_ON_SHM, SHM, SHM_IN_PLACE, "ring")}
    assert shares == {
        TORCH: None,
        "ring": None,
        **dict.fromkeys((TORCH_ON_SHM, SHM), pytest.approx(0.75)),
        SHM_IN_PLACE: pytest.approx(1.25),
    }
    assert rows[SHM, 10_000].bound_seconds == 6e-4 and rows[SHM, 10_000].ratio_to_torch == pytest.approx(0.4)
    assert rows[TORCH, 10_000].label == "torch on gloo" and rows[SHM_IN_PLACE, 10_000].label == SHM_IN_PLACE
    assert {row.algorithm for row in report.bounds} == {BOUND, BOUND_IN_PLACE}
    assert not {ADD, BOUND, BOUND_IN_PLACE} & {row.algorithm for row in report.rows}


def test_only_the_algorithms_are_predicted_and_only_they_decide_what_is_fitted():
    report, plain = report_on(over_shared_memory()), report_on(measurements())
    assert report.costs == plain.costs and report.typical_factor == pytest.approx(1)
    predicted = {row.algorithm for row in report.rows if row.predicted_seconds is not None}
    assert predicted == {row.algorithm for row in report.rows if row.messages_sent is not None} == set(ALGORITHMS)


@pytest.mark.parametrize(("name", "tensors"), [("ring", 1), ("naive", 1), ("gather-add", 1 + 3)])
def test_parts_of_others_take_memory(name, tensors):
    assert tensors_needed(mp.collectives.build(name, 4)) == tensors


def test_an_algorithm_that_does_not_fit_is_named_with_the_reason():
    budget = MemoryBudget(available=2e9, ranks=4, tensors_held=3)
    programs = [mp.collectives.build(name, 4) for name in ("ring", "gather-add")]
    assert budget.too_large(programs, 50_000_000) == {}
    [(name, reason)] = budget.too_large(programs, 100_000_000).items()
    assert name == "gather-add" and "2.8 GB" in reason and "2 GB are" in reason
    with pytest.raises(mp.errors.UsageError, match=r"--sizes"):
        budget.require(1_000_000_000)
    assert MemoryBudget(math.inf, ranks=4, tensors_held=3).too_large(programs, 10**12) == {}


# ── on a GPU ────────────────────────────────────────────────────────────────────────────────────────────────────────


def measured_on_a_gpu():
    """Made up, as if two ranks shared a GPU."""
    seconds = {
        TORCH: 12e-3,
        TORCH + AGAIN: 12.6e-3,
        TORCH_ON_NCCL: 18e-3,
        TORCH_ON_CUDA: 2e-3,
        CUDA: 1e-3,
        CUDA + AGAIN: 1.1e-3,
        BOUND: 0.5e-3,
    }
    timings = tuple(Timing(method, 25_000_000, (time,) * 5) for method, time in seconds.items())
    return Measurements(2, 2, 16, "cuda", "cuda", "float32", timings, gpu=Gpu("Some GPU", False, (1, 2)))


def test_a_gpu_s_methods_stand_beside_gloo_and_nccl_and_each_beside_itself():
    report = report_on(measured_on_a_gpu())
    rows = {row.label: row for row in report.rows}
    assert list(rows) == [
        *("torch on gloo", "torch on gloo, again", "torch on nccl", "torch on cuda", "cuda", "cuda, again")
    ]
    assert rows["cuda"].ratio_to_torch == pytest.approx(1 / 12)
    assert rows["torch on gloo, again"].ratio_to_torch == pytest.approx(1.05)
    assert rows["cuda"].share_of_bound == pytest.approx(0.5) and rows["torch on nccl"].share_of_bound is None
    [bound] = report.bounds
    assert bound.seconds == 0.5e-3
    words = {name for column in report.columns(200) for name in column.also}
    assert words >= {"again", "cuda", "nccl"} and "shm" not in words
    assert report.as_json()["gpu"] == {"name": "Some GPU", "mps": False, "process_bytes": (1, 2), "problem": None}


def test_why_nccl_was_left_out_is_said():
    report = report_on(dataclasses.replace(measured_on_a_gpu(), without="it is not there"))
    assert "torch on nccl was left out: it is not there" in report.notes


@ON_ONE_GPU
@pytest.mark.timeout(300)
def test_gloo_and_nccl_are_measured_in_the_same_run_as_ours(warm_ranks):
    settings = AllReduceSettings(algorithms=(), sizes=(4_000, 1_000_000), repeats=3)
    first, second = warm_ranks.run(bench_all_reduce, 2, settings, transport="cuda", timeout=250)
    assert first == second and first.wrong is None
    methods = {timing.method for timing in first.timings}
    assert methods - {TORCH_ON_NCCL} == {*WITHOUT_ALGORITHMS["cuda"], ADD}
    assert (TORCH_ON_NCCL in methods) == (first.without is None)
    assert first.gpu.name
