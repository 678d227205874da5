"""Pipeline(compress=…): replicas send fewer bytes; each stage's gradients are one bucket, and its program says so."""

import math

import pytest
import torch
from tests.test_what_runs_is_what_is_drawn import differences
from torch import nn

import microparallel as mp
from microparallel.collectives import payload
from microparallel.compression import TopK, compressed_sum, in_process, parse
from microparallel.errors import UsageError

WIDTH = 34  # 1156 numbers in a matrix: large


def layers(tied=False):
    torch.manual_seed(0)
    found = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    if tied:
        found[-1].weight = found[0].weight
    return nn.Sequential(*found)


def batch(replica, number):
    generator = torch.Generator().manual_seed(10 * replica + number)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def loss_fn(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def steps(comms, text, passes, tied=False, schedule="1f1b"):
    pipe = mp.Pipeline(
        layers(tied), comms, schedule, 2, loss_fn, replicas=2, compress=parse(text, warmup=1, smallest=1000)
    )
    found, wrong = [], []
    for number in range(passes):
        pipe.zero_grad()
        program = pipe.program
        inputs, targets = batch(pipe.replica, number)
        _, trace = pipe.traced_step(inputs, targets)
        found.append({name: one.grad.clone() for name, one in pipe.named_parameters()})
        wrong += differences(trace, program)
        sent = [(e.messages, e.sent) for e in trace.events if e.rank == comms.rank and "@dp:" in str(e.op)]
        names = [str(op).partition(":")[2] for op in program.ranks[comms.rank] if "@dp:" in str(op)]
    return found, wrong, sent, names, pipe.compression_state()


def gradients(replica, number, replicas=2):
    """Of one process: this replica's share of the batch."""
    model = layers()
    inputs, targets = batch(replica, number)
    (loss_fn(model(inputs), targets) / replicas).backward()
    return dict(model.named_parameters())


@pytest.mark.parametrize("text", ["topk:0.05", "powersgd:1", "bf16", "randomk:0.1"])
def test_replicas_do_what_one_process_does(any_pool, text):
    passes = 3
    everyone = any_pool.run(steps, 4, text, passes, timeout=50)
    for place in (0, 1):
        mine, same = everyone[place], everyone[place + 2]
        names = list(mine[0][0])
        assert not mine[1]
        for number in range(passes):
            assert all(torch.equal(mine[0][number][name], same[0][number][name]) for name in names)
        weights = [name for name in names if name.endswith("weight")]
        shapes = [(WIDTH, WIDTH)] * len(weights)
        compressors = [parse(text).for_bucket(place) for _ in range(2)]
        residuals = [torch.zeros(len(weights) * WIDTH * WIDTH) if compressors[0].feedback else None for _ in range(2)]
        for number in range(passes):
            each = [gradients(replica, number) for replica in range(2)]
            for name in names:
                if number == 0 or name.endswith("bias"):  # the warm-up, and what is small
                    torch.testing.assert_close(mine[0][number][name], each[0][name].grad + each[1][name].grad)
            if number > 0:
                flat = [torch.cat([one[name].grad.view(-1) for name in weights]) for one in each]
                sums = [compressed_sum(*row) for row in zip(compressors, flat, [shapes] * 2, residuals, strict=True)]
                found = torch.cat([mine[0][number][name].view(-1) for name in weights])
                torch.testing.assert_close(found, in_process(sums)[0], rtol=1e-4, atol=1e-6)


def test_bytes_are_in_the_name(any_pool):
    _, _, [(messages, sent)], [name], state = any_pool.run(steps, 4, "topk:0.05", 3, timeout=50)[0]
    kept = round(0.05 * 2 * WIDTH * WIDTH)
    assert name == f"topk-0.05-gather-{8 * kept}-sum-{4 * (2 * WIDTH + 4 + 1)}"
    rounds = payload(name, math.nan)
    assert (messages, sent) == (3, sum(one.bytes for one in rounds))
    assert state["passes"] == 3 and len(state["residuals"]) == 2


def test_a_parameter_that_stages_share(any_pool):
    """Each of its holders has a residual of its own; all copies get the same gradient."""
    everyone = any_pool.run(steps, 4, "topk:0.05", 3, True, timeout=50)
    assert not any(wrong for _, wrong, *_ in everyone)
    first, last = everyone[0], everyone[1]
    assert "0.weight" in first[4]["residuals"] and "3.weight@1" in last[4]["residuals"]
    for number in range(3):
        assert torch.equal(first[0][number]["0.weight"], last[0][number]["3.weight"])
        assert torch.equal(first[0][number]["0.weight"], everyone[2][0][number]["0.weight"])


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_several_stages_a_rank(pool, schedule):
    everyone = pool.run(steps, 4, "int8", 2, False, schedule, timeout=50)
    assert not any(wrong for _, wrong, *_ in everyone)


def going_on(comms, states=None, passes=(0, 1, 2, 3)):
    pipe = mp.Pipeline(layers(True), comms, "1f1b", 2, loss_fn, replicas=2, compress=TopK(0.05))
    if states is not None:
        pipe.load_compression_state(states)
    state = None
    for number in passes:
        if number == 2:
            state = pipe.compression_state()
        pipe.zero_grad()
        pipe.step(*batch(pipe.replica, number))
    return {name: one.grad.clone() for name, one in pipe.named_parameters()}, state


def test_a_state_goes_on_bit_for_bit(pool):
    everyone = pool.run(going_on, 4, timeout=50)
    merged = []
    for replica in (0, 1):
        ranks = [everyone[2 * replica + place][1] for place in (0, 1)]
        residuals = {name: one for rank in ranks for name, one in rank["residuals"].items()}
        methods = {name: one for rank in ranks for name, one in rank["methods"].items()}
        merged.append({"passes": 2, "methods": methods, "residuals": residuals})
    for (wanted, _), (found, _) in zip(everyone, pool.run(going_on, 4, merged, (2, 3), timeout=50), strict=True):
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def not_finite(comms):
    pipe = mp.Pipeline(layers(), comms, "gpipe", 2, loss_fn, replicas=2, compress=TopK(0.05))
    inputs, targets = batch(pipe.replica, 0)
    pipe.step(inputs, targets * (math.nan if pipe.replica == 1 else 1.0))
    bad = not any(bool(one.grad.isfinite().all()) for one in pipe.parameters())
    residuals = pipe.compression_state()["residuals"].values()
    pipe.zero_grad()
    pipe.step(inputs, targets)
    return (
        bad,
        all(bool(one.isfinite().all()) for one in residuals),
        [bool(p.grad.isfinite().all()) for p in pipe.parameters()],
    )


def test_what_is_not_finite_on_one_replica_is_on_all_and_stays_out_of_residuals(pool):
    for bad, kept, afterwards in pool.run(not_finite, 4, timeout=50):
        assert bad and kept and all(afterwards)


def refused(comms, case):
    options = (
        {"compress": TopK(0.1 + comms.rank / 10)} if case == "ranks" else {"compress": "sign", "shard": "optimizer"}
    )
    try:
        mp.Pipeline(layers(), comms, "1f1b", 2, loss_fn, replicas=2, **options)
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize(("case", "words"), [("ranks", "compress=topk-0.1"), ("shard", "choose one of the two")])
def test_refusals(pool, case, words):
    for found in pool.run(refused, 2, case):
        assert words in found and "\n" not in found
