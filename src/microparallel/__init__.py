"""Distributed training you can read, run, trust and see.

    import torch
    import microparallel as mp

    def hello(comms):
        return comms.all_gather(torch.tensor(comms.rank))

    print(mp.launch(hello, ranks=4))

Names load when they are first used, so that `import microparallel` is quick and does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__version__ = "0.1.0"

# public name → the module it lives in
_HOMES = {
    "Checkpointer": "microparallel.train.checkpointer",
    "Comms": "microparallel.comms",
    "Costs": "microparallel.simulator",
    "DataParallel": "microparallel.data_parallel",
    "FullyShardedDataParallel": "microparallel.data_parallel",
    "Link": "microparallel.topology",
    "MixedPrecision": "microparallel.data_parallel",
    "Pipeline": "microparallel.pipeline",
    "Pool": "microparallel.world",
    "ShardedOptimizer": "microparallel.data_parallel",
    "ShardedSampler": "microparallel.train.sampler",
    "SyncBatchNorm": "microparallel.data_parallel",
    "Trace": "microparallel.trace",
    "all_reduce_in_process": "microparallel.comms.in_process",
    "connect": "microparallel.world",
    "deferred_init": "microparallel.data_parallel",
    "draw": "microparallel.drawing",
    "launch": "microparallel.world",
    "pipeline_layers": "microparallel.pipeline",
    "record": "microparallel.comms.record",
    "simulate": "microparallel.simulator",
    "verify": "microparallel.verifier",
}
_MODULES = ("analyze", "collectives", "compression", "course", "errors", "models", "program", "schedules")

__all__ = [*sorted(_HOMES), *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name in _MODULES:
        return importlib.import_module(f"microparallel.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'microparallel' has no attribute {name!r}{_where_it_is_now(name)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def _where_it_is_now(name: str) -> str:
    """Names that were here in version 0.1 are in one of the modules now."""
    if name.startswith("_") or importlib.util.find_spec(f"microparallel.{name}") is not None:
        return ""  # Python itself asks for such names, and for modules it then imports; import nothing for them
    for module in ("errors", "comms", "course", "analyze", "topology"):
        if name in importlib.import_module(f"microparallel.{module}").__all__:
            return f"; it is microparallel.{module}.{name} now"
    return ""


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*globals(), *__all__])
