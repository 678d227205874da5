"""A small benchmark of data parallelism on real ranks, and what is made of its numbers."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from tests.conftest import ON_ONE_GPU
from torch.nn.parallel import DistributedDataParallel

import microparallel as mp
from microparallel.bench.data_parallel import (
    DDP,
    NONE,
    TORCH_DDP,
    TORCH_DDP_ON_SHM,
    Measurements,
    Method,
    Replica,
    Result,
    Timing,
    bench_data_parallel,
    differences,
    find_wrong,
    methods_of,
    without_rounding,
)
from microparallel.bench.data_parallel_report import report_on
from microparallel.bench.engine import transport_of
from microparallel.bench.settings import LARGE, DataParallelSettings, ShardSettings, with_usual
from microparallel.errors import UsageError

USUAL = ("naive", "hooks", "buckets", "ddp")
SMALL = DataParallelSettings(models=("mlp-8",), methods=USUAL, buckets_mb=(0.001, 1, 25), batch=2, steps=2)
LABELS = ["none", "naive", "hooks", "buckets", "ddp, 0.001 MB", "ddp, 1 MB", "torch-ddp"]


def bench(comms, settings):
    told = []
    measurements = bench_data_parallel(comms, settings, lambda *news: told.append(news))
    return transport_of(comms), measurements, told


@pytest.mark.parametrize(("ranks", "models"), [(2, ("mlp-8", "mlp-4")), (3, ("mlp-4",))])
def test_every_method_is_measured_on_all_ranks_alike_and_trains_the_same_weights(any_pool, ranks, models):
    settings = dataclasses.replace(SMALL, models=models)
    results = any_pool.run(bench, ranks, settings)
    (transport, first, told), *others = results
    assert all(other[:2] == (transport, first) for other in others)
    assert first.wrong is None
    device, twice = ("cuda", ["ddp, 0.001 MB, again", "torch-ddp, again"]) if transport == "cuda" else ("cpu", [])
    assert (first.ranks, first.transport, first.device) == (ranks, transport, device)
    assert tuple(result.model for result in first.results) == models
    for result in first.results:
        timings = {timing.method.label: timing for timing in result.timings}
        assert list(timings) == [*LABELS, *twice]
        assert all(len(timing.seconds) == 2 and min(timing.seconds) > 0 for timing in result.timings)
        assert result.steps == 8 and result.batch == 2 and result.gradient_bytes > 0  # two rounds warm up
        assert timings[NONE].apart > 0.1  # so this would have been found out, had it claimed to synchronise
        assert all(timing.apart < 1e-4 for name, timing in timings.items() if name != NONE)
    fractions = [fraction for fraction, _, _ in told]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    assert [news[1:] for news in told] == [(name, steps) for name in models for steps in (0, 1, 2)]


def test_torch_s_own_may_run_on_our_backend_too(warm_ranks):
    settings = dataclasses.replace(SMALL, models=("gpt-32",), methods=(TORCH_DDP_ON_SHM,))
    [(_, measurements, _), _] = warm_ranks.run(bench, 2, settings, transport="shm")
    assert measurements.wrong is None
    [result] = measurements.results
    assert [timing.method.name for timing in result.timings] == [NONE, TORCH_DDP_ON_SHM, TORCH_DDP]


def test_in_bfloat16_weights_are_compared_without_rounding(warm_ranks):
    settings = dataclasses.replace(SMALL, methods=("naive", "ddp"), buckets_mb=(25,), dtype="bfloat16")
    [(_, measurements, _), *_] = warm_ranks.run(bench, 3, settings, transport="shm")
    assert measurements.wrong is None and measurements.dtype_of_model == "bfloat16"
    [result] = measurements.results
    model = mp.models.FullMLP(8, 16, out_features=2)
    assert result.gradient_bytes == 2 * sum(parameter.numel() for parameter in model.parameters())
    report = report_on(measurements)
    assert report.dtype == "bfloat16"
    if result.in_float64:
        assert any("elsewhere in bfloat16, so they were compared in float64" in note for note in report.notes)


@ON_ONE_GPU
@pytest.mark.timeout(200)
def test_on_a_gpu_memory_is_counted_and_ddp_is_there_twice(warm_ranks):
    settings = dataclasses.replace(
        SMALL, models=("gpt-64",), methods=("ddp", "torch-ddp on cuda"), buckets_mb=(25,), dtype="bfloat16"
    )
    [(transport, measurements, _), _] = warm_ranks.run(bench, 2, settings, transport="cuda", timeout=150)
    assert transport == "cuda" and measurements.wrong is None
    [result] = measurements.results
    uses = {timing.method.label: timing.use for timing in result.timings}
    twice = ["ddp, 25 MB, again", "torch-ddp, again"]
    assert list(uses) == ["none", "ddp, 25 MB", "torch-ddp on cuda", "torch-ddp", *twice]
    for label, use in uses.items():
        assert (use is None) == (label in twice)
        assert use is None or min(use.bytes) > 2 * result.gradient_bytes  # weights and gradients, at least


def test_a_single_rank_synchronises_with_nobody(pool):
    [(_, measurements, _)] = pool.run(bench, 1, SMALL)
    assert measurements.wrong is None
    assert all(timing.apart < 1e-4 for timing in measurements.results[0].timings)


def test_a_budget_in_seconds_gives_at_least_a_few_steps(pool):
    settings = dataclasses.replace(SMALL, methods=("ddp",), buckets_mb=(1,), steps=None, seconds=0.1)
    _, measurements, told = pool.run(bench, 2, settings)[0]
    assert all(len(timing.seconds) >= 5 for timing in measurements.results[0].timings)
    assert told[0] == (0, "mlp-8", 0) and told[-1][0] <= 1


def groups_of_torch_s_own(comms):
    backends = []

    class Spy(DistributedDataParallel):
        def __init__(self, module, process_group, gradient_as_bucket_view):
            backends.append((dist.get_backend(process_group), gradient_as_bucket_view))
            super().__init__(module, process_group=process_group, gradient_as_bucket_view=gradient_as_bucket_view)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("microparallel.bench.data_parallel.DistributedDataParallel", Spy)
        bench_data_parallel(comms, dataclasses.replace(SMALL, methods=(TORCH_DDP_ON_SHM,), steps=1))
    return backends


def test_torch_s_own_runs_on_gloo_beside_ours(warm_ranks):
    assert warm_ranks.run(groups_of_torch_s_own, 2, transport="shm")[0] == [("microparallel", True), ("gloo", True)]


# ── wrong results ───────────────────────────────────────────────────────────────────────────────────────────────────


def bench_with_a_fault(comms, fault):
    """Let one method do something wrong after its backward."""
    honest = Replica._prepare

    def prepare(self, *arguments):
        gradients = honest(self, *arguments)
        parameters = list(self.model.parameters())

        def faulty():
            gradients()
            if fault == "one rank" and comms.rank == 1:
                parameters[3].grad[0] += 1
            if fault == "twice":
                for parameter in parameters:
                    parameter.grad *= 2
            if fault == "left out":
                parameters[0].grad.zero_()
            if fault == "nan":
                parameters[0].grad.fill_(torch.nan)

        return faulty if self.method.name == "buckets" else gradients

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "_prepare", prepare)
        return bench_data_parallel(comms, dataclasses.replace(SMALL, models=("mlp-8", "mlp-4"), steps=1))


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("one rank", "its ranks ended with different weights"),
        ("twice", "of the way from where torch-ddp did"),
        ("left out", "of the way from where torch-ddp did"),
        ("nan", "not finite"),
    ],
)
def test_wrong_weights_end_the_run_and_name_method_and_model(pool, fault, problem):
    first, second = pool.run(bench_with_a_fault, 2, fault)
    assert first == second
    assert first.wrong.method == "buckets"
    assert first.wrong.problem.startswith("trained mlp-8 wrongly: ") and problem in first.wrong.problem
    assert [result.model for result in first.results] == ["mlp-8"]


def ddp_that_forgets_to_synchronise(comms):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("microparallel.bench.data_parallel.DataParallel", lambda model, comms, bucket_cap_mb: model)
        return bench_data_parallel(comms, dataclasses.replace(SMALL, methods=("ddp",)))


def test_a_method_that_does_not_synchronise_is_found_out(pool):
    for measurements in pool.run(ddp_that_forgets_to_synchronise, 2):
        assert measurements.wrong.method == "ddp, 0.001 MB"
        assert "different weights" in measurements.wrong.problem


def with_little_memory(comms):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("microparallel.bench.engine.available_memory", lambda: 100_000)
        with pytest.raises(UsageError, match=r"mlp-8: 7 copies .* fewer --methods"):
            bench_data_parallel(comms, SMALL)


def test_models_that_do_not_fit_into_memory_are_refused(pool):
    pool.run(with_little_memory, 2)


# ── order ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def order_of_steps(comms):
    stepped = []
    honest = Replica.step

    def step(self):
        stepped.append(self.method.name)
        honest(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "step", step)
        bench_data_parallel(comms, dataclasses.replace(SMALL, methods=("naive",), steps=1))
    return stepped


def test_methods_take_turns_and_each_round_begins_with_another(pool):
    rounds = [["none", "naive", "torch-ddp"], ["naive", "torch-ddp", "none"], ["torch-ddp", "none", "naive"]]
    expected = [name for names in rounds for name in names for _ in range(2)]  # a step that does not count goes before
    assert pool.run(order_of_steps, 2)[0] == expected


# ── methods, reports ────────────────────────────────────────────────────────────────────────────────────────────────


def test_of_buckets_that_hold_the_whole_model_one_is_tried():
    sizes = [method.bucket_cap_mb for method in methods_of((DDP,), (100, 25, 4, 1), 5 * 2**20) if method.name == DDP]
    assert sizes == [1, 4, 25]
    assert methods_of((), (1,), 4) == [Method(NONE), Method(TORCH_DDP)]


def measurements(**changes):
    methods = {Method(NONE): 10, Method("naive"): 40, Method(DDP, 1): 14, Method(DDP, 25): 12, Method(TORCH_DDP): 20}
    timings = [
        Timing(method, tuple(factor * milliseconds * 1e-3 for factor in (1.2, 0.5, 1, 0.9, 3)), 1e-7)
        for method, milliseconds in methods.items()
    ]
    result = Result("mlp-8", "16 layers of width 8", 2, 4_500, 14, tuple(timings))
    return dataclasses.replace(Measurements(2, 2, 2, "shm", "cpu", (result,)), **changes)


def test_the_report_works_everything_out():
    report = report_on(measurements())
    rows = {row.label: row for row in report.rows}
    ddp = rows["ddp, 25 MB"]
    assert (ddp.seconds, ddp.fastest, ddp.slowest) == pytest.approx((0.012, 0.006, 0.036))
    assert (ddp.lower_quartile, ddp.upper_quartile) == pytest.approx((0.0108, 0.0144))
    assert ddp.seconds_minus_none == pytest.approx(0.002)
    assert (ddp.ratio_to_none, ddp.ratio_to_torch_ddp) == pytest.approx((1.2, 0.6))
    assert rows[NONE].seconds_minus_none == 0 and rows[TORCH_DDP].ratio_to_torch_ddp == 1
    assert report.best_bucket_mb == {"mlp-8": 25}
    assert report.notes == []


def test_what_chance_and_sharing_cores_do_is_said():
    [result] = measurements().results
    few = tuple(dataclasses.replace(timing, seconds=timing.seconds[:1]) for timing in result.timings)
    report = report_on(measurements(results=(dataclasses.replace(result, timings=few),), ranks_here=4))
    assert [note.split(":")[0] for note in report.notes] == ["mlp-8", "4 ranks share 2 cores and take turns"]
    assert report.rows[0].lower_quartile == report.rows[0].upper_quartile


# ── rounding is no wrong sum ────────────────────────────────────────────────────────────────────────────────────────


class Led:
    """A copy that ends elsewhere in float32, as where rounding pushes a ReLU over its edge; or always."""

    def __init__(self, method, model, *, always):
        self.method, self.model, self._always = method, copy.deepcopy(model), always

    def step(self):
        weight = next(self.model.parameters())
        elsewhere = self.method.name == "naive" and (self._always or weight.dtype == torch.float32)
        weight.data -= 0.1 if elsewhere else 1.0


def suspected(comms, always):
    torch.manual_seed(0)
    start, batch = torch.nn.Linear(2, 2), (torch.ones(1, 2), torch.ones(1))
    methods = [Method(name) for name in ("naive", "ddp", TORCH_DDP)]
    copies = [Led(method, start, always=always) for method in methods]
    for one in copies:
        one.step()
    apart, again = without_rounding(
        differences(copies, start, comms),
        start,
        batch,
        comms,
        TORCH_DDP,
        lambda method, model, _: Led(method, model, always=always),
    )
    return again, find_wrong("mine", copies, apart, comms)


def test_what_rounding_led_elsewhere_is_compared_again_in_float64(pool):
    (again, wrong), _ = pool.run(suspected, 2, False, timeout=30)
    assert (again, wrong) == (("naive",), None)


def test_a_wrong_sum_is_as_wrong_in_float64(pool):
    (again, wrong), _ = pool.run(suspected, 2, True, timeout=30)
    assert again == ("naive",) and "naive" in str(wrong) and "of the way from where torch-ddp did" in str(wrong)


# ── what is usual on a GPU ──────────────────────────────────────────────────────────────────────────────────────────


def test_on_a_gpu_the_usual_model_is_large_and_what_was_given_stays():
    assert with_usual(DataParallelSettings, {"ranks": 2}) == {"ranks": 2}
    on_a_gpu = DataParallelSettings(**with_usual(DataParallelSettings, {"device": "cuda", "buckets_mb": (4.0,)}))
    assert (on_a_gpu.models, on_a_gpu.dtype, on_a_gpu.buckets_mb) == ((LARGE,), "bfloat16", (4.0,))
    assert "torch-ddp on cuda" in on_a_gpu.methods
    over_gloo = with_usual(DataParallelSettings, {"device": "cuda", "transport": "gloo"})
    assert over_gloo["methods"] == ("ddp",)
    assert with_usual(ShardSettings, {"device": "cuda", "models": ("gpt",)})["models"] == ("gpt",)
