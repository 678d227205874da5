"""ZeRO 3 against one process: losses, gradients and weights of any model; and what may go wrong."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from tests.data_parallel.test_shard import ADAMW, SGD, WIDTH, build, difference, loss_of, samples
from tests.pairwise import pairwise
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import microparallel as mp
from microparallel.errors import GradientError, UsageError


def is_layer(module):
    return isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm | nn.Conv2d)


UNITS = {"auto": "auto", "layers": is_layer, "one": None}


def whole_gradients(model):
    """Put the parts of all ranks together, by parameter; None where there is no gradient."""
    found = {}
    for unit in model.units:
        for part in unit.parts:
            for index, name in enumerate(part.names):
                flat = torch.zeros(part.whole[index].numel(), dtype=torch.float64, device=part.flat.device)
                gradient, piece = part.shards[index].grad, part.pieces.get(index)
                if gradient is not None and piece is not None:
                    flat[piece.start : piece.stop] = gradient.flatten()
                model._shard_comms.all_reduce(flat)
                found[name] = None if gradient is None else flat.view(part.whole[index].shape)
    return found


def identical(model, comms):
    """Whether every rank would gather the same bits."""
    mine = torch.cat([tensor.flatten().double().cpu() for _, tensor in model.whole_tensors()])
    return all(torch.equal(mine, other) for other in comms.all_gather(mine))


def train_beside_one_process(
    comms, kind, units, prefetch, reshard, optimizer, accumulate, clip, replicas=1, overlap=None, steps=5, device="cpu"
):
    """The largest difference to one process, over some steps; and whether all ranks have the same bits."""
    optimizer_class, options = {"adamw": ADAMW, "sgd": SGD}[optimizer]
    how = {"units": UNITS[units], "prefetch": prefetch, "reshard_after_forward": reshard, "replicas": replicas}
    model = mp.FullyShardedDataParallel(build(kind), comms, overlap=overlap, **how)
    mine = optimizer_class(model.parameters(), **options)
    plain = build(kind).to(device)
    whole = optimizer_class(plain.parameters(), **options)
    worst = 0.0
    for step in range(steps):
        mine.zero_grad()
        whole.zero_grad()
        for number in range(abs(accumulate)):
            inputs, targets = (one.to(device) for one in samples(kind, step * 5 + number, 2 * comms.world_size))
            there = loss_of(plain(inputs), targets) / abs(accumulate)
            there.backward()
            share = slice(2 * comms.rank, 2 * comms.rank + 2)
            local = accumulate < 0 and number < -accumulate - 1
            with model.no_sync() if local else model.weighted(1.0, float(comms.world_size)):
                here = loss_of(model(inputs[share]), targets[share]) / abs(accumulate)
                here.backward()
            worst = max(worst, difference(comms.all_reduce_mean(here.detach()), there))
        gradients = whole_gradients(model) if step in (0, steps - 1) else {}
        for name, gradient in gradients.items():
            same = plain.get_parameter(name)
            assert (gradient is None) == (same.grad is None), name
            if same.grad is not None:
                worst = max(worst, difference(gradient, same.grad))
        if clip:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            worst = max(worst, difference(model.clip_grad_norm_(0.05), norm))
        mine.step()
        whole.step()
    for name, tensor in model.whole_tensors():
        worst = max(worst, difference(tensor, plain.state_dict()[name]))
    return worst, identical(model, comms)


def compared(comms, rows, **options):
    return {row: train_beside_one_process(comms, *row, **options) for row in rows}


KINDS = ["mlp", "gpt", "odd"]
WHAT = (list(UNITS), [0, 1, 2], [True, False], ["adamw", "sgd"], [1, 3, -3], [True, False])


@pytest.mark.timeout(300)  # the whole matrix takes minutes on a busy machine
@pytest.mark.parametrize(
    ("any_pool", "ranks"),
    [
        *itertools.product(["gloo", "shm"], [1, 2]),
        ("shm", 3),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("gloo", 3), ("gloo", 4), ("shm", 4))),
    ],
    indirect=["any_pool"],
)
@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        pytest.param(pairwise(KINDS, *WHAT), 3, id="pairs"),
        *(
            pytest.param(list(itertools.product([kind], *WHAT)), 5, id=f"whole {kind}", marks=pytest.mark.slow)
            for kind in KINDS
        ),
    ],
)
def test_parity_with_one_process(any_pool, ranks, rows, steps):
    for found in any_pool.run(compared, ranks, rows, steps=steps, timeout=290):
        for row, (worst, same) in found.items():
            assert worst < 1e-12, row
            assert same, row


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), (2, 2), (4, 4)])
def test_hybrid_parity(any_pool, ranks, replicas, overlap):
    """Parts inside of a group of neighbours, and the same parts in every group."""
    rows = [
        ("mlp", "layers", 1, True, "adamw", 3, True, replicas, overlap),
        ("gpt", "auto", 0, True, "sgd", -3, False, replicas, overlap),
        ("odd", "layers", 2, False, "adamw", 1, True, replicas, overlap),
    ]
    for found in any_pool.run(compared, ranks, rows, steps=3, timeout=100):
        for row, (worst, same) in found.items():
            assert worst < 1e-12, row
            assert same, row


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("ranks", "transport"), [(1, "nccl"), (2, "gloo"), (4, "gloo")])
def test_parity_on_a_gpu(pool, ranks, transport):
    rows = [
        (kind, units, prefetch, reshard, optimizer, accumulate, True, replicas, overlap, 4, "cuda")
        for kind, units, prefetch, reshard, optimizer, accumulate, replicas, overlap in (
            ("mlp", "layers", 1, True, "adamw", 1, 1, True),
            ("gpt", "auto", 2, True, "adamw", 3, 1, None),
            ("odd", "layers", 0, False, "sgd", -3, 1, True),
            ("mlp", "one", 1, True, "sgd", 1, 1 if ranks == 1 else 2, True),
        )
    ]
    for found in pool.run(compared, ranks, rows, transport=transport, device="cuda", timeout=300):
        for row, (worst, same) in found.items():
            assert worst < 1e-10, row  # a GPU multiplies matrices of other sizes in another order
            assert same, row


# ── what runs is what is drawn ──────────────────────────────────────────────────────────────────────────────────────


def look_at_parameters(comms):
    plain, model = build("mlp"), mp.FullyShardedDataParallel(build("mlp"), comms)
    names = [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    dimensions = all(
        one.dim() == other.dim() for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return names, dimensions, sum(one.numel() for one in model.parameters())


def test_parameters_between_steps_are_parts(any_pool):
    found = any_pool.run(look_at_parameters, 3, timeout=50)
    assert all(names and dimensions for names, dimensions, _ in found)
    assert sum(count for *_, count in found) == sum(one.numel() for one in build("mlp").parameters())


# ── any model ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Backwards(nn.Module):
    """Layers that are used in another order than they are registered in, one of them twice, one by its weight alone."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4, bias=False)
        self.offset = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs):
        hidden = self.middle(self.first(inputs).tanh()) + self.offset
        hidden = self.last(self.first(hidden).tanh())
        return functional.linear(hidden, self.head.weight)


class Attends(nn.Module):
    """Layers of torch's that read the weights of their parts themselves."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, inputs):
        inputs = inputs[:, None] * torch.linspace(1, 2, 3, dtype=inputs.dtype)[:, None]
        hidden, _ = self.attention(inputs, inputs, inputs)
        hidden, _ = self.recurrent(self.encoder(hidden))
        return self.head(hidden[:, -1])


class Mixed(nn.Module):
    """Two dtypes, frozen layers around trained ones in a block, a low-rank update beside a frozen layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH), nn.Tanh(), frozen())
            for _ in range(3)
        )
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.base = nn.Linear(WIDTH, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float32))

    def double(self):
        """All but one."""
        super().double()
        self.scale.data = self.scale.data.float()
        return self

    def forward(self, inputs):
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return (self.base(inputs) + self.up(self.down(inputs))) * self.scale


def frozen():
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward: around a block, inside of one, around two."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(4)
        )
        self.inside = Inside(reentrant)
        self.head = nn.Linear(WIDTH, 4)
        self.reentrant = reentrant

    def forward(self, inputs):
        hidden = inputs.requires_grad_(self.reentrant)
        hidden = checkpoint(self.blocks[0], hidden, use_reentrant=self.reentrant)
        hidden = self.inside(hidden)
        hidden = checkpoint(lambda one: self.blocks[2](self.blocks[1](one)), hidden, use_reentrant=self.reentrant)
        return self.head(self.blocks[3](hidden))


class Inside(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, inputs):
        return self.other(checkpoint(lambda one: self.one(one).tanh(), inputs, use_reentrant=self.reentrant))


class Normalised(nn.Module):
    """Running statistics, in buffers; parameters under weight norm."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4))

    def forward(self, inputs):
        return self.normed(self.layers(inputs))


ANY = {
    "backwards": Backwards,
    "attends": Attends,
    "mixed": Mixed,
    "checkpointed": lambda: Checkpointed(False),
    "reentrant": lambda: Checkpointed(True),
    "normalised": Normalised,
}


def one_unit_a_layer(module):
    return isinstance(module, nn.Linear | nn.MultiheadAttention | nn.LSTM | nn.TransformerEncoderLayer | nn.BatchNorm1d)


def any_model(comms, kind, how):
    """Beside one process: all ranks have the same samples, so batch norm sees the same, too."""
    torch.manual_seed(0)
    plain = ANY[kind]().double()
    torch.manual_seed(0)
    model = mp.FullyShardedDataParallel(ANY[kind]().double(), comms, **how)
    mine, whole = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain))
    worst = 0.0
    most = 0
    for step in range(4):
        inputs, targets = samples("mlp", step, 5)
        for one, optimizer in ((model, mine), (plain, whole)):
            optimizer.zero_grad()
            loss_of(one(inputs.clone()), targets).backward()
            optimizer.step()
        most = max(most, sum(unit.is_started for unit in model.units))
        state = plain.state_dict()
        worst = max(worst, *(difference(tensor, state[name]) for name, tensor in model.full_state_dict().items()))
        with torch.no_grad():
            for one in (model, plain):
                one.eval()
            worst = max(worst, difference(model(inputs), plain(inputs)))
            for one in (model, plain):
                one.train()
    return worst, list(model.full_state_dict()) == list(plain.state_dict()), most


HOW = [
    {},
    {"units": one_unit_a_layer, "prefetch": 2},
    {"units": one_unit_a_layer, "reshard_after_forward": False},
    {"units": None},
]


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("how", HOW, ids=["auto", "layers", "kept", "one"])
def test_any_model_is_as_in_one_process(pool, kind, how):
    for worst, names, left in pool.run(any_model, 2, kind, how, transport="shm", timeout=50):
        assert worst < (1e-6 if kind == "mixed" else 1e-12)  # one of its parameters is float32
        assert names and not left


def counted_again(comms):
    """How often layers run with activation checkpointing: inside of the model, and around the wrapped model."""
    calls = []
    model = Checkpointed(False).double()
    for block in model.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    wrapped = mp.FullyShardedDataParallel(model, comms)
    inputs, targets = samples("mlp", 0, 4)
    loss_of(wrapped(inputs), targets).backward()
    inside = len(calls)
    calls.clear()
    loss_of(checkpoint(wrapped, inputs.requires_grad_(), use_reentrant=False), targets).backward()
    return inside, len(calls) > 4


def test_checkpointing_computes_again(pool):
    """Three of four blocks are inside of a checkpoint; torch stops where nothing is missing any more."""
    found = pool.run(counted_again, 2, transport="shm", timeout=50)
    assert all(4 < inside <= 7 and around for inside, around in found)


class Skips(nn.Module):
    """Layers that only some ranks use, and one that none uses at first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, inputs, used):
        for number in used:
            inputs = inputs + self.layers[number](inputs).tanh()
        return self.head(inputs)


def skipped(comms, rows):
    """Each rank uses other layers; in one process, one batch after another does."""
    torch.manual_seed(0)
    plain = Skips().double()
    torch.manual_seed(0)
    model = mp.FullyShardedDataParallel(Skips().double(), comms, prefetch=1)
    mine, whole = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain))
    worst = 0.0
    for step, used in enumerate(rows):
        mine.zero_grad()
        whole.zero_grad()
        for rank in range(comms.world_size):
            inputs, targets = samples("mlp", 10 * step + rank, 4)
            (loss_of(plain(inputs, used[rank]), targets) / comms.world_size).backward()
            if rank == comms.rank:
                loss_of(model(inputs, used[rank]), targets).backward()
        missing = [name for name, gradient in whole_gradients(model).items() if gradient is None]
        assert missing == [name for name, one in plain.named_parameters() if one.grad is None]
        mine.step()
        whole.step()
        state = plain.state_dict()
        worst = max(worst, *(difference(tensor, state[name]) for name, tensor in model.full_state_dict().items()))
    return worst


def test_ranks_may_skip_modules(any_pool):
    rows = [
        [(0, 2), (0, 1, 2)],
        [(0, 1, 2, 4), (2,)],
        [(), (0, 1, 2, 3, 4)],
        [(3,), (1, 4)],
    ]
    assert max(any_pool.run(skipped, 2, rows, timeout=50)) < 1e-12


def uneven(comms, counts):
    """Ranks with different numbers of samples, and some with none in a step, beside one process on all samples."""
    plain, model = build("mlp"), mp.FullyShardedDataParallel(build("mlp"), comms, units=is_layer)
    mine, whole = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain))
    worst = 0.0
    for step, count in enumerate(counts):
        inputs, targets = samples("mlp", step, sum(count))
        begin = sum(count[: comms.rank])
        share = slice(begin, begin + count[comms.rank])
        whole.zero_grad()
        loss_of(plain(inputs), targets).backward()
        whole.step()
        mine.zero_grad()
        with model.weighted(count[comms.rank]):
            if count[comms.rank]:
                loss_of(model(inputs[share]), targets[share]).backward()
            else:
                model.sit_out()
        mine.step()
        state = plain.state_dict()
        worst = max(worst, *(difference(tensor, state[name]) for name, tensor in model.full_state_dict().items()))
    return worst


def test_uneven_batches(any_pool):
    assert max(any_pool.run(uneven, 3, [(1, 2, 3), (0, 4, 1), (3, 0, 0), (2, 2, 2)], timeout=50)) < 1e-12


def at_once_without_samples(comms, counts, how):
    """The first pass is one in which ranks have nothing; layers are used in another order than registered."""
    torch.manual_seed(0)
    plain = Backwards().double()
    torch.manual_seed(0)
    model = mp.FullyShardedDataParallel(Backwards().double(), comms, units=one_unit_a_layer, **how)
    worst = 0.0
    with torch.no_grad():  # an evaluation, to begin with
        inputs, _ = samples("mlp", 9, 2)
        if counts[0][comms.rank]:
            worst = difference(model(inputs), plain(inputs))
        else:
            model.sit_out_of_forward()
    mine, whole = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain))
    for step, count in enumerate(counts):
        inputs, targets = samples("mlp", step, sum(count))
        for optimizer in (mine, whole):
            optimizer.zero_grad()
        loss_of(plain(inputs), targets).backward()
        first = sum(count[: comms.rank])
        share = slice(first, first + count[comms.rank])
        with model.weighted(float(count[comms.rank]), float(sum(count))):
            if count[comms.rank]:
                loss_of(model(inputs[share]), targets[share]).backward()
            else:
                model.sit_out()
        mine.step()
        whole.step()
        state = plain.state_dict()
        worst = max(worst, *(difference(tensor, state[name]) for name, tensor in model.full_state_dict().items()))
    return worst


@pytest.mark.parametrize(
    ("counts", "how"),
    [
        ([(0, 2, 1), (2, 0, 2)], {}),
        ([(1, 0, 0), (0, 0, 3)], {"prefetch": 2, "overlap": True}),
        ([(0, 1), (1, 1)], {"prefetch": 0, "reshard_after_forward": False}),
        ([(0, 1, 0, 2), (1, 1, 1, 1)], {"replicas": 2, "overlap": False}),
    ],
)
def test_a_rank_without_samples_in_the_very_first_pass(any_pool, counts, how):
    assert max(any_pool.run(at_once_without_samples, len(counts[0]), counts, how, timeout=15)) < 1e-12


def several_ways(comms):
    """Two forwards before one backward, backward twice through a graph, gradients without backward, a pass left out."""
    plain, model = build("mlp"), mp.FullyShardedDataParallel(build("mlp"), comms, units=is_layer)
    inputs, targets = samples("mlp", 0, 4)
    found = {}

    def compare(name):
        gradients = whole_gradients(model)
        found[name] = max(
            difference(gradients[key], one.grad) for key, one in plain.named_parameters() if one.grad is not None
        )
        found[name] += sum((gradients[key] is None) != (one.grad is None) for key, one in plain.named_parameters())

    def anew():
        for one in (model, plain):
            one.zero_grad()

    for one in (model, plain):
        (loss_of(one(inputs), targets) + loss_of(one(-inputs), targets)).backward()
    compare("two forwards")
    anew()
    for one in (model, plain):
        loss = loss_of(one(inputs), targets)
        loss.backward(retain_graph=True)
        loss.backward()
    compare("twice")
    anew()
    for one in (model, plain):
        wanted = inputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(one(wanted), targets), wanted)
        found[type(one).__name__] = float(gradient.sum())
        one(inputs)  # nothing follows
        loss_of(one(inputs), targets).backward()
    compare("after autograd.grad")
    anew()
    with model.no_sync():
        loss_of(model(inputs), targets).backward()
    model.zero_grad()  # also what was not summed
    for one in (model, plain):
        loss_of(one(inputs), targets).backward()
    compare("removed")
    anew()
    with model.no_sync():
        loss_of(model(inputs), targets).backward()
    with torch.no_grad():
        model(inputs)
    loss_of(model(-inputs), targets).backward()
    for sign in (1, -1):
        loss_of(plain(sign * inputs), targets).backward()
    compare("evaluated in between")
    found["autograd.grad"] = abs(found.pop("FullMLP") - found.pop("FullyShardedDataParallel"))
    return found


def test_passes_in_other_orders(any_pool):
    for found in any_pool.run(several_ways, 2, timeout=50):
        assert {name: worst for name, worst in found.items() if worst > 1e-12} == {}


def with_penalty(comms):
    """A loss that has the parameters in it, and so the parts of this rank."""
    plain, model = build("mlp"), mp.FullyShardedDataParallel(build("mlp"), comms)
    inputs, targets = samples("mlp", 0, 4)
    for one in (model, plain):
        penalty = sum(parameter.square().sum() for parameter in one.parameters())
        (loss_of(one(inputs), targets) + 0.1 * penalty).backward()
    gradients = whole_gradients(model)
    return max(difference(gradients[name], one.grad) for name, one in plain.named_parameters())


def test_a_loss_with_the_parameters_in_it(any_pool):
    assert max(any_pool.run(with_penalty, 2, timeout=50)) < 1e-12


def changed(comms):
    """Freeze, thaw and convert after wrapping."""
    plain, model = build("mlp").float(), mp.FullyShardedDataParallel(build("mlp").float(), comms, units=is_layer)
    for one in (model, plain):
        one.double()
    mine, whole = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    worst = 0.0
    for step in range(4):
        inputs, targets = samples("mlp", step, 4)
        for one, optimizer in ((model, mine), (plain, whole)):
            for number, parameter in enumerate(one.parameters()):
                parameter.requires_grad_(step in (0, 3) or (number + step) % 2 == 0)
            optimizer.zero_grad()
            loss_of(one(inputs), targets).backward()
            optimizer.step()
        state = plain.state_dict()
        worst = max(worst, *(difference(tensor, state[name]) for name, tensor in model.full_state_dict().items()))
    return worst


def test_parameters_may_be_frozen_thawed_and_converted(any_pool):
    assert max(any_pool.run(changed, 2, timeout=50)) < 1e-12


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.at = None

    def forward(self, inputs):
        for number, layer in enumerate(self.layers):
            inputs = Breaks.apply(layer(inputs), self.at == ("backward", number))
            if self.at == ("forward", number):
                raise KeyError("broken")
        return self.head(inputs)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs, breaks):
        context.breaks = breaks
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        if context.breaks:
            raise KeyError("broken")
        return gradient, None


def broken_passes(comms):
    """An error in a forward or a backward of all ranks leaves nothing whole, and the next step is right."""
    torch.manual_seed(0)
    plain = Fails().double()
    torch.manual_seed(0)
    model = mp.FullyShardedDataParallel(Fails().double(), comms)
    left = []
    inputs, targets = samples("mlp", 0, 4)
    for at in (("forward", 1), ("backward", 1), ("backward", 2), ("forward", 0)):
        model.module.at = at
        with pytest.raises(KeyError):
            loss_of(model(inputs), targets).backward()
        model.module.at = None
        model.zero_grad()
        plain.zero_grad()
        for one in (model, plain):
            loss_of(one(inputs), targets).backward()
        gradients = whole_gradients(model)
        left.append(max(difference(gradients[name], one.grad) for name, one in plain.named_parameters()))
        left.append(sum(unit.is_started for unit in model.units))
    return max(left)


def test_after_an_error_the_next_step_is_right(any_pool):
    assert max(any_pool.run(broken_passes, 2, timeout=50)) < 1e-12


def in_place(comms):
    """torch's own error for a tensor that was changed after it was saved."""

    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs):
            hidden = self.layer(inputs).exp()
            hidden.mul_(3)
            return hidden

    model = mp.FullyShardedDataParallel(Changes(), comms)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(2, WIDTH)).sum().backward()


def test_a_change_in_place_is_still_refused(pool):
    pool.run(in_place, 2, transport="shm", timeout=50)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def refusal(function):
    try:
        function()
    except UsageError as error:
        return str(error)
    return "nothing was refused"


def refused(comms):
    plain = build("mlp")
    early = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = mp.FullyShardedDataParallel(plain, comms)
    inputs, targets = samples("mlp", 0, 4)
    loss_of(model(inputs), targets).backward()
    words = {
        "torch's clipping": refusal(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        "an optimizer made before": refusal(early.step),
        "a part is no matrix": refusal(torch.optim.Adafactor(model.parameters()).step),
        "ShardedOptimizer": refusal(lambda: mp.ShardedOptimizer(model.parameters(), torch.optim.SGD, comms, lr=0.1)),
        "a copy": refusal(lambda: copy.deepcopy(model)),
        "pickle": refusal(lambda: pickle.dumps(model)),
        "join": refusal(lambda: model.join().__enter__()),
        "assign": refusal(lambda: model.load_state_dict({}, assign=True)),
        "names": refusal(lambda: model.load_state_dict({"else": inputs})),
    }
    state = model.full_state_dict()
    state["layers.0.weight"] = state["layers.0.weight"][:1]
    words["shapes"] = refusal(lambda: model.load_state_dict(state))
    model.zero_grad()
    with model.no_sync():
        loss_of(model(inputs), targets).backward()
    words["not summed"] = refusal(torch.optim.SGD(model.parameters(), lr=0.1).step)
    for name, how in {
        "units": {"units": "layers"},
        "prefetch": {"prefetch": -1},
        "replicas": {"replicas": 3},
        "a list": {"units": lambda module: isinstance(module, nn.ModuleList)},
    }.items():
        words[name] = refusal(lambda how=how: mp.FullyShardedDataParallel(build("mlp"), comms, **how))
    words["wrapped already"] = refusal(lambda: mp.DataParallel(model, comms))
    words["given before"] = refusal(lambda: mp.FullyShardedDataParallel(plain, comms))
    norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), mp.SyncBatchNorm(WIDTH, comms))
    words["SyncBatchNorm"] = refusal(lambda: mp.FullyShardedDataParallel(norm, comms))
    model.module.more = nn.Linear(2, 2)
    words["added later"] = refusal(lambda: model(inputs))
    return words


REFUSED = {
    "torch's clipping": "call clip_grad_norm_ of the wrapped model",
    "an optimizer made before": "make it of the wrapped model's parameters()",
    "a part is no matrix": "Adafactor does not update each element by itself",
    "ShardedOptimizer": "SGD(model.parameters(), …)",
    "a copy": "load full_state_dict()",
    "pickle": "save full_state_dict()",
    "join": "sit_out()",
    "assign": "assign=True",
    "names": "unexpected: else",
    "shapes": "layers.0.weight has shape",
    "not summed": "outside of no_sync()",
    "units": "units='layers'",
    "prefetch": "prefetch=-1",
    "replicas": "replicas=3: 2 ranks",
    "a list": "which is never called",
    "wrapped already": "this model is a FullyShardedDataParallel already",
    "given before": "was given to a FullyShardedDataParallel before",
    "SyncBatchNorm": "SyncBatchNorm",
    "added later": "'more.weight' was added",
}


def test_what_cannot_be_right_is_refused_in_one_line(any_pool):
    for words in any_pool.run(refused, 2, timeout=50):
        assert {name: text for name, text in words.items() if REFUSED[name] not in text or "\n" in text} == {}
        assert words.keys() == REFUSED.keys()


class OwnOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs, order):
        for number in order:
            inputs = self.layers[number](inputs)
        return inputs


def other_orders(comms):
    """Each rank gathers another layer on demand, of the same size: each computes with the other's weights."""
    model = mp.FullyShardedDataParallel(OwnOrder().double(), comms, units=is_layer, prefetch=0)
    inputs = torch.ones(2, WIDTH, dtype=torch.float64)
    model(inputs, (0, 1, 2)).sum().backward()
    with torch.no_grad():
        model(inputs, (0, 1, 2, comms.rank))
    return refusal(lambda: model(inputs, (0, 1, 2)).sum().backward())


def test_ranks_that_use_units_in_different_orders_are_noticed(any_pool):
    """No transport can: both ranks make the same call."""
    assert all("in different orders" in words for words in any_pool.run(other_orders, 2, timeout=20))


def with_nothing_finite(comms):
    model = mp.FullyShardedDataParallel(build("mlp"), comms, check_finite=True)
    inputs, targets = samples("mlp", 0, 4)
    with pytest.raises(GradientError) as caught:
        loss_of(model(inputs * (float("nan") if comms.rank else 1.0)), targets).backward()
    model.zero_grad()
    loss_of(model(inputs), targets).backward()
    strict = mp.FullyShardedDataParallel(Skips().double(), comms, find_unused_parameters=False)
    with pytest.raises(GradientError) as unused:
        loss_of(strict(inputs, (0, 1)), targets).backward()
    return str(caught.value), str(unused.value)


def test_gradients_that_are_not_finite_or_missing_are_named(any_pool):
    for finite, unused in any_pool.run(with_nothing_finite, 2, timeout=50):
        assert "rank 1: layers" in finite and "rank 0" not in finite
        assert "layers.2.weight" in unused and "find_unused_parameters=True" in unused


def compiled(comms, backend):
    """Blocks that are compiled before the model is wrapped; the wrapped model itself is not."""
    plain, inner = build("gpt"), build("gpt")
    for module in inner.modules():
        if type(module).__name__ == "Block":
            module.compile(backend=backend)
    model = mp.FullyShardedDataParallel(inner, comms, units=is_layer)
    mine, whole = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain))
    for step in range(2):
        inputs, targets = samples("gpt", step, 4)
        for one, optimizer in ((model, mine), (plain, whole)):
            optimizer.zero_grad()
            loss_of(one(inputs), targets).backward()
            optimizer.step()
    state = plain.state_dict()
    worst = max(difference(tensor, state[name]) for name, tensor in model.full_state_dict().items())
    return worst, refusal(lambda: torch.compile(model, backend="eager")(inputs))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_layers_may_be_compiled(pool, backend):
    for worst, words in pool.run(compiled, 2, backend, transport="shm", timeout=55):
        assert worst < 1e-12
        assert "block.compile()" in words


# ── whole parameters ────────────────────────────────────────────────────────────────────────────────────────────────


def summoned(comms):
    plain, model = build("gpt"), mp.FullyShardedDataParallel(build("gpt"), comms)
    state = plain.state_dict()
    inputs, targets = samples("gpt", 0, 4)
    with model.summon_full_parameters() as module, torch.no_grad():
        same = all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
        for parameter in module.parameters():
            parameter.mul_(0.5)
    with model.summon_full_parameters(write_back=False) as module, torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for parameter in plain.parameters():
        parameter.data.mul_(0.5)
    found = [difference(loss_of(model(inputs), targets), loss_of(plain(inputs), targets))]
    only = model.full_state_dict(on=1)
    names = list(model.state_dict()) == list(state)
    other = mp.FullyShardedDataParallel(build("gpt").float(), comms, units=is_layer)
    other.double()
    other.load_state_dict(model.state_dict())
    found.append(difference(loss_of(other(inputs), targets), loss_of(plain(inputs), targets)))
    return same, names, len(only) == len(state) * (comms.rank == 1), max(found)


def test_whole_parameters_for_a_while(any_pool):
    assert any_pool.run(summoned, 2, timeout=50) == [(True, True, True, 0.0)] * 2


def let_go(comms):
    """After a step nothing of it is left; after the model, nothing of the model."""
    model = mp.FullyShardedDataParallel(build("mlp"), comms)
    inputs, targets = samples("mlp", 0, 4)
    loss_of(model(inputs), targets).backward()
    gathered = [part.gathered for unit in model.units for part in unit.parts]
    references = [weakref.ref(unit) for unit in model.units]
    del model
    gc.collect()
    return [one for one in gathered if one is not None], [one for one in references if one() is not None]


def test_nothing_is_left_behind(any_pool):
    assert any_pool.run(let_go, 2, timeout=50) == [([], [])] * 2


# ── a model that fits on no rank ────────────────────────────────────────────────────────────────────────────────────


def deferred(comms, kind, seed_of_rank):
    torch.manual_seed(0)
    plain = ANY[kind]().double()
    torch.manual_seed(seed_of_rank * comms.rank)
    with mp.deferred_init():
        module = ANY[kind]().double()
    model = mp.FullyShardedDataParallel(module, comms, units=one_unit_a_layer)
    state = plain.state_dict()
    same = all(torch.equal(tensor, state[name]) for name, tensor in model.full_state_dict().items())
    inputs, targets = samples("mlp", 0, 4)
    losses = [loss_of(one(inputs.clone()), targets) for one in (model, plain)]
    for loss in losses:
        loss.backward()
    return same, difference(*losses)


@pytest.mark.parametrize("kind", ANY)
def test_a_deferred_model_has_the_weights_of_one_process(pool, kind):
    for same, worst in pool.run(deferred, 2, kind, 0, transport="shm", timeout=50):
        assert same
        assert worst < 1e-6 if kind == "mixed" else worst < 1e-12


def test_ranks_with_different_seeds_are_told(pool):
    with pytest.raises(mp.errors.RankFailed, match=r"torch\.manual_seed with the same number"):
        pool.run(deferred, 2, "backwards", 1, transport="shm", timeout=50)
