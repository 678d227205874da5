"""A model that is no list of layers, cut between the calls of its modules: its own `forward` runs in every stage.

```
class Decoder:                                     pipeline_layers(Decoder()), cut into two stages
    def forward(self, ids, mask):                  stage 0                  stage 1
        x = self.embed(ids)                        computes                 zeros
        mask = make_mask(mask)                     computes                 computes, from the batch
        for block in self.blocks:
            x = block(x, mask)                     blocks 0, 1; ends at 2   0, 1: zeros; 2 gets what was sent; 3
        return self.head(x)                                                 computes
```

Every stage runs the whole `forward`, and so needs the whole batch: it is sent along. Modules that other stages have are
`Skipped`: they cost nothing. What a stage sends to the next are the arguments of the module where that one begins, if
they come from a module with a state (`flow.py`); the next stage computes the others from the batch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from microparallel.errors import PartitionError, StageError, UsageError
from microparallel.pipeline.flow import Flow, flow
from microparallel.pipeline.stand_ins import CPU, Entry, Exit, Now, Reached, Skipped, on_meta, tensors_of
from microparallel.text import did_you_mean
from microparallel.torch_private import children_of, present, pytree

EVERY_LAYER = ("output_hidden_states", "output_attentions")
IDS = ("input_ids", "decoder_input_ids")  # made for a model that takes them, where no example is given


def pipeline_layers(model: nn.Module, at: Sequence[str] | None = None, *, example: Any = None) -> list[nn.Module]:
    """Cut a model whose `forward` is its own, and not a list of layers, into layers for `mp.Pipeline`.

    This is for models that call the modules of an `nn.ModuleList` (or several) one after another and pass on more than
    one tensor, such as the decoders, encoders and encoder-decoders of Hugging Face. The pipeline's parameters have the
    names that they have in the model, and tied ones stay tied. A cut is possible at a module if everything computed
    before it is an argument of that module, or can be computed again from the batch; other cuts are refused.

    Args:
        model: the model; every rank builds the same. Its parameters become those of the pipeline.
        at: the names of modules, as in `model.named_modules()`, each of which begins a new layer. By default, every
            module of the outermost lists does.
        example: a batch, for a model that does not take `input_ids`: a dict for `model(**batch)`, a tuple for
            `model(*batch)`, or a tensor. Only its form counts.

    Example:
        ```python
        layers = mp.pipeline_layers(GPT2LMHeadModel(config))
        pipe = mp.Pipeline(layers, comms, "1f1b", microbatches=4, loss_fn=loss_fn)
        loss = pipe.step({"input_ids": ids, "attention_mask": mask}, labels)
        ```
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"pipeline_layers: {type(model).__name__} is no nn.Module")
    config = getattr(model, "config", None)
    _refuse_more_outputs({name: getattr(config, name, None) for name in EVERY_LAYER})
    plan = _planned(model, at, _example(model) if example is None else as_plain(example))
    parts = [Part(plan, index, index + 1) for index in range(plan.parts)]
    for part in parts:
        part.plan = plan
    return [*parts]


def as_plain(batch: Any) -> Any:
    """A batch whose mappings of other kinds, such as the BatchEncoding of a tokenizer, are dicts."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return {name: as_plain(value) for name, value in batch.items()}
    if type(batch) is dict:
        return {name: as_plain(value) for name, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(as_plain(value) for value in batch)
    return batch


def _example(model: nn.Module) -> dict[str, torch.Tensor]:
    names = _argument_names(model)
    if IDS[0] not in names:
        raise UsageError(
            f"pipeline_layers: {type(model).__name__}.forward takes no input_ids ({', '.join(names) or 'nothing'}): "
            "pass a small batch as example=, a dict, a tuple or a tensor"
        )
    return {name: torch.ones((2, 4), dtype=torch.int64) for name in IDS if name in names}


def _argument_names(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


# ── where a model is cut ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Plan:
    """A model, and where it is cut.

    Attributes:
        model: the whole model.
        units: its modules with a state, by name, which are computed by some parts only; and each on the meta device.
        flow: what flows between them.
        takes: the names of the arguments of its forward.
    """

    model: nn.Module
    units: Mapping[str, tuple[nn.Module, nn.Module]]
    flow: Flow
    takes: frozenset[str]

    @property
    def parts(self) -> int:
        """The largest number of parts."""
        return len(self.flow.cuts) + 1

    def up_to_date(self) -> Plan:
        """The same plan; with new modules on the meta device if the model was given another dtype since."""
        pairs = ((a, b) for module, meta in self.units.values() for a, b in zip(*_states(module, meta), strict=True))
        if all(a.dtype == b.dtype and a.requires_grad == b.requires_grad for a, b in pairs):
            return self
        return replace(self, units=_with_metas({name: module for name, (module, _) in self.units.items()}))


def _planned(model: nn.Module, at: Sequence[str] | None, example: Any) -> Plan:
    """Find what flows; without `at`, leave out the cuts that are impossible."""
    cuts = _modules_of_lists(model) if at is None else _checked_names(model, at)
    takes = frozenset(_argument_names(model))
    while True:
        units = _units(model, set(cuts))
        found = _flow(model, units, cuts, example, takes)
        wrong = _impossible(found, cuts)
        if at is not None and wrong:
            raise PartitionError(next(iter(wrong.values())))
        if not wrong:
            break
        cuts = [name for name in cuts if name not in wrong]
    if at is None and found.cuts and not any(0 in segments for segments in found.segments.values()):
        cuts = cuts[1:]  # before the first of them there is nothing
        found = _flow(model, units := _units(model, set(cuts)), cuts, example, takes)
    if not found.cuts:
        raise PartitionError(
            f"found no place to cut a {type(model).__name__}: no nn.ModuleList or nn.Sequential in it has modules that "
            "are each called once, one after another; name modules to cut at, as in at=['encoder.2']"
        )
    for segment, function in found.reads.items():
        if segment < len(found.cuts):  # no other stage runs the last one
            raise PartitionError(
                f"the forward reads the contents of what modules computed, with {function}, before "
                f"{found.cuts[segment]} is called: stages that do not compute it would read zeros; put this into a "
                "module, or cut elsewhere"
            )
    _place_what_is_not_called(found, units)
    return Plan(model, units, found, takes)


def _flow(
    model: nn.Module,
    units: Mapping[str, tuple[nn.Module, nn.Module]],
    cuts: Sequence[str],
    example: Any,
    takes: frozenset[str],
) -> Flow:
    try:
        return flow(model, units, cuts, example, lambda skeleton, batch: called_on(skeleton, batch, takes))
    except PartitionError:
        raise
    except Exception as error:
        raise PartitionError(
            f"pipeline_layers: {type(model).__name__} could not be run on the example without contents: "
            f"{type(error).__name__}: {error}"
        ) from error


def called_on(model: nn.Module, batch: Any, takes: frozenset[str]) -> Any:
    """Call a model on a batch: a dict by name, a tuple or list in order."""
    more: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}  # a cache cannot be sent
    if isinstance(batch, dict):
        _refuse_more_outputs(batch)
        return model(**{**more, **batch})
    return model(*batch, **more) if isinstance(batch, tuple | list) else model(batch, **more)


def _refuse_more_outputs(options: Mapping[str, Any]) -> None:
    """Refuse what would be returned of every layer: a stage has only its own."""
    for name in EVERY_LAYER:
        if options.get(name):
            raise UsageError(f"{name}={options[name]}: no stage of a pipeline has those of all layers; leave it out")


def _modules_of_lists(model: nn.Module, name: str = "") -> list[str]:
    """The names of the modules of the outermost lists."""
    names = []
    is_list = isinstance(model, nn.ModuleList) or type(model) is nn.Sequential
    for own, child in children_of(model).items():
        whole = f"{name}.{own}" if name else own
        if child is not None:
            names += [whole] if is_list else _modules_of_lists(child, whole)
    return names


def _checked_names(model: nn.Module, at: Sequence[str]) -> list[str]:
    if isinstance(at, str) or not at:
        raise UsageError(f"at={at!r}: give the names of modules, such as at=['layers.4']")
    known = dict(model.named_modules())
    for name in at:
        if name not in known or not name:
            hint = did_you_mean(name, known, otherwise="model.named_modules() has their names")
            raise PartitionError(f"at={list(at)}: this {type(model).__name__} has no module {name!r}; {hint}")
        inside = [other for other in at if other.startswith(f"{name}.")]
        if inside:
            raise PartitionError(f"at={list(at)}: {inside[0]} is inside {name}; cut at one of them")
    return list(dict.fromkeys(at))


def _impossible(found: Flow, cuts: Sequence[str]) -> dict[str, str]:
    """The cuts that cannot be, each with the reason."""
    reasons = {}
    for name in cuts:
        calls = found.calls.get(name, 0)
        if calls != 1:
            times = "not called" if calls == 0 else f"called {calls} times"
            reasons[name] = f"cannot cut at {name}: it is {times} in a forward on the example, and must be called once"
        elif name in found.beside:
            reasons[name] = (
                f"cannot cut at {name}: something that was computed before it is used after it, by "
                f"{found.beside[name]}, and is not an argument of {name}; cut elsewhere"
            )
    lists = {name.rpartition(".")[0] for name in reasons if found.calls.get(name, 0) != 1}
    for name in cuts:
        if name.rpartition(".")[0] in lists:  # a list whose modules are not a chain
            reasons.setdefault(name, f"cannot cut at {name}: another module of its list is not called once")
    return reasons


def _units(model: nn.Module, cuts: set[str]) -> dict[str, tuple[nn.Module, nn.Module]]:
    """The modules that are computed by one part: those with a state of their own, and those at a cut.

    A module around a cut belongs to all parts, with the parameters that are its own.
    """
    around = {name.rpartition(".")[0] for name in cuts}
    around |= {prefix for name in around for prefix in _prefixes(name)} | {""}
    return _with_metas(dict(_outermost(model, "", cuts, around)))


def _with_metas(modules: Mapping[str, nn.Module]) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Modules by name, each with itself on the meta device."""
    memo: dict[int, Any] = {}
    metas = {id(module): on_meta(module, memo) for module in modules.values()}
    return {name: (module, metas[id(module)]) for name, module in modules.items()}


def _states(*modules: nn.Module) -> list[list[torch.Tensor]]:
    return [[*module.parameters(), *module.buffers()] for module in modules]


def _prefixes(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _outermost(module: nn.Module, name: str, cuts: set[str], around: set[str]) -> Iterator[tuple[str, nn.Module]]:
    has_state = any("." not in key for key in module.state_dict())
    if name in cuts or (has_state and name not in around):
        yield name, module
        return
    for own, child in children_of(module).items():
        if child is not None:
            yield from _outermost(child, f"{name}.{own}" if name else own, cuts, around)


def _place_what_is_not_called(found: Flow, units: Mapping[str, tuple[nn.Module, nn.Module]]) -> None:
    """A module that is never called goes where its parameters are used under another name, or into the first part."""
    users: dict[nn.Parameter, set[int]] = {}
    for name, segments in found.segments.items():
        for parameter in units[name][0].parameters():
            users.setdefault(parameter, set()).update(segments)
    for name, (module, _) in units.items():
        if name not in found.segments:
            used = [users[parameter] for parameter in module.parameters() if parameter in users]
            found.segments[name] = {min(min(segments) for segments in used)} if used else {0}


# ── a part ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Part(nn.Module):
    """A part of a model, from one cut to another: it runs the model's forward in which all other parts are skipped.

    It has those parameters of the model that it uses, under the model's names. It takes what the part before returned:
    the batch, and what was sent; the first takes the batch, and the last returns what the model returns. Where the
    model returns something that an earlier part computed and did not send, the output has None.

    Attributes:
        reach: its first segment, and the one at which it ends.
        takes: the names of the arguments of the model's forward.
        plan: for `joined`, and only until then: a stage's part must not hold the whole model.
    """

    def __init__(self, plan: Plan, first: int, end: int) -> None:
        super().__init__()
        self.plan: Plan | None = None
        self.takes = plan.takes
        self.reach = (first, end)
        self._is_last = end == plan.parts
        self._stale = frozenset(plan.flow.stale)
        self._now = Now()
        reach = {*range(first, end)}
        self._own = {name: module for name, (module, _) in plan.units.items() if plan.flow.segments[name] & reach}
        self._places = {name: self._place(name, *unit, plan.flow) for name, unit in plan.units.items()}
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*plan.model.parameters(), *plan.model.buffers())}
        memo |= {id(module): self._places[name] for name, (module, _) in plan.units.items()}
        skeleton = copy.deepcopy(plan.model, memo)
        self.__dict__["skeleton"] = skeleton  # not as a child: its parameters would have other names
        present(self, skeleton)
        self.training = skeleton.training

    def _place(self, name: str, module: nn.Module, meta: nn.Module, found: Flow) -> nn.Module:
        """What is in the place of a module in this part: itself, or a stand-in."""
        first, end = self.reach
        begins = found.cuts.index(name) + 1 if name in found.cuts else None
        if begins == end:
            return Exit(meta, self._now, found.sent[end - 1])
        if name not in self._own:
            return Skipped(meta, self._now, name)
        if begins is not None and begins == first:
            return Entry(module, self._now, found.sent[first - 1])
        return module

    def forward(self, value: Any) -> Any:
        """Run this part of the model.

        Returns:
            What the next part takes; of the last part, what the model returns.
        """
        value = _with_contents(value) if self._now.dry else value
        batch, arrived = (value["batch"], value["sent"]) if self.reach[0] else (as_plain(value), [])
        tensors = tensors_of(value)
        self._now.arrived = arrived
        self._now.device = tensors[0][1].device if tensors else CPU
        skeleton = self.__dict__["skeleton"]
        skeleton.training = self.training
        try:
            with _devices(CPU if self._now.dry else None):
                outputs = called_on(skeleton, batch, self.takes)
        except Reached as reached:
            if reached.now is not self._now:
                raise
            return {"batch": batch, "sent": reached.tensors}
        finally:
            self._now.arrived = []
        if not self._is_last:
            raise StageError("the forward ended before it came to the module at which the next stage begins")
        return self._without_stale(outputs) if self._stale else outputs

    def _without_stale(self, outputs: Any) -> Any:
        leaves, tree = pytree.tree_flatten_with_path(outputs)
        return tree.unflatten([None if pytree.keystr(path) in self._stale else leaf for path, leaf in leaves])

    def dry(self) -> Part:
        """A copy in which no module has contents, for a dry run: it finds what this part returns."""
        now = Now(dry=True)
        memo: dict[int, Any] = {id(self._now): now, id(self.plan): None}
        metas: dict[int, Any] = {}
        for name, module in self._own.items():
            memo[id(module)] = Skipped(on_meta(module, metas), now, name, own=True)
            place = self._places[name]
            if isinstance(place, Entry):
                memo[id(place)] = Entry(memo[id(module)], now, place.paths)
        return copy.deepcopy(self, memo).to(CPU)

    def follow_dtype(self, dtype: torch.dtype) -> None:
        """Let what is skipped return another dtype, after this part's own modules were given it."""
        for place in self._places.values():
            if isinstance(place, Skipped):
                place.change_dtype(dtype)

    def __repr__(self) -> str:
        first, end = self.reach
        return f"<{type(self.__dict__['skeleton']).__name__}, parts {first} to {end - 1}>"


def joined(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Put neighbouring parts of one model together: the model's forward then runs once for all of them."""
    runs: list[list[nn.Module]] = []
    for part in parts:
        if runs and _follows(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_joined(run) for run in runs]


def _joined(run: Sequence[nn.Module]) -> nn.Module:
    first, last = run[0], run[-1]
    if not isinstance(first, Part) or not isinstance(last, Part) or first.plan is None:
        return first
    return Part(first.plan.up_to_date(), first.reach[0], last.reach[1])


def _follows(one: nn.Module, other: nn.Module) -> bool:
    return (
        isinstance(one, Part) and isinstance(other, Part) and one.plan is other.plan and one.reach[1] == other.reach[0]
    )


def _with_contents(value: Any) -> Any:
    """Tensors on the CPU instead of the meta device: the code around modules may read them."""

    def ones(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.ones(tensor.shape, dtype=tensor.dtype, device=CPU)
        return made.requires_grad_() if tensor.requires_grad else made

    return pytree.tree_map_only(torch.Tensor, ones, value)


@contextmanager
def _devices(device: torch.device | None) -> Iterator[None]:
    if device is None:
        yield
        return
    with device:
        yield
