"""Replicas in one process learn what one model learns from whole batches, and stay the same."""

import copy
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import microparallel as mp
from microparallel.course.replicas import AVERAGES, share_out

RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-6}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.003),
}


class Subject(nn.Module):
    """Smooth, so that rounding stays rounding; tied or frozen on request; one layer that only some samples use."""

    def __init__(self, *, tied=False, frozen=False, unused=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(6, 3)
        self.unused = unused
        if tied:
            self.second.weight = self.first.weight
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, inputs, targets=None):
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        chosen = inputs[:, :1] > 1
        if not self.unused or chosen.any():
            hidden = hidden + torch.where(chosen, self.sometimes(hidden), 0.0)
        outputs = self.last(hidden)
        return outputs if targets is None else cross_entropy(outputs, targets)


def batches(sizes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype)
        yield inputs, torch.randint(3, (size,), generator=generator)


EVEN, UNEVEN = [12] * 10, [7, 5, 1, 2, 13, 3, 11, 1, 10, 4]  # often fewer samples than replicas
CASES = {
    "plain": ({}, EVEN),
    "tied": ({"tied": True}, EVEN),
    "frozen": ({"frozen": True}, EVEN),
    "unused": ({"unused": True}, UNEVEN),
    "uneven": ({}, UNEVEN),
    "all together": ({"tied": True, "frozen": True, "unused": True}, UNEVEN),
}


def learn_alone(model, sizes, optimizer):
    """What plain training makes of the batches: the losses."""
    losses = []
    device = next(model.parameters()).device
    for inputs, targets in batches(sizes, model.last.weight.dtype):
        optimizer.zero_grad()
        loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def learn_together(replicas, sizes, optimizer, loss_fn=None):
    losses = []
    for inputs, targets in batches(sizes, replicas.master.last.weight.dtype):
        optimizer.zero_grad()
        losses.append(replicas.step(inputs, targets, loss_fn).item())
        optimizer.step()
    return losses


def assert_close(ours, wanted, relative):
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        difference = (ours[name].cpu() - tensor.cpu()).abs().max() / tensor.abs().max().cpu()
        assert difference <= relative, f"{name} is off by {difference:.1e}"


def assert_identical(replicas):
    first, *others = ([*model.named_parameters(), *model.named_buffers()] for model in replicas.models)
    for other in others:
        for (name, wanted), (_, tensor) in zip(first, other, strict=True):
            assert torch.equal(tensor.cpu(), wanted.cpu()), name
            assert (tensor.grad is None) == (wanted.grad is None), name
            assert wanted.grad is None or torch.equal(tensor.grad.cpu(), wanted.grad.cpu()), name


def check_parity(case, optimizer, dtype, averaging, devices):
    options, sizes = CASES[case]
    model = Subject(**options).to(devices[0], dtype)
    before = copy.deepcopy(model.state_dict())
    replicas = mp.course.Replicas(model, devices, averaging)
    losses = learn_together(replicas, sizes, OPTIMIZERS[optimizer](replicas.parameters()))
    learnt = replicas.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    wanted = learn_alone(model, sizes, OPTIMIZERS[optimizer](model.parameters()))
    assert losses == pytest.approx(wanted, rel=RELATIVE[dtype], abs=0)
    assert_close(learnt, model.state_dict(), RELATIVE[dtype])
    assert_identical(replicas)
    assert not torch.equal(model.last.weight, before["last.weight"])  # something was learnt


@pytest.mark.in_turn
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("averaging", AVERAGES)
@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_plain_training(case, optimizer, dtype, averaging, count):
    check_parity(case, optimizer, dtype, averaging, ["cpu"] * count)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("averaging", AVERAGES)
@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_the_same_on_gpus(case, optimizer, dtype, averaging, count):
    gpus = torch.cuda.device_count()
    check_parity(case, optimizer, dtype, averaging, [f"cuda:{index % gpus}" for index in range(count)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_master_copy_is_on_the_cpu_and_cuda_means_the_current_gpu():
    replicas = mp.course.Replicas(Subject().cuda(), ["cuda", torch.device("cuda", 0)])
    assert {parameter.device.type for parameter in replicas.master.parameters()} == {"cpu"}
    assert {parameter.device for parameter in replicas.parameters()} == {torch.device("cuda", 0)}
    last = f"the last of {torch.cuda.device_count()} GPUs"
    for devices, words in ((["cpu", "cuda"], "round differently"), (["cuda:99"], last)):
        with pytest.raises(mp.errors.UsageError, match=words):
            mp.course.Replicas(Subject(), devices)


@given(samples=st.integers(1, 20), count=st.integers(1, 7), averaging=st.sampled_from(sorted(AVERAGES)))
def test_loss_and_gradients_are_those_of_the_whole_batch(samples, count, averaging):
    model = Subject(tied=True, unused=True).double()
    replicas = mp.course.Replicas(model, ["cpu"] * count, averaging)
    [(inputs, targets)] = batches([samples])
    wanted = model(inputs, targets)
    wanted.backward()
    assert replicas.step(inputs, targets).item() == pytest.approx(wanted.item(), rel=1e-12)
    for replica in replicas.models:
        for (name, parameter), ours in zip(model.named_parameters(), replica.parameters(), strict=True):
            if parameter.grad is None:
                assert ours.grad is None, name  # no rank used it
            else:
                torch.testing.assert_close(ours.grad, parameter.grad, rtol=1e-12, atol=1e-15)
    assert_identical(replicas)


@given(samples=st.integers(1, 20), count=st.integers(1, 7))
def test_shares_are_the_batch_in_order_and_differ_by_at_most_one(samples, count):
    inputs, targets = torch.randn(samples, 2), torch.arange(samples)
    shares = share_out(inputs, targets, [torch.device("cpu")] * count)
    assert len(shares) == count
    assert torch.equal(torch.cat([share for share, _ in shares]), inputs)
    assert torch.equal(torch.cat([share for _, share in shares]), targets)
    sizes = [len(share) for _, share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("averaging", AVERAGES)
def test_gradients_accumulate(averaging):
    model = Subject(unused=True).double()
    replicas = mp.course.Replicas(model, ["cpu"] * 3, averaging)
    for inputs, targets in batches(UNEVEN):
        model(inputs, targets).backward()
        replicas.step(inputs, targets)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    ours = {name: parameter.grad for name, parameter in replicas.models[2].named_parameters() if name in wanted}
    assert_close(ours, wanted, 1e-12)
    assert_identical(replicas)


def test_ties_and_frozen_parameters_are_kept_in_every_replica():
    replicas = mp.course.Replicas(Subject(tied=True, frozen=True), ["cpu", "cpu"])
    for model in [replicas.master, *replicas.models]:
        assert model.first.weight is model.second.weight
        assert not model.first.weight.requires_grad
    first, second = replicas.models
    assert first.first.weight.data_ptr() != second.first.weight.data_ptr()
    assert len(list(replicas.parameters())) == 2 * len(list(first.parameters()))


def test_what_is_frozen_later_stays_as_it_is():
    replicas = mp.course.Replicas(Subject(), ["cpu"] * 3)
    optimizer = torch.optim.SGD(replicas.parameters(), lr=0.1)
    learn_together(replicas, [5], optimizer)
    stale = replicas.models[0].first.weight.grad.clone()
    for model in replicas.models:
        model.first.requires_grad_(False)
    [(inputs, targets)] = batches([5], torch.float32)
    replicas.step(inputs, targets)
    assert all(torch.equal(model.first.weight.grad, stale) for model in replicas.models)


class Normalised(nn.Module):
    """With buffers: running statistics, and the last inputs."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, inputs):
        self.seen = inputs.detach()
        return self.last(self.norm(inputs))


def test_buffers_are_those_of_the_first_replica_everywhere():
    model = Normalised()
    replicas = mp.course.Replicas(model, ["cpu"] * 3)
    [(inputs, targets)] = batches([8], torch.float32)  # shares of 3, 3 and 2: `seen` has no common shape
    replicas.step(inputs, targets, cross_entropy)
    model(inputs[:3])
    for replica in replicas.models:
        assert torch.equal(replica.norm.running_mean, model.norm.running_mean)
        assert replica.norm.num_batches_tracked == 1
    assert len(replicas.models[2].seen) == 2


def test_weights_come_back_and_can_be_put_in():
    replicas, fresh = (mp.course.Replicas(Subject().double(), ["cpu", "cpu"]) for _ in range(2))
    learn_together(replicas, EVEN, torch.optim.SGD(replicas.parameters(), lr=0.1))
    learnt = replicas.state_dict()
    assert torch.equal(learnt["last.weight"], replicas.models[1].last.weight)
    assert not torch.equal(learnt["last.weight"], fresh.state_dict()["last.weight"])
    fresh.load_state_dict(learnt)
    for model in [fresh.master, *fresh.models]:
        assert all(torch.equal(tensor, learnt[name]) for name, tensor in model.state_dict().items())


def test_a_replica_that_fails_leaves_the_replicas_the_same():
    def fails_on_the_second(outputs, targets):
        if len(targets) == 2:
            raise RuntimeError("out of luck")
        return cross_entropy(outputs, targets)

    replicas = mp.course.Replicas(Normalised(), ["cpu", "cpu"])
    [(inputs, targets)] = batches([5], torch.float32)
    with pytest.raises(RuntimeError, match="out of luck"):
        replicas.step(inputs, targets, fails_on_the_second)
    assert all(parameter.grad is None for parameter in replicas.parameters())
    first, second = (model.norm.running_mean for model in replicas.models)
    assert torch.equal(first, second)
    assert first.abs().sum() > 0


Pair = namedtuple("Pair", "left right")


class TakesANest(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, batch):
        pair, scale = batch["pair"], batch["options"][0]
        return self.layer(pair.left) * scale + self.layer(pair.right)


def test_inputs_may_be_nests():
    model = TakesANest().double()
    replicas = mp.course.Replicas(model, ["cpu"] * 3, "ring")
    (left, targets), (right, _) = batches([7, 7])
    inputs = {"pair": Pair(left, right), "options": [2.0]}
    wanted = cross_entropy(model(inputs), targets)
    wanted.backward()
    assert replicas.step(inputs, targets, cross_entropy).item() == pytest.approx(wanted.item(), rel=1e-14)
    torch.testing.assert_close(replicas.models[1].layer.weight.grad, model.layer.weight.grad, rtol=1e-12, atol=1e-15)


def test_sparse_gradients_go_through_the_cpu_only():
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(12, 3)).double()
    inputs, targets = torch.tensor([[0, 1], [1, 2], [8, 8]]), torch.tensor([0, 1, 2])
    cross_entropy(model(inputs), targets).backward()
    replicas = mp.course.Replicas(model, ["cpu", "cpu"])
    replicas.step(inputs, targets, cross_entropy)
    torch.testing.assert_close(replicas.models[1][0].weight.grad.to_dense(), model[0].weight.grad.to_dense())
    with pytest.raises(mp.errors.UsageError, match=r"float64\[9, 6\] is sparse.*averaging='cpu'"):
        mp.course.Replicas(model, ["cpu", "cpu"], "ring").step(inputs, targets, cross_entropy)


def lazy():
    return nn.Sequential(nn.LazyLinear(3))


def uncopyable():
    model = Subject()
    model.cache = model.last.weight * 2  # torch copies leaves of the graph only
    return model


@pytest.mark.parametrize(
    ("make_model", "options", "words"),
    [
        (Subject, {"devices": []}, r"devices=\[\].*\['cpu', 'cpu'\]"),
        (Subject, {"devices": "cpu"}, r"devices='cpu': give a list"),
        (Subject, {"devices": 2}, "devices=2: give a list"),
        (Subject, {"devices": None}, "devices=None: give a list"),
        (Subject, {"devices": ["cpu", "gpu"]}, "'gpu' is no device.*cuda:0"),
        (Subject, {"devices": ["cpu", None]}, "None is no device"),
        (Subject, {"devices": ["meta"]}, "replicas cannot be on 'meta'"),
        (Subject, {"devices": ["cpu"], "averaging": "rign"}, "averaging='rign'.*cpu, ring"),
        (lazy, {"devices": ["cpu"]}, "0.weight has no shape"),
        (uncopyable, {"devices": ["cpu"]}, "Subject cannot be copied to cpu"),
        (nn.ReLU, {"devices": ["cpu"]}, "no trainable parameters"),
        (list, {"devices": ["cpu"]}, "torch.nn.Module is needed, and this is list"),
    ],
)
def test_what_cannot_be_replicated_is_refused_in_one_line(make_model, options, words):
    with pytest.raises(mp.errors.UsageError, match=words) as refused:
        mp.course.Replicas(make_model(), **options)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(device):
    with pytest.raises(mp.errors.UsageError, match=f"'{device}' was asked for, and torch sees no GPU; use 'cpu'"):
        mp.course.Replicas(Subject(), ["cpu", device])


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (torch.zeros(0, 6), torch.zeros(0), "the batch is empty"),
        (torch.zeros(4, 6), torch.zeros(5), r"float32\[4, 6\].*5 targets"),
        ([torch.zeros(5, 6), torch.tensor(1.0)], torch.zeros(5), r"float32\[\].*5 targets"),
        (torch.zeros(4, 6), [0, 1, 2, 1], "this is list"),
        (torch.zeros(4, 6), torch.tensor(1), r"this is int64\[\]"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(inputs, targets, words):
    with pytest.raises(mp.errors.UsageError, match=words) as refused:
        mp.course.Replicas(Subject(), ["cpu", "cpu"]).step(inputs, targets)
    assert "\n" not in str(refused.value)
