"""The small GPT looks back and never ahead, can be cut between any two layers, and learns."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microparallel.errors import UsageError
from microparallel.models import GPT


def small(**sizes):
    torch.manual_seed(0)
    return GPT(**{"vocabulary": 11, "context": 8, "dim": 12, "heads": 3, "depth": 2, **sizes})


@settings(max_examples=10)
@given(
    batch=st.integers(1, 3),
    time=st.integers(1, 8),
    heads=st.integers(1, 3),
    size=st.integers(1, 4),
    depth=st.integers(1, 3),
)
def test_shapes(batch, time, heads, size, depth):
    model = small(dim=heads * size, heads=heads, depth=depth)
    tokens = torch.randint(11, (batch, time))
    assert len(model.layers) == depth + 2
    assert model(tokens).shape == (batch, time, 11)
    assert model(tokens, tokens).shape == ()


def test_defaults_start_about_as_surprised_as_a_guess():
    torch.manual_seed(0)
    model = GPT()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    tokens = torch.randint(256, (4, 64))
    assert abs(model(tokens, tokens).item() - torch.tensor(256.0).log().item()) < 0.3


def test_no_position_sees_a_later_one():
    model, tokens = small(), torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_each_position_sees_every_earlier_one():
    model, tokens = small(), torch.randint(11, (1, 8))
    embedded = model.layers[0](tokens).detach().requires_grad_()
    outputs = embedded
    for layer in model.layers[1:]:
        outputs = layer(outputs)
    outputs[0, -1].square().sum().backward()
    assert (embedded.grad.abs().sum(-1) > 0).all()


def test_layers_one_after_the_other_are_the_model():
    model, tokens = small(), torch.randint(11, (2, 8))
    outputs = tokens
    for layer in model.layers:
        outputs = layer(outputs)
    assert torch.equal(outputs, model(tokens))


def test_pipeline_layers_are_the_layers():
    model = small()
    assert model.pipeline_layers() is model.layers


def test_a_tied_head_is_the_embedding():
    tied, untied = small(tied=True), small()
    assert tied.layers[-1].linear.weight is tied.layers[0].token.weight
    assert len(list(tied.parameters())) == len(list(untied.parameters())) - 1
    assert list(tied.state_dict()) == list(untied.state_dict())
    assert untied.layers[-1].linear.weight is not untied.layers[0].token.weight


def test_tying_changes_no_other_weight_and_draws_the_same_random_numbers():
    tied, after_tied = small(tied=True).state_dict(), torch.rand(3)
    untied, after_untied = small().state_dict(), torch.rand(3)
    head = "layers.3.linear.weight"
    assert all(torch.equal(tied[name], untied[name]) for name in untied if name != head)
    assert torch.equal(tied[head], untied["layers.0.token.weight"])
    assert torch.equal(after_tied, after_untied)


def test_a_tied_weight_gathers_the_gradients_of_both_its_uses():
    tied, untied, tokens = small(tied=True), small(), torch.randint(11, (2, 8))
    untied.load_state_dict(tied.state_dict())
    tied(tokens, tokens).backward()
    untied(tokens, tokens).backward()
    both = untied.layers[0].token.weight.grad + untied.layers[-1].linear.weight.grad
    torch.testing.assert_close(tied.layers[0].token.weight.grad, both)


def test_works_in_float64():
    model, tokens = small().double(), torch.randint(11, (2, 8))
    loss = model(tokens, tokens)
    loss.backward()
    assert loss.dtype == torch.float64
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_learns_to_count():
    model = small(dim=24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = (torch.arange(9) + torch.arange(11)[:, None]) % 11
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_too_long_a_sequence():
    with pytest.raises(UsageError, match=r"sequence of 9 tokens does not fit.*context of 8.*context=9"):
        small()(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        *(({name: 0}, f"{name}=0") for name in ("vocabulary", "context", "dim", "heads", "depth")),
        ({"dim": 10, "heads": 4}, r"dim=10 .* heads=4: use dim=12"),
    ],
)
def test_impossible_sizes(sizes, words):
    with pytest.raises(UsageError, match=words):
        small(**sizes)
