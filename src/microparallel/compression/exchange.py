"""A compressed sum, with error feedback: one generator for every method and every transport.

```
e ← e + g        this rank's residual takes the gradients
send c = C(e)    the ranks sum or gather what they have encoded
e ← e − c        what was not sent stays: after any number of passes, Σ sent + e = Σ g
```
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microparallel.comms.in_process import all_reduce_in_process
from microparallel.comms.rounds import Rounds
from microparallel.compression.compressor import (
    Compressor,
    Received,
    Shape,
    own_result,
    packed,
    require_parts,
    unpacked,
)


def compressed_sum(
    compressor: Compressor,
    gradients: torch.Tensor,
    shapes: Sequence[Shape],
    residual: torch.Tensor | None = None,
    *,
    sends_nothing: bool = False,
) -> Rounds[torch.Tensor]:
    """Sum gradients over the ranks, compressed; whoever runs this generator carries the messages.

    Args:
        compressor: of this bucket.
        gradients: a flat tensor, which stays as it is; it is compressed in float32.
        shapes: of the gradients in it.
        residual: what earlier passes have not sent, which changes; None: no error feedback.
        sends_nothing: this rank takes part, but sends zeros and keeps its residual as it is: it has gradients that are
            not finite.

    Returns:
        The sum of what all ranks have sent.
    """
    if sends_nothing:
        bucket = torch.zeros_like(gradients, dtype=torch.float32)
    elif residual is None:
        bucket = gradients.to(torch.float32)
    else:
        bucket = residual.add_(gradients).to(torch.float32)
    received: list[Received] = []
    own: Received = ()
    for kind in compressor.rounds:
        parts = compressor.encode(bucket, shapes, *received)
        require_parts(compressor, kind, parts)
        own = own_result(kind, parts)
        if kind == "sum":
            own = parts[0].clone() if residual is not None else parts[0]  # the sum is made in place
            summed = yield kind, parts[0]
            assert isinstance(summed, torch.Tensor)
            received.append(summed)
        else:
            messages = yield kind, packed(parts)
            received.append([unpacked(message, parts) for message in messages])
    if residual is not None and not sends_nothing:
        residual.sub_(compressor.decode(shapes, *received[:-1], own))
    # This last: what a method keeps for the next pass, such as PowerSGD's Q, must be what all ranks have.
    return compressor.decode(shapes, *received)


def in_process(sums: Sequence[Rounds[torch.Tensor]]) -> list[torch.Tensor]:
    """Run the sums of several ranks in this process, round by round; returns each rank's result.

    Sums are made as the ranks would make them (`direct`): 16-bit numbers in float32, rounded once.
    """
    asked = [next(one) for one in sums]
    while True:
        kind = asked[0][0]
        tensors = [tensor for _, tensor in asked]
        if kind == "sum":
            all_reduce_in_process("direct", tensors)
        ended = []
        following = []
        for rank, one in enumerate(sums):
            try:
                following.append(one.send(tensors[rank] if kind == "sum" else tensors))
            except StopIteration as stop:
                ended.append(stop.value)
        if ended:
            return ended
        asked = following
