"""Programs for one training step: pipeline schedules, and data parallelism with buckets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from microparallel.errors import UsageError
from microparallel.program import Program
from microparallel.schedules.data_parallel import data_parallel_step, ddp, ddp_naive
from microparallel.schedules.dualpipe import dualpipev
from microparallel.schedules.fully_sharded import fully_sharded_step
from microparallel.schedules.gpipe import gpipe
from microparallel.schedules.interleaved import interleaved
from microparallel.schedules.naive import naive
from microparallel.schedules.one_f_one_b import one_f_one_b
from microparallel.schedules.passes import complete, forwards_only, free_dead_values, insert_sends, lower
from microparallel.schedules.replicas import replicate, with_sums
from microparallel.schedules.zero import LEVELS, zero
from microparallel.schedules.zero_bubble import zb_h1, zb_h2, zbv
from microparallel.text import did_you_mean

PIPELINES: dict[str, Callable[..., Program]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
ZERO: dict[str, Callable[..., Program]] = {f"zero-{level}": functools.partial(zero, level) for level in LEVELS}
DATA_PARALLEL: dict[str, Callable[..., Program]] = {"ddp": ddp, "ddp-naive": ddp_naive, **ZERO}


def build(name: str, ranks: int, microbatches: int | None = None, **options: Any) -> Program:
    """Build a training step by name: a pipeline schedule, with its sends, receives and frees, or a step of replicas.

    Args:
        name: `naive`, `gpipe`, `1f1b`, `interleaved` (`stages_per_rank=2`), `zb-h1`, `zb-h2`, `zbv` or `dualpipev`;
            or `ddp` (`layers=8, buckets=4`) and `ddp-naive` (`layers=8`), with the `algorithm` of their all-reduces;
            or `zero-1` and `zero-2` (`layers=8, buckets=4, gather="after"`), and `zero-3` (`layers=8, buckets=4,
            prefetch=1, reshard_after_forward=True, replicas=1`).
        ranks: how many ranks share the work, any number from 1.
        microbatches: into how many micro-batches a pipeline's batch is cut, any number from 1; of ZeRO, how many each
            rank has.
        options: what only some schedules take, as above.

    Example:
        ```python
        program = mp.schedules.build("1f1b", ranks=4, microbatches=8)
        print(mp.draw(program))
        ```
    """
    builders = PIPELINES | DATA_PARALLEL
    if name not in builders:
        raise UsageError(f"there is no schedule {name!r}; {did_you_mean(name, builders)}")
    _require_options(name, builders[name], options)
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: a training step needs at least 1 rank")
    if name in DATA_PARALLEL:
        return _build_data_parallel(name, ranks, microbatches, options)
    if microbatches is None or microbatches < 1:
        given = "no microbatches" if microbatches is None else f"microbatches={microbatches}"
        raise UsageError(f"{given}: schedule {name!r} needs at least 1 micro-batch")
    return lower(builders[name](ranks, microbatches, **options))


def _build_data_parallel(name: str, ranks: int, microbatches: int | None, options: dict[str, Any]) -> Program:
    if microbatches is not None and name not in ZERO:
        raise UsageError(f"microbatches={microbatches}: {name!r} has none; every rank has its share of the batch")
    if microbatches is not None:
        options["microbatches"] = microbatches
    options.setdefault("layers", 8)
    if options["layers"] < 1:
        raise UsageError(f"layers={options['layers']}: a model has at least 1 layer")
    if name != "ddp-naive":
        options.setdefault("buckets", min(4, options["layers"]))
    return free_dead_values(DATA_PARALLEL[name](ranks=ranks, **options))


def _require_options(name: str, builder: Callable[..., Program], options: dict[str, Any]) -> None:
    known = [option for option in inspect.signature(builder).parameters if option not in ("ranks", "microbatches")]
    for option in options:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no options"
            raise UsageError(f"schedule {name!r} does not take {option}; {takes}")


__all__ = [
    "DATA_PARALLEL",
    "PIPELINES",
    "build",
    "complete",
    "data_parallel_step",
    "ddp",
    "ddp_naive",
    "dualpipev",
    "forwards_only",
    "free_dead_values",
    "fully_sharded_step",
    "gpipe",
    "insert_sends",
    "interleaved",
    "lower",
    "naive",
    "one_f_one_b",
    "replicate",
    "with_sums",
    "zb_h1",
    "zb_h2",
    "zbv",
    "zero",
]
