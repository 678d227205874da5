"""Both ways to a loss, and the shapes it takes."""

import pytest
import torch

from microparallel.errors import UsageError
from microparallel.models import FullMLP, cross_entropy, mean_squared_error
from microparallel.models.loss import mean_loss


def test_every_position_counts_the_same():
    outputs, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    one_by_one = [cross_entropy(outputs[i, t], targets[i, t]) for i in range(2) for t in range(3)]
    torch.testing.assert_close(cross_entropy(outputs, targets), torch.stack(one_by_one).mean())
    torch.testing.assert_close(cross_entropy(outputs.flatten(0, 1), targets.flatten()), cross_entropy(outputs, targets))


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "words"),
    [
        (cross_entropy, (3, 5), torch.zeros(4).long(), r"targets of shape \(4,\).*outputs of shape \(3, 5\)"),
        (
            mean_squared_error,
            (3, 1),
            torch.zeros(3),
            r"targets of shape \(3,\) do not fit outputs of shape \(3, 1\).*unsqueeze",
        ),
    ],
)
def test_targets_of_another_shape(loss, outputs, targets, words):
    with pytest.raises(UsageError, match=words):
        loss(torch.zeros(outputs), targets)


def test_mean_loss_uses_the_models_own_or_the_one_given():
    model, inputs, targets = FullMLP(4, 2), torch.randn(3, 4), torch.tensor([0, 1, 1])
    assert torch.equal(mean_loss(model, inputs, targets), model(inputs, targets))
    assert torch.equal(mean_loss(model, inputs, targets, cross_entropy), model(inputs, targets))
    assert mean_loss(model, inputs, targets, lambda outputs, targets: outputs.sum() * 0).item() == 0


def test_mean_squared_error():
    assert mean_squared_error(torch.zeros(3, 1), torch.ones(3, 1)).item() == 1.0
