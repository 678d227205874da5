"""Refuse what a learner's code returned or left behind, with words that say what is wrong with it.

Every grader compares in the same way (`require_equal`): the tensor is the expected one; or it is what a known mistake
would leave (a `Suspect`), and that mistake is named; or the first number that differs is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from microparallel.learn.verdict import Wrong

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Suspect:
    """What one would find if a certain mistake had been made, and the words for that mistake."""

    value: torch.Tensor
    words: str


def suspects(mistakes: Mapping[str, Iterable[torch.Tensor]]) -> list[Suspect]:
    """The words for each mistake with the tensors that it would leave, to be compared with all of them in a row."""
    return [Suspect(flat(tensors), words) for words, tensors in mistakes.items()]


# ── is it of the right kind? Asked on the rank, since not every value can be sent to the grader ─────────────────────


def require_type(value: object, kind: type[Kind] | tuple[type[Kind], ...], what: str, wanted: str) -> Kind:
    """Refuse what is of another type; `what` begins the message ("ping_pong"), `wanted` says what it should be."""
    if not isinstance(value, kind):
        raise Wrong(f"{what} should be {wanted}, and is {shown(value)}")
    return value


def require_tensor(value: object, what: str) -> torch.Tensor:
    """Refuse what is not a tensor."""
    return require_type(value, torch.Tensor, what, "a tensor")


def require_number(value: object, what: str) -> float:
    """Refuse what is not one number; a tensor with one number will do."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.item())
    if isinstance(value, torch.Tensor):
        raise Wrong(f"{what} should be one number, and is a tensor of shape {_shape(value)}")
    try:
        return float(require_type(value, (int, float), what, "a number"))
    except OverflowError:
        raise Wrong(f"{what} is {shown(value)}, which is too large") from None


def require_like(value: object, expected: torch.Tensor, what: str) -> torch.Tensor:
    """Refuse what is not a tensor of the expected one's shape and dtype."""
    found = require_tensor(value, what)
    if found.shape != expected.shape:
        raise Wrong(f"{what} has shape {_shape(found)}, and should have {_shape(expected)}")
    if found.dtype != expected.dtype:
        raise Wrong(f"{what} has dtype {_dtype(found)}, and should have {_dtype(expected)}")
    return found


def shown(value: object) -> str:
    """A value as its programmer would write it, in a few words; some cannot even be shown."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__}"


# ── is it right? ────────────────────────────────────────────────────────────────────────────────────────────────────


def require_equal(
    found: object, expected: torch.Tensor, what: str, suspects: Sequence[Suspect] = (), tolerance: float = 1e-9
) -> None:
    """Refuse a tensor that is not the expected one, with the words of the first suspect that explains it.

    `what` begins the message: "rank 1's sum", say.
    """
    tensor = require_like(found, expected, what)
    if _close(tensor, expected, tolerance):
        return
    place = first_difference(tensor, expected, tolerance)
    for suspect in suspects:
        if suspect.value.shape == tensor.shape and _close(tensor, suspect.value, tolerance):
            raise Wrong(f"{suspect.words}\n  {what}{place}")
    raise Wrong(f"{what} is not right\n  {what}{place}")


def first_difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> str:
    """The first number that differs, in words that follow the tensor's name."""
    wrong = ~torch.isclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)
    if not wrong.any():
        return " is right"
    index = tuple(wrong.nonzero()[0].tolist())
    at = f" at [{', '.join(map(str, index))}]" if index else ""
    return f"{at} is {found[index].item():.6g}, and should be {expected[index].item():.6g}"


def listed(numbers: Iterable[Any]) -> str:
    """Numbers one after another: 0, 2, 3."""
    return ", ".join(map(str, numbers))


def flat(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """All numbers of some tensors in one row, to be compared at once; what is None is left out."""
    rows = [tensor.reshape(-1) for tensor in tensors if tensor is not None]
    return torch.cat(rows) if rows else torch.empty(0)


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
