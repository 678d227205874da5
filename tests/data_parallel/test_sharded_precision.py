"""FullyShardedDataParallel in mixed precision: float32 parts, 16 bits to gather, compute and send; skipped steps."""

import copy
from contextlib import nullcontext

import pytest
import torch
from tests.data_parallel.test_fully_sharded import ANY, identical, is_layer, one_unit_a_layer, refusal, whole_gradients
from tests.data_parallel.test_shard import WIDTH, build, loss_of, samples
from torch import nn
from torch.func import functional_call

import microparallel as mp

SIXTEEN = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shares(kind, step, ranks, rows=3):
    """What each rank has of a step's samples."""
    inputs, targets = samples(kind, step, rows * ranks)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    targets = targets.float() if targets.is_floating_point() else targets
    return list(zip(inputs.split(rows), targets.split(rows), strict=True))


# ── one process does the same ───────────────────────────────────────────────────────────────────────────────────────


def in_float64(comms):
    """A float32 model that is converted, beside one that was float64 before: the same bits."""
    found = []
    for precision, dtype in (("float64", torch.float32), (None, torch.float64)):
        model = mp.FullyShardedDataParallel(build("mlp").to(dtype), comms, units=is_layer, precision=precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            inputs, targets = samples("mlp", step * 2 + comms.rank, 3)
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        found.append(model.full_state_dict())
    first, other = found
    return all(one.dtype is torch.float64 for one in first.values()), [
        name for name in first if not torch.equal(first[name], other[name])
    ]


def test_float64_is_the_plain_run_in_float64(any_pool):
    """The weights of a model that was float32 are those of float32: so the plain run begins with the same."""
    torch.manual_seed(0)
    assert any_pool.run(in_float64, 2, timeout=50) == [(True, [])] * 2


class OneProcess:
    """What ranks do together, in one process: 16-bit copies of float32 masters, gradients rounded on their way."""

    def __init__(self, module, precision, ranks):
        self.module, self.ranks = module, ranks
        self.compute, self.wire = precision.compute, precision.reduce

    def gradients(self, inputs, targets, scale):
        """Of one rank's samples: as autograd gives them for the copies, which are all of one dtype."""
        own = dict(self.module.named_parameters(remove_duplicate=False))
        first = {id(one): name for name, one in reversed(own.items())}
        copies = {id(one): one.detach().to(self.compute).requires_grad_() for one in own.values()}
        given = inputs.to(self.compute) if inputs.is_floating_point() else inputs
        outputs = functional_call(self.module, {name: copies[id(one)] for name, one in own.items()}, given)
        (loss_of(outputs.to(torch.float32), targets) * scale).backward()
        return {first[key]: one.grad for key, one in copies.items() if one.grad is not None}

    def sums(self, turns, scale, local):
        """The average that all ranks have after a step of some turns, each with a share for each rank."""
        total = {}
        for turn in [sum(turns, [])] if local else turns:
            of_rank = [turn[rank :: self.ranks] for rank in range(self.ranks)]
            sent = [self.sent(mine, scale) for mine in of_rank]
            for name in sent[0]:
                first, *others = (one[name].float() for one in sent)
                summed = sum(others, first) / scale
                total[name] = total[name] + summed if name in total else summed
        return total

    def sent(self, mine, scale):
        """What one rank sends: several backwards are added up in float32 first."""
        added = {}
        for inputs, targets in mine:
            for name, gradient in self.gradients(inputs, targets, scale).items():
                added[name] = added[name] + gradient.float() if name in added else gradient
        if self.wire is torch.float32:
            return {name: one.float() * (1 / self.ranks) for name, one in added.items()}
        return {name: (one * (1 / self.ranks)).to(self.wire) for name, one in added.items()}


def beside_one_process(comms, kind, precision, how, turns, local):
    """Three steps; returns where gradients or weights differ at all."""
    precision = mp.MixedPrecision(*precision)
    plain = build(kind).float()
    one_process = OneProcess(plain, precision, comms.world_size)
    model = mp.FullyShardedDataParallel(copy.deepcopy(plain), comms, precision=precision, **how)
    mine, whole = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain))
    if model.loss_scale is not None:
        model.loss_scale.value = 256.0  # so that nothing overflows
    wrong = []
    for step in range(3):
        mine.zero_grad()
        given = [shares(kind, step * 7 + turn, comms.world_size) for turn in range(turns)]
        for number, turn in enumerate(given):
            with model.no_sync() if local and number < turns - 1 else nullcontext():
                inputs, targets = turn[comms.rank]
                outputs = model(inputs)
                wrong += [str(outputs.dtype)] * (outputs.dtype is not torch.float32)
                loss_of(outputs, targets).backward()
        scale = model.loss_scale.value if model.loss_scale else 1.0
        wanted = one_process.sums(given, scale, local)
        gradients = whole_gradients(model)
        for name, parameter in plain.named_parameters():
            parameter.grad = wanted.get(name)
            if not torch.equal(gradients[name], wanted[name].double()):
                wrong.append((step, name, float((gradients[name] - wanted[name]).abs().max())))
        mine.step()
        whole.step()
    state = plain.state_dict()
    for name, tensor in model.full_state_dict().items():
        if tensor.dtype is not torch.float32 or not torch.equal(tensor, state[name]):
            wrong.append((name, tensor.dtype))
    return wrong, identical(model, comms)


BF16, FP16 = (torch.bfloat16,), (torch.float16,)
WIDE = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("ranks", "kind", "precision", "how", "turns", "local"),
    [
        (1, "mlp", BF16, {"units": is_layer}, 2, False),
        (2, "mlp", BF16, {"units": is_layer, "overlap": True}, 1, False),
        (2, "mlp", WIDE, {"units": None, "overlap": False}, 3, False),
        (2, "gpt", BF16, {"prefetch": 2}, 3, True),
        (3, "mlp", FP16, {"reshard_after_forward": False, "overlap": True}, 2, True),
        (4, "gpt", BF16, {"units": is_layer, "prefetch": 0, "overlap": False}, 2, False),
        (4, "mlp", FP16, {"units": is_layer}, 3, True),
        (2, "gpt", FP16, {"overlap": True}, 2, False),
        (1, "mlp", FP16, {}, 2, True),
    ],
)
def test_ranks_together_are_one_process_bit_for_bit(any_pool, ranks, kind, precision, how, turns, local):
    for wrong, same in any_pool.run(beside_one_process, ranks, kind, precision, how, turns, local, timeout=50):
        assert not wrong
        assert same
