"""What may cross from stage to stage: trees of tensors, plain values, what needs no gradient, changing shapes."""

import copy
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pairwise import sample_and_whole
from tests.pipeline.oracle import batch, far, gpt, whole_batch, wrong_gradients
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

import microparallel as mp
from microparallel.errors import PartitionError, UsageError
from microparallel.models import cross_entropy
from microparallel.pipeline.stage import Boundary, DryRun

WIDTH = 5
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zbv", "dualpipev")
Pair = namedtuple("Pair", "left right")


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Spread(nn.Module):
    """Begins a stream of many things: tensors of three dtypes, some without gradients, and plain values."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, inputs):
        hidden = self.linear(inputs)
        return {
            "hidden": (hidden, [hidden.square()]),
            "mask": inputs[:, :1] > 0,
            "ids": (inputs[:, 0] * 3).long(),
            "single": hidden.float(),
            "fixed": inputs,
            "plain": (None, True, 3, 0.5, "word"),
        }


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, stream):
        hidden, (square,) = stream["hidden"]
        assert stream["plain"] == (None, True, 3, 0.5, "word")
        mixed = torch.where(stream["mask"], torch.tanh(self.linear(hidden)), square)
        return stream | {"hidden": (mixed, [square]), "ids": stream["ids"] + 1, "single": stream["single"] * 2}


class Merge(nn.Module):
    def __init__(self, leave_out=False):
        super().__init__()
        self.linear = linear()
        self.leave_out = leave_out

    def forward(self, stream):
        hidden, (square,) = stream["hidden"]
        result = self.linear(hidden) + stream["fixed"] * stream["ids"][:, None]
        return result if self.leave_out else result + square + stream["single"].double()


class Apply(nn.Module):
    """A layer of one line."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)


class With(Apply):
    """A layer of one line, with weights."""

    def __init__(self, function):
        super().__init__(function)
        self.linear = linear()

    def forward(self, inputs):
        return self.function(inputs, self.linear)


def frozen(*layers):
    return [layer.requires_grad_(False) for layer in layers]


def in_place():
    return nn.ReLU(inplace=True)


# Each is a model of six layers: three ranks cut it into three stages, or six.
MODELS = {
    "trees": lambda: [Spread(), Mix(), Mix(), Mix(), Mix(), Merge()],
    "an unused part": lambda: [Spread(), Mix(), Mix(), Mix(), Mix(), Merge(leave_out=True)],
    "the input itself": lambda: [linear(), nn.Identity(), nn.Identity(), linear(), nn.Identity(), linear()],
    "only itself in the end": lambda: [linear(), linear(), linear(), linear(), nn.Identity(), nn.Identity()],
    "twice the same": lambda: [
        linear(),
        Apply(lambda x: (x, x)),
        nn.Identity(),
        Apply(lambda pair: (pair[0], pair[1], pair[0] * pair[1])),
        nn.Identity(),
        With(lambda three, layer: layer(three[0] + 2 * three[1] + three[2])),
    ],
    "in place": lambda: [linear(), in_place(), linear(), in_place(), linear(), in_place()],
    "in place at first": lambda: [in_place(), linear(), linear(), linear(), linear(), linear()],
    "in place on a part": lambda: [
        With(lambda x, layer: (layer(x), torch.ones(len(x), dtype=torch.int64))),
        Apply(lambda pair: (pair[0].relu_(), pair[1].add_(1))),
        Apply(lambda pair: (pair[0] * 2, pair[1].add_(1))),
        nn.Identity(),
        Apply(lambda pair: pair[0] * pair[1][:, None]),
        linear(),
    ],
    "laid out otherwise": lambda: [
        With(lambda x, layer: layer(x).t()),
        With(lambda x, layer: layer(x.t()).t()),
        With(lambda x, layer: layer(x.t()).sum(1, keepdim=True).expand(-1, WIDTH)),
        With(lambda x, layer: layer(x)[:, ::2]),
        Apply(lambda x: x.sum(1, keepdim=True).expand(-1, WIDTH)),
        linear(),
    ],
    "several dtypes": lambda: [
        With(lambda x, layer: (layer(x), layer(x).float(), layer(x).to(torch.complex128))),
        Apply(lambda three: (three[0], three[1].double().exp(), three[2] * 1j)),
        nn.Identity(),
        nn.Identity(),
        Apply(lambda three: three[0] + three[1] + three[2].imag),
        linear(),
    ],
    "no weights": lambda: [linear(), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh(), linear()],
    "no weights at first": lambda: [nn.Tanh(), nn.Tanh(), linear(), linear(), nn.Tanh(), nn.Tanh()],
    "frozen first": lambda: [*frozen(linear(), linear()), linear(), linear(), linear(), linear()],
    "frozen in the middle": lambda: [linear(), linear(), *frozen(linear(), linear()), linear(), linear()],
    "frozen but for the last": lambda: [*frozen(*(linear() for _ in range(5))), linear()],
    "frozen but for the first": lambda: [linear(), *frozen(*(linear() for _ in range(5)))],
    "without a gradient": lambda: [linear(), linear(), Apply(torch.Tensor.detach), linear(), linear(), linear()],
    "a number": lambda: [
        With(lambda x, layer: (layer(x), layer.weight.sum())),
        nn.Identity(),
        Apply(lambda pair: (pair[0], pair[1].tanh())),
        nn.Identity(),
        Apply(lambda pair: pair[0] * pair[1]),
        linear(),
    ],
    "a weight used twice": lambda: [*(layer := [linear(), linear()]), nn.Tanh(), layer[0], layer[1], layer[0]],
}
BATCHES = {
    "a dict": lambda x: {"left": x, "right": x + 1, "flag": True, "none": None},
    "a tuple": lambda x: (x, [x * 2]),
    "a named tuple": lambda x: Pair(x, x * 2),
    "integers and floats": lambda x: (x, torch.arange(len(x))),
}


def named(label):
    torch.manual_seed(1)
    return nn.Sequential(*MODELS[label]()).double()


def taking(kind):
    """A model whose first layer takes such a batch."""
    torch.manual_seed(1)
    first = With(
        lambda tree, layer: layer(
            sum(one for one in pytree.tree_leaves(tree) if torch.is_tensor(one) and one.dim() > 1)
        )
    )
    return nn.Sequential(first, *(linear() for _ in range(5))).double()


def numbers(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def given_to(comms, model, inputs, targets, schedule, microbatches, loss_fn=mse_loss):
    """A step where the first rank alone has inputs, and the ranks that may have the last stage the targets."""
    with torch.no_grad():
        expected = loss_fn(model(copy.deepcopy(inputs)), targets)
    loss, gradients = whole_batch(model, copy.deepcopy(inputs), targets, loss_fn)
    pipe = mp.Pipeline(
        model, comms, schedule, microbatches, loss_fn, balance=[2, 2, 2] if "v" not in schedule else "auto"
    )
    for number in range(2):
        for parameter in pipe.parameters():
            parameter.grad = None
        mine = copy.deepcopy(inputs) if 0 in pipe.stages else None
        answers = targets if pipe._has_last else None
        found = pipe.step(mine, answers)
        if far(found, loss, 1e-12):
            yield f"loss of step {number}: {float(found)} and not {float(loss)}"
        yield from (f"{what} in step {number}" for what in wrong_gradients(pipe.named_parameters(), gradients))
    if far(pipe.evaluate(copy.deepcopy(inputs), targets), expected, 1e-12):
        yield "evaluate"


def every_model_that_fails(comms, rows):
    torch.set_num_threads(1)
    inputs, targets = numbers(8)
    wrong = []
    for label, schedule in rows:
        if label in MODELS:
            shown = given_to(comms, named(label), inputs, targets, schedule, 4)
        else:
            shown = given_to(comms, taking(label), BATCHES[label](inputs), targets, schedule, 3)
        wrong += [f"{label}, {schedule}: {what}" for what in shown]
    return wrong


@pytest.mark.parametrize("transport", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", sample_and_whole([*MODELS, *BATCHES], SCHEDULES, ["shm", "gloo"]))
def test_whatever_crosses_a_boundary_the_gradients_are_those_of_one_process(pool, transport, rows):
    mine = [(label, schedule) for label, schedule, carrier in rows if carrier == transport]
    assert pool.run(every_model_that_fails, 3, mine, transport=transport, timeout=55) == [[]] * 3


def shapes_that_change(comms):
    torch.set_num_threads(1)
    wrong = []
    model = gpt()
    pipe = mp.Pipeline(copy.deepcopy(model), comms, "1f1b", 4, cross_entropy)
    for number, (samples, length) in enumerate([(8, 5), (8, 5), (6, 3), (3, 5), (1, 1), (8, 5), (9, 4)]):
        inputs, targets = (whole[:, :length] for whole in batch("gpt", samples, seed=number))
        loss, gradients = whole_batch(model, inputs, targets)
        for parameter in pipe.parameters():
            parameter.grad = None
        found = pipe.step(inputs, targets, allow_fewer=True)
        wrong += [f"{samples} of {length}: {what}" for what in wrong_gradients(pipe.named_parameters(), gradients)]
        if far(found, loss, 1e-12) or far(pipe.evaluate(inputs, targets), loss, 1e-12):
            wrong.append(f"{samples} of {length}: loss")
    return wrong


def test_batches_and_sequences_may_change_their_length_from_step_to_step(pool):
    assert pool.run(shapes_that_change, 3, transport="shm", timeout=30) == [[]] * 3


# ── descriptions ────────────────────────────────────────────────────────────────────────────────────────────────────

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.tuples(
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]),
    ).map(lambda made: torch.zeros(made[0], dtype=made[1])),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(TREES)
def test_a_description_travels_as_text_and_puts_the_value_together_again(value):
    boundary = Boundary.of(value, "a value")
    assert Boundary.from_json(boundary.to_json()) == boundary
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    again = boundary.put_together(tensors)
    assert pytree.tree_structure(again) == pytree.tree_structure(value)
    assert all(
        one is other
        for one, other in zip(pytree.tree_leaves(again), pytree.tree_leaves(value), strict=True)
        if torch.is_tensor(one)
    )


def test_a_class_of_ones_own_cannot_be_described():
    with pytest.raises(
        UsageError, match=r"Pair\(left=float32\[2\], right=1\) cannot be described to another rank: return"
    ):
        Boundary.of(Pair(torch.zeros(2), 1), "a value").to_json()


def test_a_description_is_readable():
    value = {"x": (torch.zeros(2, 3), None), "n": 4}
    assert str(Boundary.of(value, "a value")) == "{'x': (float32[2, 3], None), 'n': 4}"


@pytest.mark.parametrize(
    ("value", "message"),
    [({1, 2}, "holds a set"), (torch.zeros(2).to_sparse(), "holds a torch.sparse_coo tensor.*to_dense")],
)
def test_what_cannot_cross_is_named(value, message):
    with pytest.raises(UsageError, match=f"what stage 3 returns {message}"):
        Boundary.of((value, 1), "what stage 3 returns")


def test_a_dry_run_changes_nothing():
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)]
    before = copy.deepcopy(nn.Sequential(*layers).state_dict())
    torch.manual_seed(5)
    outputs = DryRun(0, layers).outputs(Boundary.of(torch.zeros(4, 3), "inputs"), training=True)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert str(outputs) == "float32[4, 3]"
    assert outputs.contents[0].needs_gradient
    after = nn.Sequential(*layers).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_dry_run_that_fails_names_the_stage_and_what_it_was_given():
    with pytest.raises(PartitionError, match=r"dry run of stage 2 on float32\[4, 7\] failed: RuntimeError"):
        DryRun(2, [nn.Linear(3, 3)]).outputs(Boundary.of(torch.zeros(4, 7), "inputs"), training=True)
    reads = Apply(lambda x: x * x.sum().item())
    with pytest.raises(PartitionError, match="a layer that reads the contents of tensors"):
        DryRun(1, [reads]).outputs(Boundary.of(torch.zeros(4, 7), "inputs"), training=True)
