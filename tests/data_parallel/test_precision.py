"""Mixed precision of DataParallel: 16-bit copies to compute with, float32 parameters, and steps that are skipped."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import microparallel as mp
from microparallel.data_parallel import LossScale
from microparallel.data_parallel.skipped_steps import is_finite
from microparallel.errors import GradientError, UsageError

WIDTH, ROWS = 8, 6
SIXTEEN = {"bf16": torch.bfloat16, "fp16": torch.float16}


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, WIDTH))


def share(comms, step=0, rows=ROWS):
    """This rank's samples of a step."""
    whole = torch.randn(rows * comms.world_size, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole[comms.rank * rows : (comms.rank + 1) * rows]


def gradients(model):
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


# ── which copies a layer computes with ──────────────────────────────────────────────────────────────────────────────


class Unusual(nn.Module):
    """Layers that read their parameters in other ways than a Linear does, twice, or not at all."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(1, 1, 3, padding=1))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.embed.weight
        self.embed.bias.requires_grad_(False)

    def forward(self, inputs):
        hidden = self.embed(inputs) * self.scale[0]
        if self.kind == "attention":
            hidden = self.attention(hidden[None], hidden[None], hidden[None])[0][0]
        if self.kind == "recurrent":
            hidden = self.recurrent(hidden[None])[0][0]
        if self.kind == "encoder":
            hidden = self.encoder(hidden[None])[0]
        if self.kind == "parametrized":
            hidden = self.convolution(hidden[:, None])[:, 0]
        if self.kind == "called twice":
            hidden = self.embed(hidden)
        if self.kind in ("checkpoint", "reentrant checkpoint"):
            hidden = checkpoint(self.encoder, hidden[None], use_reentrant=self.kind.startswith("reentrant"))[0]
        return self.tied(hidden) if self.kind != "reentrant checkpoint" else hidden


def by_hand(module, inputs, dtype, scale):
    """Gradients of a module of which all parameters are converted, with a scaled loss: what the wrapper must give."""
    own = dict(module.named_parameters(remove_duplicate=False))
    copies = {id(one): one.to(dtype) for one in own.values()}
    outputs = functional_call(module, {name: copies[id(one)] for name, one in own.items()}, inputs.to(dtype))
    (outputs.to(torch.float32).pow(2).mean() * scale).backward()
    return {name: one / scale for name, one in gradients(module).items()}


def unusual(comms, kind, precision):
    module = Unusual(kind)
    plain = copy.deepcopy(module)
    plain.kind = "encoder" if "checkpoint" in kind else kind
    if kind == "reentrant checkpoint":
        plain.tied = nn.Identity()
    model = mp.DataParallel(module, comms, precision=precision)
    seen = []
    for module in (plain.encoder, model.encoder):  # what a layer inside is given, and what it reads
        module.register_forward_hook(lambda layer, given, _: seen.append((given[0].dtype, layer.linear1.weight.dtype)))
    inputs = share(comms)
    outputs = model(inputs)
    assert outputs.dtype is torch.float32
    outputs.pow(2).mean().backward()
    wanted = by_hand(plain, inputs, SIXTEEN[precision], model.loss_scale.value if model.loss_scale else 1.0)
    mine = gradients(model)
    assert mine.keys() == wanted.keys()
    assert all(one.dtype is torch.float32 for one in (*mine.values(), *model.parameters()))
    return {name: float((mine[name] - wanted[name]).abs().max()) for name in mine}, set(seen)


KINDS = ["attention", "recurrent", "encoder", "parametrized", "called twice", "checkpoint", "reentrant checkpoint"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_computes_with_copies(pool, kind, precision):
    """The oracle is the module whose parameters torch converts, all of them: the same numbers, bit for bit."""
    [(differences, seen)] = pool.run(unusual, 1, kind, precision, transport="shm", timeout=50)
    assert set(differences.values()) == {0.0}
    assert len(seen) <= 1 and all(dtypes == (SIXTEEN[precision],) * 2 for dtypes in seen)


class Positions(nn.Module):
    """The usual table of positions, which is a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(ROWS, WIDTH))

    def forward(self, inputs):
        return inputs + self.table


class Statistics(nn.Module):
    """Counts what it sees, in a buffer, and has a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.offset = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs):
        self.mean.mul_(0.999).add_(inputs.detach().float().mean(0), alpha=0.001)
        return inputs - self.mean + self.offset


def with_buffers(comms, precision):
    torch.manual_seed(0)
    net = nn.Sequential(Positions(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Statistics(), nn.Linear(WIDTH, 2))
    model = mp.DataParallel(net, comms, precision=precision)
    before = net[2].running_mean.clone()
    read = []
    net[2].register_forward_hook(lambda layer, *_: read.append(layer.weight.dtype))
    net[3].register_forward_hook(lambda *_: read.append(_[-1].dtype))
    model(share(comms)).pow(2).mean().backward()
    changed = not torch.equal(before, net[2].running_mean) and bool(net[3].mean.abs().sum() > 0)
    return read, changed, {buffer.dtype for buffer in net.buffers() if buffer.is_floating_point()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_layers_with_buffers_keep_them_and_their_parameters_in_float32(pool, precision):
    for read, changed, dtypes in pool.run(with_buffers, 2, precision, transport="shm", timeout=50):
        assert read == [torch.float32, SIXTEEN[precision]]
        assert changed
        assert dtypes == {torch.float32}


def of_inputs(comms):
    model = mp.DataParallel(layers(), comms, precision="fp16")
    inputs = share(comms).requires_grad_()
    model(inputs).mean().backward()
    plain = layers()
    beside = share(comms).requires_grad_()
    plain(beside).mean().backward()
    return float((inputs.grad - beside.grad).abs().max() / beside.grad.abs().max())


def test_gradients_of_inputs_are_not_scaled(pool):
    assert max(pool.run(of_inputs, 1, transport="shm", timeout=50)) < 1e-2


# ── several ranks, and one process ──────────────────────────────────────────────────────────────────────────────────


def train(comms, precision, steps=4, shard=None, rows=ROWS, microbatches=1, dtype=torch.float32):
    """Some steps; returns the weights and the losses of all samples."""
    model = mp.DataParallel(layers().to(dtype), comms, precision=precision, shard=shard, bucket_cap_mb=3e-4)
    if shard:
        optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for number, part in enumerate(share(comms, step, rows).chunk(microbatches)):
            with model.no_sync() if number < microbatches - 1 else nullcontext():
                (model(part.to(dtype)).pow(2).mean() / microbatches).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    same = mp.data_parallel.replicas_are_identical(model, comms)
    return {name: one.detach().clone() for name, one in model.state_dict().items()}, same


@pytest.mark.parametrize("shard", [None, "optimizer", "gradients"])
def test_float64_is_the_plain_run_in_float64(pool, shard):
    plain = pool.run(train, 2, None, shard=shard, dtype=torch.float64, transport="shm", timeout=50)
    asked = pool.run(train, 2, "float64", shard=shard, dtype=torch.float64, transport="shm", timeout=50)
    for (wanted, _), (mine, same) in zip(plain, asked, strict=True):
        assert same
        assert all(torch.equal(wanted[name], mine[name]) for name in wanted)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("shard", "microbatches"), [(None, 1), (None, 3), ("optimizer", 1), ("gradients", 1), ("gradients", 2)]
)
def test_ranks_together_are_one_process(any_pool, shard, microbatches, precision):
    """Within the rounding of 16 bits; all ranks hold the same weights, bit for bit, and these are float32."""
    [(wanted, _)] = any_pool.run(train, 1, precision, rows=2 * ROWS, timeout=50)
    start = layers().state_dict()
    for mine, same in any_pool.run(train, 2, precision, shard=shard, microbatches=microbatches, timeout=50):
        assert same
        assert list(mine) == list(start)
        for name, weights in mine.items():
            assert weights.dtype is torch.float32
            moved = (wanted[name] - start[name]).norm()
            assert (weights - wanted[name]).norm() < 0.1 * moved


def names_and_dtypes(comms):
    model = mp.DataParallel(layers().bfloat16(), comms, precision="bf16")
    model(share(comms)).mean().backward()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in layers().named_parameters()]
    return list(model.state_dict()), {one.dtype for one in model.state_dict().values()}


def test_a_state_has_the_plain_names_and_the_masters_dtype(pool):
    found = pool.run(names_and_dtypes, 1, transport="shm", timeout=50)
    assert found == [(list(layers().state_dict()), {torch.float32})]


def converted_in_place(comms):
    """An optimizer that was made before the model was wrapped has the parameters still."""
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = mp.DataParallel(net, comms, precision="float64")
    before = [one.detach().clone() for one in model.parameters()]
    model(share(comms).double()).sum().backward()
    optimizer.step()
    assert {one.dtype for one in model.state_dict().values()} == {torch.float64}
    assert not all(map(torch.equal, before, model.parameters()))


def test_a_model_is_converted_where_it_is(pool):
    pool.run(converted_in_place, 1, transport="shm", timeout=50)


# ── on the wire ─────────────────────────────────────────────────────────────────────────────────────────────────────


def bytes_sent(comms, precision, shard, by):
    """What a rank sends of gradients in a step, beside what it is in float32; and the weights after it."""
    model = mp.DataParallel(nn.Linear(64, 32), comms, precision=precision, shard=shard)
    if shard:
        optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.SGD, comms, by=by, lr=1e6)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    before = [one.detach().clone() for one in model.parameters()]
    inputs = torch.full((4, 64), 0.01 * (1 + comms.rank))
    with mp.record(comms) as recorder:
        (model(inputs).mean() * 1e-3).backward()
        optimizer.step()
    sums = [event for event in recorder.trace.events if event.rank == comms.rank and str(event.op)[1:2] == "U"]
    changes = [(one - start).detach() for one, start in zip(model.parameters(), before, strict=True)]
    return sum(event.sent for event in sums), changes, mp.data_parallel.replicas_are_identical(model, comms)


HALVES = [(None, "element"), ("optimizer", "element"), ("gradients", "element"), ("gradients", "parameter")]


@pytest.mark.parametrize(("shard", "by"), HALVES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_travel_in_16_bits(pool, precision, shard, by):
    """Half the bytes, but for counts; and gradients of 5e-9, for which float16 has no number, arrive."""
    plain = pool.run(bytes_sent, 2, "float32", shard, by, transport="shm", timeout=50)
    narrow = pool.run(bytes_sent, 2, precision, shard, by, transport="shm", timeout=50)
    assert sum(sent for sent, *_ in narrow) == pytest.approx(sum(sent for sent, *_ in plain) / 2, rel=0.01)
    for (_, mine, same), (_, wanted, _) in zip(narrow, plain, strict=True):
        assert same
        for one, other in zip(mine, wanted, strict=True):
            assert float(other.abs().max()) > 1e-3
            torch.testing.assert_close(one, other, rtol=0.02, atol=0)


def test_reduce_may_be_wider_than_compute(pool):
    wide = mp.MixedPrecision(torch.bfloat16, reduce=torch.float32)
    for shard, by in HALVES:
        plain = pool.run(bytes_sent, 2, "float32", shard, by, transport="shm", timeout=50)
        mixed = pool.run(bytes_sent, 2, wide, shard, by, transport="shm", timeout=50)
        assert [sent for sent, *_ in plain] == [sent for sent, *_ in mixed]


def checked(comms):
    """Not a number on rank 1: with bfloat16, where nothing is skipped, `check_finite` names it."""
    model = mp.DataParallel(layers(), comms, precision="bf16", check_finite=True)
    with pytest.raises(GradientError) as raised:
        (model(share(comms)).mean() * (torch.nan if comms.rank == 1 else 1.0)).backward()
    return str(raised.value)


def test_gradients_that_are_not_finite_are_named(any_pool):
    for text in any_pool.run(checked, 2, timeout=50):
        assert "rank 1: 3.bias" in text and "rank 0" not in text


# ── steps that are not taken ────────────────────────────────────────────────────────────────────────────────────────


numbers = st.sampled_from([0.0, -1.0, 3e38, 1e-45, torch.inf, -torch.inf, torch.nan])


@given(st.lists(numbers, max_size=6), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_what_is_finite(elements, dtype):
    tensor = torch.tensor(elements, dtype=dtype)
    assert is_finite(tensor) == bool(tensor.isfinite().all())


def own_scale(model, value=2.0**4, interval=2):
    model.loss_scale.value, model.loss_scale.interval = value, interval
    return model.loss_scale


def as_one_process(steps, value, interval):
    """Weights and scales after each step of torch's GradScaler, with parameters that are converted by hand."""
    module = layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=value, growth_interval=interval)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        copies = {name: one.half() for name, one in module.named_parameters()}
        scaler.scale(functional_call(module, copies, inputs.half()).float().pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), {name: one.clone() for name, one in module.state_dict().items()}))
    return found


def beside_grad_scaler(comms, steps, value, interval):
    model = mp.DataParallel(layers(), comms, precision="fp16")
    own_scale(model, value, interval)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped = []
    for step, (scale, weights) in enumerate(as_one_process(steps, value, interval)):
        optimizer.zero_grad()
        model(share(comms, step)).pow(2).mean().backward()
        skipped.append(all(one.grad is None for one in model.parameters()))
        optimizer.step()
        assert model.loss_scale.value == scale
        assert all(torch.equal(weights[name], one) for name, one in model.state_dict().items())
    return skipped, model.loss_scale.skipped


def test_one_rank_is_grad_scaler_bit_for_bit(pool):
    """The scale begins far too large, is lowered until gradients fit, and grows until they do not."""
    [(skipped, counted)] = pool.run(beside_grad_scaler, 1, 20, 2.0**20, 3, transport="shm", timeout=50)
    assert sum(skipped) == counted
    assert skipped[0] and not all(skipped) and any(skipped[skipped.index(False) :])


def scales_of_grad_scaler(broken):
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    scales = []
    for bad in broken:
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * (torch.inf if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def broken_now_and_then(comms, broken, shard, local):
    """Two micro-batches a step; `broken` says in which step which micro-batch of which rank overflows."""
    model = mp.DataParallel(layers(), comms, precision="fp16", shard=shard, bucket_cap_mb=3e-4)
    own_scale(model)
    if shard:
        optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scales, changed = [], []
    for step, bad in enumerate(broken):
        before = [one.detach().clone() for one in model.parameters()]
        optimizer.zero_grad()
        for number, part in enumerate(share(comms, step).chunk(2)):
            factor = torch.inf if (comms.rank, number) in bad else 1.0
            with model.no_sync() if local and number == 0 else nullcontext():
                (model(part).pow(2).mean() * factor).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        changed.append(not all(map(torch.equal, before, model.parameters())))
        scales.append(model.loss_scale.value)
    assert all(bool(one.isfinite().all()) for one in model.parameters())
    return scales, changed, mp.data_parallel.replicas_are_identical(model, comms)


somewhere = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=1)


@settings(max_examples=15, deadline=None)
@given(broken=st.lists(somewhere, min_size=2, max_size=7), local=st.booleans())
@pytest.mark.parametrize("shard", [None, "optimizer", "gradients"])
def test_an_overflow_anywhere_skips_the_step_everywhere(pool, shard, broken, local):
    """The same steps, and the same scales, as one process with torch's GradScaler."""
    wanted = scales_of_grad_scaler([bool(bad) for bad in broken])
    for scales, changed, same in pool.run(broken_now_and_then, 2, broken, shard, local, transport="shm", timeout=50):
        assert scales == wanted
        assert changed == [not bad for bad in broken]
        assert same


def broken_in_one_part(comms, shard):
    """A single element of rank 1's gradient is infinite, and only one rank has the part that it belongs to."""
    model = mp.DataParallel(layers(), comms, precision="fp16", shard=shard)
    optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms, lr=0.01)

    def spoil(gradient):
        return gradient.index_put((torch.tensor([0]), torch.tensor([0])), torch.tensor([torch.inf]))

    hook = model.module[0].weight.register_hook(spoil) if comms.rank == 1 else None
    found = []
    for _ in range(2):
        before = [one.detach().clone() for one in model.parameters()]
        model(share(comms)).pow(2).mean().backward()
        optimizer.step()
        if hook is not None:
            hook.remove()
        found.append((all(map(torch.equal, before, model.parameters())), model.loss_scale.skipped))
    return found


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_ranks_tell_each_other_what_is_wrong_with_their_parts(any_pool, shard):
    wanted = [(True, 1), (False, 1)]
    assert any_pool.run(broken_in_one_part, 2, shard, timeout=50) == [wanted] * 2


def by_two_optimizers(comms):
    model = mp.DataParallel(layers(), comms, precision="fp16")
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [torch.optim.SGD(some, lr=0.1) for some in (first, second)]
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for broken in (False, True, False):
        model.zero_grad()
        (model(share(comms)).pow(2).mean() * (torch.inf if broken else 1.0)).backward()
        for optimizer in (other, *optimizers):
            optimizer.step()
    return model.loss_scale.state_dict()


def test_a_step_of_several_optimizers_counts_once(pool):
    state = {"value": 2.0**15, "good_steps": 1, "skipped": 1}
    assert pool.run(by_two_optimizers, 2, transport="shm", timeout=50) == [state] * 2


def run_out(comms):
    """Rank 1 has run out of data when a step is skipped; it has the scale of the others in the end."""
    model = mp.DataParallel(layers(), comms, precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(3 if comms.rank == 0 else 1):
            optimizer.zero_grad()
            (model(share(comms, step)).pow(2).mean() * (torch.inf if step == 1 else 1.0)).backward()
            optimizer.step()
    optimizer.zero_grad()
    model(share(comms)).pow(2).mean().backward()
    optimizer.step()
    return model.loss_scale.state_dict(), mp.data_parallel.replicas_are_identical(model, comms)


def test_a_rank_that_runs_out_of_data_has_the_scale_of_the_others(any_pool):
    wanted = {"value": 2.0**15, "good_steps": 2, "skipped": 1}
    assert any_pool.run(run_out, 2, timeout=50) == [(wanted, True)] * 2


class Answer:
    """An output that torch cannot look into."""

    def __init__(self, tensor):
        self.tensor = tensor


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, inputs):
        return Answer(self.layers(inputs))


def refusals(comms):
    words = []
    for options in ({"precision": "fp16", "check_finite": True}, {"precision": "float16"}):
        net = layers()
        with pytest.raises(UsageError) as refused:
            mp.DataParallel(net.bfloat16(), comms, **options)
        assert {one.dtype for one in net.parameters()} == {torch.bfloat16}
        words.append(str(refused.value))
    with pytest.raises(UsageError) as refused:
        mp.DataParallel(Wrapping(), comms, precision="fp16")(share(comms)).tensor.float().mean().backward()
    return [*words, str(refused.value)]


def test_refusals(pool):
    [words] = pool.run(refusals, 1, transport="shm", timeout=50)
    assert "watch model.loss_scale.skipped" in words[0]
    assert "precision='float16'; choose 'float32', 'bf16', 'fp16'" in words[1]
    assert "let the model return tensors" in words[2]
    assert not any("\n" in text for text in words)


# ── what people do with a wrapped model ─────────────────────────────────────────────────────────────────────────────


def with_other_parameters(comms):
    model = mp.DataParallel(layers(), comms, precision="bf16")
    doubled = {name: (2 * one).detach().requires_grad_() for name, one in model.named_parameters()}
    functional_call(model, doubled, share(comms)).mean().backward()
    found = {name: one.grad for name, one in doubled.items()}
    plain = mp.DataParallel(layers(), comms, precision="bf16")
    with torch.no_grad():
        for one in plain.parameters():
            one.mul_(2)
    with plain.no_sync():
        plain(share(comms)).mean().backward()
    return all(torch.equal(one, found[name]) for name, one in gradients(plain).items())


def test_a_model_called_with_other_parameters(pool):
    assert pool.run(with_other_parameters, 1, transport="shm", timeout=50) == [True]


def copied(comms):
    model = mp.DataParallel(layers(), comms, precision="fp16")
    model(share(comms)).pow(2).mean().backward()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    other = copy.deepcopy(model)
    own_scale(other, 2.0)
    other.zero_grad()
    outputs = other(share(comms))
    outputs.pow(2).mean().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    averaged.update_parameters(other)
    with torch.no_grad():
        again = other.eval()(share(comms))
    in_file = pickle.loads(pickle.dumps(model.module))
    assert type(in_file[0]._parameters) is type(copy.deepcopy(model.module)[0]._parameters) is dict
    assert in_file(share(comms)).dtype is copy.deepcopy(model.module)(share(comms)).dtype is torch.float32
    assert averaged(share(comms)).dtype is again.dtype is torch.float32
    assert torch.equal(gradients(model)["0.weight"], gradients(other)["0.weight"])  # their scales are powers of two
    return model.loss_scale.state_dict(), other.loss_scale.state_dict()


def test_copies_and_files(pool):
    """A copy of the wrapped model has a scale of its own; the plain module in a file is a plain module."""
    own, others = {"value": 2.0**16, "good_steps": 0, "skipped": 0}, {"value": 2.0, "good_steps": 1, "skipped": 0}
    assert pool.run(copied, 2, transport="shm", timeout=50) == [(own, others)] * 2


def compiled(comms, precision, inside):
    torch.compiler.reset()
    plain = mp.DataParallel(layers(), comms, precision=precision)
    net = layers()
    if inside:
        net[0].compile(backend="aot_eager")
        model = called = mp.DataParallel(net, comms, precision=precision)
    else:
        model = mp.DataParallel(net, comms, precision=precision)
        called = torch.compile(model, backend="aot_eager")
    pairs = [(one, call, torch.optim.SGD(one.parameters(), lr=0.1)) for one, call in ((plain, plain), (model, called))]
    for step in range(4):
        for one, call, optimizer in pairs:
            if one.loss_scale is not None and step == 2:
                one.loss_scale.value /= 4
            optimizer.zero_grad()
            call(share(comms, step)).pow(2).mean().backward()
            optimizer.step()
    return [
        float((mine - wanted).abs().max()) for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True)
    ]


@pytest.mark.parametrize("inside", [False, True], ids=["the wrapped model", "a layer"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_compiled_models_read_the_weights_of_this_pass(pool, precision, inside):
    """Weights change in every step, and so may the scale: what was compiled must not keep either."""
    [differences] = pool.run(compiled, 1, precision, inside, transport="shm", timeout=55)
    assert max(differences) < 1e-6


# ── torch's own autocast and GradScaler ─────────────────────────────────────────────────────────────────────────────


def autocast(comms):
    """bf16 by torch's autocast around a model that is left as it is: the average of what each rank would have."""
    model = mp.DataParallel(layers(), comms)
    plain = layers()
    for one in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = one(share(comms))
        assert outputs.dtype is torch.bfloat16
        outputs.float().pow(2).mean().backward()
    for name, mine in gradients(model).items():
        average = comms.all_reduce_mean(gradients(plain)[name])
        torch.testing.assert_close(mine, average)


def test_torchs_autocast_around_a_model(any_pool):
    any_pool.run(autocast, 2, timeout=50)


def grad_scaler(comms, broken):
    """float16 by torch's autocast and GradScaler; rank 1 overflows in some steps."""
    model = mp.DataParallel(layers(), comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    scales, changed = [], []
    for step, bad in enumerate(broken):
        before = [one.detach().clone() for one in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = model(share(comms, step))
        scaler.scale(outputs.float().pow(2).mean() * (torch.inf if bad and comms.rank == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed.append(not all(map(torch.equal, before, model.parameters())))
    return scales, changed, mp.data_parallel.replicas_are_identical(model, comms)


def test_torchs_grad_scaler_around_a_model(any_pool):
    broken = [False, True, False, False, False, True]
    found = any_pool.run(grad_scaler, 2, broken, timeout=50)
    assert found == [(scales_of_grad_scaler(broken), [not bad for bad in broken], True)] * 2


def test_a_scale_that_cannot_help_is_named():
    scale = LossScale()
    with pytest.raises(GradientError, match=r"fell to 3.0e-08 after 41 steps .* whatever the scale"):
        for _ in range(100):
            scale.step_ends(overflow=True)
