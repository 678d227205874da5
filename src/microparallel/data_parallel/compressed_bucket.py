"""A bucket whose gradients are compressed before they are sent (`mp.compression`).

```
gradients ─► residual ─► encode ─► *U0@dp:topk-0.01 ─► decode ─► gradients: the sum of what all ranks have sent
                ▲           │
                └───────────┘ what was not sent waits for the next pass
```

Which gradients a rank has, and whether all are finite, goes to all ranks in a message of its own (`*:presence0@dp`). A
pipeline's stage has all its gradients in one bucket: there small ones go as they are, in a last round, with the counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from microparallel.collectives import is_compressed
from microparallel.comms import Comms
from microparallel.comms.rounds import Rounds
from microparallel.compression import Compressor, Shape, compressed_sum, parse
from microparallel.data_parallel.bucket import FlatBucket, numbers_of
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
        whole: it has all gradients that are summed together, also small ones, which are not compressed; and the counts
            go with these.

    Attributes:
        shapes: of the gradients that are compressed.
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
        whole: bool = False,
    ) -> None:
        super().__init__(parameters, comms, number, overwrites=overwrites)
        chosen = [index for index, one in enumerate(parameters) if not whole or is_large(one, compressor)]
        self._chosen = chosen
        self._rest = [index for index in range(len(parameters)) if index not in chosen]
        self._whole = whole
        self.shapes: list[Shape] = [tuple(parameters[index].shape) for index in chosen]
        self.compressor = compressor.for_bucket(number)
        self.algorithm = stage_algorithm(parameters, compressor) if whole else compressor.algorithm(self.shapes)
        self._sizes = [math.prod(shape) for shape in self.shapes]
        self.residual: torch.Tensor | None = None
        if self.compressor.feedback:
            first = parameters[0]
            self.residual = torch.zeros(sum(self._sizes), dtype=_wide(first.dtype), device=first.device)
        self.unsendable: list[int] = []
        self._compressed = False  # whether the sum of this pass is
        self._called = self._ended = Point()  # of the sum, in the streams of the threads that call it and run it

    def start(self, comms: Comms, operation: AllReduce | ReduceScatter, overlap: bool) -> None:
        """Sum the gradients as `operation` of the program says: compressed, or as they are."""
        self._compressed = is_compressed(operation.algorithm)
        if not self._compressed:
            super().start(comms, operation, overlap)
            return
        self._move_together()
        if not self.compressor.sends_not_finite:
            self.unsendable = self._not_finite()
            self.not_finite = max(self.not_finite, len(self.unsendable))
        self._called = Point.now(self.buffer.device)
        count = sum(self._sizes) + sum(self.views[index].numel() for index in self._rest)
        words = f"{operation.algorithm} of {count} numbers"
        if overlap:
            self.request = comms.exchange_rounds(
                self._rounds(), words, size=4 * count, async_op=True, operation=operation
            )
        else:
            comms.exchange_rounds(self._rounds(), words, size=4 * count, operation=operation)

    def _not_finite(self) -> list[int]:
        """The chosen parameters whose gradients are not finite: nor are their sums, which are found sooner."""
        sums = [self.views[index].sum(dtype=torch.float64) for index in self._chosen]
        totals = zip(self._chosen, numbers_of(sums), strict=True)
        doubtful = [index for index, total in totals if not math.isfinite(total)]
        return [index for index in doubtful if not bool(self.views[index].isfinite().all())]

    def _rounds(self) -> Rounds[torch.Tensor]:
        """Run by the thread that runs the exchange: the sum is in the buffer when it ends."""
        self._called.join()
        views = [self.views[index] for index in self._chosen]
        gradients = torch.cat([view.reshape(-1) for view in views])
        total = yield from compressed_sum(
            self.compressor, gradients, self.shapes, self.residual, sends_nothing=bool(self.unsendable)
        )
        for view, piece in zip(views, torch.split(total, self._sizes), strict=True):
            view.copy_(piece.view(view.shape))
        if self._whole:
            yield from self._rest_as_it_is()
        self._ended = Point.now(self.buffer.device)
        return self.buffer

    def wait(self) -> None:
        """Return when the sum is in the buffer, or will be before what this thread starts on a GPU from now on."""
        super().wait()
        self._ended.join()

    def _rest_as_it_is(self) -> Rounds[None]:
        """Sum small gradients, and the counts."""
        views = [self.views[index] for index in self._rest]
        counts = torch.tensor(self.presence(), device=self.buffer.device)
        small = torch.cat([*(view.reshape(-1) for view in views), counts]).to(_wide(self.buffer.dtype))
        total = yield "sum", small
        assert isinstance(total, torch.Tensor)
        *pieces, sums = torch.split(total, [*(view.numel() for view in views), len(counts)])
        for view, piece in zip(views, pieces, strict=True):
            view.copy_(piece.view(view.shape))
        self.take_presence(sums)

    @property
    def shares_presence(self) -> bool:
        """Whether what all ranks must know of this pass goes in a message of its own."""
        return self._compressed and not self._whole

    def presence(self) -> list[float]:
        """What all ranks must know: for each parameter, whether this rank has a gradient; how many are not finite."""
        return [*map(float, self.ready), float(max(self.not_finite, len(self.found_not_finite())))]

    def take_presence(self, counts: torch.Tensor) -> None:
        """Take the sums of what all ranks said in `presence`."""
        self.ranks_with_gradient.copy_(counts[:-1])
        self._not_finite_on_all.copy_(counts[-1])

    def came_late(self, index: int) -> bool:
        """Whether ranks have sent something for a parameter that no rank used in this pass: what was left of others."""
        return self._compressed and index in self._chosen and bool(self.views[index].any())

    def invalidate(self) -> None:
        """Some rank has sent zeros: let no rank take the sum for its gradients."""
        for index in self._chosen:
            self.views[index].fill_(math.nan)

    def reset(self) -> None:
        """Make all gradients missing again, before the next pass."""
        super().reset()
        self.unsendable = []

    # ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────

    def residuals(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """What this rank has not sent, for each parameter: views, none without error feedback."""
        if self.residual is None:
            return []
        pieces = torch.split(self.residual, self._sizes)
        found = zip(self._chosen, pieces, self.shapes, strict=True)
        return [(self.parameters[index], piece.view(shape)) for index, piece, shape in found]


def is_large(parameter: nn.Parameter, compressor: Compressor) -> bool:
    """Whether a parameter's gradient is compressed; small ones are left alone."""
    return parameter.numel() >= max(1, compressor.smallest)


def stage_algorithm(parameters: Sequence[nn.Parameter], compressor: Compressor) -> str:
    """The name of the sum of a stage's gradients, with all its bytes: what is compressed, and then the rest."""
    large = [tuple(one.shape) for one in parameters if is_large(one, compressor)]
    small = [one for one in parameters if not is_large(one, compressor)]
    numbers = sum(one.numel() for one in small) + len(parameters) + 1
    rest = numbers * _wide(parameters[0].dtype).itemsize
    sent = zip(compressor.rounds, compressor.payload(large), strict=True)
    return f"{compressor.name}{''.join(f'-{kind}-{size}' for kind, size in sent)}-sum-{rest}"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Point:
    """How far the calling thread's stream was on a GPU; on a CPU, where a thread does one thing after another, nothing.

    The thread that runs an exchange computes, too: on a stream of its own, or on the device's default stream.
    """

    def __init__(self, event: torch.cuda.Event | None = None, device: torch.device | None = None) -> None:
        self._event = event
        self._device = device

    @classmethod
    def now(cls, device: torch.device) -> Point:
        """How far the stream is now."""
        return cls(torch.cuda.current_stream(device).record_event(), device) if device.type == "cuda" else cls()

    def join(self) -> None:
        """Let the calling thread's stream wait until that one has come so far."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class ResidualsOfStep:
    """What a rank had not sent when a step began. If that step is not taken, nobody has used what was sent in it.

    Only a rank that may skip steps (float16) keeps this: as many numbers again as its residuals.
    """

    def __init__(self) -> None:
        self._at_first: dict[nn.Parameter, torch.Tensor] = {}

    def keep(self, buckets: Sequence[FlatBucket]) -> None:
        """A step begins."""
        self._at_first = {parameter: residual.clone() for parameter, residual in _residuals(buckets)}

    def give_back(self, buckets: Sequence[FlatBucket]) -> None:
        """The step is not taken: let the residuals be what they were. The buckets may be others than at its begin."""
        for parameter, residual in _residuals(buckets):
            if parameter in self._at_first:
                residual.copy_(self._at_first[parameter])


def _residuals(buckets: Sequence[FlatBucket]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    return (one for bucket in buckets if isinstance(bucket, CompressedBucket) for one in bucket.residuals())


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
            residuals |= {names[parameter]: residual.clone() for parameter, residual in bucket.residuals()}
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
    places = {names[parameter]: residual for parameter, residual in _residuals(buckets)}
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
