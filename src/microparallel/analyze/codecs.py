"""How long does this machine take to encode and decode gradients? Measured once, on as many numbers as a step has.

Each method does what it does in a step, with error feedback, and with as many ranks' payloads to decode; but nothing is
sent.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import torch

from microparallel.analyze.compressed import Codec, gradient_sums
from microparallel.bench.engine import seconds_of
from microparallel.bench.settings import COMPRESSED
from microparallel.collectives import Round
from microparallel.compression import Compressor, Shape, compressed_sum, parse
from microparallel.simulator.fitted import fit_step
from microparallel.topology import threads_per_rank
from microparallel.trace import Trace

_MOST = 2**22  # numbers: of more, these are measured
_REPEATS = 3


def measure_codecs(shapes: Sequence[Shape], ranks: int, device: torch.device) -> tuple[Codec, ...]:
    """Measure all methods; where ranks share cores, all of them do it at once, as they do in training.

    Args:
        shapes: of the gradients. Where they are not known, one flat tensor stands for all; then there are no matrices,
            and PowerSGD is left out.
        ranks: whose payloads are decoded.
        device: where gradients are.
    """
    matrices = any(len(shape) > 1 for shape in shapes)
    methods = [method for method in COMPRESSED if matrices or not method.startswith("powersgd")]
    found = (_measure(method, shapes, ranks, device) for method in methods)
    return tuple(codec for codec in found if codec is not None)


def codecs_for(trace: Trace) -> tuple[Codec, ...]:
    """Measure all methods for the gradients of a recorded step, of which only the size is known.

    One process does it, with as many threads as a rank of such a world would have here.
    """
    size = sum(gradient_sums(fit_step(trace)).values())
    if not size:
        return ()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(trace.ranks))
    try:
        return measure_codecs([(int(size) // 4,)], trace.ranks, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def _measure(method: str, shapes: Sequence[Shape], ranks: int, device: torch.device) -> Codec | None:
    """Measure one method; None where all tensors are so small that it leaves them alone."""
    compressor = parse(method)
    large = [shape for shape in shapes if math.prod(shape) >= compressor.smallest]
    if not large:
        return None
    together = itertools.accumulate(map(math.prod, large))
    measured = [shape for shape, numbers in zip(large, together, strict=True) if numbers <= _MOST] or [_part(large[0])]
    gradients = torch.randn(sum(map(math.prod, measured)), device=device)
    residual = torch.zeros_like(gradients) if compressor.feedback else None
    rounds: list[Round] = []

    def once() -> None:
        rounds[:] = _encode_and_decode(compressor, gradients, measured, residual, ranks)

    seconds = [seconds_of(once, device) for _ in range(_REPEATS + 1)][1:]  # the first one takes memory
    every = sum(map(math.prod, shapes))
    left_alone = (every - sum(map(math.prod, large))) / every
    return Codec(
        method, compressor.name, tuple(rounds), gradients.nbytes, statistics.median(seconds), left_alone=left_alone
    )


def _part(shape: Shape) -> Shape:
    """As much of a large tensor as is measured: its first rows."""
    row = math.prod(shape[1:])
    return (max(1, _MOST // row), *shape[1:]) if row < _MOST else (_MOST,)


def _encode_and_decode(
    compressor: Compressor,
    gradients: torch.Tensor,
    shapes: Sequence[Shape],
    residual: torch.Tensor | None,
    ranks: int,
) -> list[Round]:
    """What one rank does in a compressed sum; all ranks have sent the same. Returns what it would have sent."""
    running = compressed_sum(compressor, gradients, shapes, residual)
    sent: list[Round] = []
    answer: torch.Tensor | list[torch.Tensor] | None = None
    while True:
        try:
            kind, tensor = next(running) if answer is None else running.send(answer)
        except StopIteration:
            return sent
        sent.append(Round(kind, tensor.nbytes))
        answer = tensor if kind == "sum" else [tensor] * ranks
