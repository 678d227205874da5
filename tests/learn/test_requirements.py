"""What is asked of a value, and how it is shown."""

import pytest
import torch

from microparallel.learn.requirements import flat, require_like, require_number, require_tensor, require_type, shown
from microparallel.learn.verdict import Wrong


@pytest.mark.parametrize("value", [None, "text", [1.0], (1, 2), torch.ones(2), torch.ones(0), 1j, torch.tensor(1j), {}])
def test_a_number_is_required(value):
    with pytest.raises(Wrong, match=r"the loss should be (a|one) number, and is"):
        require_number(value, "the loss")


@pytest.mark.parametrize("value", [2, 2.0, torch.tensor(2), torch.tensor([2.0])])
def test_a_number_is_a_number(value):
    assert require_number(value, "the loss") == 2.0


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        (lambda: require_tensor(None, "the ball"), "the ball should be a tensor, and is None"),
        (lambda: require_type(5, range, "it", "a range"), "it should be a range, and is 5"),
        (lambda: require_like(torch.ones(2), torch.ones(3), "it"), r"it has shape \[2\], and should have \[3\]"),
        (
            lambda: require_like(torch.ones(3).long(), torch.ones(3), "it"),
            "it has dtype int64, and should have float32",
        ),
    ],
)
def test_other_requirements(requirement, words):
    with pytest.raises(Wrong, match=words):
        requirement()


def test_nothing_is_flat():
    assert flat([None]).numel() == 0


def test_what_cannot_be_shown_has_a_name():
    class Shy:
        def __repr__(self):
            raise ValueError

    assert shown(Shy()) == "a Shy"
