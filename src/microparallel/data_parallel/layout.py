"""How tensors are divided between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """Some elements of a tensor: what one rank holds of it.

    ```
    a tensor of shape (2, 3), flattened    0 1 2 3 4 5
    Part(tensor, start=2, shape=(2, 3))        ^^^        where tensor has 3 elements
    ```

    Attributes:
        tensor: the elements, in one dimension.
        start: where they begin in the flattened tensor.
        shape: of the whole tensor.
    """

    tensor: torch.Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Where they end in the flattened tensor."""
        return self.start + self.tensor.numel()
