"""Compare what a learner's code left with what is right, and name the mistake that explains the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from microparallel.learn.verdict import Wrong


@dataclass(frozen=True, slots=True)
class Suspect:
    """What one would find if a certain mistake had been made, and the words for that mistake."""

    value: torch.Tensor
    words: str


def require_equal(
    found: object, expected: torch.Tensor, what: str, suspects: Sequence[Suspect] = (), tolerance: float = 1e-9
) -> None:
    """Refuse a tensor that is not the expected one, with the words of the first suspect that explains it.

    `what` begins the message: "rank 1's sum", say.
    """
    if not isinstance(found, torch.Tensor):
        raise Wrong(f"{what} should be a tensor, and is {found!r:.80}")
    if found.shape != expected.shape:
        raise Wrong(f"{what} has shape {_shape(found)}, and should have {_shape(expected)}")
    if found.dtype != expected.dtype:
        raise Wrong(f"{what} has dtype {_dtype(found)}, and should have {_dtype(expected)}")
    if _close(found, expected, tolerance):
        return
    place = first_difference(found, expected, tolerance)
    for suspect in suspects:
        if suspect.value.shape == found.shape and _close(found, suspect.value, tolerance):
            raise Wrong(f"{suspect.words}\n  {what}{place}")
    raise Wrong(f"{what} is not right\n  {what}{place}")


def first_difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> str:
    """The first number that differs, in words that follow the tensor's name."""
    wrong = ~torch.isclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)
    if not wrong.any():
        return " is right"
    index = tuple(wrong.nonzero()[0].tolist())
    at = f"[{', '.join(map(str, index))}]" if index else ""
    return f"{at} is {found[index].item():.6g}, and should be {expected[index].item():.6g}"


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
