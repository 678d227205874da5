"""A small benchmark of steps in parts on real ranks, and what is made of its numbers."""

import dataclasses

import pytest
import torch
from tests.conftest import ON_ONE_GPU

from microparallel.bench import shard
from microparallel.bench.engine import transport_of
from microparallel.bench.settings import ShardSettings
from microparallel.bench.shard import Measurements, Memory, Method, Replica, Result, Timing, bench_shard
from microparallel.bench.shard_memory import covered, span
from microparallel.bench.shard_report import report_on
from microparallel.trace.parts import Parts

SMALL = ShardSettings(models=("mlp-8",), batch=4, steps=2)
OURS = ["none", "ddp", "shard optimizer", "shard gradients", "shard parameters", "shard parameters, kept"]
ON_SHM = ["torch-zero", "torch-zero on shm", "torch-fsdp", "torch-fsdp on shm"]
AGAIN = ["none, again", "torch-zero, again", "torch-fsdp, again"]


def bench(comms, settings):
    told = []
    measurements = bench_shard(comms, settings, lambda *news: told.append(news))
    return transport_of(comms), measurements, told


@pytest.mark.timeout(200)  # a dozen seconds alone; three ranks on busy cores take long
@pytest.mark.parametrize(
    ("any_pool", "ranks", "accumulate", "models"),
    [
        ("shm", 2, 2, ("gpt-32",)),
        pytest.param("shm", 3, 2, ("gpt-32",), marks=pytest.mark.slow),
        pytest.param("gloo", 2, 1, ("gpt-32",), marks=pytest.mark.slow),
        pytest.param("shm", 2, 1, ("mlp-8", "gpt-32"), marks=pytest.mark.slow),
        pytest.param("gloo", 2, 1, ("mlp-8", "gpt-32"), marks=pytest.mark.slow),
        pytest.param("gloo", 3, 2, ("gpt-32",), marks=pytest.mark.slow),
    ],
    indirect=["any_pool"],
)
def test_every_method_is_measured_on_all_ranks_alike_and_trains_the_same_weights(any_pool, ranks, accumulate, models):
    settings = dataclasses.replace(SMALL, accumulate=accumulate, models=models)
    (transport, first, told), *others = any_pool.run(bench, ranks, settings, timeout=190)
    assert all(other[:2] == (transport, first) for other in others)
    assert first.wrong is None
    assert [result.model for result in first.results] == list(models)
    torchs = ON_SHM if transport == "shm" else ["torch-zero", "torch-fsdp"]
    for result in first.results:
        timings = {timing.method.name: timing for timing in result.timings}
        assert list(timings) == [*OURS, *torchs, *AGAIN]
        assert all(len(timing.seconds) == 2 and min(timing.seconds) > 0 for timing in result.timings)
        assert timings["none"].apart > 0.1  # so this would have been found out, had it claimed to synchronise
        assert all(timing.apart < 1e-2 for name, timing in timings.items() if not name.startswith("none"))
        size, few = result.parameter_bytes, 4000  # bytes of paddings, counts of steps, small messages
        kept = {name: timing.memory for name, timing in timings.items()}
        assert kept["none"].parameters == size
        if accumulate == 1:
            assert kept["none"].gradients == size
        else:  # those of the first micro-batch, and the first one of the second
            assert size < kept["none"].gradients <= 1.5 * size
        assert kept["none"].optimizer == pytest.approx(2 * size, abs=few)
        for name in ("shard optimizer", "shard gradients"):
            assert kept[name].parameters == pytest.approx(size, abs=few)
            assert kept[name].optimizer == pytest.approx(2 * size / ranks, abs=few)
        assert sum(result.units) == size and len(result.units) == {"mlp-8": 16, "gpt-32": 6}[result.model]
        pairs = [sum(two) for two in zip(result.units, result.units[1:], strict=False)]
        gathered = {"shard parameters": max(pairs), "shard parameters, kept": size}
        for name, most in gathered.items():
            assert kept[name].parameters == pytest.approx(size / ranks + most, abs=few)
            assert kept[name].optimizer == pytest.approx(2 * size / ranks, abs=few)
            assert (
                size / ranks + max(result.units) <= kept[name].gradients <= size / ranks + 4 * max(result.units) + few
            )
        assert kept["torch-fsdp"].parameters < 0.9 * size + few
        assert kept["torch-fsdp"].optimizer == pytest.approx(2 * size / ranks, abs=few)
        assert timings["none"].sent == 0 and timings["torch-zero"].sent is timings["torch-fsdp"].sent is None
        for name in OURS:
            spent = timings[name].parts
            assert spent.computing + spent.communicating + spent.waiting + spent.other == pytest.approx(spent.step)
        if result.model == "mlp-8":
            continue  # so small that other algorithms are faster, which send more
        each = (ranks - 1) / ranks * size
        assert timings["ddp"].sent == pytest.approx(2 * each, abs=few)
        assert timings["shard optimizer"].sent == pytest.approx(2 * each, abs=few)
        assert timings["shard gradients"].sent == pytest.approx((accumulate + 1) * each, abs=few)
        assert timings["shard parameters"].sent == pytest.approx(3 * accumulate * each, abs=few)
        assert timings["shard parameters, kept"].sent == pytest.approx(2 * accumulate * each, abs=few)
    assert told[0] == (0, models[0], 0) and told[-1] == (1, models[-1], 2)


def gradients_of_small_buckets(comms):
    """Of two methods alone, and the one whose weights they must have."""
    few = [
        method
        for method in shard.methods_of("shm")
        if method.name in ("shard optimizer", "shard gradients", "torch-zero")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "methods_of", lambda transport: few)
        [result] = bench_shard(comms, dataclasses.replace(SMALL, models=("mlp-128",), bucket_cap_mb=0.05)).results
    return result.parameter_bytes, {timing.method.name: timing.memory.gradients for timing in result.timings}


def test_gradients_in_parts_take_their_part_and_buckets_in_flight(pool):
    size, gradients = pool.run(gradients_of_small_buckets, 2, timeout=50)[0]
    bucket = 4 * (128 * 128 + 128)
    assert gradients["shard optimizer"] == pytest.approx(size + bucket, rel=0.05)
    assert size / 2 + 2 * bucket <= gradients["shard gradients"] <= 1.05 * (size / 2 + 4 * bucket)


def bench_with_a_fault(comms):
    """Let one method's ranks train alone."""
    honest = Replica._prepare

    def prepare(self, *arguments):
        method, self.method = self.method, Method("none") if self.method.name == "shard gradients" else self.method
        try:
            return honest(self, *arguments)
        finally:
            self.method = method

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "_prepare", prepare)
        return bench_shard(comms, dataclasses.replace(SMALL, models=("mlp-8", "mlp-4"), steps=1))


def test_wrong_weights_end_the_run_and_name_method_and_model(pool):
    first, second = pool.run(bench_with_a_fault, 2, timeout=50)
    assert first == second
    assert str(first.wrong) == "shard gradients trained mlp-8 wrongly: its ranks ended with different weights"
    assert [result.model for result in first.results] == ["mlp-8"]


def test_views_of_the_same_memory_count_once():
    tensor = torch.zeros(100)
    views = [tensor, tensor[10:20], tensor[50:], torch.zeros(7)]
    assert covered(map(span, views)) == 428
    assert covered([]) == 0


# ── reports ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measurements(ranks=2, accumulate=1):
    names = [*OURS, *ON_SHM, *AGAIN]
    milliseconds = dict(zip(names, (10, 14, 12, 13, 15, 14.5, 20, 16, 30, 25, 11, 21, 33), strict=True))
    timings = [
        Timing(
            Method(name),
            tuple(factor * time * 1e-3 for factor in (1.2, 0.5, 1, 0.9, 3)),
            Memory(1000, 1100, 2000),
            None if name.startswith("torch") else 1000.0,
            None if name.startswith("torch") else Parts(0.01, 0.002, 0.004, 0.001, 0.001, 0.001, 0.001, 0.0),
            1e-7,
        )
        for name, time in milliseconds.items()
    ]
    result = Result("mlp-8", "16 layers of width 8", 4, 1000, (100, 400, 300, 200), accumulate, tuple(timings))
    return Measurements(ranks, ranks, 4, "shm", "cpu", (result,))


def test_the_report_works_everything_out():
    report = report_on(measurements(ranks=4, accumulate=3))
    rows = {row.method: row for row in report.rows}
    gradients = rows["shard gradients"]
    assert gradients.seconds == pytest.approx(0.013)
    assert (gradients.ratio_to_torch_zero, gradients.ratio_to_none) == pytest.approx((0.65, 1.3))
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    formulas = {name: [getattr(row, f"{kind}_by_formula") for kind in kinds] for name, row in rows.items()}
    assert formulas["ddp"] == [1000, 1000, 2000]
    assert formulas["shard optimizer"] == formulas["torch-zero"] == [1000, 1000, 500]
    assert formulas["shard gradients"] == [1000, 250, 500]
    assert formulas["shard parameters"] == [250 + 700, 250 + 400, 500]
    assert formulas["torch-fsdp"] == formulas["torch-fsdp on shm"] == [250 + 400, 250 + 400, 500]
    assert formulas["shard parameters, kept"] == [250 + 1000, 250 + 400, 500]
    assert rows["shard parameters"].ratio_to_torch_fsdp == pytest.approx(0.5)
    sent = {name: row.sent_bytes_by_formula for name, row in rows.items()}
    assert sent["none"] == 0 and sent["ddp"] == sent["shard optimizer"] == 1500
    assert sent["shard gradients"] == 3000 and sent["torch-zero on shm"] == 2250
    assert sent["shard parameters"] == sent["torch-fsdp"] == 3 * 3 * 750
    assert sent["shard parameters, kept"] == 2 * 3 * 750
    [model] = report.as_json()["models"]
    assert (model["none_to_itself"], model["torch_zero_to_itself"]) == pytest.approx((1.1, 1.05))
    assert model["torch_fsdp_to_itself"] == pytest.approx(1.1)
    assert report.notes == []


# ── on a GPU ────────────────────────────────────────────────────────────────────────────────────────────────────────


@ON_ONE_GPU
@pytest.mark.timeout(300)
def test_on_a_gpu_everything_is_measured_that_torch_does_not_refuse(warm_ranks):
    settings = dataclasses.replace(SMALL, models=("gpt-64",), dtype="bfloat16")
    [(transport, measured, _), _] = warm_ranks.run(bench, 2, settings, transport="cuda", timeout=250)
    assert transport == "cuda" and measured.wrong is None
    [result] = measured.results
    uses = {timing.method.name: timing.use for timing in result.timings}
    refused = {reason.partition(":")[0] for reason in result.refused}
    assert refused <= {"torch-fsdp"}  # gloo may not carry all that it asks of a GPU
    assert uses.keys() | refused >= {*OURS, "torch-zero", "torch-zero on cuda", "torch-fsdp", "torch-fsdp on cuda"}
    assert all(min(use.bytes) > 0 for name, use in uses.items() if not name.endswith(", again"))
    assert report_on(measured).measurements.gpu.name


@pytest.mark.slow
def test_what_torch_refuses_is_left_out_and_named(pool):
    """Made up: torch's fully_shard was refused."""
    _, measured, _ = pool.run(bench, 2, dataclasses.replace(SMALL, models=("mlp-8",)))[0]
    [result] = measured.results
    kept = tuple(timing for timing in result.timings if not timing.method.name.startswith("torch-fsdp"))
    left = dataclasses.replace(result, timings=kept, refused=("torch-fsdp: it cannot",))
    report = report_on(dataclasses.replace(measured, results=(left,)))
    assert "mlp-8: torch refuses torch-fsdp: it cannot" in report.notes
    assert all(row.ratio_to_torch_fsdp is None for row in report.rows)
    assert report.details()["models"][0]["torch_fsdp_to_itself"] is None
    report.show()
