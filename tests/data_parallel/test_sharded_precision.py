"""FullyShardedDataParallel in mixed precision: float32 parts, 16 bits to gather, compute and send; skipped steps."""

import copy
import functools
import statistics
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.data_parallel import test_fully_sharded
from tests.data_parallel.test_fully_sharded import ANY, identical, is_layer, one_unit_a_layer, refusal, whole_gradients
from tests.data_parallel.test_precision import scales_of_grad_scaler
from tests.data_parallel.test_shard import WIDTH, build, loss_of, samples
from tests.test_what_runs_is_what_is_drawn import differences
from torch import nn
from torch.func import functional_call

import microparallel as mp
from microparallel.simulator.fitted import fit_step, predicted
from microparallel.simulator.gathering import choices_of

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
        for turn in [list(chain(*turns))] if local else turns:
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
        model.full_state_dict(on=0)  # whole parameters have 32 bits for a while, and 16 again
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


def in_groups(comms, precision, replicas, overlap):
    """Hybrid: every rank has the same samples, so each sum of a group is half of the gradient: exact in any dtype."""
    plain = build("mlp").float()
    model = mp.FullyShardedDataParallel(
        copy.deepcopy(plain), comms, units=is_layer, replicas=replicas, precision=precision, overlap=overlap
    )
    if model.loss_scale is not None:
        model.loss_scale.value = 256.0
    one_process = OneProcess(plain, model.precision, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ((inputs, targets),) = shares("mlp", 0, 1)
    wrong = []
    for turn in range(2):
        loss_of(model(inputs), targets).backward()
        wanted = one_process.sums([[(inputs, targets)]] * (turn + 1), model._scale, local=False)
        found = whole_gradients(model)
        wrong += [(turn, name) for name in found if not torch.equal(found[name], wanted[name].double())]
    optimizer.step()
    return wrong, identical(model, comms)


@pytest.mark.parametrize(
    ("ranks", "replicas", "precision", "overlap"),
    [(4, 2, "bf16", True), (4, 2, "fp16", False), (2, 2, "bf16", False), (4, 4, "fp16", True)],
)
def test_groups_of_ranks(any_pool, ranks, replicas, precision, overlap):
    for wrong, same in any_pool.run(in_groups, ranks, precision, replicas, overlap, timeout=50):
        assert not wrong
        assert same


def any_model(comms, kind, how):
    """Beside DataParallel, which computes with copies of whole parameters; all ranks have the same samples."""
    precision = mp.MixedPrecision(torch.bfloat16, reduce=torch.float32)
    found = []
    for wrapper, options in ((mp.FullyShardedDataParallel, how), (mp.DataParallel, {})):
        torch.manual_seed(0)
        model = wrapper(ANY[kind](), comms, precision=precision, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            inputs, targets = samples("mlp", step, 5)
            optimizer.zero_grad()
            loss_of(model(inputs.float()), targets.float()).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            outputs = model(inputs.float())
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found.append((state | {"outputs": outputs}, list(state)))
    (mine, names), (other, same_names) = found
    wrong = [name for name in mine if mine[name].dtype != other[name].dtype]
    worst = max(float((mine[name].double() - other[name].double()).abs().max()) for name in mine)
    return wrong, names == same_names, worst


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("ranks", "transport"), [(1, "nccl"), (2, "gloo")])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_on_a_gpu(pool, ranks, transport, precision):
    """As DataParallel, whose copies torch converts: a GPU rounds alike in both."""
    found = pool.run(on_a_gpu, ranks, precision, transport=transport, device="cuda", timeout=100)
    assert max(worst for worst, _ in found) < 1e-3 and all(same for _, same in found)


def on_a_gpu(comms, precision):
    found = []
    for wrapper in (mp.FullyShardedDataParallel, mp.DataParallel):
        model = wrapper(build("mlp").float().cuda(), comms, precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            inputs, targets = (one.cuda() for one in shares("mlp", step, comms.world_size)[comms.rank])
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        found.append((model, {name: one.cpu() for name, one in model.state_dict().items()}))
    (model, mine), (_, other) = found
    return max(float((mine[name] - other[name]).abs().max()) for name in mine), identical(model, comms)


HOW = [{}, {"units": one_unit_a_layer, "prefetch": 2}, {"units": None, "reshard_after_forward": False}]


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("how", HOW, ids=["auto", "layers", "one"])
def test_any_model_computes_as_with_copies_of_whole_parameters(pool, kind, how):
    """Running statistics, and the parameters beside them, stay float32; tied, frozen and checkpointed layers work."""
    for wrong, names, worst in pool.run(any_model, 2, kind, how, transport="shm", timeout=50):
        assert not wrong and names
        assert worst < 1e-6


def in_two_precisions(comms, case, *arguments):
    """A case of the tests without precision, computed in float32, of parts in float64."""
    plain = mp.FullyShardedDataParallel
    mp.FullyShardedDataParallel = functools.partial(plain, precision=TWO)
    try:
        return getattr(test_fully_sharded, case)(comms, *arguments)
    finally:
        mp.FullyShardedDataParallel = plain


TWO = mp.MixedPrecision(torch.float32, master=torch.float64)
SKIPPED = [[(0, 2), (0, 1, 2)], [(0, 1, 2, 4), (2,)], [(), (0, 1, 2, 3, 4)], [(3,), (1, 4)]]
CASES = {
    "several_ways": (),
    "with_penalty": (),
    "changed": (),
    "broken_passes": (),
    "skipped": (SKIPPED,),
    "uneven": ([(1, 2), (0, 4), (3, 0)],),
    "at_once_without_samples": ([(0, 2), (2, 1)], {"overlap": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_passes_of_any_kind(pool, case):
    """Gradients come in one dtype and are kept in another: which are summed, kept, removed or missing, and when."""
    for found in pool.run(in_two_precisions, 2, case, *CASES[case], transport="shm", timeout=50):
        worst = found if isinstance(found, float) else max(found.values())
        assert 1e-12 < worst < 1e-4  # it was computed in float32


# ── what runs is what is drawn, in half the bytes ───────────────────────────────────────────────────────────────────


def recorded(comms, precision, how, microbatches, local):
    """Two steps beside their programs; the bytes of gathers and sums beside what they must be; and what was held."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = mp.FullyShardedDataParallel(
        nn.Sequential(*layers, nn.BatchNorm1d(WIDTH)), comms, units=one_unit_a_layer, precision=precision, **how
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    programs = []
    with mp.record(comms) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            programs.append(model.program(microbatches, at_once=not local))
            for number in range(microbatches):
                with model.no_sync() if local and number < microbatches - 1 else nullcontext():
                    model(torch.ones(comms.rank + 2, WIDTH)).sum().backward()
            optimizer.step()
    steps = [recorder.trace.step(number) for number in range(2)]
    wrong = [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]
    parts = list(model._parts())
    gathered = sum(part.layout.length * part.compute.itemsize for part in parts)
    summed = sum(part.layout.length * model.precision.reduce.itemsize for part in parts)
    ranks = model._shard_comms.world_size
    sums = 1 if local else microbatches
    wanted = (ranks - 1) / ranks * (2 * microbatches * gathered + sums * summed)
    across = [event for event in steps[-1].by_rank[comms.rank] if str(event.op).startswith("*U")]
    mine = [event for event in steps[-1].by_rank[comms.rank] if str(event.op)[0] in "%~"]
    simulated = predicted(steps[-1]).by_rank[comms.rank]
    again = [event for event in simulated if str(event.op)[0] in "%~"]
    held = steps[-1].memory[comms.rank].peak_of("parameters")
    kept = sum(4 * one.numel() for part in parts for one in part.whole) / ranks  # in float32
    largest = max(sum(one.nbytes for one in part.whole) for part in parts)  # in 16 bits
    return (
        wrong,
        [sum(event.sent for event in events) / wanted for events in (mine, again)],
        sum(event.bytes for event in across) == (sums * summed / ranks if ranks < comms.world_size else 0),
        (held - kept) / largest,
        choices_of(fit_step(steps[-1])),
    )


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("precision", "ranks", "how", "microbatches", "local"),
    [
        ("bf16", 3, {}, 1, False),
        ("bf16", 2, {"prefetch": 2}, 3, True),
        ("fp16", 3, {"prefetch": 0}, 2, False),
        ("fp16", 4, {"replicas": 2}, 2, False),
        ("bf16", 4, {"replicas": 2}, 1, False),
    ],
)
def test_a_step_is_its_program_with_half_the_bytes(any_pool, precision, ranks, how, microbatches, local, overlap):
    how = how | {"overlap": overlap}
    by_rank = any_pool.run(recorded, ranks, precision, how, microbatches, local, timeout=50)
    for wrong, sent, across, units, choices in by_rank:
        assert not wrong
        if microbatches == 1:  # otherwise buffers are broadcast twice, which `analyze` does not read
            assert choices[0].now and choices[0].prefetch == how.get("prefetch", 1)
        assert sent == pytest.approx([1.0, 1.0]) or not any_pool.shares_evenly
        assert sent[0] == pytest.approx(sent[1])
        assert across
        assert units == pytest.approx(how.get("prefetch", 1) + 1)
    assert statistics.mean(sent[0] for _, sent, *_ in by_rank) == pytest.approx(1.0)


# ── steps that no rank takes ────────────────────────────────────────────────────────────────────────────────────────


class WithOneNumber(nn.Module):
    """Beside what its layers compute it returns one number of a vector, of which one rank has the gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
        self.vector = nn.Parameter(torch.ones(40))

    def forward(self, inputs):
        return self.layers(inputs), self.vector[-1] * 1.0


def loss_with(outputs, factor):
    hidden, number = outputs
    return hidden.float().pow(2).mean() + number * factor


def broken_now_and_then(comms, broken, how, local):
    """Two micro-batches a step; `broken` says in which step which micro-batch of which rank overflows."""
    model = mp.FullyShardedDataParallel(WithOneNumber(), comms, units=is_layer, precision="fp16", **how)
    model.loss_scale.value, model.loss_scale.interval = 2.0**4, 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scales, changed, programs = [], [], []
    with mp.record(comms) as recorder:
        for step, bad in enumerate(broken):
            before = [one.detach().clone() for one in model.parameters()]
            optimizer.zero_grad()
            programs.append(model.program(2, clip=True, at_once=not local))
            for number in range(2):
                factor = torch.inf if (comms.rank, number) in bad else 1.0
                inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step * 2 + number))
                with model.no_sync() if local and number == 0 else nullcontext():
                    loss_with(model(inputs), factor).backward()
            assert all(one.grad is None for one in model.parameters()) == bool(bad)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scales.append(model.loss_scale.value)
            changed.append(not all(map(torch.equal, before, model.parameters())))
    steps = [recorder.trace.step(number) for number in range(len(broken))]
    wrong = [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]
    return scales, changed, identical(model, comms), wrong


somewhere = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=1)


@settings(max_examples=10, deadline=None)
@given(broken=st.lists(somewhere, min_size=2, max_size=6), local=st.booleans(), overlap=st.booleans())
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_overflow_anywhere_skips_the_step_everywhere(pool, replicas, broken, local, overlap):
    """The same steps, and the same scales, as one process with torch's GradScaler; and a step is its program."""
    wanted = scales_of_grad_scaler([bool(bad) for bad in broken])
    how = {"replicas": replicas, "overlap": overlap}
    for scales, changed, same, wrong in pool.run(
        broken_now_and_then, 2, broken, how, local, transport="shm", timeout=50
    ):
        assert scales == wanted
        assert changed == [not bad for bad in broken]
        assert same and not wrong


def with_grad_scaler(comms, broken, local):
    """float16 by torch's autocast and GradScaler: the last rank alone has a number that is not finite, in one part."""
    model = mp.FullyShardedDataParallel(WithOneNumber(), comms, units=is_layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    scales, changed = [], []
    for step, bad in enumerate(broken):
        before = [one.detach().clone() for one in model.parameters()]
        optimizer.zero_grad()
        for number in range(2):
            inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step * 2 + number))
            factor = torch.inf if bad and number == 0 and comms.rank == comms.world_size - 1 else 1.0
            with model.no_sync() if local and number == 0 else nullcontext(), torch.autocast("cpu", torch.float16):
                outputs = model(inputs)
                scaler.scale(loss_with(outputs, factor)).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed.append(not all(map(torch.equal, before, model.parameters())))
    return scales, changed, identical(model, comms)


@pytest.mark.parametrize("local", [True, False])
def test_torchs_grad_scaler_around_a_model(any_pool, local):
    """Each rank's scaler sees its own parts alone, and still all of them skip the same steps."""
    broken = [False, True, False, False, False, True]
    found = any_pool.run(with_grad_scaler, 3, broken, local, timeout=50)
    assert found == [(scales_of_grad_scaler(broken), [not bad for bad in broken], True)] * 3


def skipped_in_a_rank_without_samples(comms):
    """A rank that sits out skips the step that another rank's overflow loses, and has its average otherwise."""
    model = mp.FullyShardedDataParallel(WithOneNumber(), comms, units=is_layer, precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = WithOneNumber()
    model.loss_scale.value = 2.0**4
    found = []
    inputs = torch.ones(2, WIDTH)
    for factor in (1.0, torch.inf, 2.0):
        optimizer.zero_grad()
        with model.weighted(float(comms.rank == 0), 1.0):
            loss_with(model(inputs), factor).backward() if comms.rank == 0 else model.sit_out()
        found.append(model.vector.grad is None)
        optimizer.step()
    with model.summon_full_parameters() as module:
        vector = module.vector.detach().clone()
    wanted = plain.vector.detach().clone()
    wanted[-1] -= 0.1 * 1.0 + 0.1 * 2.0
    return found, float((vector - wanted).abs().max()) < 1e-6, model.loss_scale.value


def test_a_rank_without_samples_skips_with_the_others(any_pool):
    assert any_pool.run(skipped_in_a_rank_without_samples, 3, timeout=50) == [([False, True, False], True, 8.0)] * 3


def scaled_once(comms):
    """Gradients of inputs, and of two forwards, are those without a scale; the loss may be of a part of the outputs."""
    model = mp.FullyShardedDataParallel(WithOneNumber(), comms, units=is_layer, precision="fp16")
    model.loss_scale.value = 2.0**6
    inputs = torch.ones(2, WIDTH, requires_grad=True)
    plain = WithOneNumber()
    found = []
    for one, leaf in ((model, inputs), (plain, inputs.detach().clone().requires_grad_())):
        (loss_with(one(leaf), 1.0) + loss_with(one(-leaf), 3.0)).backward()
        found.append(leaf.grad)
    gradients = whole_gradients(model)
    near = all(torch.allclose(gradients[name].float(), one.grad, atol=3e-3) for name, one in plain.named_parameters())
    return near, torch.allclose(*found, atol=3e-3), float(gradients["vector"].sum())


def test_gradients_are_never_scaled_where_a_user_sees_them(any_pool):
    assert any_pool.run(scaled_once, 2, timeout=50) == [(True, True, 4.0)] * 2


# ── the master's state ──────────────────────────────────────────────────────────────────────────────────────────────


def states(comms, path):
    """Whole parameters, states and files are the master's, bit for bit, whatever was computed with."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))
    model = mp.FullyShardedDataParallel(copy.deepcopy(plain), comms, units=one_unit_a_layer, precision="bf16")
    wrong = []

    def compare(name, state):
        for key, tensor in plain.state_dict().items():
            if state[key].dtype != tensor.dtype or not torch.equal(state[key], tensor):
                wrong.append((name, key))

    model(torch.ones(2, WIDTH))
    plain.load_state_dict(model.state_dict())  # running statistics have changed
    compare("full_state_dict", model.full_state_dict())
    with model.summon_full_parameters() as module:
        compare("summoned", module.state_dict())
        wrong += [name for name, one in module.named_parameters() if one.dtype is not torch.float32]
        with torch.no_grad():
            for one in (module, plain):
                one[0].weight.add_(1e-6)  # too little for 16 bits
    compare("changed", model.full_state_dict())
    model.save(path)
    compare("saved", load_file(path))
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    model.load_state_dict(plain.state_dict())
    compare("loaded", model.full_state_dict())
    seen = []
    for layer in list(model.module)[:2]:
        layer.register_forward_pre_hook(lambda layer, given: seen.append((layer.weight.dtype, given[0].dtype)))
    outputs = model.eval()(torch.ones(2, WIDTH))
    parts = {part.dtype for part in model.parameters()}
    return wrong, seen, outputs.dtype, parts


def test_states_are_the_masters(any_pool, tmp_path):
    for wrong, seen, outputs, parts in any_pool.run(states, 2, tmp_path / "model.safetensors", timeout=50):
        assert not wrong
        assert seen == [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
        assert outputs is torch.float32 and parts == {torch.float32}


def deferred(comms, kind):
    """A model that is filled part by part has the weights of one that was there, in the master's dtype."""
    found = []
    for block in (mp.deferred_init, nullcontext):
        torch.manual_seed(3)
        with block():
            module = ANY[kind]()
        model = mp.FullyShardedDataParallel(
            module, comms, precision=mp.MixedPrecision(torch.bfloat16, master=torch.float64)
        )
        inputs, targets = samples("mlp", 0, 4)
        loss_of(model(inputs), targets).backward()
        found.append((model.full_state_dict(), whole_gradients(model)))
    (state, gradients), (other, others) = found
    wrong = [name for name, one in state.items() if one.is_floating_point() and one.dtype is not torch.float64]
    wrong += [name for name, one in state.items() if not torch.equal(one, other[name])]
    return wrong + [name for name, one in gradients.items() if one is not None and not torch.equal(one, others[name])]


@pytest.mark.parametrize("kind", ["backwards", "attends", "mixed"])
def test_a_deferred_model_is_filled_with_masters(pool, kind):
    assert pool.run(deferred, 2, kind, transport="shm", timeout=50) == [[]] * 2


def resumed(comms, precision):
    """Six steps at once; and three, of which all is saved, and three more by another model: the same bits."""

    def fresh():
        model = mp.FullyShardedDataParallel(build("mlp").float(), comms, units=is_layer, precision=precision)
        if model.loss_scale is not None:
            model.loss_scale.value, model.loss_scale.interval = 2.0**17, 2  # it overflows, and grows again
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def go(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            inputs, targets = shares("mlp", step, comms.world_size)[comms.rank]
            loss_of(model(inputs), targets).backward()
            optimizer.step()

    model, optimizer = fresh()
    go(model, optimizer, range(6))
    wanted = model.full_state_dict()
    first, its_optimizer = fresh()
    go(first, its_optimizer, range(3))
    second, optimizer = fresh()
    second.load_state_dict(first.full_state_dict())
    optimizer.load_state_dict(copy.deepcopy(its_optimizer.state_dict()))
    if first.loss_scale is not None:
        second.loss_scale.load_state_dict(first.loss_scale.state_dict())
    go(second, optimizer, range(3, 6))
    state = second.full_state_dict()
    scales = [one.loss_scale and one.loss_scale.state_dict() for one in (model, second)]
    return [name for name in wanted if not torch.equal(wanted[name], state[name])], scales[0] == scales[1], scales[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_goes_on_bit_for_bit(any_pool, precision):
    for wrong, same, scale in any_pool.run(resumed, 2, precision, timeout=50):
        assert not wrong and same
        assert scale is None or (scale["skipped"] and scale["good_steps"] is not None)


def converted_later(comms):
    """`model.double()`: parts, their gradients and sums are float64 from then on; layers compute as before."""
    model = mp.FullyShardedDataParallel(build("mlp").float(), comms, units=is_layer, precision="bf16")
    inputs, targets = shares("mlp", 0, 1)[0]
    loss_of(model(inputs), targets).backward()
    before = whole_gradients(model)
    model.zero_grad()
    model.double()
    loss_of(model(inputs), targets).backward()
    after = whole_gradients(model)
    kinds = {one.grad.dtype for one in model.parameters()}
    return kinds == {torch.float64}, all(torch.equal(before[name], after[name]) for name in before)


def test_parts_may_be_converted_later(any_pool):
    assert any_pool.run(converted_later, 2, timeout=50) == [(True, True)] * 2


class Hidden:
    """Outputs in which no tensors are found."""

    def __init__(self, outputs):
        self.outputs = outputs


class Hides(nn.Linear):
    def forward(self, inputs):
        return Hidden(super().forward(inputs))


def refused(comms):
    """What is said, by case."""

    def wrapped(**how):
        return mp.FullyShardedDataParallel(build("mlp").float(), comms, **how)

    hides = mp.FullyShardedDataParallel(Hides(WIDTH, WIDTH), comms, precision="fp16")
    older = wrapped(precision="fp16")
    optimizer = torch.optim.SGD(older.parameters(), lr=0.1)

    def through_a_step():
        inputs, targets = shares("mlp", 0, 1)[0]
        first = loss_of(older(inputs), targets)
        (loss_of(older(inputs), targets) * torch.inf).backward()
        optimizer.step()
        (first + loss_of(older(inputs), targets)).backward()

    return {
        "precision": refusal(lambda: wrapped(precision="half")),
        "other ranks": refusal(lambda: wrapped(precision="fp16" if comms.rank else "bf16")),
        "check_finite": refusal(lambda: wrapped(precision="fp16", check_finite=True)),
        "outputs": refusal(lambda: hides(torch.ones(2, WIDTH).half()).outputs.sum().backward()),
        "two scales": refusal(through_a_step),
    }


REFUSED = {
    "precision": "precision='half'",
    "other ranks": "rank 0 has precision=MixedPrecision(compute=torch.bfloat16",
    "check_finite": "check_finite=True with float16",
    "outputs": "did not come through the outputs",
    "two scales": "before and after a step",
}


def test_what_cannot_be_right_is_refused_in_one_line(any_pool):
    for words in any_pool.run(refused, 2, timeout=50):
        assert {name: text for name, text in words.items() if REFUSED[name] not in text or "\n" in text} == {}
        assert words.keys() == REFUSED.keys()
