"""What stages send each other, in fewer bytes: activations and their gradients, as 16-bit or 8-bit numbers.

```
stage 0   A0.3 float32 ──encode──► >A0.3@1   half the bytes, or a quarter   ──decode──► A0.3 float32   stage 1
```

The operation stays a send of A0.3: the program knows values, and not in which form they travel. A stage computes with
the numbers that arrive, and the gradient that it sends back is that of these numbers. There is no error feedback: the
next micro-batch has other activations, to which nothing could be added.
"""

from __future__ import annotations

import torch

from microparallel.compression import Cast, Compressor, Int8, parse
from microparallel.compression.compressor import packed, unpacked
from microparallel.errors import UsageError


class ActivationWire:
    """How tensors travel between stages; what has no real numbers, or no more bits than the wire, goes as it is.

    Args:
        compressor: `Cast` or `Int8`.
    """

    def __init__(self, compressor: Cast | Int8) -> None:
        self._compressor = compressor

    def __str__(self) -> str:
        return self._compressor.name

    def _goes_as_it_is(self, tensor: torch.Tensor) -> bool:
        bits = 8 if isinstance(self._compressor, Int8) else 16
        return not tensor.is_floating_point() or tensor.element_size() * 8 <= bits or not tensor.numel()

    def message(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is sent of a tensor: contiguous."""
        if self._goes_as_it_is(tensor):
            return tensor.contiguous()
        if isinstance(self._compressor, Cast):
            return tensor.to(self._compressor.dtype).contiguous()
        return packed(self._compressor.encode(tensor.detach().reshape(-1).float(), [tuple(tensor.shape)]))

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for the message of such a tensor."""
        if self._goes_as_it_is(like):
            return like
        if isinstance(self._compressor, Cast):
            return torch.empty_like(like, dtype=self._compressor.dtype)
        return torch.empty(self._compressor.payload([tuple(like.shape)])[0], dtype=torch.uint8, device=like.device)

    def read(self, message: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Write what a message says into a tensor, and return that."""
        if self._goes_as_it_is(into):
            return message
        if isinstance(self._compressor, Cast):
            return into.copy_(message)
        blocks = -(-into.numel() // self._compressor.block)
        like = (torch.empty(blocks, device="meta"), torch.empty(into.numel(), dtype=torch.int8, device="meta"))
        numbers = self._compressor.decode([tuple(into.shape)], [unpacked(message, like)])
        return into.copy_(numbers.view(into.shape))


def as_activation_wire(given: str | Compressor | None) -> ActivationWire | None:
    """Read what a user gave as `compress_activations=`."""
    compressor = parse(given) if isinstance(given, str) else given
    if compressor is None:
        return None
    if not isinstance(compressor, Cast | Int8):
        name = compressor.name if isinstance(compressor, Compressor) else repr(compressor)
        raise UsageError(
            f"Pipeline: compress_activations={name}: a stage needs every number of its input; choose "
            "mp.compression.Cast or mp.compression.Int8"
        )
    return ActivationWire(compressor)
