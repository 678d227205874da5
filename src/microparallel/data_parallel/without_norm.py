"""A gradient that refuses its norm: a rank has a part of all gradients, and would clip by the norm of that part.

torch's `clip_grad_norm_` takes the norm of the gradients that it is given, and says nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar, SupportsIndex

import torch

from microparallel.errors import UsageError
from microparallel.torch_private import without_own_functions

FOR_CLIPPING = frozenset({"_foreach_norm", "vector_norm", "linalg_vector_norm"})  # which torch's clip_grad_norm_ calls


class GradientWithoutNorm(torch.Tensor):
    """A tensor like any other, of which some norms are not taken; what is computed with it, and copies, are plain.

    Attributes:
        refused: the names of the functions of torch's that are refused.
        refusal: the line that says so.
    """

    refused: ClassVar[frozenset[str]] = FOR_CLIPPING
    refusal: ClassVar[str]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Compute as with any tensor; refuse norms."""
        if getattr(function, "__name__", "") in cls.refused:
            raise UsageError(cls.refusal)
        with without_own_functions():
            return function(*arguments, **(named or {}))

    def plain(self) -> torch.Tensor:
        """The same memory, as a plain tensor."""
        return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """A plain copy."""
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """In a file it is a plain tensor, which `torch.load` reads."""
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
