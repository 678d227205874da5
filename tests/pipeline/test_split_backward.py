"""The two halves of a backward pass must add up to exactly the whole: same gradients, same work, each hook once."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from microparallel.errors import UsageError
from microparallel.models import GPT
from microparallel.pipeline.split_backward import SplitBackward


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def as_list(outputs):
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def plain(stage, inputs, gradients):
    """What torch's ordinary backward pass gives: the gradients of inputs and of parameters."""
    stage.zero_grad()
    outputs = as_list(stage(*inputs))
    torch.autograd.backward(outputs, gradients)
    found = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    return found, {name: parameter.grad for name, parameter in stage.named_parameters()}


def same(left, right):
    if left is None or right is None:
        return left is right
    return torch.allclose(left, right, rtol=0, atol=1e-12)


def check(stage, *inputs, whole=False):
    """Compare both halves with the whole, on fresh gradients and on top of others; return the split."""
    inputs = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in inputs]
    gradients = [torch.randn_like(output) for output in as_list(stage(*inputs))]
    of_inputs, of_parameters = plain(stage, inputs, gradients)
    stage.zero_grad()
    for times in (1, 2):
        before = {name: clone(parameter.grad) for name, parameter in stage.named_parameters()}
        split = SplitBackward(as_list(stage(*inputs)), inputs)
        assert split.whole == whole
        found = split.input_half([gradient.clone() for gradient in gradients])
        assert all(same(*pair) for pair in zip(found, of_inputs, strict=True))
        assert all(tensor.grad is None for tensor in inputs)
        if not whole:
            assert all(same(parameter.grad, before[name]) for name, parameter in stage.named_parameters())
        split.weight_half()
        for name, parameter in stage.named_parameters():
            expected = of_parameters[name]
            assert same(parameter.grad, None if expected is None else times * expected), name


def clone(tensor):
    return None if tensor is None else tensor.clone()


class Stage(nn.Module):
    """A stage from a function of its parameters and its inputs."""

    def __init__(self, function, **shapes):
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Scale(torch.autograd.Function):
    """Multiplies; counts how often its backward pass runs."""

    calls = 0

    @staticmethod
    def forward(ctx, factor, inputs, weight):
        ctx.factor = factor
        ctx.save_for_backward(inputs, weight)
        return factor * inputs * weight, inputs + 1

    @staticmethod
    def backward(ctx, gradient, other):
        Scale.calls += 1
        inputs, weight = ctx.saved_tensors
        # torch undoes the broadcasting of the second
        return None, ctx.factor * gradient * weight + other, ctx.factor * gradient * inputs


@pytest.mark.parametrize(
    ("stage", "shape"),
    [
        (lambda: nn.Linear(3, 4), (2, 3)),
        (lambda: nn.Linear(3, 4, bias=False), (2, 5, 3)),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), (2, 3)),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten()), (2, 3, 6, 6)),
        (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)), (3, 4)),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 3)), (5, 3)),
        (lambda: nn.Sequential(*GPT(vocabulary=11, context=5, dim=8, heads=2, depth=2).double().layers[1:]), (2, 5, 8)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), (2, 3)),
        (lambda: nn.PReLU(), (2, 3)),
        (lambda: nn.ReLU(), (2, 3)),
        (lambda: nn.Identity(), (2, 3)),
    ],
)
def test_modules(stage, shape):
    check(stage(), torch.randn(shape))


def test_an_lstm():
    class Last(nn.LSTM):
        def forward(self, inputs):
            return super().forward(inputs)[0]

    check(Last(3, 4, num_layers=2), torch.randn(5, 2, 3))


STAGES = {
    "residual": lambda s, x: x + (x + torch.tanh(x @ s.a)) @ s.b,
    "same weight at two depths": lambda s, x: torch.tanh(x @ s.a) @ s.a,
    "three depths and a bias": lambda s, x: torch.sin(torch.sin(x @ s.a + s.c) @ s.a + s.c) @ s.a + s.c,
    "transposed once, used twice": lambda s, x: _twice(x, s.a.t()),
    "standardised": lambda s, x: torch.tanh(x @ (s.a / s.a.norm())) @ (s.b / s.b.norm()),
    "standardised once, used twice": lambda s, x: _twice(x, s.a / s.a.norm()),
    "two weights that meet": lambda s, x: torch.tanh(x @ (s.a @ s.b)) @ (s.b * s.c) @ s.a,
    "added to the output": lambda s, x: torch.tanh(x) + s.c,
    "broadcast, twice": lambda s, x: torch.tanh(x * s.c) * s.c + s.d,
    "twice in one operation": lambda s, x: torch.addcmul(x, s.c, s.c),
    "twice in one operation, twice": lambda s, x: torch.tanh(torch.addcmul(x, s.c, s.c)).addcmul(s.c, s.c),
    "independent of inputs": lambda s, x: s.a @ s.b,
    "an independent output": lambda s, x: (x @ s.a, s.a @ s.b),
    "a weight as an output": lambda s, x: (torch.tanh(x @ s.a) @ s.b, s.a),
    "an input as an output": lambda s, x: (x, x @ s.a),
    "same output twice": lambda s, x: (x @ s.a,) * 2,
    "a value and what follows it": lambda s, x: (y := x @ s.a, torch.tanh(y) @ s.b),
    "pieces": lambda s, x: (x @ s.a).chunk(2, dim=-1),
    "one piece of two": lambda s, x: (x * s.c).unbind()[0] * s.d,
    "in place": lambda s, x: (x @ s.a).add_(s.c).relu_().mul(s.c).add_(s.c),
    "in place on a view": lambda s, x: _write_into_view(x @ s.a, s.c),
    "in place on a view, shared": lambda s, x: _write_into_view(x @ s.a, s.c) * s.c,
    "function": lambda s, x: Scale.apply(2.0, torch.tanh(x @ s.a), s.c)[0] @ s.b,
    "function, shared weight": lambda s, x: sum(Scale.apply(2.0, Scale.apply(3.0, x * s.c, s.c)[1], s.c)) * s.c,
    "another dtype": lambda s, x: torch.tanh(x.float() * s.c.float()).double() * s.c + s.c.float() * x,
    "mask": lambda s, x: functional.scaled_dot_product_attention(x @ s.a, x @ s.b, x, attn_mask=s.d + s.e),
    "mask of all layers": lambda s, x: _attend(_attend(x @ s.a, s.e), s.e),
    "no weights": lambda s, x: torch.tanh(x) * x,
}


def _twice(x, weight):
    return torch.tanh(x @ weight) @ weight


def _write_into_view(hidden, weight):
    hidden = hidden * 1.0
    hidden[0].mul_(weight)
    hidden[:, 1:3].add_(weight[:2])
    return torch.tanh(hidden)


def _attend(x, mask):
    return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("name", STAGES)
def test_functions(name):
    check(Stage(STAGES[name], a=(4, 4), b=(4, 4), c=(4,), d=(1,), e=(2, 2)), torch.randn(2, 4))


def test_an_embedding_has_no_input_half():
    model = GPT(vocabulary=11, context=5, dim=8, heads=2, depth=1).double()
    check(model, torch.randint(11, (2, 5)))


def test_embedding_and_head_share_their_weight():
    check(
        Stage(lambda s, tokens: torch.tanh(functional.embedding(tokens, s.w) @ s.a) @ s.w.t(), w=(7, 4), a=(4, 4)),
        torch.randint(7, (2, 5)),
    )
    check(
        Stage(lambda s, x, tokens: torch.tanh(functional.embedding(tokens, s.w) * x) @ s.w.t(), w=(7, 4)),
        torch.randn(2, 5, 4),
        torch.randint(7, (2, 5)),
    )


def test_several_inputs_of_which_some_do_not_matter():
    check(
        Stage(lambda s, x, y, z: (x @ s.a + z, torch.tanh(x) * s.c), a=(4, 4), c=(4,)),
        torch.randn(2, 4),
        torch.randn(3),
        torch.randn(2, 4),
    )


def test_the_same_linear_three_times():
    linear = nn.Linear(4, 4)
    check(nn.Sequential(linear, nn.Tanh(), linear, nn.Tanh(), linear), torch.randn(3, 4))


def test_frozen_parameters_stay_without_gradient():
    stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))
    stage[0].requires_grad_(False)
    stage[2].weight.requires_grad_(False)
    check(stage, torch.randn(3, 4))
    assert stage[0].weight.grad is None
    assert stage[2].weight.grad is None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))])
def test_checkpoints_are_not_split(reentrant, inside):
    inside.double()
    stage = Stage(lambda s, x: checkpoint(s.inside, torch.tanh(x * s.c), use_reentrant=reentrant), c=(4,))
    stage.inside = inside
    check(stage, torch.randn(3, 4), whole=True)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself
def test_compiled_modules_are_not_split():
    stage = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="aot_eager"))
    check(stage, torch.randn(3, 4), whole=True)


def test_whole_on_demand_leaves_the_second_half_empty():
    stage, inputs = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    inputs.grad = torch.ones(3, 4)
    split = SplitBackward([stage(inputs)], [inputs], whole=True)
    assert split.whole
    (found,) = split.input_half([torch.ones(3, 4)])
    assert same(found, torch.ones(3, 4) @ stage.weight)
    assert same(inputs.grad, torch.ones(3, 4))
    before = stage.weight.grad.clone()
    split.weight_half()
    assert same(stage.weight.grad, before)


@given(st.permutations(range(4)), st.booleans())
def test_microbatches_in_any_order(order, shared):
    linear = nn.Linear(4, 4)
    stage = nn.Sequential(linear, nn.Tanh(), linear if shared else nn.Linear(4, 4), nn.LayerNorm(4)).double()
    microbatches = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in order]
    gradients = [torch.randn(3, 4, dtype=torch.float64) for _ in order]
    for inputs, gradient in zip(microbatches, gradients, strict=True):
        stage(inputs).backward(gradient)
    expected = [parameter.grad for parameter in stage.parameters()]
    stage.zero_grad()
    splits = [SplitBackward([stage(inputs)], [inputs]) for inputs in microbatches]
    for number, split in enumerate(splits):
        (found,) = split.input_half([gradients[number]])
        assert same(found, microbatches[number].grad)
    for number in order:
        splits[number].weight_half()
    assert all(same(parameter.grad, right) for parameter, right in zip(stage.parameters(), expected, strict=True))


@st.composite
def graphs(draw):
    """Operations, each with the numbers of the values and weights that it takes."""
    count = draw(st.integers(1, 8))
    kinds = st.sampled_from(["product", "sum", "weight sum", "matrix", "in place", "weights", "function"])
    return [(draw(kinds), draw(st.integers(0, 99)), draw(st.integers(0, 99))) for _ in range(count)]


def random_stage(operations, ends):
    def run(stage, *inputs):
        values, weights = list(inputs), [stage.a, stage.b, stage.a.t()]
        for kind, first, second in operations:
            value, weight = values[first % len(values)], weights[second % len(weights)]
            if kind == "weights":
                weights.append(torch.tanh(weights[first % len(weights)] @ weight))
                continue
            values.append(
                {
                    "product": lambda v, w, o: torch.sin(v) * o,
                    "sum": lambda v, w, o: v + o,
                    "weight sum": lambda v, w, o: v + w[0],
                    "matrix": lambda v, w, o: torch.tanh(v @ w),
                    "in place": lambda v, w, o: (v * 1).mul_(w).tanh_(),
                    "function": lambda v, w, o: Scale.apply(2.0, v, w)[0],
                }[kind](value, weight, values[second % len(values)])
            )
        return [(values + weights)[end % len(values + weights)] for end in ends]

    return Stage(run, a=(3, 3), b=(3, 3)).double()


@given(graphs(), st.lists(st.integers(0, 99), min_size=1, max_size=3))
def test_any_graph(operations, ends):
    check(random_stage(operations, ends), *torch.randn(2, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "stage",
    [
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)),
        lambda: nn.Sequential(linear := nn.Linear(8, 8), nn.GELU(), linear, nn.GELU(), linear),
        lambda: Stage(lambda s, x: _twice(x, s.a @ s.b), a=(8, 8), b=(8, 8)),
    ],
)
def test_nothing_is_calculated_twice(stage):
    stage = stage()
    inputs = torch.randn(5, 8, requires_grad=True)

    def flops(work):
        with FlopCounterMode(display=False) as counter:
            work()
        return counter.get_total_flops()

    outputs = stage(inputs)
    gradient = torch.randn_like(outputs)
    whole = flops(lambda: outputs.backward(gradient))
    split = SplitBackward([stage(inputs)], [inputs])
    first, second = flops(lambda: split.input_half([gradient])), flops(split.weight_half)
    assert first + second == whole
    assert min(first, second) > 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_function_runs_once(shared):
    stage = Stage(lambda s, x: Scale.apply(2.0, x * (s.c if shared else 1), s.c)[0], c=(4,))
    inputs = torch.randn(2, 4, requires_grad=True)
    split = SplitBackward([stage(inputs)], [inputs])
    Scale.calls = 0
    split.input_half([torch.ones(2, 4)])
    split.weight_half()
    assert Scale.calls == 1


def test_hooks_of_parameters_run_once_per_weight_half():
    linear = nn.Linear(4, 4)
    stage = nn.Sequential(linear, nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), linear)  # shared ones as well
    counts = dict.fromkeys(stage.parameters(), 0)

    def count(parameter):
        counts[parameter] += 1

    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    inputs = torch.randn(3, 4, requires_grad=True)
    for times in (1, 2):
        split = SplitBackward([stage(inputs)], [inputs])
        split.input_half([torch.ones(3, 4)])
        assert set(counts.values()) == {times - 1}
        split.weight_half()
        assert set(counts.values()) == {times}


@pytest.mark.parametrize("shared", [True, False])
def test_hooks_that_change_a_gradient_on_its_way_count_once(shared):
    def run(stage, x):
        hidden = x @ stage.a
        hidden.register_hook(lambda gradient: 2 * gradient)
        return torch.tanh(hidden) @ (stage.a if shared else stage.b)

    check(Stage(run, a=(4, 4), b=(4, 4)), torch.randn(2, 4))


def test_module_hooks():
    stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    seen = []
    stage[2].register_full_backward_hook(lambda module, gradients, _: seen.append(gradients[0].clone()))
    check(stage, torch.randn(2, 4))
    assert len(seen) == 3  # one for each pass of `check`


class Holder:
    """Carries what torch saves for the backward pass, so that a test can see when it is let go of."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("shared", [True, False])
def test_the_weight_half_lets_go_of_the_graph(shared):
    linear = nn.Linear(4, 4)
    stage = nn.Sequential(linear, nn.GELU(), linear if shared else nn.Linear(4, 4))
    saved = weakref.WeakSet()
    inputs = torch.randn(3, 4, requires_grad=True)

    def save(tensor):
        saved.add(holder := Holder(tensor.detach()))
        return holder

    gc.disable()  # it must not take a search for cycles
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda holder: holder.tensor):
            outputs = stage(inputs)
        split = SplitBackward([outputs], [inputs])
        split.input_half([torch.ones(3, 4)])
        del outputs
        assert saved
        split.weight_half()
        assert not saved
    finally:
        gc.enable()


def test_deep_graphs():
    stage = Stage(lambda s, x: x, c=(2,))

    def run(s, x):
        for _ in range(5000):
            x = torch.sin(x)
        return x * s.c

    stage.function = run
    check(stage, torch.randn(2))


def test_gradients_may_be_missing():
    stage = Stage(lambda s, x: (x @ s.a, x @ s.b, s.c * 2), a=(4, 4), b=(4, 4), c=(4,))
    inputs = torch.randn(2, 4, requires_grad=True)
    for whole in (False, True):
        stage.zero_grad()
        split = SplitBackward(stage(inputs), [inputs], whole=whole)
        (found,) = split.input_half([torch.ones(2, 4), None, None])
        split.weight_half()
        assert same(found, torch.ones(2, 4) @ stage.a.t())
        assert stage.a.grad is not None
        assert stage.b.grad is None
        assert stage.c.grad is None
    split = SplitBackward(stage(inputs), [inputs])
    assert split.input_half([None, None, None]) == [None]


def test_what_is_refused():
    inputs = torch.randn(2, 4, requires_grad=True)
    split, done = SplitBackward([inputs * 2], [inputs]), SplitBackward([inputs * 2], [inputs])
    done.input_half([inputs])
    done.weight_half()
    for call, words in (
        (lambda: SplitBackward([inputs * 2, inputs.detach()], [inputs]), "output 1 of the stage does not require grad"),
        (lambda: SplitBackward([inputs * 2], [inputs * 2]), "input 0 of the stage is the result of an operation"),
        (split.weight_half, r"input_half\(\) comes next"),
        (lambda: split.input_half([inputs, inputs]), "2 gradients for 1 outputs"),
        (done.weight_half, "both halves are done"),
    ):
        with pytest.raises(UsageError, match=words):
            call()
