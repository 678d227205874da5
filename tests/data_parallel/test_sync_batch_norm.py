"""mp.SyncBatchNorm against one process with the whole batch: outputs, gradients, running statistics."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import microparallel as mp
from microparallel.program import Lane, lane, to_text

KINDS = {"1d": (nn.BatchNorm1d, ()), "1d, sequences": (nn.BatchNorm1d, (5,)), "2d": (nn.BatchNorm2d, (3, 2))}
KINDS["3d"] = nn.BatchNorm3d, (2, 1, 3)
OPTIONS = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.3}]
SIZES = [[2, 5], [3, 3], [1, 0, 4]]
CHANNELS = 4


class Branches(nn.Module):
    """Layers inside of layers, one of them used twice, and a mean far from zero."""

    def __init__(self, kind, options):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(1, 1), kind(CHANNELS, **options))
        self.twice = nn.ModuleDict({"norm": kind(CHANNELS, **options)})
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        inputs = self.stem[1](self.stem[0](inputs.unsqueeze(-1)).squeeze(-1) + 30)
        inputs = self.twice["norm"](inputs.tanh() * self.scale)
        return self.twice["norm"](inputs.square())


def build(kind, options):
    torch.manual_seed(0)
    model = Branches(kind, options).double()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def whole(step, sizes, shape):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(sum(sizes), CHANNELS, *shape, dtype=torch.float64, generator=generator) * 3 + 1


def share(comms, step, sizes, shape):
    start = sum(sizes[: comms.rank])
    return whole(step, sizes, shape)[start : start + sizes[comms.rank]]


def loss_of(outputs, samples):
    """A sum over samples, divided by how many there are; each sample's part differs."""
    weights = torch.linspace(1, 2, max(1, outputs[:1].numel()), dtype=outputs.dtype)[: outputs[:1].numel()]
    return (outputs.flatten(1).pow(3) * weights).sum() / samples if len(outputs) else outputs.sum()


def alone(kind, options, sizes, shape):
    model = build(kind, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        outputs = model(whole(step, sizes, shape))
        loss_of(outputs, sum(sizes)).backward()
        optimizer.step()
    return outputs.detach(), model


def differences(outputs, model, wanted, plain):
    """What differs from the plain model, by name."""
    pairs = {"outputs": (outputs, wanted)}
    theirs = plain.state_dict() | {f"gradient of {name}": one.grad for name, one in plain.named_parameters()}
    ours = model.state_dict() | {f"gradient of {name}": one.grad for name, one in model.named_parameters()}
    assert list(ours) == list(theirs)
    pairs |= {name: (ours[name], theirs[name]) for name in ours}
    close = {name: torch.allclose(*pair, rtol=1e-12, atol=1e-12) for name, pair in pairs.items()}
    return [name for name, fine in close.items() if not fine]


def one_case(comms, kind, shape, options, sizes, how):
    wanted, plain = alone(kind, options, sizes, shape)
    inner = mp.SyncBatchNorm.convert(build(kind, options), comms)
    total, ranks = sum(sizes), comms.world_size
    torchs = how == "torch's DDP"
    group = comms.process_group
    model = DistributedDataParallel(inner, process_group=group) if torchs else mp.DataParallel(inner, comms)
    optimizer = torch.optim.SGD(inner.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        inputs = share(comms, step, sizes, shape)
        with model.weighted(len(inputs)) if how == "weighted" else nullcontext():
            outputs = model(inputs)
            loss_of(outputs, len(inputs) if how == "weighted" else total / ranks).backward()
        optimizer.step()
    found = differences(outputs.detach(), inner, wanted[sum(sizes[: comms.rank]) :][: len(outputs)], plain)
    model.eval()
    plain.eval()
    inputs = share(comms, 9, sizes, shape)
    if options.get("track_running_stats", True) and comms.rank == 0:  # one rank alone: nothing is sent
        found += [] if torch.allclose(inner(inputs), plain(inputs), rtol=1e-12, atol=1e-12) else ["evaluation"]
    return [f"{kind.__name__}{list(shape)}, {options}, {sizes}, {how}: {name}" for name in found]


def every_case(comms, sizes, how):
    found = []
    for number, (kind, shape) in enumerate(KINDS.values()):
        for options in OPTIONS if number == 2 else OPTIONS[number : number + 2]:
            found += one_case(comms, kind, shape, options, sizes, how)
    return found


@pytest.mark.parametrize("how", ["weighted", "scaled loss", "torch's DDP"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_as_one_process_with_the_whole_batch(any_pool, sizes, how):
    for found in any_pool.run(every_case, len(sizes), sizes, how, timeout=55):
        assert not found


def whole_precisions(comms):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        plain = nn.BatchNorm1d(CHANNELS)
        ours = mp.SyncBatchNorm(CHANNELS, comms)
        inputs = whole(0, [4, 4], ()).to(dtype)
        mine = inputs[4 * comms.rank :][:4].requires_grad_()
        wanted = plain(inputs.requires_grad_())
        wanted.float().pow(3).sum().backward()
        found = ours(mine)
        found.float().pow(3).sum().backward()
        assert found.dtype == dtype and ours.running_mean.dtype == torch.float32
        rows = slice(4 * comms.rank, 4 * comms.rank + 4)
        torch.testing.assert_close(found, wanted[rows], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(mine.grad, inputs.grad[rows], rtol=tolerance, atol=10 * tolerance)
        torch.testing.assert_close(ours.running_var, plain.running_var, rtol=tolerance, atol=tolerance)


def test_other_precisions(pool):
    pool.run(whole_precisions, 2, transport="shm", timeout=50)


# ── what runs is what is drawn ──────────────────────────────────────────────────────────────────────────────────────


def stack():
    torch.manual_seed(0)
    parts = (part for _ in range(3) for part in (nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Tanh()))
    return nn.Sequential(*parts, nn.Linear(CHANNELS, CHANNELS)).double()


def operations(trace, rank, which):
    mine = [event for event in trace.events if event.rank == rank and event.lane is which]
    return [str(event.op) for event in sorted(mine, key=lambda event: event.asked)]


def record(comms, microbatches, overlap, bucket_cap_mb, make):
    model = mp.DataParallel(mp.SyncBatchNorm.convert(make(), comms), comms, bucket_cap_mb, overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs = []
    with mp.record(comms) as recorder:
        for step in range(3):
            optimizer.zero_grad()
            programs.append(model.program(microbatches))
            for number in range(microbatches):
                with model.no_sync() if number < microbatches - 1 else nullcontext():
                    model(share(comms, step, [3, 2], ())).pow(2).mean().backward()
            optimizer.step()
    wrong = []
    for step, program in enumerate(programs):
        mp.verify(program)
        mp.simulate(program)
        assert mp.program.from_text(to_text(program)) == program
        for rank, ops in enumerate(program.ranks):
            for which in Lane:
                meant = [str(op) for op in ops if lane(op) is which and str(op) != "="]
                done = operations(recorder.trace.step(step), rank, which)
                wrong += [] if meant == done else [f"step {step}, rank {rank}, {which}: meant {meant}, did {done}"]
    return wrong, to_text(programs[-1])


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one after another"])
@pytest.mark.parametrize(("microbatches", "bucket_cap_mb"), [(1, 25), (1, 2e-4), (3, 2e-4)])
def test_the_sums_of_layers_are_operations_of_the_program(any_pool, microbatches, overlap, bucket_cap_mb):
    for wrong, text in any_pool.run(record, 2, microbatches, overlap, bucket_cap_mb, stack, timeout=50):
        assert not wrong
        assert text.count("*:moments1@dp") == text.count("*:moments1.gradient@dp") == 2 * microbatches


class AnotherOrder(nn.Module):
    """Layers that are called in another order than they were registered in; the first of them on the inputs."""

    def __init__(self):
        super().__init__()
        self.last, self.norm = nn.Linear(CHANNELS, 2).double(), nn.BatchNorm1d(CHANNELS).double()
        self.first = nn.Linear(CHANNELS, CHANNELS).double()
        self.inputs = nn.BatchNorm1d(CHANNELS, affine=False).double()

    def forward(self, inputs):
        return self.last(self.norm(self.first(self.inputs(inputs))))


def test_the_order_of_the_sums_is_learnt_in_the_first_step(any_pool):
    for wrong, text in any_pool.run(record, 2, 1, True, 1e-4, AnotherOrder, timeout=50):
        assert not [one for one in wrong if not one.startswith("step 0")]
        assert "*:moments1@dp *:moments0@dp F" in text and "moments1.gradient" not in text


# ── use and misuse ──────────────────────────────────────────────────────────────────────────────────────────────────


def convert(comms):
    model = stack()
    norm = model[1]
    called = []
    norm.register_forward_hook(lambda *_: called.append(1))
    model.extra = norm  # the same layer under two names
    state = model.state_dict()
    assert mp.SyncBatchNorm.convert(model, comms) is model
    assert model[1] is norm is model.extra and isinstance(norm, mp.SyncBatchNorm)
    assert list(model.state_dict()) == list(state)
    plain = stack()
    plain.extra = plain[1]
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    wrapped = mp.DataParallel(model, comms)
    other = copy.deepcopy(wrapped)
    for one in (wrapped, other):
        one(share(comms, 0, [2, 2], ())).sum().backward()
    assert len(called) == 4
    assert all(map(torch.equal, [p.grad for p in wrapped.parameters()], [p.grad for p in other.parameters()]))
    averages = torch.optim.swa_utils.AveragedModel(wrapped)
    averages.update_parameters(wrapped)
    torch.compile(wrapped, backend="eager")(share(comms, 0, [2, 2], ()))
    with pytest.raises(mp.errors.UsageError, match=r"a Comms cannot be pickled: .* save its state_dict\(\)"):
        pickle.dumps(mp.SyncBatchNorm(CHANNELS, comms))
    for refuse in (wrapped.sit_out, wrapped.join().__enter__):
        with pytest.raises(mp.errors.UsageError, match=r"SyncBatchNorm needs every rank .* an empty batch$"):
            refuse()
    with pytest.raises(mp.errors.UsageError, match=r"microbatches=\[2, 1\]: a SyncBatchNorm needs every rank"):
        wrapped.program([2, 1])
    with pytest.raises(ValueError, match=r"^expected 2D or 3D input \(got 4D input\)$"):
        model[1](torch.ones(1, CHANNELS, 1, 1).double())
    with pytest.raises(ValueError, match=r"^expected at least 2D input \(got 1D input\)$"):
        mp.SyncBatchNorm(CHANNELS, comms)(torch.ones(CHANNELS))
    with pytest.raises(ValueError, match=r"all ranks together have 1$"):
        mp.SyncBatchNorm(CHANNELS, comms)(torch.ones(1 - comms.rank, CHANNELS))


def test_a_converted_model(pool):
    pool.run(convert, 2, transport="shm", timeout=50)


def count_nothing(comms):
    model = mp.DataParallel(mp.SyncBatchNorm.convert(stack(), comms), comms)
    with model.weighted(1 - comms.rank, 1):
        model(share(comms, 0, [2, 2], ())).sum().backward()


def test_samples_that_are_in_the_mean_cannot_count_nothing(pool):
    with pytest.raises(mp.errors.RankFailed, match=r"weighted\(0\) on a rank that has 2 samples: they are in the mean"):
        pool.run(count_nothing, 2, transport="shm", timeout=50)


class Fused(nn.BatchNorm1d):
    def forward(self, inputs):
        return super().forward(inputs).relu()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Fused(3), r"^SyncBatchNorm\.convert: 0 is a Fused, whose own forward would be lost; use BatchNorm1d"),
        (nn.LazyBatchNorm1d(), r"^SyncBatchNorm\.convert: 0 does not know its channels yet; call the model"),
    ],
)
def test_what_cannot_be_converted_is_named(pool, layer, message):
    with pytest.raises(mp.errors.RankFailed, match=message[1:]):
        pool.run(convert_it, 2, layer, transport="shm", timeout=50)


def convert_it(comms, layer):
    mp.SyncBatchNorm.convert(nn.Sequential(layer), comms)


def in_a_pipeline(comms):
    mp.Pipeline(mp.SyncBatchNorm.convert(stack(), comms), comms, "1f1b", 2, nn.functional.mse_loss)


def test_a_pipeline_refuses_it(pool):
    with pytest.raises(mp.errors.RankFailed, match="has a SyncBatchNorm, which needs all ranks at once"):
        pool.run(in_a_pipeline, 2, transport="shm", timeout=50)


def single(comms):
    model, plain = mp.SyncBatchNorm.convert(stack(), comms), stack()
    inputs = share(comms, 0, [4], ())
    return torch.equal(model(inputs), plain(inputs))


def test_a_world_of_one_rank_is_plain_batch_norm(pool):
    assert pool.run(single, 1, transport="shm", timeout=50) == [True]
