"""The options that torch passes with a call, in one form."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Options:
    """What torch's options objects say, and its shorter forms such as `group.broadcast(tensor, 0)`."""

    op: Any
    root: int
    timeout: float | None
    waits: bool

    @staticmethod
    def of(opts: Any = None, *, op: Any = dist.ReduceOp.SUM, root: int = 0, timeout: Any = None) -> Options:
        """Read them."""
        if isinstance(opts, int):
            return Options(op, opts, seconds(timeout), False)
        if isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return Options(opts, root, seconds(timeout), False)
        if opts is None or isinstance(opts, timedelta):
            return Options(op, root, seconds(timeout or opts), False)
        return Options(
            getattr(opts, "reduceOp", op),
            getattr(opts, "rootRank", root),
            seconds(opts.timeout),
            not getattr(opts, "asyncOp", True),
        )


def seconds(timeout: timedelta | None) -> float | None:
    """A timeout as torch passes it; None where it passes none (zero, or a negative one)."""
    return None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
