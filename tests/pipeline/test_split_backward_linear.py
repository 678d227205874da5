"""Weights' gradients of linear layers, deferred: the same numbers, later."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from microparallel.models import GPT
from microparallel.pipeline.split_backward import DeferredGradients, DeferringLinear, SplitBackward


def compare(model, inputs, leaves):
    """Both halves of two micro-batches, their weight halves in another order, against plain backward."""
    plain = copy.deepcopy(model)
    passes = []
    for sign in (1, -1):
        given = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        deferred = DeferredGradients()
        with DeferringLinear(deferred):
            output = model(inputs(given))
        wanted = [leaf for leaf in given if leaf.requires_grad]
        split = SplitBackward([output], wanted)
        passes.append((split, deferred, split.input_half([sign * torch.ones_like(output)])))
    before = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    for split, deferred, _ in reversed(passes):
        split.weight_half()
        deferred.add_up()
        deferred.add_up()  # there is nothing left
    for sign, (_, _, found) in zip((1, -1), passes, strict=True):
        given = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        output = plain(inputs(given))
        output.backward(sign * torch.ones_like(output))
        for mine, leaf in zip(found, [leaf for leaf in given if leaf.requires_grad], strict=True):
            torch.testing.assert_close(mine, leaf.grad, rtol=1e-12, atol=1e-12)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=name)
    return before


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Reused(nn.Module):
    """One layer used at two depths, without its bias once."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value):
        return nn.functional.linear(torch.tanh(self.layer(value)), self.layer.weight) + value


MODELS = {
    "mlp": nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 4, bias=False)),
    "norms": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3)),
    "reused": Reused(),
    "frozen": nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_gradients_as_a_plain_backward(name):
    torch.manual_seed(0)
    before = compare(
        copy.deepcopy(MODELS[name]).double(), lambda leaves: leaves[0], [torch.randn(2, 3, 4, requires_grad=True)]
    )
    if name in ("mlp", "reused"):
        assert all(gradient is None for gradient in before.values())  # the input half leaves weights alone


def test_the_layers_of_a_gpt():
    torch.manual_seed(0)
    blocks = nn.Sequential(*GPT(vocabulary=11, context=6, dim=8, heads=2, depth=2).layers[1:])
    compare(blocks, lambda leaves: leaves[0], [torch.randn(2, 6, 8, requires_grad=True)])


def test_a_first_stage_has_no_input_half():
    torch.manual_seed(0)
    compare(copy.deepcopy(MODELS["mlp"]).double(), lambda leaves: leaves[0], [torch.randn(3, 4)])


def names_of(output):
    """The nodes that a graph consists of."""
    found, to_do = set(), [output.grad_fn]
    while to_do:
        node = to_do.pop()
        if node is not None and node not in found:
            found.add(node)
            to_do += [one for one, _ in node.next_functions]
    return {node.name() for node in found}


@pytest.mark.parametrize(
    "reason", ["hook", "another kind of hook", "no gradient of the input", "a weight that was computed", "no gradients"]
)
def test_where_a_hook_or_graph_needs_the_gradient_it_is_not_deferred(reason):
    layer, inputs = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=reason != "no gradient of the input")
    weight = layer.weight * 2 if reason == "a weight that was computed" else layer.weight
    if reason == "hook":
        layer.weight.register_hook(lambda gradient: gradient)
    if reason == "another kind of hook":
        layer.weight.register_post_accumulate_grad_hook(lambda _: None)
    with DeferringLinear(DeferredGradients()), torch.set_grad_enabled(reason != "no gradients"):
        output = nn.functional.linear(inputs, weight, layer.bias)
    assert output.grad_fn is None or not any("LinearFunction" in name for name in names_of(output))


def test_gradients_that_are_views_stay_views():
    """Replicas' gradients live in buckets."""
    layer = nn.Linear(3, 2)
    flat = torch.zeros(6)
    layer.weight.grad = flat.view(2, 3)
    deferred = DeferredGradients()
    with DeferringLinear(deferred):
        output = layer(torch.ones(4, 3, requires_grad=True))
    assert any("LinearFunction" in name for name in names_of(output))
    output.sum().backward()
    deferred.add_up()
    assert flat.tolist() == [4.0] * 6 and layer.bias.grad.tolist() == [4.0] * 2


class Checkpointed(nn.Module):
    """A model's own checkpoint, between layers that are deferred."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inside = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.reentrant = reentrant

    def forward(self, value):
        return self.last(checkpoint(self.inside, self.first(value).tanh(), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_nothing_is_deferred_inside_of_a_checkpoint(reentrant):
    """It is computed again in backward, outside of the mode; torch compares what both have saved."""
    before = compare(Checkpointed(reentrant), lambda leaves: leaves[0], [torch.randn(3, 4, requires_grad=True)])
    assert all((before[f"inside.{number}.weight"] is not None) for number in (0, 2))
    assert before["first.weight"] is None
