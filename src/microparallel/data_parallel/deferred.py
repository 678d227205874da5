"""Build a model without memory, then fill it part by part, with the weights that one process would give it.

```
torch.manual_seed(0)
with deferred_init():                   the record: operations, and the values that they make
    layer = nn.Linear(4, 3)             1  a0     = empty(3, 4)
                                        2  b0     = empty(3)
                                        3  a1, s1 = uniform_(s0)       overwrites a0; s0 is the generator's state
                                        4  b1, s2 = uniform_(s1)       overwrites b0
    nn.init.normal_(layer.weight)       5  a2, s3 = normal_(s2)        overwrites a1

fill(layer, keep)                       3  a1: nothing needs it, so it is let go; but s1 is needed
                                        4  b1: keep("bias", b1), let go
                                        5  a2: keep("weight", a2), let go
```

Operations that draw random numbers keep their order. Others are done as soon as what they need is drawn: `model.half()`
at the end of the block halves each weight before the next one is drawn. So `fill` holds about one weight at a time;
more if each weight needs what is drawn after all of them.

Code in the block that asks for values (`tensor.item()`, `if mask.any():`) gets them, by a replay of what they need. And
in the block, deferred tensors say that they are on the CPU: torch's functions, and other people's, do not initialise
what is on the meta device, where these tensors really are.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

from microparallel.data_parallel.replay import Operation, Record, Storage, View
from microparallel.errors import UsageError
from microparallel.torch_private import EveryOperation, changed_by, pytree, takes_device, truncated_normal, version_of

Named = dict[str, Any]


@contextmanager
def deferred_init() -> Iterator[None]:
    """Within this block, models are built without memory; `fill` makes their contents.

    After it, torch's generator has the state that it had before: `fill` draws the numbers, and returns the state after
    them. Generators of the program's own (`generator=`) have the state that they have in one process.
    """
    if _is_recording():  # the block around this one
        yield
        return
    recorder = _Recorder()
    hooks = (modules.register_module_parameter_registration_hook, modules.register_module_buffer_registration_hook)
    handles = [register(recorder.registered) for register in hooks]
    state = torch.get_rng_state()
    try:
        with truncated_normal(recorder.instead_of_trunc_normal), recorder, _OnTheCPU(recorder):
            yield
    finally:
        for handle in handles:
            handle.remove()
        recorder.close()
        torch.set_rng_state(state)


def is_deferred(model: nn.Module) -> bool:
    """Whether a model has parameters or buffers that were made in `deferred_init`, and so have no contents yet."""
    return any(_value_of(tensor) is not None for tensor in chain(model.parameters(), model.buffers()))


def require_contents(model: nn.Module, wanted: str) -> None:
    """Raise `UsageError` if a model was built in `deferred_init`, and has not been filled."""
    if is_deferred(model):
        raise UsageError(
            f"{wanted}: this model was built inside of mp.deferred_init() and has no memory yet, which only "
            "FullyShardedDataParallel fills; build it outside of that block"
        )


def fill(model: nn.Module, keep: Callable[[str, torch.Tensor], None]) -> torch.Tensor:
    """Make the contents of a model that was built in `deferred_init`, and hand them over one after the other.

    Args:
        model: the model, or a part of one; it is not changed.
        keep: called once for each parameter and buffer, with its name and its contents on the CPU; in the same order
            on every rank. It copies what it needs: `fill` lets go of the tensor. A tied one has its first name.

    Returns:
        The state of torch's generator in a process that has built the model: after `torch.set_rng_state` with it, a
        program goes on as that process does. `fill` itself leaves the generator as it is.
    """
    if _is_recording():
        raise UsageError("fill() was called inside `with deferred_init():`, where nothing has contents; call it after")
    wanted: dict[int, list[tuple[str, View]]] = defaultdict(list)
    records: dict[Record, str] = {}
    ready = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        held = _held(name, tensor)
        if held is None:
            ready.append((name, tensor.detach()))
        else:
            records.setdefault(held[0], name)
            wanted[held[1]].append((name, View.of(tensor, held[1])))
    if len(records) > 1:
        first, second, *_ = records.values()
        raise UsageError(f"{first} and {second} were made in two `with deferred_init():` blocks; build a model in one")
    for name, tensor in ready:
        keep(name, tensor)
    state = torch.get_rng_state()

    def hand_over(value: int, content: Storage) -> None:
        nonlocal state
        if value == record.end.value:
            state = record.end.on(content)
        for name, view in wanted.get(value, ()):
            keep(name, view.on(content))

    for record in records:
        with torch.autocast("cpu", enabled=False):
            record.replay({record.end.value, *wanted}, hand_over)
    return state


def _is_recording() -> bool:
    """Whether the program is in a `deferred_init`."""
    return _value_of(torch.empty(0, device="cpu")) is not None


def _value_of(tensor: torch.Tensor) -> tuple[Record, int] | None:
    """The record of a deferred tensor, and its value there; None for all other tensors.

    This stands on the tensor's storage, which has no memory: all views share it, and `tensor.data` does. Nothing else
    holds the record, so it lives as long as the model.
    """
    if nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided:
        return None
    return getattr(tensor.untyped_storage(), "deferred", None)


def _held(name: str, tensor: torch.Tensor) -> tuple[Record, int] | None:
    """The record and the value of a model's tensor; None for one that has contents already."""
    if nn.parameter.is_lazy(tensor):
        raise UsageError(f"{name} has no shape before the first forward, and cannot be filled: use a layer with sizes")
    held = _value_of(tensor)
    if held is None:
        if tensor.is_meta:
            raise UsageError(
                f"{name} is on the meta device, without a record of how its contents are made: build the model, and "
                "copy or convert it, inside `with mp.deferred_init():`"
            )
        return None
    if held[0].versions.get(tensor, version := version_of(tensor)) != version:
        raise UsageError(f"{name} was changed after `with deferred_init():`, which did not record it: do that inside")
    return held


# ── recording ───────────────────────────────────────────────────────────────────────────────────────────────────────

# They write all elements of their first argument, and read none.
_OVERWRITING = {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_"}
_OVERWRITING |= {"random_", "uniform_", "zero_"}
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Recorder(EveryOperation):  # type: ignore[misc]
    """Is called for every operation in the block; does those of deferred tensors on the meta device, and records them.

    A recorded draw takes one number from the real generator, whose state is then a bookmark: it stands for the state
    that one process has there. So a program may save states and restore them (`torch.random.fork_rng`), and seed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self._is_paused = False
        self._bookmarks: dict[bytes, View] = {}
        self._generators: dict[int, torch.Generator] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Named | None = None) -> Any:
        """Record an operation that takes deferred tensors, or makes a tensor on the CPU; just do all others."""
        named = kwargs or {}
        if self._is_paused:
            return function(*args, **named)
        name, draws = function.overloadpacket.__name__, torch.Tag.nondeterministic_seeded in function.tags
        tensors, changed = _tensors((args, named)), []
        device = named["device"].type if named.get("device") else None
        if any(map(self._is_deferred, tensors)):
            if device not in (None, "cpu", "meta"):
                raise UsageError(f"deferred_init() has no contents to move to {device}: move what fill() hands over")
            changed = changed_by(function, args, named)
            wants_contents = name == "_to_copy" and device == "cpu"  # as `tolist` does
            is_recorded = all(map(self._is_deferred, changed)) and not wants_contents
        elif name == "lift_fresh" and _kind(tensors[0]) == "cpu":  # numbers, or an array, have become a tensor
            return self.constant(tensors[0])
        else:
            makes = device == "meta" or (not tensors and device in (None, "cpu"))
            is_recorded = makes and takes_device(function)
        if not is_recorded:
            return self._do(function, args, named, draws and device in (None, "cpu"))
        views = self._views(tensors)
        try:
            meta_args, meta_named = pytree.tree_map(_on_meta, (args, named))
            result = function(*meta_args, **meta_named)
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(error, NotImplementedError) and _NEEDS_VALUES.isdisjoint(function.tags):
                raise
            if changed:
                raise UsageError(f"deferred_init() cannot record {name}(): torch needs values for it") from error
            return pytree.tree_map_only(torch.Tensor, self.constant, self._do(function, args, named, draws))
        self._note(function, (args, named), views, result, changed, name in _OVERWRITING, draws)
        return result

    def instead_of_trunc_normal(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Record `nn.init.trunc_normal_` as one operation."""

        def record_it(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
            if not self._is_deferred(tensor):
                return function(tensor, *args, **named)
            with self.paused():
                arguments = (tensor, *args), named
                self._note(function, arguments, self._views([tensor]), tensor, [tensor], overwrites=True, draws=True)
            return tensor

        return record_it

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A deferred tensor with the contents that another tensor has now."""
        _require_strided(tensor)
        content = tensor.detach().clone()
        made: torch.Tensor = _on_meta(content)
        self.record.constants[self._make(made)] = content.untyped_storage()
        return made

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this, operations are just done."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def registered(self, _module: nn.Module, _name: str, tensor: torch.Tensor | None) -> None:
        """Remember a parameter or a buffer of a module, so as to notice if it is changed after the block."""
        if tensor is not None and not nn.parameter.is_lazy(tensor) and not tensor.is_inference():
            self.record.versions[tensor] = 0

    def close(self) -> None:
        """End the record."""
        for tensor in list(self.record.versions):
            self.record.versions[tensor] = version_of(tensor)
        self.record.end = self._state(torch.default_generator)
        for generator in self._generators.values():
            if generator is not torch.default_generator:
                self._catch_up(generator)
        self.record.is_open = False

    def _is_deferred(self, tensor: torch.Tensor) -> bool:
        held = _value_of(tensor)
        if held is not None and held[0] is not self.record:
            shape = list(tensor.shape)
            raise UsageError(f"a tensor of shape {shape} is of another `with deferred_init():`; build a model in one")
        return held is not None

    def _views(self, tensors: Sequence[torch.Tensor]) -> dict[int, View]:
        """How tensors without contents show their values, by the tensors' ids."""
        views = {}
        for tensor in tensors:
            if _kind(tensor) == "meta":
                _, value = _value_of(tensor) or (None, next(self.record.values))
                views[id(tensor)] = View.of(tensor, value)
        return views

    def _make(self, tensor: torch.Tensor) -> int:
        """Give a new value to a tensor."""
        _require_strided(tensor)
        value = next(self.record.values)
        tensor.untyped_storage().deferred = (self.record, value)  # type: ignore[attr-defined]
        return value

    def _note(
        self,
        function: Callable[..., Any],
        arguments: tuple[Sequence[Any], Named],
        views: dict[int, View],
        result: Any,
        changed: Sequence[torch.Tensor],
        overwrites: bool,
        draws: bool,
    ) -> None:
        """Record an operation that was done on the meta device, if it has made or changed a value."""
        shown = [views[id(tensor)].value for tensor in _tensors(arguments) if id(tensor) in views]
        reads = set(shown)
        if overwrites:
            view = views[id(changed[0])]
            is_whole = view.size.numel() * view.dtype.itemsize == view.nbytes
            if is_whole and shown.count(view.value) == 1:  # and no other argument reads it
                reads.remove(view.value)
                views[id(changed[0])] = replace(view, value=self._make(changed[0]))
        results: list[View | None] = []
        for leaf in pytree.tree_leaves(result):
            is_new = isinstance(leaf, torch.Tensor) and _value_of(leaf) is None
            results.append(View.of(leaf, self._make(leaf)) if is_new else None)
        writes = {view.value for view in results if view} | {views[id(tensor)].value for tensor in changed}
        if not writes:  # it has returned views of what was there
            return

        def as_recorded(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in views:  # it has contents, which may change later
                constant = self.constant(leaf)
                views[id(leaf)] = self._views([constant])[id(constant)]
                reads.add(views[id(leaf)].value)
            if isinstance(leaf, torch.Generator):
                return None
            return torch.device("cpu") if _is_device(leaf, "meta") else views.get(id(leaf), leaf)

        recorded = pytree.tree_map(as_recorded, arguments)
        states = self._draw(_generator_of(arguments)) if draws else None
        if states:
            reads.add(states[0].value)
            writes.add(states[1].value)
        operation = Operation(function, recorded, results, frozenset(reads), frozenset(writes), states)
        self.record.operations.append(operation)

    def _draw(self, generator: torch.Generator) -> tuple[View, View]:
        """The states before and after a draw; the generator gets a bookmark for the second one."""
        self._generators[id(generator)] = generator
        before = self._state(generator)
        after = replace(before, value=next(self.record.values))
        while _digest(generator) in self._bookmarks:
            torch.rand((), generator=generator, device="cpu")
        self._bookmarks[_digest(generator)] = after
        return before, after

    def _state(self, generator: torch.Generator) -> View:
        """The value of a generator's state in one process."""
        if _digest(generator) not in self._bookmarks:  # the program has seeded it, or set its state
            state, value = generator.get_state(), next(self.record.values)
            self.record.states[value] = state.untyped_storage()
            self._bookmarks[_digest(generator)] = View.of(state, value)
        return self._bookmarks[_digest(generator)]

    def _catch_up(self, generator: torch.Generator) -> None:
        """Give a generator the state that it has in one process."""
        view = self._state(generator)
        generator.set_state(view.on(self._contents({view.value})[view.value]))

    def _contents(self, values: Collection[int]) -> dict[int, Storage]:
        """What values hold at this point."""
        found: dict[int, Storage] = {}
        self.record.replay(values, found.__setitem__)
        return found

    def _do(self, function: Callable[..., Any], args: Any, named: Named, draws: bool) -> Any:
        """Do an operation now, with the contents of deferred tensors, and with random numbers as in one process."""
        tensors = _tensors((args, named))
        deferred = [tensor for tensor in tensors if self._is_deferred(tensor)]
        if draws and all(_kind(tensor) == "cpu" or self._is_deferred(tensor) for tensor in tensors):
            self._catch_up(_generator_of((args, named)))
        if deferred:
            views = self._views(deferred)
            contents = self._contents({view.value for view in views.values()})
            real = {place: view.on(contents[view.value]) for place, view in views.items()}
            args, named = pytree.tree_map(lambda leaf: real.get(id(leaf), leaf), (args, named))
        return function(*args, **named)


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _require_strided(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise UsageError(f"deferred_init() cannot record tensors of layout {tensor.layout}: make them after fill()")


def _kind(tensor: torch.Tensor) -> str:
    """The kind of device that a tensor is on, which for deferred ones is "meta"."""
    return tensor.untyped_storage().device.type if tensor.layout == torch.strided else tensor.device.type


def _is_device(leaf: Any, kind: str) -> bool:
    return leaf == kind if isinstance(leaf, str) else isinstance(leaf, torch.device) and leaf.type == kind


def _on_meta(leaf: Any) -> Any:
    """An argument for the meta device, where nothing but shapes is computed."""
    if isinstance(leaf, torch.Tensor) and _kind(leaf) != "meta":
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.Generator):
        return None
    return torch.device("meta") if _is_device(leaf, "cpu") else leaf


def _generator_of(arguments: Any) -> torch.Generator:
    given = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Generator))
    return next(given, torch.default_generator)


def _digest(generator: torch.Generator) -> bytes:
    """A short name for a generator's state, of which there are as many as draws."""
    return hashlib.sha256(generator.get_state().numpy().tobytes()).digest()


_Tensor: Any = torch.Tensor
_ANSWERS = {_Tensor.device.__get__: torch.device("cpu"), _Tensor.is_cpu.__get__: True, _Tensor.is_meta.__get__: False}
_ADDRESSES = {_Tensor.numpy, _Tensor.__array__, _Tensor.__dlpack__, _Tensor.data_ptr}


class _OnTheCPU(TorchFunctionMode):
    """Is called for every function of torch's that Python calls; lets deferred tensors look as if on the CPU."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Named | None = None) -> Any:
        """Call a function in such a way that it does not tell where a deferred tensor is."""
        named = dict(kwargs or {})
        if not (args and isinstance(args[0], torch.Tensor) and _value_of(args[0]) is not None):
            if _is_device(named.get("device"), "meta"):  # no deferred tensor says so: the program wants it
                with self._recorder.paused():
                    return function(*args, **named)
        elif torch.is_autocast_enabled("cpu"):
            raise UsageError("torch.autocast has no effect on tensors of deferred_init(): build the model without it")
        elif function in _ANSWERS:
            return _ANSWERS[function]
        elif function in _ADDRESSES:
            raise UsageError(
                f"{function.__name__}() of a tensor of shape {list(args[0].shape)}, which has no memory inside "
                "deferred_init(): compute with torch's functions, or with the numbers of tensor.tolist()"
            )
        elif function is _Tensor.cpu:
            return args[0]
        elif function is _Tensor.to:
            here = torch.device("meta")
            args, named = pytree.tree_map(lambda leaf: here if _is_device(leaf, "cpu") else leaf, (args, named))
        elif function is _Tensor.new_tensor and named.get("device") is None:
            named["device"] = torch.device("cpu")
        elif function == _Tensor.data.__set__ and _kind(args[1]) == "cpu":
            with self._recorder.paused():
                args = args[0], self._recorder.constant(args[1])
        return function(*args, **named)
