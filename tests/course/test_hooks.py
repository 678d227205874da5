"""Hooks and buckets against one process that sees the whole batch. Ranks start slowly, so a world runs all cases."""

import itertools

import pytest
import torch
from tests.pairwise import sample_and_whole
from torch import nn

import microparallel as mp
from microparallel.data_parallel import replicas_are_identical

STEPS, SAMPLES = 10, 13
RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-6}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3, weight_decay=0.01),
}
CASES = ["plain", "tied", "frozen", "unused", "accumulated", "no-sync", "uneven"]
SETTINGS = [*itertools.product(CASES, RELATIVE, OPTIMIZERS), ("unregistered", torch.float64, "adam")]
WORLDS = [("gloo", 1), ("gloo", 2), ("shm", 3), ("shm", 4)]


class Subject(nn.Module):
    """Two layers, smooth so that rounding stays small, and few so that messages are; the rest is for one case each."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 4)
        self.branch = nn.Linear(4, 4) if case == "unused" else None
        self.never = nn.Parameter(torch.ones(3)) if case == "unused" else None
        self.last = nn.Linear(4, 4)
        if case == "tied":
            self.again = self.first  # the same parameters under a second name, used twice
        if case == "frozen":
            self.first.weight.requires_grad_(False)
            self.last.bias.requires_grad_(False)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        if hasattr(self, "again"):
            hidden = torch.tanh(self.again(hidden))
        if self.branch is not None and (inputs[:, 0] > 1).any():
            hidden = hidden + torch.where(inputs[:, :1] > 1, self.branch(hidden), 0.0)
        return self.last(hidden)


def batch(step, dtype):
    """Every third step no rank needs the branch, and in the others not every rank does."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64).clamp(-1, 1)
    if step % 3:
        inputs[step % SAMPLES, 0] = 2.0
    return inputs.to(dtype), torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64).to(dtype)


def share(comms, case, step):
    """This rank's part of a batch; with uneven parts, a rank may have no sample at all."""
    if case != "uneven":
        bounds = [SAMPLES * rank // comms.world_size for rank in range(comms.world_size + 1)]
    elif step % 2:
        bounds = [0] * comms.world_size + [SAMPLES]  # the last rank has everything
    else:
        bounds = [0, *([1] * (comms.world_size - 1)), SAMPLES]
    return slice(bounds[comms.rank], bounds[comms.rank + 1])


def learn(model, optimizer, step, case):
    """Train with a function that leaves the gradients of a batch in the model."""
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in range(2 if case in ("accumulated", "no-sync") else 1):
            losses.append(step(2 * number + part, part).item())
        optimizer.step()
    return losses


def alone(case, dtype, optimizer):
    model = Subject(case).to(dtype)

    def step(number, _):
        inputs, targets = batch(number, dtype)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    losses = learn(model, OPTIMIZERS[optimizer](model.parameters()), step, case)
    return losses, list(model.parameters()), [parameter.grad is not None for parameter in model.parameters()]


def together(comms, case, dtype, optimizer, use_bucketing):
    model = Subject(case).to(comms.device, dtype)
    hooks = mp.course.register_ddp_hooks(model, comms, use_bucketing, 6e-5) if case != "unregistered" else None

    def step(number, part):
        inputs, targets = (tensor.to(comms.device) for tensor in batch(number, dtype))
        mine = share(comms, case, number)
        if case == "no-sync" and part == 0:
            loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
            loss = loss * (len(targets[mine]) * comms.world_size / SAMPLES)
            with hooks.no_sync():
                loss.backward()
            return comms.all_reduce_mean(loss.detach())
        samples = SAMPLES if number % 4 else None
        return mp.course.ddp_step(model, comms, inputs[mine], targets[mine], nn.functional.mse_loss, samples=samples)

    losses = learn(model, OPTIMIZERS[optimizer](model.parameters()), step, case)
    if hooks is not None:
        hooks.remove()
    return losses, model


def differences(losses, model, reference, relative):
    """What of a run differs from the single process by more than rounding."""
    wanted_losses, weights, used = reference
    if any(abs(loss - wanted) > relative * abs(wanted) for loss, wanted in zip(losses, wanted_losses, strict=True)):
        yield "the loss"
    for (name, parameter), wanted, has_gradient in zip(model.named_parameters(), weights, used, strict=True):
        if (parameter.cpu() - wanted).abs().max() > relative * wanted.abs().max():
            yield name
        if (parameter.grad is not None) != has_gradient:
            yield f"whether {name} has a gradient"


def everything_that_fails(comms, references, rows):
    failures = []
    for case, dtype, optimizer, use_bucketing in rows:
        losses, model = together(comms, case, dtype, optimizer, use_bucketing)
        found = list(differences(losses, model, references[case, dtype, optimizer], RELATIVE[dtype]))
        if not replicas_are_identical(model, comms):
            found.append("the replicas from each other")
        where = f"{case}, {dtype}, {optimizer}, {'buckets' if use_bucketing else 'hooks'}"
        failures += [f"{where}: {what}" for what in found]
    return failures


@pytest.fixture(scope="module")
def references():
    return {setting: alone(*setting) for setting in SETTINGS}


@pytest.mark.parametrize(("transport", "ranks"), WORLDS)
@pytest.mark.parametrize("rows", sample_and_whole(WORLDS, CASES, RELATIVE, OPTIMIZERS, [False, True]))
def test_parity_with_one_process(pool, references, ranks, transport, rows):
    mine = [setting for world, *setting in rows if world == (transport, ranks)]
    mine.append(("unregistered", torch.float64, "adam", True))
    world = {"transport": transport, "timeout": 55}
    assert pool.run(everything_that_fails, ranks, references, mine, **world) == [[]] * ranks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("ranks", "transport"), [(1, "nccl"), (2, "gloo")])
def test_parity_on_a_gpu(pool, references, ranks, transport):
    exact = [
        (*setting, use_bucketing)
        for setting in references
        for use_bucketing in (False, True)
        if setting[1] == torch.float64 and (use_bucketing or setting[0] != "unregistered")
    ]
    world = {"transport": transport, "device": "cuda", "timeout": 55}
    assert pool.run(everything_that_fails, ranks, references, exact, **world) == [[]] * ranks


class Crossed(nn.Module):
    """Goes through its layers in one order on some ranks, and in the other on the rest."""

    def __init__(self, reverse):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()
        self.order = range(3, -1, -1) if reverse else range(4)

    def forward(self, inputs):
        for index in self.order:
            inputs = torch.tanh(self.layers[index](inputs))
        return inputs


def gradients_of_each_kind(comms):
    """The same step by hand, with hooks and with buckets, where no two ranks make their gradients in the same order."""
    inputs, targets = batch(0, torch.float64)
    results = []
    for use_bucketing in (None, False, True):
        model = Crossed(reverse=comms.rank % 2)
        step = mp.course.naive_data_parallel_step
        if use_bucketing is not None:
            mp.course.register_ddp_hooks(model, comms, use_bucketing, 1e-4)
            step = mp.course.ddp_step
        losses = [step(model, comms, inputs, targets, nn.functional.mse_loss).item() for _ in range(3)]
        results.append((losses, [parameter.grad for parameter in model.parameters()]))
    return results


def test_ranks_may_make_their_gradients_in_different_orders(any_pool):
    for naive, *ours in any_pool.run(gradients_of_each_kind, 2, check=True, timeout=30):
        for losses, gradients in ours:
            assert losses == pytest.approx(naive[0], rel=1e-14)
            torch.testing.assert_close(gradients, naive[1], rtol=1e-13, atol=1e-15)


# ── in one process ──────────────────────────────────────────────────────────────────────────────────────────────────


class Done:
    """A request whose all-reduce is back."""

    def __init__(self, tensor):
        self.tensor = tensor

    def wait(self):
        return self.tensor


class Alone:
    """A world of one, which writes down what is all-reduced."""

    rank, world_size = 0, 1

    def __init__(self):
        self.sent = []

    def all_reduce(self, tensor, op="sum", async_op=False):
        if not async_op:
            return tensor
        self.sent.append(tensor)
        return Done(tensor)


@pytest.fixture
def comms():
    return Alone()


def backward(model):
    model(torch.randn(3, 4)).square().mean().backward()


def test_each_gradient_leaves_before_the_next_is_made(comms):
    model = Subject("plain")
    sent_before = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: sent_before.update({name: len(comms.sent)}))
    hooks = mp.course.register_ddp_hooks(model, comms, use_bucketing=False)
    backward(model)
    assert sent_before == {"last.bias": 0, "last.weight": 1, "first.bias": 2, "first.weight": 3}
    in_order = [model.last.bias, model.last.weight, model.first.bias, model.first.weight]
    assert [id(tensor) for tensor in comms.sent] == [id(parameter.grad) for parameter in in_order]
    hooks.finish()
    assert len(comms.sent) == 4


def test_what_is_ready_early_waits_its_turn(comms):
    model = Crossed(reverse=True).float()  # used from the last layer to the first, so the first has its gradients first
    sent_before = []
    model.layers[3].weight.register_post_accumulate_grad_hook(lambda _: sent_before.append(len(comms.sent)))
    hooks = mp.course.register_ddp_hooks(model, comms, use_bucketing=False)
    backward(model)
    assert sent_before == [1]  # the bias of the same layer: all others were ready, and waited
    registered = list(model.parameters())
    assert [id(tensor) for tensor in comms.sent] == [id(parameter.grad) for parameter in reversed(registered)]
    hooks.finish()


@pytest.mark.parametrize("use_bucketing", [False, True])
def test_the_next_step_begins_with_nothing_left_over(comms, use_bucketing):
    model = Subject("plain")
    hooks = mp.course.register_ddp_hooks(model, comms, use_bucketing, 1e-6)
    counts = []
    for _ in range(3):
        model.zero_grad()
        with hooks.no_sync():
            backward(model)
        assert counts == [] or len(comms.sent) == sum(counts)  # neither sends what only accumulates
        backward(model)
        hooks.finish()
        counts.append(len(comms.sent) - sum(counts))
    assert counts == [4, 4, 4]


@pytest.mark.parametrize("use_bucketing", [False, True])
def test_removed_hooks_do_nothing(comms, use_bucketing):
    model = Subject("plain")
    hooks = mp.course.register_ddp_hooks(model, comms, use_bucketing)
    backward(model)
    hooks.remove()
    hooks.remove()
    sent = len(comms.sent)
    backward(model)
    assert len(comms.sent) == sent
    mp.course.register_ddp_hooks(model, comms)  # there is room for others


def test_a_second_backward_before_finish_is_refused_by_name(comms):
    model = Subject("plain")
    hooks = mp.course.register_ddp_hooks(model, comms)
    backward(model)
    with pytest.raises(
        mp.errors.UsageError, match=r"^last.bias has a second gradient .* call finish\(\) .* no_sync\(\)$"
    ):
        backward(model)
    hooks.finish()
    backward(model)


def test_what_has_no_hook_is_refused_by_name(comms):
    model = Subject("frozen")
    hooks = mp.course.register_ddp_hooks(model, comms)
    model.first.weight.requires_grad_(True)
    backward(model)
    with pytest.raises(mp.errors.UsageError, match=r"^first.weight has no hook"):
        hooks.finish()


def test_a_sparse_gradient_is_refused_by_name(comms):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    mp.course.register_ddp_hooks(model, comms)
    with pytest.raises(mp.errors.UsageError, match=r"^the gradient of 0.weight is sparse"):
        model(torch.tensor([1, 2])).sum().backward()


def test_what_cannot_be_averaged_is_refused(comms):
    model = Subject("plain")
    mp.course.register_ddp_hooks(model, comms)
    frozen, batch, loss = nn.Linear(2, 2).requires_grad_(False), torch.zeros(1, 4), nn.functional.mse_loss
    for call, words in (
        (lambda: mp.course.register_ddp_hooks(frozen, comms), "no trainable parameters"),
        (lambda: mp.course.register_ddp_hooks(model, comms), "has hooks already, and two sets"),
        (lambda: mp.course.ddp_step(model, Alone(), batch, batch, loss), "another Comms"),
    ):
        with pytest.raises(mp.errors.UsageError, match=words):
            call()


def test_a_step_that_fails_leaves_no_hooks_behind(comms):
    model = Subject("plain")
    with pytest.raises(RuntimeError):
        mp.course.ddp_step(model, comms, torch.zeros(1, 5), torch.zeros(1, 4), nn.functional.mse_loss)
    backward(model)
    assert comms.sent == []
