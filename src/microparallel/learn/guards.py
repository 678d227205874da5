"""What a learner's code may not call: the functions that do what it is to do itself, and what would harm the machine.

While an exam is on, each of them is replaced by one that refuses, in every module that knows it. A refusal is
remembered, so that catching it does not help.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from microparallel.learn.verdict import NotAllowed

_MOST_MEMORY = 2 << 30  # bytes that a rank may ask for beyond what it has

# fmt: off
_TORCH = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv",
    "barrier", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "init_process_group",
)
_COMMS = (
    "send_tensor", "recv_tensor", "isend", "irecv", "barrier", "broadcast", "scatter", "gather", "all_gather", "reduce",
    "reduce_scatter", "all_reduce", "all_reduce_mean",
)
# fmt: on
_OURS = [
    "microparallel.world.launch.launch",
    "microparallel.world.pool.Pool.__init__",
    "microparallel.comms.headers.write_headers",
    "microparallel.comms.headers.read_headers",
    "microparallel.comms.in_process.all_reduce_in_process",
    "microparallel.comms.in_process.run_in_process",
    "microparallel.data_parallel.replicas.Replicas.__init__",
    "microparallel.data_parallel.naive.naive_data_parallel_step",
    "microparallel.data_parallel.ddp.ddp_step",
    "microparallel.data_parallel.naive.sum_gradients",
    "microparallel.data_parallel.replicate.replicate",
    "microparallel.data_parallel.shortcuts.accumulated_step",
    "microparallel.data_parallel.hooks.OneGradient.__init__",
    "microparallel.data_parallel.hooks.GradientHooks.__init__",
    "microparallel.data_parallel.flat_bucket.FlatBucket.__init__",
    "microparallel.data_parallel.reducer.Reducer.__init__",
    "microparallel.data_parallel.buckets.in_buckets",
    "microparallel.data_parallel.buckets.GradientBucket.__init__",
    "microparallel.data_parallel.buckets.BucketedDDPHooks.__init__",
    "microparallel.data_parallel.wrapper.DataParallel.__init__",
    "microparallel.pipeline.pipeline.Pipeline.__init__",
    "microparallel.pipeline.pipeline.Pipeline.of_stage",
    "microparallel.schedules.build",
    "microparallel.collectives.build",
    "microparallel.schedules.interleaved.interleaved",
    "microparallel.schedules.interleaved._order",  # also known by name, in schedules.PIPELINES
    "microparallel.schedules.one_f_one_b._order",
    "microparallel.schedules.gpipe._order",
    "microparallel.schedules.zero_bubble._order",
    "microparallel.schedules.one_f_one_b.one_f_one_b",
    "microparallel.schedules.gpipe.gpipe",
    "microparallel.schedules.zero_bubble.zb_h1",
    "microparallel.schedules.zero_bubble.zb_h2",
    "microparallel.schedules.zero_bubble.zbv",
    "microparallel.models.mlp.ShardedMLP.__init__",
    "microparallel.models.mlp.shard_bounds",
    "torch.nn.parallel.DistributedDataParallel.__init__",
    "torch.nn.parallel.DataParallel.__init__",
]
FORBIDDEN = [
    *_OURS,
    *(f"torch.distributed.{name}" for name in _TORCH),
    *(f"microparallel.comms.comms.Comms.{name}" for name in _COMMS),
]

_inside = threading.local()


@contextlib.contextmanager
def trusted() -> Iterator[None]:
    """Within this block the call comes from the grader, not from the learner."""
    before = getattr(_inside, "depth", 0)
    _inside.depth = before + 1
    try:
        yield
    finally:
        _inside.depth = before


class Guards:
    """Everything that refuses while it is entered; `refused` has what was called all the same."""

    def __init__(self, also: tuple[str, ...] = ()) -> None:
        self._names = [*FORBIDDEN, *also]
        self.refused: list[str] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Guards:
        functions: dict[int, Any] = {}  # by the identity of what they stand for
        for dotted in self._names:
            owner, name = _find(dotted)
            short = dotted.removesuffix(".__init__").replace("microparallel.comms.comms.", "")
            refusing = self._wrap(getattr(owner, name), short, "the point is to write it yourself")
            if isinstance(owner, type):
                self._replace(owner, name, refusing)
            else:
                functions[id(getattr(owner, name))] = refusing
        self._replace_everywhere(functions)
        for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "_exit"):
            self._replace(os, name, self._wrap(getattr(os, name), f"os.{name}", _NO_PROCESSES))
        self._replace(subprocess.Popen, "__init__", self._wrap(subprocess.Popen.__init__, "subprocess", _NO_PROCESSES))
        self._undo.enter_context(_limited_memory())
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _replace_everywhere(self, functions: dict[int, Any]) -> None:
        """In every module that has imported one of them, under whatever name."""
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(("torch", "microparallel")):
                for name, value in list(getattr(module, "__dict__", {}).items()):
                    if id(value) in functions:
                        self._replace(module, name, functions[id(value)])

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.callback(setattr, owner, name, owner.__dict__[name])
        setattr(owner, name, value)

    def _wrap(self, original: Callable[..., Any], name: str, why: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def refuse(*arguments: Any, **named: Any) -> Any:
            if getattr(_inside, "depth", 0):
                return original(*arguments, **named)
            self.refused.append(f"your code calls {name}: {why}")
            raise NotAllowed(self.refused[-1])

        return refuse


_NO_PROCESSES = "it may not start or end processes; the ranks are started for you"


def _find(dotted: str) -> tuple[Any, str]:
    """The module or class, and the name in it."""
    *path, name = dotted.split(".")
    for cut in range(len(path), 0, -1):
        with contextlib.suppress(ImportError):
            owner: Any = importlib.import_module(".".join(path[:cut]))
            for part in path[cut:]:
                owner = getattr(owner, part)
            return owner, name
    raise LookupError(dotted)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """A list that never stops growing ends with an error, not with the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(next((line.split()[1] for line in _status() if line.startswith("VmData")), 0)) * 1024
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (used + _MOST_MEMORY, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _status() -> list[str]:
    try:
        return Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return []
