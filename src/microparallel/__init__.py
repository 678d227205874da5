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
from typing import Any

__version__ = "0.1.0"

# public name → the module it lives in
_HOMES = {
    "Comms": "microparallel.comms",
    "all_reduce_in_process": "microparallel.comms.in_process",
    "run_in_process": "microparallel.comms.in_process",
    "Request": "microparallel.comms",
    "record": "microparallel.comms.record",
    "DDPPerformanceAnalyzer": "microparallel.analyze.analyzer",
    "Pool": "microparallel.world",
    "connect": "microparallel.world",
    "launch": "microparallel.world",
    "verify": "microparallel.verifier",
    "simulate": "microparallel.simulator",
    "Costs": "microparallel.simulator",
    "draw": "microparallel.drawing",
    "Link": "microparallel.topology",
    "Trace": "microparallel.trace",
    "ShardedSampler": "microparallel.train.sampler",
    "DataParallel": "microparallel.data_parallel",
    "accumulated_step": "microparallel.data_parallel",
    "ParameterAveraging": "microparallel.data_parallel",
    "naive_data_parallel_step": "microparallel.data_parallel",
    "ddp_step": "microparallel.data_parallel",
    "register_ddp_hooks": "microparallel.data_parallel",
    "GradientHooks": "microparallel.data_parallel",
    "GradientBucket": "microparallel.data_parallel",
    "BucketedDDPHooks": "microparallel.data_parallel",
    "HookTracker": "microparallel.course.hook_tracker",
    "demonstrate_hook_order": "microparallel.course.hooks_demo",
    "demonstrate_overlap": "microparallel.course.hooks_demo",
    "compare_hook_timing": "microparallel.course.hooks_demo",
    "draw_overlap": "microparallel.drawing.overlap",
    "Replicas": "microparallel.data_parallel",
    "Mesh": "microparallel.topology",
    "Pipeline": "microparallel.pipeline",
    "naive_pipeline_step": "microparallel.pipeline",
    "gpipe_pipeline_step": "microparallel.pipeline",
    "onef_oneb_pipeline_step": "microparallel.pipeline",
    **dict.fromkeys(
        [
            "MicroparallelError",
            "UsageError",
            "ConfigError",
            "DataError",
            "PartitionError",
            "ProgramError",
            "LaunchError",
            "RankFailed",
            "RanksTimedOut",
            "CommsError",
            "PeerLost",
            "Interrupted",
            "Mismatch",
            "CommsTimeout",
            "TransportError",
            "TransportTimeout",
            "PeerGone",
            "AddressInUse",
            "CheckpointError",
            "GradientError",
            "StageError",
        ],
        "microparallel.errors",
    ),
}
_MODULES = ("collectives", "models", "program", "schedules")

__all__ = [*sorted(_HOMES), *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name in _MODULES:
        return importlib.import_module(f"microparallel.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'microparallel' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*globals(), *__all__])
