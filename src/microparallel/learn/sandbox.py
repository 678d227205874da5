"""What a learner's code may not call: the functions that do what it is to do itself, and what would harm the machine.

While a `Sandbox` is entered, each of these functions is replaced by one that refuses, in every module that knows it;
and Python's own audit events say when the learner's code starts a process or opens a solution. A refusal is remembered,
so that catching it does not help. A learner who wants to cheat at any price still can: this keeps people from passing,
and from harming their machine, by accident.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import pkgutil
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from microparallel.learn.catalogue import exercises_folder
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
    "send_tensor", "recv_tensor", "send", "recv", "isend", "irecv", "barrier", "broadcast", "scatter", "gather",
    "all_gather", "reduce", "reduce_scatter", "all_reduce", "all_reduce_mean", "all_to_all",
)
# fmt: on
_OURS = [
    "microparallel.world.launch.launch",
    "microparallel.world.launch.Pool.__init__",
    "microparallel.train.checkpointer.Checkpointer.__init__",
    "microparallel.train.sampler.ShardedSampler.__init__",
    "microparallel.comms.wire.write_headers",
    "microparallel.comms.wire.read_headers",
    "microparallel.comms.in_process.all_reduce_in_process",
    "microparallel.comms.in_process.run_in_process",
    "microparallel.course.replicas.Replicas.__init__",
    "microparallel.course.replicas.device_copy",
    "microparallel.course.replicas.share_out",
    "microparallel.course.replicas.local_pass",
    "microparallel.course.replicas.average_through_cpu",
    "microparallel.course.naive.naive_data_parallel_step",
    "microparallel.course.ddp.ddp_step",
    "microparallel.course.naive.sum_gradients",
    "microparallel.data_parallel.replicate.replicate",
    "microparallel.course.shortcuts.accumulated_step",
    "microparallel.course.shortcuts.accumulate",
    "microparallel.course.shortcuts.ParameterAveraging.__init__",
    "microparallel.course.hooks.OneGradient.__init__",
    "microparallel.course.hooks.GradientHooks.__init__",
    "microparallel.data_parallel.bucket.FlatBucket.__init__",
    "microparallel.data_parallel.bucket.split",
    "microparallel.data_parallel.reducer.Reducer.__init__",
    "microparallel.course.buckets.in_buckets",
    "microparallel.course.buckets.GradientBucket.__init__",
    "microparallel.course.buckets.BucketedDDPHooks.__init__",
    "microparallel.data_parallel.wrapper.DataParallel.__init__",
    "microparallel.data_parallel.fully_sharded.FullyShardedDataParallel.__init__",
    "microparallel.data_parallel.units.ShardedParameters.__init__",
    "microparallel.data_parallel.sharded_optimizer.ShardedOptimizer.__init__",
    "microparallel.data_parallel.precision.LossScale.__init__",
    "microparallel.compression.methods.TopK.__init__",
    "microparallel.compression.low_rank.PowerSGD.__init__",
    "microparallel.files.atomic.write_durably",
    "microparallel.files.atomic.write_atomically",
    "microparallel.files.atomic.written_aside",
    "microparallel.train.checkpoint.save",
    "microparallel.pipeline.pipeline.Pipeline.__init__",
    "microparallel.pipeline.pipeline.Pipeline.of_stage",
    "microparallel.pipeline.microbatches.sizes",
    "microparallel.observe.diagnosis.diagnose",
    "microparallel.observe.diagnosis.find_waits",
    "microparallel.observe.diagnosis.missing_in",
    "microparallel.observe.diagnosis.find_call_differences",
    "microparallel.trace.intervals.union",
    "microparallel.trace.intervals.outside",
    "microparallel.trace.intervals.length",
    "microparallel.models.mlp.ShardedMLP.__init__",
    "microparallel.models.mlp.shard_bounds",
    "torch.nn.parallel.DistributedDataParallel.__init__",
    "torch.nn.parallel.DataParallel.__init__",
    "torch.amp.GradScaler.__init__",
    "importlib.reload",  # another copy of a function would not refuse
]
_BUILDERS = ("microparallel.collectives", "microparallel.schedules")  # everything in these packages
# What reads a program is for everybody, and may call a builder's passes itself.
_READERS = ("microparallel.simulator.engine.simulate", "microparallel.verifier.verify")

_PROCESSES = "it may not start or end processes; the ranks are started for you"
_EVENTS = {  # Python's names for what a program does (sys.addaudithook)
    "os.fork": _PROCESSES,
    "os.forkpty": _PROCESSES,
    "os.posix_spawn": _PROCESSES,
    "os.system": _PROCESSES,
    "os.exec": _PROCESSES,
    "os.kill": _PROCESSES,
    "os.killpg": _PROCESSES,
    "subprocess.Popen": _PROCESSES,
}

_inside = threading.local()  # how many `trusted` blocks a thread is in


@contextlib.contextmanager
def trusted() -> Iterator[None]:
    """Within this block, calls of this thread come from the grader, not from the learner, and nothing is refused."""
    before = getattr(_inside, "depth", 0)
    _inside.depth = before + 1
    try:
        yield
    finally:
        _inside.depth = before


def _is_trusted() -> bool:
    return bool(getattr(_inside, "depth", 0))


def forbidden() -> list[str]:
    """Every function that refuses, by its full name."""
    return [
        *_OURS,
        *(f"torch.distributed.{name}" for name in _TORCH),
        *(f"microparallel.comms.comms.Comms.{name}" for name in _COMMS),
        *(name for package in _BUILDERS for name in _functions_of(package)),
    ]


def _functions_of(package: str) -> list[str]:
    """The functions that are written in the modules of a package."""
    home = importlib.import_module(package)
    names = [found.name for found in pkgutil.iter_modules(home.__path__, f"{package}.")]
    modules = [home, *map(importlib.import_module, names)]
    return [
        f"{module.__name__}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]


def load() -> None:
    """Import all that refuses, and see which modules know it: what ranks are forked from does this once for all."""
    for name in list(sys.modules):
        _known_in(name)


def _known_in(module_name: str) -> list[str]:
    """By which names a module knows functions that refuse; torch's many modules are looked through once."""
    if module_name.startswith("torch"):
        return _found_in_torch(module_name)
    return _found_in(module_name) if module_name.startswith(("microparallel", "importlib")) else []


def _found_in(module_name: str) -> list[str]:
    originals, module = _originals(), sys.modules.get(module_name)
    return [name for name, value in list(getattr(module, "__dict__", {}).items()) if id(value) in originals]


_found_in_torch = functools.cache(_found_in)


@functools.cache
def _originals() -> frozenset[int]:
    """The identities of the functions that a sandbox replaces; they are asked for before one is entered."""
    found = [_find(dotted) for dotted in (*forbidden(), *_READERS)]
    return frozenset(id(getattr(owner, name)) for owner, name in found)


class Sandbox:
    """Refuses what a learner's code may not call, while it is entered; `refused` has what was called all the same."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._active = False
        self._undo = contextlib.ExitStack()
        self._solutions = str(exercises_folder() / "solutions")

    def __enter__(self) -> Sandbox:
        functions: dict[int, Any] = {}  # by the identity of what they stand for
        for dotted in forbidden():
            owner, name = _find(dotted)
            short = dotted.removesuffix(".__init__").replace("microparallel.comms.comms.", "")
            refusing = self._wrap(getattr(owner, name), short)
            if isinstance(owner, type):
                self._replace(owner, name, refusing)
            else:
                functions[id(getattr(owner, name))] = refusing
        for dotted in _READERS:
            owner, name = _find(dotted)
            original = getattr(owner, name)
            functions[id(original)] = _trusting(original)
        self._replace_everywhere(functions)
        self._replace(os, "_exit", self._wrap(os._exit, "os._exit", _PROCESSES))
        self._undo.enter_context(_limited_memory())
        self._active = True
        sys.addaudithook(self._on_event)  # for the rest of this process's life, which ends with the check
        return self

    def __exit__(self, *error: object) -> None:
        self._active = False
        self._undo.close()

    def _replace_everywhere(self, functions: dict[int, Any]) -> None:
        """Replace functions in every module that has imported one of them, under whatever name."""
        for module_name, module in list(sys.modules.items()):
            for name in _known_in(module_name):
                if (value := getattr(module, name, None)) is not None and id(value) in functions:
                    self._replace(module, name, functions[id(value)])

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        for one in getattr(owner, "__mro__", (owner,)):  # a method is replaced in the class that has it
            if name in vars(one):
                self._undo.callback(setattr, one, name, vars(one)[name])
                setattr(one, name, value)
                return

    def _wrap(self, original: Callable[..., Any], name: str, why: str = "the point is to write it yourself") -> Any:
        @functools.wraps(original)
        def refuse(*arguments: Any, **named: Any) -> Any:
            if _is_trusted() or not self._active:
                return original(*arguments, **named)
            raise self._refusal(f"your code calls {name}: {why}")

        return refuse

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called by Python before it opens a file, starts a process and the like; an error raised here stops that."""
        if not self._active or (event not in _EVENTS and event != "open") or _is_trusted():
            return
        if event != "open":
            raise self._refusal(f"your code calls {event}: {_EVENTS[event]}")
        if isinstance(arguments[0], str) and os.path.abspath(arguments[0]).startswith(self._solutions):  # noqa: PTH100
            raise self._refusal("your code opens a solution: write your own; `learn solution` shows it afterwards")

    def _refusal(self, words: str) -> NotAllowed:
        self.refused.append(words)
        return NotAllowed(words)


def _trusting(original: Callable[..., Any]) -> Any:
    """The same function, within which nothing is refused."""

    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        with trusted():
            return original(*arguments, **named)

    return call


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
    """Limit the memory of this process: a list that never stops growing ends with an error, not with the machine."""
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
