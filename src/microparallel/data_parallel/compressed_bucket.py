"""A bucket whose gradients are compressed before they are sent (`mp.compression`).

```
gradients ─► residual ─► encode ─► *U0@dp:topk-0.01 ─► decode ─► gradients: the sum of what all ranks have sent
                ▲           │
                └───────────┘ what was not sent waits for the next pass
```

Which gradients a rank has, and whether all are finite, goes to all ranks in a message of its own (`*:presence0@dp`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from microparallel.collectives import is_compressed
from microparallel.comms import Comms
from microparallel.comms.rounds import Rounds
from microparallel.compression import Compressor, Shape, compressed_sum, parse
from microparallel.data_parallel.bucket import FlatBucket
from microparallel.errors import UsageError
from microparallel.program import AllReduce, ReduceScatter


class CompressedBucket(FlatBucket):
    """Gradients that are summed compressed; in passes of warm-up it is a plain bucket.

    Args:
        parameters: whose gradients it holds, all of one dtype and on one device.
        comms: the ranks.
        number: its place among the buckets of the model.
        compressor: how it is compressed; the bucket has a copy of its own.
        overwrites: see `FlatBucket`.

    Attributes:
        compressor: the bucket's own.
        algorithm: its name in a program.
        residual: what this rank has not sent yet, for each parameter one after another; None without error feedback.
        unsendable: in this pass, the numbers of the parameters whose gradients are not finite, so that this rank
            sends zeros.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        comms: Comms,
        number: int,
        compressor: Compressor,
        *,
        overwrites: bool = False,
    ) -> None:
        super().__init__(parameters, comms, number, overwrites=overwrites)
        self.shapes: list[Shape] = [tuple(parameter.shape) for parameter in parameters]
        self.compressor = compressor.for_bucket(number)
        self.algorithm = self.compressor.algorithm(self.shapes)
        self._sizes = [math.prod(shape) for shape in self.shapes]
        first = parameters[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        self.residual = (
            torch.zeros(sum(self._sizes), dtype=dtype, device=first.device) if self.compressor.feedback else None
        )
        self.unsendable: list[int] = []
        self._compressed = False  # whether the sum of this pass is

    def start(self, comms: Comms, operation: AllReduce | ReduceScatter, overlap: bool) -> None:
        """Sum the gradients as `operation` of the program says: compressed, or as they are."""
        self._compressed = is_compressed(operation.algorithm)
        if not self._compressed:
            super().start(comms, operation, overlap)
            return
        if not self.compressor.sends_not_finite:
            self.unsendable = [index for index, view in enumerate(self.views) if not _is_finite(view)]
            self.not_finite = max(self.not_finite, len(self.unsendable))
        count = sum(self._sizes)
        words = f"{operation.algorithm} of {count} numbers"
        if overlap:
            self.request = comms.exchange_rounds(
                self._rounds(), words, size=4 * count, async_op=True, operation=operation
            )
        else:
            comms.exchange_rounds(self._rounds(), words, size=4 * count, operation=operation)

    def _rounds(self) -> Rounds[torch.Tensor]:
        """Run by the thread that runs the exchange: the sum is in the buffer when it ends."""
        gradients = torch.cat([view.reshape(-1) for view in self.views])
        total = yield from compressed_sum(
            self.compressor, gradients, self.shapes, self.residual, sends_nothing=bool(self.unsendable)
        )
        for view, piece in zip(self.views, torch.split(total, self._sizes), strict=True):
            view.copy_(piece.view(view.shape))
        return self.buffer

    @property
    def shares_presence(self) -> bool:
        """Whether what all ranks must know of this pass goes in a message of its own."""
        return self._compressed

    def presence(self) -> list[float]:
        """What all ranks must know: for each parameter, whether this rank has a gradient; how many are not finite."""
        return [*map(float, self.ready), float(self.not_finite)]

    def take_presence(self, counts: torch.Tensor) -> None:
        """Take the sums of what all ranks said in `presence`."""
        self.ranks_with_gradient.copy_(counts[:-1])
        self._not_finite_on_all.copy_(counts[-1])

    def came_late(self, index: int) -> bool:
        """Whether ranks have sent something for a parameter that no rank used in this pass: what was left of others."""
        return self._compressed and bool(self.views[index].any())

    def invalidate(self) -> None:
        """Some rank has sent zeros: let no rank take the sum for its gradients."""
        for view in self.views:
            view.fill_(math.nan)

    def reset(self) -> None:
        """Make all gradients missing again, before the next pass."""
        super().reset()
        self.unsendable = []

    # ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────

    def residuals(self) -> list[torch.Tensor]:
        """What this rank has not sent, for each parameter: views, none without error feedback."""
        if self.residual is None:
            return []
        pieces = torch.split(self.residual, self._sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def compression_state(buckets: Sequence[FlatBucket], names: Mapping[nn.Parameter, str], passes: int) -> dict[str, Any]:
    """What a rank keeps of compression from pass to pass: for a checkpoint.

    Args:
        buckets: those of the model.
        names: of its parameters.
        passes: how many were averaged, which decides whether the warm-up has ended.
    """
    residuals: dict[str, torch.Tensor] = {}
    methods: dict[str, dict[str, Any]] = {}
    for bucket in buckets:
        if isinstance(bucket, CompressedBucket):
            for parameter, residual in zip(bucket.parameters, bucket.residuals(), strict=False):
                residuals[names[parameter]] = residual.clone()
            methods[names[bucket.parameters[0]]] = bucket.compressor.state_dict()
    return {"passes": passes, "residuals": residuals, "methods": methods}


def load_compression_state(
    buckets: Sequence[FlatBucket],
    names: Mapping[nn.Parameter, str],
    states: Sequence[Mapping[str, Any]],
    methods: Mapping[str, Mapping[str, Any]],
) -> None:
    """Go on with what `compression_state` returned.

    Args:
        buckets: those of the model.
        names: of its parameters.
        states: whose residuals this rank takes: they are added up.
        methods: the state of the methods, which is the same on all ranks.
    """
    places = {
        names[parameter]: residual
        for bucket in buckets
        if isinstance(bucket, CompressedBucket)
        for parameter, residual in zip(bucket.parameters, bucket.residuals(), strict=False)
    }
    for state in states:
        for name, saved in state["residuals"].items():
            if name not in places or places[name].shape != saved.shape:
                raise UsageError(
                    f"the state of compression has a residual for {name!r} of shape {list(saved.shape)}, and here "
                    "there is none; use the same model and the same compress="
                )
    for residual in places.values():
        residual.zero_()
    for state in states:
        for name, saved in state["residuals"].items():
            places[name].add_(saved.to(places[name].device))
    for bucket in buckets:
        kept = methods.get(names[bucket.parameters[0]])
        if isinstance(bucket, CompressedBucket) and kept is not None:
            bucket.compressor.load_state_dict(kept)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are: their sum is not if one is not, and takes half the time to find."""
    return bool(tensor.sum(dtype=torch.float64).isfinite()) or bool(tensor.isfinite().all())


def as_compressor(given: str | Compressor | None, module: nn.Module) -> Compressor | None:
    """Read what a user gave as `compress=`; refuse models whose gradients cannot be compressed."""
    compressor = parse(given) if isinstance(given, str) else given
    if compressor is None:
        return None
    if not isinstance(compressor, Compressor):
        raise UsageError(f"compress={compressor!r}; give an object of mp.compression, such as TopK(0.01), or its name")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise UsageError(
                f"compress={compressor.name}: {name} has {str(parameter.dtype).removeprefix('torch.')} gradients, and "
                "only real numbers are compressed; leave out compress="
            )
    return compressor
