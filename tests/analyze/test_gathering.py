"""A recorded step of FullyShardedDataParallel: it is its program, with its memory, and other options are simulated."""

import json

import pytest
import torch
from tests.conftest import CpuPool
from torch import nn

import microparallel as mp
from microparallel.analyze.bottleneck import find_bottleneck
from microparallel.cli import analyze
from microparallel.program import Join, Observed
from microparallel.reporting import Run, report_page
from microparallel.simulator.fitted import fit_step
from microparallel.simulator.gathering import choices_of, options_of, waits_of

WIDTH, LAYERS = 24, 4


@pytest.fixture
def shm_pool(warm_ranks):
    """Where a rank is always seen to wait."""
    return CpuPool(warm_ranks, "shm")


def is_layer(module):
    return isinstance(module, nn.Linear)


def record(comms, microbatches=1, steps=3, **options):
    """Some steps of an MLP with units of a layer each; and the program that they follow."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = mp.FullyShardedDataParallel(nn.Sequential(*layers), comms, units=is_layer, **options)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        for number in range(microbatches):
            model(torch.full((8, WIDTH), float(number))).square().mean().backward()
        optimizer.step()

    step()
    with mp.record(comms, batch=8) as recorder:
        for _ in range(steps):
            step()
    return recorder.trace, model.program(microbatches)


def without_joins(program):
    return [[op for op in ops if not isinstance(op, Join | Observed)] for ops in program.ranks]


OPTIONS = [
    {"overlap": False},
    {"overlap": True},
    {"overlap": False, "prefetch": 0, "microbatches": 2},
    {"overlap": True, "prefetch": 2, "reshard_after_forward": False},
    {"overlap": False, "replicas": 2},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_what_was_recorded_is_the_program_and_its_memory_follows_the_formula(any_pool, options):
    ranks = 4 if "replicas" in options else 2
    trace, program = any_pool.run(record, ranks, timeout=50, **options)[0]
    parts = ranks // options.get("replicas", 1)
    unit = 4 * (WIDTH * WIDTH + WIDTH)
    for number in trace.steps:
        step = trace.step(number)
        assert step.followed.goal.sharded
        # A Join stands where a rank was seen to wait: not for what was there at once.
        assert without_joins(step.followed) == without_joins(program)
        fitted = fit_step(step)
        assert fitted.program == step.followed
        found = options_of(fitted.program)
        assert without_joins(found.program()) == without_joins(program)
        assert found.prefetch == options.get("prefetch", 1)
        kept = not options.get("reshard_after_forward", True)
        for rank in step.memory:
            gathered = LAYERS if kept else found.prefetch + 1
            assert rank.peak_of("parameters") == LAYERS * unit / parts + gathered * unit
            assert rank.peak_of("optimizer") == pytest.approx(2 * LAYERS * unit / parts, rel=0.02)
            assert rank.peak_of("gradients") >= LAYERS * unit / parts
        gathers = options.get("microbatches", 1) * LAYERS * (1 if kept else 2)
        assert [one.what for one in waits_of(step)].count("gather") == gathers * options.get("replicas", 1)


def test_options_are_tried_and_their_memory_is_known(shm_pool):
    trace, _ = shm_pool.run(record, 2, timeout=50, overlap=False)[0]
    step = trace.step(1)
    now, *others = choices_of(fit_step(step))
    assert (now.prefetch, now.reshard_after_forward, now.overlap) == (1, True, False)
    unit, whole = 4 * (WIDTH * WIDTH + WIDTH), 4 * 4 * (WIDTH * WIDTH + WIDTH)
    weights = {(one.prefetch, one.reshard_after_forward, one.overlap): one.weights for one in others}
    assert weights == {
        (0, True, False): whole / 2 + unit,
        (2, True, False): whole / 2 + 3 * unit,
        (3, True, False): whole / 2 + 4 * unit,
        (1, False, False): whole / 2 + 4 * unit,
        (1, True, True): whole / 2 + 2 * unit,
    }
    kept = next(one for one in others if not one.reshard_after_forward)
    assert kept.sent == pytest.approx(now.sent * 2 / 3, rel=0.01)
    assert kept.exposed < now.exposed and kept.memory > now.memory
    names = {change.name: change for change in find_bottleneck(step).changes}
    assert {"prefetch 0", "prefetch 2", "prefetch 3", "parameters kept", "overlap"} <= names.keys()
    assert "half the buckets" not in names
    assert "reshard_after_forward=False" in names["parameters kept"].advice
    assert "more memory" in names["parameters kept"].advice


def test_analyze_and_the_report_say_what_was_waited_for(shm_pool, tmp_path, capsys):
    trace, _ = shm_pool.run(record, 2, timeout=50, overlap=False)[0]
    trace.save(tmp_path)
    analyze._show(analyze._recorded(tmp_path), None, False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "units 8 gathers and 4 sums; computation waited longest for:" in shown
    assert "gather of unit" in shown
    assert "options the same step with others, by simulation" in shown
    analyze._show(analyze._recorded(tmp_path), None, True)
    found = json.loads(capsys.readouterr().out)["gathering"]
    assert len(found["waits"]) == 12 and found["choices"][0]["now"]
    worst = found["waits"][0]
    assert worst["exposed"] + worst["waiting"] == max(one["exposed"] + one["waiting"] for one in found["waits"])
    page = report_page(Run("run", {}, [], {}, trace))
    assert "for units to be gathered and summed, longest for the " in page


def test_a_step_without_units_says_nothing_of_them(pool, tmp_path, capsys):
    trace = pool.run(record_replicas, 2, timeout=50)[0]
    trace.save(tmp_path)
    analyze._show(analyze._recorded(tmp_path), None, True)
    assert json.loads(capsys.readouterr().out)["gathering"] == {"waits": [], "choices": []}
    assert "gathered" not in report_page(Run("run", {}, [], {}, trace)).partition("<script")[0]


def record_replicas(comms):
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mp.record(comms) as recorder:
        model(torch.ones(8, WIDTH)).square().mean().backward()
        optimizer.step()
    return recorder.trace
