"""torch's private names, each with what breaks without it: no other file uses one.

A name of torch's is private if it begins with an underscore, or if such a name is on the way to it: `torch._C.…`,
`torch.utils._pytree`, `tensor._version`. torch may rename it in any release without notice. So each has a function
here, under a name that says what it is for, and `tests/test_torch_private.py` tests that function: if a new torch fails
there, this file is the only one to change. Methods that torch calls by a private name are here, too: the classes at the
end lead such calls to methods of ours with names of their own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed import distributed_c10d
from torch.nn.modules import module as torch_modules
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Without it: a model could take and return single tensors only, not tuples or dictionaries of tensors. Pipelines could
# not cut such batches nor send them from stage to stage, and DataParallel would not find what needs a gradient.
pytree = _pytree

Engine = Callable[..., Any]
_autograd: Any = torch.autograd
_naming = threading.Lock()


# ── autograd ────────────────────────────────────────────────────────────────────────────────────────────────────────


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Let the backward that is running call this when all gradients are there, before it returns.

    Without it: DataParallel would not know when the last bucket is complete if parameters are unused, and would need a
    call of its own after `loss.backward()`; and traces would not show what torch's DDP waits for in backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(not_compiled(callback))


def number_of_backward() -> int | None:
    """The number of the backward in which the calling thread is; None outside of one.

    Without it: `mp.record` could not tell a call that backward began, and waits for, from the program's own; and where
    ranks use all cores, a thread of ours would interrupt a backward that could have finished first.
    """
    number = torch._C._current_graph_task_id()
    return None if number == -1 else int(number)


def backward_engine() -> Engine:
    """The function through which all of `torch.autograd` starts a backward.

    Without it, and `replace_backward_engine`: traces would miss the backward of what has no module, and recording that
    of modules would cost several times as much (hooks on everything a module returns, and a callback at the end). And
    no grader could see which tensors a learner's backward makes: torch hides what `backward` calls from a mode.
    """
    engine: Engine = _autograd._engine_run_backward
    return engine


def replace_backward_engine(engine: Engine) -> None:
    """Let `torch.autograd` start every backward through this function."""
    _autograd._engine_run_backward = engine


def backward_adds_to(leaf: torch.Tensor) -> bool:
    """Inside of a backward: whether it will add to `grad` of a leaf; `torch.autograd.grad` adds to none.

    Without it: `FullyShardedDataParallel` would sum the gradients of units that `torch.autograd.grad` goes through.
    """
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # torch does not answer for a leaf that `torch.autograd.grad` was asked for
        return False


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place.

    Without it: a pipeline would not notice that a stage changes its input, which others may have saved for backward.
    """
    return tensor._version


def references_to(tensor: torch.Tensor) -> int:
    """How many hold a tensor in C++: one for all of Python, one for each parameter whose `grad` it is, and so on.

    Without it: a gradient that only torch's C++ holds would be overwritten by the next pass of `DataParallel`.
    """
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def tensors_in_memory_of(tensor: torch.Tensor) -> int:
    """How many tensors share a tensor's memory, itself included, plus a constant for this question.

    Without it: what a user has made of a gradient (a view, a flat tensor) would be overwritten by the next pass of
    `DataParallel`; or every pass would have to begin with new memory.
    """
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def copy_all(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each of these tensors to its place, with one kernel for many of them.

    Without it: on a GPU each gradient would be copied into its bucket by a call of its own, which takes the host longer
    than the GPU.
    """
    torch._foreach_copy_(list(into), list(tensors))


def largest_of_each(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude in each of these tensors, which have elements; not a number where one is none.

    Without it: `check_finite=True` would look at each gradient by a call of its own.
    """
    return torch.stack(torch._foreach_norm(list(tensors), math.inf))


def hooks_of_gradient(tensor: torch.Tensor) -> Collection[Any]:
    """What was given to `register_post_accumulate_grad_hook`.

    Without it: `mp.course.ddp_step` and the hook tracker cannot find the buckets of a model prepared elsewhere.
    """
    return (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook waits for a tensor's gradient.

    Without it: zero-bubble pipelines would not know where they may compute the gradients of weights later.
    """
    return bool(tensor._backward_hooks) or bool(hooks_of_gradient(tensor))


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a hook is called before or after a module.

    Without it: a pipeline would seed random generators before layers that draw nothing.
    """
    return bool(module._forward_pre_hooks or module._forward_hooks)


def what_arrives_at(edge: GradientEdge) -> Any:
    """The shape and dtype of the gradient that flows along an edge of autograd's graph.

    Without it: split backward could not undo broadcasting, as the engine does between two nodes.
    """
    node: Any = edge.node
    return node._input_metadata[edge.output_nr]


def hooks_of_saved(node: Node) -> list[Any]:
    """The functions that unpack what a node of autograd's graph has saved; those of `torch.utils.checkpoint` are some.

    Without it: split backward could not see that a node was checkpointed, and would calculate its forward twice.
    """
    hooks = []
    for name in _names_of_saved(type(node)):
        with contextlib.suppress(RuntimeError):  # freed already: torch's error will say so when the node runs
            saved = getattr(node, name)
            for tensor in saved if isinstance(saved, tuple | list) else (saved,):
                hooks.append(getattr(tensor, "unpack_hook", None))
    return [hook for hook in hooks if hook is not None]


def saved_by(node: Node) -> Iterator[torch.Tensor]:
    """The tensors that a node of autograd's graph has saved for its backward; not those that hooks have packed.

    Without it: `mp.record` could not say how many bytes of activations a rank holds. Hooks that torch calls for each
    saved tensor would tell, too, but `torch.func` refuses to work while there are any.
    """
    for name in _names_of_saved(type(node)):
        try:
            raw = getattr(node, name)
            if any(getattr(one, "unpack_hook", None) for one in (raw if isinstance(raw, tuple | list) else (raw,))):
                continue
            # Functions of a user's own have no underscore there.
            saved = getattr(node, name[4:] if hasattr(node, name[4:]) else name[5:])
        except RuntimeError:  # freed already, or changed in place: backward will say so
            continue
        for tensor in saved if isinstance(saved, tuple | list) else (saved,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


@cache
def _names_of_saved(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def enclosing_saved_tensors_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The hooks by which autograd packs and unpacks what it saves at the moment; None if there are none.

    Without it: `torch.utils.checkpoint` around a `FullyShardedDataParallel`, or `save_on_cpu`, would do nothing, since
    torch calls the innermost hooks only.
    """
    hooks: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def without_own_functions() -> AbstractContextManager[None]:
    """Within this block torch treats tensors of our own classes as plain ones.

    Without it: `GradientWithoutNorm` could not refuse norms and still be computed with.
    """
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return guard


def share_by_descriptor(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Move a storage into shared memory, under all of its views; returns a descriptor of the file, and its size.

    Without it: with MICROPARALLEL_MOVE=1, tensors would still be copied. `Tensor.share_memory_` moves them as well, but
    does not hand out the descriptor that other processes need.
    """
    descriptor, size = storage._share_fd_cpu_()
    return int(descriptor), int(size)


# ── streams of a GPU ────────────────────────────────────────────────────────────────────────────────────────────────

_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def stream_of_thread(device: torch.device) -> torch.cuda.Stream:
    """The stream on which this thread's work for a GPU runs: the same object for the same stream.

    Without it: each message between ranks on a GPU would take some ten microseconds longer. `torch.cuda.current_stream`
    takes four, and is asked several times.
    """
    key: tuple[int, int, int] = torch._C._cuda_getCurrentStream(device.index)
    stream = _streams.get(key)
    if stream is None:
        stream_id, index, kind = key
        stream = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)  # type: ignore[no-untyped-call]
        stream = _streams.setdefault(key, stream)
    return stream


def current_stream_address(device: torch.device) -> int:
    """The calling thread's stream on a GPU, as a number that `torch.cuda.ExternalStream` and CUDA's driver take.

    Without it: the hook of each gradient would make an object for its stream, which takes longer than all it does.
    """
    return int(torch._C._cuda_getCurrentRawStream(device.index or 0))


# ── every operation ─────────────────────────────────────────────────────────────────────────────────────────────────

# Without it, `changed_by` and `takes_device`: `deferred_init` could not record how a model's weights are made.
# `torch.overrides.TorchFunctionMode` sees what Python calls, and not what torch's own functions call in turn.
EveryOperation: Any = TorchDispatchMode


def changed_by(operation: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation changes in place."""
    changed: list[torch.Tensor] = []
    for place, declared in enumerate(operation._schema.arguments):
        given = arguments[place] if place < len(arguments) else named.get(declared.name)
        # BatchNorm's operation changes its running statistics while training, and does not declare it.
        undeclared = operation._schema.name == "aten::native_batch_norm" and declared.name.startswith("running_")
        if undeclared or (declared.alias_info is not None and declared.alias_info.is_write):
            changed += [one for one in pytree.tree_leaves(given) if isinstance(one, torch.Tensor)]
    return changed


def takes_device(operation: Any) -> bool:
    """Whether an operation is told on which device its result shall be."""
    return any(declared.name == "device" for declared in operation._schema.arguments)


@contextmanager
def truncated_normal(instead: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let `nn.init.trunc_normal_` call another function, which is made from the one that it calls otherwise.

    Without it: since torch 2.13, that function looks at the numbers that it has drawn, and may draw again. So
    `deferred_init` would have to draw them while the model is built, several times, and once more to fill it.
    """
    before = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = instead(before)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = before


# ── torch.compile ───────────────────────────────────────────────────────────────────────────────────────────────────

Given = ParamSpec("Given")
Returned = TypeVar("Returned")
Kind = TypeVar("Kind", bound=type)
_compiler: Any = torch._C._dynamo.eval_frame
_NOT_COMPILED = "it talks to other ranks; compile the model inside: DataParallel(torch.compile(model), comms)"


def _skip(code: CodeType, *, what_it_calls: bool) -> None:
    """Let the compiler leave a function as it is; and perhaps all that it calls, and the functions that it makes.

    `torch.compiler.disable` does the same, but imports all of the compiler first, which takes seconds.
    """
    skip, as_usual = _compiler._FrameAction.SKIP, _compiler._FrameAction.DEFAULT
    _compiler.set_code_exec_strategy(code, _compiler._FrameExecStrategy(skip, skip if what_it_calls else as_usual))
    for inner in code.co_consts if what_it_calls else ():
        if isinstance(inner, CodeType):
            _skip(inner, what_it_calls=True)


def leave_uncompiled(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Keep `torch.compile` from compiling a function, and all that it calls, when torch's C++ calls it; it is free.

    Without it: compiled DDP models fail in our backend, and so do hooks of a compiled `DataParallel`.
    """
    _skip(function.__code__, what_it_calls=True)
    return function


def compiled_of(model: Any) -> Any:
    """The module that `torch.compile` was given, whose names are the plain ones; another model as it is.

    Without it: the names of a compiled model's parameters have a prefix, so its checkpoint fits no plain one.
    """
    return getattr(model, "_orig_mod", model)


def uncompiled(kind: Kind) -> Kind:
    """Leave all methods of a class uncompiled: torch's C++, or Python when an object is gone, may call any of them.

    Without it: a compiled DDP model with buffers fails now and then, since it waits in C++ for a work of ours.
    """
    for member in vars(kind).values():
        for part in (member.fget, member.fset) if isinstance(member, property) else (member,):
            function = getattr(part, "__func__", part)  # of a static method
            if isinstance(function, FunctionType):
                leave_uncompiled(inspect.unwrap(function))
    return kind


def not_compiled(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Let `torch.compile` compile neither this function nor what it calls, also where a compiled function calls it.

    Without it: `torch.compile(mp.DataParallel(model, comms))` would try to compile how ranks talk, and fail.
    """

    @functools.wraps(function)
    def alone(*arguments: Given.args, **named: Given.kwargs) -> Returned:
        before = _compiler.set_eval_frame(None)
        try:
            return function(*arguments, **named)
        finally:
            _compiler.set_eval_frame(before)

    return not_compiled_itself(alone)


def not_compiled_itself(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Let `torch.compile` leave this function as it is, and compile what it calls.

    Without it: a model inside of a compiled `DataParallel` would not be compiled, or not as one graph.
    """
    _skip(function.__code__, what_it_calls=False)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _NOT_COMPILED  # type: ignore[attr-defined]
    return function


@not_compiled_itself
def compiles_what_is_called() -> bool:
    """Whether `torch.compile` is at work in this thread, and compiles what is called next.

    Without it: `torch.compile(mp.FullyShardedDataParallel(…))` could not be refused, and would compile how units come
    and go.
    """
    before = _compiler.set_eval_frame(None)
    _compiler.set_eval_frame(before)
    return bool(before)


# ── modules ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Hooks = dict[int, Any]


def forward_pre_hooks_of_all_modules() -> Hooks:
    """The dictionary, torch's own, of the hooks that every module calls before its forward.

    Without it: `mp.record` would need a hook on every module inside a model, some microseconds each.
    """
    return torch_modules._global_forward_pre_hooks


def share_tensors(wrapper: nn.Module, module: nn.Module) -> None:
    """Let a wrapper have the parameters and buffers that its module has itself, under the same names.

    Without it: `torch.func.functional_call(wrapped, dict(wrapped.named_parameters()))` would not find a parameter of
    the outermost module under its plain name, and would run the module with its own parameter instead.
    """
    wrapper._parameters, wrapper._buffers = module._parameters, module._buffers


def own_parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary of the parameters that a module has itself.

    Without it, and `replace_own_parameters`: a layer of `FullyShardedDataParallel` that reads its weight would get this
    rank's part of it; each kind of layer would need a forward of its own.
    """
    return module._parameters


def replace_own_parameters(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    """Let a module have these parameters: what is listed, and what is read as its attributes."""
    module._parameters = parameters


def forward_hooks_of(module: nn.Module) -> tuple[Hooks, Hooks]:
    """A module's own dictionaries of what it calls after its forward, and which of these even after an error.

    Without them: `mp.record` would register a hook for each forward, which takes as long as the rest of recording.
    """
    always: Any = module._forward_hooks_always_called
    return module._forward_hooks, always


def children_of(module: nn.Module) -> MutableMapping[str, nn.Module | None]:
    """A module's children by name, with those that it has twice (`named_children` leaves them out).

    Without it: a pipeline of layers that share their weights could not be cut.
    """
    return module._modules


def buffers_of(module: nn.Module) -> MutableMapping[str, torch.Tensor | None]:
    """A module's own buffers by name, with those that are None as yet.

    Without it: measuring how long layers take would change what batch normalisation has counted.
    """
    return module._buffers


def present(view: nn.Module, module: nn.Module) -> None:
    """Let a module have another's parameters, buffers and children, under the names that they have there.

    Without it: the stages of a model that is no list of layers would hold its parameters under other names than the
    model, and its checkpoints would not fit them.
    """
    view._parameters = module._parameters
    view._buffers = module._buffers
    view._non_persistent_buffers_set = module._non_persistent_buffers_set
    view._modules = module._modules


def load_for_optimizers() -> None:
    """Import what a process's first optimizer imports.

    Without it: ranks that are forked from a process that has imported torch would each need a second for that.
    """
    import torch._dynamo  # noqa: F401


# ── the profiler ────────────────────────────────────────────────────────────────────────────────────────────────────


def is_profiling() -> bool:
    """Whether `torch.profiler` records in this process.

    Without it: each call would make events that no profiler records, some microseconds each.
    """
    return profiler._is_profiler_enabled


def profiled_call(name: str, tensors: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    """A block that `torch.profiler` shows under this name, with the shapes of these tensors.

    Without it, and `profile_until`: the profiler would show none of our calls, and programs that look for
    `c10d::allreduce_` in a profile would find nothing. `torch.profiler.record_function` knows no shapes.
    """
    block: AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(name, list(tensors), {})
    return block


def profile_until(name: str, when_done: Callable[[Callable[[], None]], None]) -> None:
    """Let `torch.profiler` show something that begins now, and ends, in any thread, when `when_done` calls back.

    Without it: the profiler would show when a collective was called, and not how long it took.
    """
    done: torch.futures.Future[None] = torch.futures.Future()
    with profiler.record_function(name) as event:
        event._call_end_callbacks_on_future(done)
    when_done(lambda: done.set_result(None))


# ── torch.distributed ───────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def next_group_is_called(name: str) -> Iterator[None]:
    """Let the next process group have this name: torch has no argument for it.

    Without it: members of a new group that are in different numbers of groups would wait for each other for ever.
    """
    with _naming:
        before = distributed_c10d._process_group_name
        distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
        try:
            yield
        finally:
            distributed_c10d._process_group_name = before


def store_of_the_world() -> dist.Store:
    """The store of the world, through which its ranks found each other.

    Without it: ranks of a world that another program has made could not agree on a folder for their flight recorders.
    """
    return distributed_c10d._get_default_store()


def nccl_group(
    device: torch.device, store: dist.Store, rank: int, world_ranks: Sequence[int], timeout: timedelta
) -> dist.ProcessGroup:
    """A process group with NCCL that torch does not list among its groups.

    Without it, and `gloo_group`: a mixed group ("cpu:microparallel,cuda:nccl") could not carry tensors of a GPU.
    """
    backend = dist.ProcessGroupNCCL(store, rank, len(world_ranks), nccl_options(world_ranks, timeout))
    return _group_with(dist.ProcessGroup.BackendType.NCCL, backend, device, store, rank, len(world_ranks))


def nccl_options(world_ranks: Sequence[int], timeout: timedelta) -> Any:
    """NCCL's options for a group of these ranks.

    Without it: tensors of a GPU in a mixed group would wait for half an hour, whatever timeout the program asked for.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(world_ranks)
    return options


def gloo_group(
    device: torch.device, store: dist.Store, rank: int, world_ranks: Sequence[int], timeout: timedelta
) -> dist.ProcessGroup:
    """A process group with gloo that torch does not list among its groups."""
    backend = dist.ProcessGroupGloo(store, rank, len(world_ranks), timeout)
    return _group_with(dist.ProcessGroup.BackendType.GLOO, backend, device, store, rank, len(world_ranks))


def _group_with(
    kind: dist.ProcessGroup.BackendType, backend: Any, device: torch.device, store: dist.Store, rank: int, ranks: int
) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, rank, ranks)
    group._register_backend(torch.device(device.type), kind, backend)
    group._set_default_backend(kind)
    return group


# What torch called these methods before 2.13.
BEFORE_2_13 = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def call_on(group: dist.ProcessGroup, name: str, *arguments: Any, **named: Any) -> Any:
    """Call a process group's method by the name that it has since torch 2.13.

    Without it: in a mixed group, tensors of a GPU could not be gathered nor scattered under an older torch.
    """
    method = getattr(group, name if hasattr(group, name) else BEFORE_2_13[name])
    return method(*arguments, **named)


def start_coalescing(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let a process group start its next calls together.

    Without it, and `end_coalescing`: `batch_isend_irecv` of a GPU's tensors would hang in a mixed group.
    """
    group._start_coalescing(device)


def end_coalescing(group: dist.ProcessGroup, device: torch.device) -> dist.Work:
    """Start the calls that were made since `start_coalescing`."""
    return group._end_coalescing(device)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that carries a device's tensors in a process group of torch's own.

    Without it: torch could not ask a mixed group whether NCCL can split or shrink, and `barrier` would fail there.
    """
    return group._get_backend(device)


def works_may_enter_graphs() -> bool:
    """Whether the program is within `allow_inflight_collective_as_graph_input_ctx`.

    Without it, `make_known_in_graphs` and `forget_in_graphs`: `wait_tensor` would not wait for a collective that was
    started with `async_op=True`, and a compiled graph would compute with tensors that have not arrived.
    """
    return bool(torch._C._distributed_c10d._allow_inflight_collective_as_graph_input())


def make_known_in_graphs(tensors: Iterable[torch.Tensor], work: dist.Work) -> None:
    """Let `wait_tensor` of these tensors wait for a work, which is kept until then."""
    for tensor in tensors:
        torch._C._distributed_c10d._register_work(tensor, work)


def forget_in_graphs(tensors: Iterable[torch.Tensor]) -> None:
    """Let `wait_tensor` wait for no work of these tensors any more: all that torch knows of are waited for here."""
    for tensor in tensors:
        torch.ops._c10d_functional.wait_tensor(tensor)


def backend_options(backend: str, timeout: timedelta, world_ranks: Sequence[int], group_name: str) -> Any:
    """The options of a process group's backend, as `group._get_backend(device).options` gives them.

    Without it: programs that read a group's timeout there, or copy its options for another group, would fail.
    """
    options: Any = torch._C._distributed_c10d.Backend.Options(backend, timeout)
    options.global_ranks_in_group = list(world_ranks)
    options.group_name = group_name
    return options


# torch declares several signatures for each method. With a base that is Any, our methods can have one.
_ProcessGroup: Any = dist.ProcessGroup


class CalledProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group written in Python: methods that torch calls by a private name call one of ours.

    Without these methods, and `CalledWork`, torch would ask its own base class, which has no backend: every group would
    fail as soon as it is named, and `barrier`, FSDP and `batch_isend_irecv` at their first call.
    """

    def _get_backend(self, device: torch.device) -> Any:
        return self.backend_of(device)

    def _get_backend_name(self) -> str:
        return str(self.getBackendName())

    def _get_sequence_number_for_group(self) -> int:
        number: int = self.sequence_number()
        return number

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: torch calls this when it has made the group, and no call has been made in it."""

    @property
    def _device_types(self) -> list[torch.device]:
        devices: list[torch.device] = self.devices()
        return devices

    def _set_group_name(self, name: str) -> None:
        self.setGroupName(name)

    def _set_group_desc(self, description: str) -> None:
        self.setGroupDesc(description)

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        work: dist.Work = self.end_coalescing(device)
        return work

    # The names that torch used before 2.13, as in `BEFORE_2_13`.

    def _allgather_base(self, *arguments: Any, **named: Any) -> dist.Work:
        work: dist.Work = self.all_gather_single(*arguments, **named)
        return work

    def _reduce_scatter_base(self, *arguments: Any, **named: Any) -> dist.Work:
        work: dist.Work = self.reduce_scatter_single(*arguments, **named)
        return work


class CalledWork(dist.Work):
    """A work written in Python; see `CalledProcessGroup`."""

    def source_rank(self) -> int:
        """The rank that sent the message; -1 where there is none, or it is not known."""
        return -1

    def _source_rank(self) -> int:
        return self.source_rank()


# Without it: `mp.SyncBatchNorm.convert` would have to name every kind of BatchNorm that torch has.
BatchNorm = nn.modules.batchnorm._BatchNorm


class AnyBatchNorm(BatchNorm):
    """A BatchNorm whose subclass says which inputs it takes.

    Without it: `mp.SyncBatchNorm` would need a class for each number of dimensions.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        self.check_dimensions(input)

    def check_dimensions(self, inputs: torch.Tensor) -> None:
        """Raise `ValueError` for inputs with a number of dimensions that this layer does not take."""
        raise NotImplementedError
