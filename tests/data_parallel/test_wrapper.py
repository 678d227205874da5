"""mp.DataParallel against one process that sees the whole batch, against torch's own, and against misuse."""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
from tests.course.test_hooks import (
    CASES,
    OPTIMIZERS,
    RELATIVE,
    SAMPLES,
    SETTINGS,
    Subject,
    alone,
    batch,
    differences,
    learn,
    share,
)
from tests.pairwise import sample_and_whole
from torch import nn
from torch.nn.functional import mse_loss

import microparallel as mp
from microparallel.data_parallel import replicas_are_identical
from microparallel.program import Lane, lane

WORLDS = [("shm", 1), ("gloo", 2), ("shm", 3), ("shm", 4)]
SMALL = 6e-5  # megabytes: a bucket holds a few small gradients


def average_of(comms, loss, samples):
    return comms.all_reduce(loss.detach() * samples / SAMPLES)


def train(comms, case, dtype, optimizer):
    model = mp.DataParallel(Subject(case).to(comms.device, dtype), comms, bucket_cap_mb=SMALL)

    def step(number, part):
        inputs, targets = (whole[share(comms, case, number)].to(comms.device) for whole in batch(number, dtype))
        samples = len(targets)
        if case == "no-sync":  # gradients of two parts are averaged at once, so their losses are weighted
            loss = mse_loss(model(inputs), targets)
            with model.no_sync() if part == 0 else nullcontext():
                (loss * samples * comms.world_size / SAMPLES).backward()
            return average_of(comms, loss, samples)
        with model.weighted(samples, SAMPLES if number % 4 else None):
            if not samples:
                model.sit_out()
                return average_of(comms, torch.zeros((), dtype=dtype), 0)
            loss = mse_loss(model(inputs), targets)
            loss.backward()
        return average_of(comms, loss, samples)

    return learn(model, OPTIMIZERS[optimizer](model.parameters()), step, case), model.cpu()


def everything_that_fails(comms, references, rows):
    failures = []
    for case, dtype, optimizer in rows:
        losses, model = train(comms, case, dtype, optimizer)
        found = list(differences(losses, model, references[case, dtype, optimizer], RELATIVE[dtype]))
        if not replicas_are_identical(model, comms):
            found.append("the replicas from each other")
        failures += [f"{case}, {dtype}, {optimizer}: {what}" for what in found]
    return failures


@pytest.fixture(scope="module")
def references():
    return {setting: alone(*setting) for setting in SETTINGS if setting[0] != "unregistered"}


@pytest.mark.parametrize(("transport", "ranks"), WORLDS)
@pytest.mark.parametrize("rows", sample_and_whole(WORLDS, CASES, RELATIVE, OPTIMIZERS))
def test_parity_with_one_process(pool, references, ranks, transport, rows):
    mine = [setting for world, *setting in rows if world == (transport, ranks)]
    world = {"transport": transport, "timeout": 55}
    assert pool.run(everything_that_fails, ranks, references, mine, **world) == [[]] * ranks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("ranks", "transport"), [(1, "nccl"), (2, "gloo")])
def test_parity_on_a_gpu(pool, references, ranks, transport):
    exact = [setting for setting in references if setting[1] == torch.float64]
    world = {"transport": transport, "device": "cuda", "timeout": 55}
    assert pool.run(everything_that_fails, ranks, references, exact, **world) == [[]] * ranks


# ── what backward leaves ────────────────────────────────────────────────────────────────────────────────────────────


def linear(comms, **options):
    torch.manual_seed(0)
    return mp.DataParallel(nn.Linear(3, 2).double(), comms, **options)


def mine(comms, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + comms.rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def average(comms, function):
    """What the ranks should agree on: a plain model's gradients, averaged by hand."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).double()
    function(plain)
    return [comms.all_reduce_mean(parameter.grad.clone()) for parameter in plain.parameters()]


def same(model, wanted):
    return all(
        torch.allclose(parameter.grad, expected, rtol=1e-13, atol=0)
        for parameter, expected in zip(model.parameters(), wanted, strict=True)
    )


def passes(comms):
    """Ways to come to gradients, each beside the same thing by hand; returns those that went wrong."""
    one, other = mine(comms), mine(comms, seed=1)
    wrong = []

    def check(name, ours, by_hand):
        model = linear(comms)
        for _ in range(3):  # buckets are made anew after the first
            model.zero_grad()
            ours(model)
            if not same(model, average(comms, by_hand)):
                wrong.append(name)

    def both(model):
        (model(one).sum() + model(other).pow(2).sum()).backward()

    def one_after_the_other(model):
        model(one).sum().backward()
        model(other).pow(2).sum().backward()

    def accumulate(model, forward_too):
        if forward_too:
            with model.no_sync():
                model(one).sum().backward()
        else:
            loss = model(one).sum()
            with model.no_sync():
                loss.backward()
        model(other).pow(2).sum().backward()

    def forward_only(model):
        with model.no_sync():
            loss = model(one).sum()
        loss.backward()
        model(other).pow(2).sum().backward()

    def interrupted(model):
        try:
            with model.no_sync():
                raise KeyError
        except KeyError:
            both(model)

    def keeps_zeros(model):
        both(model)
        model.zero_grad(set_to_none=False)
        both(model)

    def autograd_grad(model):
        inputs = one.clone().requires_grad_()
        torch.autograd.grad(model(inputs).sum(), inputs)
        both(model)

    def after_an_error(model):
        outputs = model(one)
        outputs.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            outputs.sum().backward()
        both(model)

    def retained(model):
        loss = model(one).sum() / 2 + model(other).pow(2).sum() / 2
        loss.backward(retain_graph=True)
        loss.backward()

    def regularised(model):
        (model(one).sum() + sum(parameter.pow(2).sum() for parameter in model.parameters())).backward()

    check("several forwards", both, both)
    check("several backwards", one_after_the_other, both)
    check("no_sync around both", lambda model: accumulate(model, True), both)
    check("no_sync around backward", lambda model: accumulate(model, False), both)
    check("no_sync around forward", forward_only, both)
    check("no_sync left by an error", interrupted, both)
    check("zero_grad without None", keeps_zeros, both)
    check("autograd.grad", autograd_grad, both)
    check("an error in backward", after_an_error, both)
    check("retain_graph", retained, both)
    check("a loss on the parameters themselves", regularised, regularised)
    return wrong


def test_every_way_to_come_to_gradients(any_pool):
    assert any_pool.run(passes, 2, timeout=40) == [[], []]


class Recomputing(nn.Module):
    def __init__(self, shared, reentrant):
        super().__init__()
        torch.manual_seed(0)
        first = nn.Linear(3, 3).double()
        self.layers = nn.ModuleList([first, first if shared else nn.Linear(3, 3).double()])
        self._reentrant = reentrant

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=self._reentrant)
        return inputs


def recompute(comms):
    inputs = mine(comms).requires_grad_()
    for shared, reentrant in ((False, False), (True, False), (False, True)):
        plain = Recomputing(shared, reentrant)
        plain(inputs).pow(2).sum().backward()
        model = mp.DataParallel(Recomputing(shared, reentrant), comms, bucket_cap_mb=SMALL)
        for _ in range(2):
            model.zero_grad()
            model(inputs).pow(2).sum().backward()
            assert same(model, [comms.all_reduce_mean(parameter.grad.clone()) for parameter in plain.parameters()])
    model = mp.DataParallel(Recomputing(True, True), comms)
    with pytest.raises(mp.errors.UsageError, match=r"'layers.0.bias' got two gradients.*use_reentrant=False"):
        model(inputs).pow(2).sum().backward()


def test_activation_checkpointing(pool):
    pool.run(recompute, 2, timeout=30)


class Mixed(nn.Module):
    """Two dtypes, a parameter laid out with channels last, tied and frozen ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.picture = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(3, 3).double()
        self.narrow = nn.Linear(3, 3).to(torch.bfloat16)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs):
        hidden = self.picture(inputs).mean((2, 3)) * self.frozen
        return self.narrow(self.wide(hidden.double()).to(torch.bfloat16)).float()


def mix(comms):
    inputs = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(comms.rank))
    plain = Mixed()
    plain(inputs).sum().backward()
    model = mp.DataParallel(Mixed(), comms, bucket_cap_mb=SMALL)
    for _ in range(2):
        model.zero_grad()
        model(inputs).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
        else:
            torch.testing.assert_close(ours.grad, comms.all_reduce_mean(theirs.grad.clone()))
            assert ours.grad.stride() == ours.stride()


def test_dtypes_and_layouts(any_pool):
    any_pool.run(mix, 2, timeout=30)


def thaw(comms):
    """Parameters are frozen and unfrozen between steps."""
    model = mp.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double(), comms, bucket_cap_mb=SMALL)
    first = model.module[0]
    for frozen in (False, True, True, False, False):
        first.requires_grad_(not frozen)
        model.zero_grad()
        model(mine(comms)).pow(2).sum().backward()
        assert (first.weight.grad is None) == frozen
        for parameter in model.parameters():
            if parameter.grad is not None:
                gathered = comms.all_gather(parameter.grad)
                assert all(torch.equal(gathered[0], other) for other in gathered)
    wanted = copy.deepcopy(model.module)
    wanted.zero_grad()
    wanted(mine(comms)).pow(2).sum().backward()
    assert same(model, [comms.all_reduce_mean(parameter.grad) for parameter in wanted.parameters()])


def test_parameters_may_be_frozen_and_unfrozen(pool):
    pool.run(thaw, 2, timeout=30)


def clip_and_compile(comms):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    everything = torch.cat(comms.all_gather(mine(comms)))
    compiled = mp.DataParallel(torch.compile(copy.deepcopy(plain), backend="aot_eager"), comms)
    outside = torch.compile(mp.DataParallel(copy.deepcopy(plain), comms), backend="aot_eager")
    plain(everything).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    for model in (compiled, outside):
        for _ in range(2):
            model.zero_grad()
            model(mine(comms)).pow(2).mean().backward()
        torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 0.1), norm)
        assert same(model, [parameter.grad for parameter in plain.parameters()])


def test_clipping_and_compiled_models(pool):
    pool.run(clip_and_compile, 2, timeout=50)


# ── gradients live in buckets ───────────────────────────────────────────────────────────────────────────────────────


class Backwards(nn.Module):
    """Uses its layers in the opposite of the order in which they were registered, and one of them not at all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.idle = nn.Linear(8, 8)

    def forward(self, inputs):
        for layer in reversed(self.layers):
            inputs = layer(inputs)
        return inputs


def look_into_buckets(comms):
    model = mp.DataParallel(Backwards(), comms, bucket_cap_mb=600 / 2**20)  # two layers fit
    names = {parameter: name for name, parameter in model.named_parameters()}
    orders = []
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        orders.append([[names[parameter] for parameter in bucket.parameters] for bucket in model._reducer.buckets])
        model(torch.ones(1, 8))  # makes new buckets, if need be
    used = [parameter for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    flats = [bucket.buffer for bucket in model._reducer.buckets]
    inside = all(
        any(flat.data_ptr() <= parameter.grad.data_ptr() < flat.data_ptr() + flat.nbytes for flat in flats)
        for parameter in used
    )
    return [[name for bucket in order for name in bucket] for order in orders], inside


def test_buckets_follow_the_order_in_which_gradients_arrive(pool):
    for (_, learnt), inside in pool.run(look_into_buckets, 2, transport="shm", timeout=30):
        assert [name[:8] for name in learnt] == [f"layers.{n}" for n in (0, 0, 1, 1, 2, 2, 3, 3)] + [
            "idle.wei",
            "idle.bia",
        ][::-1]
        assert inside


def tracked(comms):
    """A step as the tracker sees it from outside, beside the program that it follows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64).double(), nn.Linear(64, 64).double())
    model[1].register_forward_hook(lambda *arguments: arguments[2].double())
    tracker = mp.course.HookTracker(model, comms)
    wrapped = mp.DataParallel(model, tracker.comms, bucket_cap_mb=0.02)
    for _ in range(3):
        wrapped.zero_grad()
        with tracker.step():
            wrapped(torch.ones(2, 64)).sum().backward()
    trace = tracker.trace("ddp")
    tracker.remove()
    return wrapped.program(), trace


def test_buckets_leave_as_the_program_says(any_pool):
    for program, trace in any_pool.run(tracked, 2, timeout=30):
        mp.verify(program)
        assert len(program.goal.buckets) > 2
        for rank, ops in enumerate(program.ranks):
            left = [event.op for event in trace.by_rank[rank] if event.lane is Lane.COMM]
            assert left == [op for op in ops if lane(op) is Lane.COMM]
        assert mp.simulate(program, mp.Costs()).makespan > 0


def test_the_state_has_the_plain_models_names(pool):
    def body(comms):
        plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model = mp.DataParallel(copy.deepcopy(plain), comms)
        state = model.state_dict()
        plain.load_state_dict(state)
        model.load_state_dict(plain.state_dict())
        assert list(state) == list(plain.state_dict())
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]

    pool.run(body, 2, timeout=30)


# ── buffers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def normalise(comms, broadcast):
    """The same training with torch's own DistributedDataParallel; returns what differs."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    results = []
    for ours in (True, False):
        model = copy.deepcopy(plain)
        if ours:
            wrapped = mp.DataParallel(model, comms, bucket_cap_mb=SMALL, broadcast_buffers=broadcast)
        else:
            group = comms.process_group
            wrapped = DistributedDataParallel(model, process_group=group, broadcast_buffers=broadcast)
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
        for step in range(10):
            optimizer.zero_grad()
            wrapped(mine(comms, step)).pow(2).sum().backward()
            optimizer.step()
        results.append(model.state_dict())
    ours, torchs = results
    return [name for name in ours if not torch.allclose(ours[name], torchs[name], rtol=1e-12, atol=1e-15)]


@pytest.mark.parametrize("broadcast", [True, False])
def test_batch_norm_as_torchs_own(any_pool, broadcast):
    assert any_pool.run(normalise, 2, broadcast, timeout=30) == [[], []]


# ── ranks that have more or less ────────────────────────────────────────────────────────────────────────────────────


def run_out(comms, lengths, weigh):
    """Rank r has lengths[r] batches; after each step the parameters must be those of one process with all data."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double().eval()
    model = mp.DataParallel(copy.deepcopy(plain), comms, bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def samples(rank, step):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        return torch.randn(rank + 1 if weigh else 2, 3, generator=generator, dtype=torch.float64)

    with model.join():
        for step in range(lengths[comms.rank]):
            inputs = samples(comms.rank, step)
            with model.weighted(len(inputs)):
                optimizer.zero_grad()
                model(inputs).pow(2).mean().backward()
                optimizer.step()

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(max(lengths)):
        optimizer.zero_grad()
        everything = torch.cat([samples(rank, step) for rank, length in enumerate(lengths) if step < length])
        plain(everything).pow(2).mean().backward()
        optimizer.step()
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)
    assert replicas_are_identical(model, comms)


@pytest.mark.parametrize("lengths", [(3, 5), (4, 1, 2), (0, 2), (0, 0)])
def test_ranks_may_run_out_of_data(any_pool, lengths):
    for weigh in (False, True):
        any_pool.run(run_out, len(lengths), lengths, weigh, timeout=30)


# ── misuse ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def refuse(comms):
    for options, words in (
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 must be a number of megabytes greater than 0"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan must be"),
        ({"broadcast_buffers": "none"}, "broadcast_buffers='none' must be True or False"),
        ({"find_unused_parameters": "no"}, "find_unused_parameters='no' must be True or False"),
    ):
        with pytest.raises(mp.errors.UsageError, match=words):
            linear(comms, **options)
    with pytest.raises(mp.errors.UsageError, match="ReLU has no trainable parameters"):
        mp.DataParallel(nn.ReLU(), comms)
    with pytest.raises(mp.errors.UsageError, match="0 gives sparse gradients"):
        mp.DataParallel(nn.Sequential(nn.Embedding(3, 3, sparse=True)), comms)
    for weight in (torch.tensor(2), torch.tensor([2.0]).numpy()[0], 2):
        with linear(comms).weighted(weight, torch.tensor(4.0)):
            pass
    for weight in (-1, float("nan"), "2"):
        with (
            pytest.raises(mp.errors.UsageError, match=f"weight={weight!r} must be a finite number"),
            linear(comms).weighted(weight),
        ):
            pass
    with pytest.raises(
        mp.errors.UsageError,
        match=r"where rank 0 has parameter weight float32\[3, 2\], rank 1 has parameter weight float32\[3, 3\]",
    ):
        mp.DataParallel(nn.Linear(2 + comms.rank, 3), comms)
    with pytest.raises(mp.errors.UsageError, match=r"rank 0 has nothing, rank 1 has parameter bias float32\[3\]"):
        mp.DataParallel(nn.Linear(2, 3, bias=comms.rank == 1), comms)
    with pytest.raises(mp.errors.UsageError, match=r"rank 1 has parameter weight float32\[3, 2\], frozen"):
        mp.DataParallel(nn.Linear(2, 3, bias=False).requires_grad_(comms.rank == 0), comms)


def test_what_cannot_work_is_refused_on_every_rank(any_pool):
    any_pool.run(refuse, 2, timeout=30)


def spoil(comms):
    model = linear(comms, check_finite=True)
    messages = []
    for step in range(3):
        inputs = mine(comms)
        if step == 1 and comms.rank == 1:
            inputs[0, 0] = float("nan")
        model.zero_grad()
        try:
            model(inputs).sum().backward()
        except mp.errors.GradientError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_that_are_not_finite_are_named_on_every_rank(any_pool, ranks):
    words = "step 2: gradients that are not finite for parameters of rank 1: weight"
    assert any_pool.run(spoil, ranks, timeout=30) == [[words]] * ranks


def skip_a_layer(comms):
    model = mp.DataParallel(Subject("unused"), comms, find_unused_parameters=False)
    inputs = torch.zeros(2, 4)
    inputs[0, 0] = 2.0 * comms.rank  # rank 0 does not use the branch, and no rank the last
    with pytest.raises(mp.errors.GradientError) as caught:
        model(inputs).sum().backward()
    return str(caught.value)


def test_unused_parameters_are_an_error_on_request(any_pool):
    for text in any_pool.run(skip_a_layer, 2, timeout=30):
        assert "step 1: no gradients for parameters of rank 0:" in text
        assert "branch.bias" in text.partition("rank 1")[0]
        assert text.endswith("rank 1: never\n  try: find_unused_parameters=True, which counts them as zero")


def stay_away(comms):
    model = linear(comms)
    loss = model(mine(comms)).sum()
    if comms.rank == 1:
        return "went home"
    with pytest.raises(mp.errors.PeerLost) as caught:
        loss.backward()
    return str(caught.value)


def test_a_rank_that_never_calls_backward_is_named(any_pool):
    waiting, gone = any_pool.run(stay_away, 2, timeout=30)
    assert "rank 1" in waiting
    assert gone == "went home"


def come_and_go(comms):
    import weakref

    model = linear(comms)
    model(mine(comms)).sum().backward()
    reducer = weakref.ref(model._reducer)
    del model
    gc.collect()
    return reducer() is None


def test_a_model_that_is_gone_leaves_nothing(pool):
    assert pool.run(come_and_go, 2, transport="shm", timeout=30) == [True, True]
