"""Checkpointer: saving, and exact continuation, for scripts that have a loop of their own.

```
restore()      memory of the launcher (mp.launch), or the newest checkpoint on the disk that all ranks can read
  step 40 ◀──  model, optimizer, what was named, random numbers: each rank takes its share, whatever the layout then

save(41)       all ranks    copy their shares into memory; the loop waits for that alone
               the writer   a process of its own brings the copy to the disk, as step-00000041
save(42)       all ranks    copy into the other slot; the writer is busy, so this copy waits for it
save(43)       all ranks    copy over 42, which is never written; the writer is free, and gets 43
close()        rank 0       waits until the newest copy is on the disk
```

What a checkpoint holds (`checkpoint.py` has its format), and which rank's:
- model and optimizer: each rank's share of them (`layouts.py`); what was not sent of compressed gradients
- what was given by name (a sampler, a scheduler): one for all ranks if all have the same bits, or else each rank's own
- random numbers: each rank's own
- the names of the parameters, by the optimizer's groups: its state goes by names, whatever order they have later
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.data_parallel import DataParallel, FullyShardedDataParallel
from microparallel.errors import CheckpointError, ConfigError, MicroparallelError, UsageError
from microparallel.files.lock import FolderLock
from microparallel.pipeline import Pipeline
from microparallel.text import show_some
from microparallel.torch_private import compiled_of
from microparallel.train import checkpoint
from microparallel.train.checkpoint import Ranks
from microparallel.train.checkpoint_folder import check_keep, is_finite, newest_first
from microparallel.train.checkpoint_reader import Checkpoint, read_whole
from microparallel.train.checkpoint_values import TensorTable, encode
from microparallel.train.copies import Copies
from microparallel.train.guard import not_finite
from microparallel.train.layouts import layout_of
from microparallel.train.random_state import random_state, restore_random_state
from microparallel.train.replica_check import find_difference

_OWN_BUFFERS = "the model's buffers"  # stands among what has names, none of which has a space


@runtime_checkable
class HasState(Protocol):
    """A sampler, a learning-rate scheduler, a `GradScaler`, another module."""

    def state_dict(self) -> Any:
        """Return what is to be saved: numbers, text, tensors, and lists, tuples and dicts of them."""

    def load_state_dict(self, state: Any) -> Any:
        """Go on from there."""


class Checkpointer:
    """Saves the state of a training loop, and goes on from it bit for bit after a failure.

    Every rank makes one when all is built, and makes the same calls. A rank may die at any moment, also in a save: a
    checkpoint has its name only when all of it is on the disk. Nothing is pickled.

    With `mp.launch(…, restarts=…)` the newest copy also lives in memory of the launcher. Ranks that are started again
    go on from there, and if there is no restart left, it is brought to the disk. Under `torchrun --max-restarts` they
    go on from the disk.

    Args:
        folder: where checkpoints are, for all ranks the same. It is locked: another process that wants it is refused.
        comms: the ranks.
        model: a module (the same weights on all ranks), or what `mp.DataParallel`, `mp.FullyShardedDataParallel` or
            `mp.Pipeline` made of it.
        optimizer: of the model's parameters: one of torch's, a `mp.ShardedOptimizer`, or one of your own.
        keep: how many checkpoints are left. One whose weights are not finite does not count, and removes none.
        keep_every: those whose step is a multiple of this are kept for good.
        others: whatever else has `state_dict()` and `load_state_dict()`, each by a name of your choice.

    Example:
        ```python
        def train(comms):
            model = mp.DataParallel(build_model(), comms)
            optimizer = torch.optim.AdamW(model.parameters())
            sampler = mp.ShardedSampler(samples, batch=32, comms=comms)
            with mp.Checkpointer("checkpoints", comms, model, optimizer, sampler=sampler) as checkpointer:
                step = checkpointer.restore()  # 0 if there is nothing yet
                while step < 1000:
                    for indices in sampler:
                        ...
                        step += 1
                        if step % 50 == 0:
                            checkpointer.save(step)

        mp.launch(train, ranks=4, restarts=10)
        ```
    """

    def __init__(
        self,
        folder: Path | str,
        comms: Comms,
        model: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        **others: HasState,
    ) -> None:
        check_keep(keep, keep_every)
        _require_states(others)
        self.folder = Path(folder).absolute()
        self._comms = comms
        self._ranks = Ranks(comms)
        self._keep, self._keep_every = keep, keep_every
        model = compiled_of(model)
        self._layout = layout_of(comms, model, optimizer)
        self._groups = self._layout.groups()
        self._optimizer = optimizer
        # Of a plain module, nobody has made the ranks' weights the same.
        self._is_plain = not isinstance(model, DataParallel | Pipeline)
        self._loss_scale = None if self._is_plain else model.loss_scale
        self._others = others | _own_buffers(model, comms)
        self._step = 0  # of what is saved
        self._finite = True  # whether the weights are that were saved last
        self._failure: str | None = None  # of the last save that is known to have failed
        self._copied: int | None = None  # step of the newest copy in memory; all of these are rank 0's
        self._writing: int | None = None  # that the writer is told to write
        self._written: int | None = None  # that is on the disk
        self._lock: FolderLock | None = None
        self._copies: Copies | None = None
        self._closed = False
        _on_first(comms, self._take_folder)
        try:
            checkpoint.require_storable(**self._contents())
            self._copies = Copies.into_memory(comms, self._contents)
            if self._copies is not None:
                self._copies.if_all_fails(self.folder, keep, keep_every, "the same script")
        except BaseException:
            self._release()
            raise
        comms.before_finishing.append(self._leave)
        atexit.register(self._leave)  # the writer ends with this process

    # ── going on ────────────────────────────────────────────────────────────────────────────────────────────────

    def restore(self) -> int:
        """Load the newest state that all ranks can read, and return its step; 0 if there is none.

        It may come from another number of ranks, or from another layout of the same model. Call it when all is built,
        just before the loop: random numbers go on from here, too.

        At the same number of ranks all goes on bit for bit. At another: what the ranks had each for itself stays as it
        was built (a warning names it); random numbers that were the same on all ranks are so again, and otherwise a
        rank goes on with those that the rank of its number had.

        Raises:
            CheckpointError: what is there does not fit the model, or all of it is damaged; the same on every rank.
        """
        self._require_open("restore")
        found = None if self._copies is None else self._copies.newest_state(self.folder)
        if found is None:
            found = self._newest_on_disk()
        if found is None:
            return 0
        self._comms.flight.at_step(found.step)
        self._load(found)
        return found.step

    def _newest_on_disk(self) -> Checkpoint | None:
        """The newest checkpoint that is not damaged, and whose weights are finite; None if there are none at all."""
        listed = self._ranks.do(lambda: [(name, is_finite(self.folder / name)) for name in newest_first(self.folder)])[
            0
        ]
        reasons = []
        for name, finite in listed:
            try:
                if not finite:
                    raise CheckpointError(f"{self.folder / name} has weights that are not finite")
                found = checkpoint.load(self.folder / name, self._comms)
            except CheckpointError as error:
                reasons.append(str(error))
            else:
                for reason in reasons:
                    self._warn(f"{reason}; going on from {name} instead")
                return found
        if reasons:
            listing = "".join(f"\n  {reason}" for reason in reasons)
            raise CheckpointError(f"no checkpoint in {self.folder} can be used; remove them to begin anew{listing}")
        return None

    def _load(self, found: Checkpoint) -> None:
        if "groups" not in found.state:
            raise CheckpointError(
                f"step {found.step} in {self.folder} is not a checkpoint of mp.Checkpointer; choose another folder"
            )
        everywhere = {name for names in gather_json([*self._layout.shapes()], self._comms) for name in names}
        self._ranks.do(lambda: self._require_fit(found, everywhere))
        optimizer = {} if self._optimizer is None else _renumbered(found, self._groups)
        fitting = Checkpoint(found.step, found.state, found.stored_model, optimizer, found.files, found.stored_by_rank)
        try:
            self._layout.load(fitting)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"step {found.step} in {self.folder} does not fit: {error}") from error
        if self._loss_scale is not None and found.state["loss_scale"] is not None:
            self._loss_scale.load_state_dict(found.state["loss_scale"])
        self._load_others(found.stored_by_rank.get("others", {}), len(found.state["random"]))
        _go_on_drawing(found.state["random"], self._comms.rank)

    def _require_fit(self, found: Checkpoint, everywhere: set[str]) -> None:
        """Refuse a checkpoint of another model or another optimizer; the first difference is named."""
        where = f"step {found.step} in {self.folder}"
        start = f"{where} does not fit the model:"
        then, mine = found.stored_model, self._layout.shapes()
        if missing := [name for name in everywhere if name not in then]:
            raise CheckpointError(f"{start} it has no {show_some(sorted(missing))}")
        if unknown := [name for name in then if name not in everywhere]:
            raise CheckpointError(f"{start} the model has no {show_some(unknown)}")
        for name, shape in mine.items():
            if then[name].shape != shape:
                raise CheckpointError(f"{start} {name} is of shape {[*then[name].shape]} there, and {[*shape]} here")
        if self._optimizer is None:
            return
        kind = found.state["optimizer"]
        if kind != _kind_of(self._optimizer):
            raise CheckpointError(
                f"{where} has the state of {kind or 'no optimizer'}, and this is {_kind_of(self._optimizer)}"
            )
        _renumbered(found, self._groups, where)

    def _load_others(self, stored: Mapping[str, Any], ranks: int) -> None:
        for name, one in self._others.items():
            if name not in stored:
                if name != _OWN_BUFFERS:
                    self._warn(f"{name} is not in the checkpoint, and begins anew")
                continue
            if "all" in stored[name]:
                one.load_state_dict(read_whole(stored[name]["all"]))
            elif ranks == self._comms.world_size:
                one.load_state_dict(read_whole(stored[name][f"rank_{self._comms.rank}"]))
            else:
                self._warn(
                    f"{name} was not the same on all of {ranks} ranks, and there are {self._comms.world_size} now: it "
                    "stays as it was built"
                )
        for name in stored.keys() - self._others.keys() - {_OWN_BUFFERS}:
            self._warn(f"{name} is in the checkpoint, and was not given to this Checkpointer: nothing goes on with it")

    # ── saving ──────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, step: int, *, wait: bool = False) -> None:
        """Save the state after so many steps; every rank calls it.

        The loop waits until the state is copied into memory; a process of its own writes it. If that process is still
        busy with an earlier state, the copy waits for it, and a later one takes its place (but for those of
        `keep_every`). A save that fails is a warning on rank 0, and the next one is another try.

        Without room in memory for two copies, and on several machines, the loop waits for the disk.

        Args:
            step: how many steps are done.
            wait: return when the checkpoint is on the disk.
        """
        self._require_open("save")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise UsageError(f"save: step={step!r}: give the number of steps that are done, from 0")
        self._step = step
        self._comms.flight.at_step(step)
        try:
            if not self._copy():
                checkpoint.save(self.folder, **self._contents(), keep=self._keep, keep_every=self._keep_every)
                self._succeeded()
            elif self._comms.rank == 0:
                self._hand_over(wait or (self._keep_every is not None and step % self._keep_every == 0), wait)
        except CheckpointError as error:
            self._failed(str(error))
        if wait:
            gather_json(None, self._comms)  # rank 0 has waited

    def _copy(self) -> bool:
        """Copy the state into memory; if that is not possible, there are no more copies from now on."""
        if self._copies is None:
            return False
        try:
            self._copies.copy()
        except CheckpointError as error:
            self._copies.give_up()
            self._copies = None
            self._warn(f"{error}; saves hold up the loop from now on until they are on the disk")
            return False
        self._copied = self._step
        return True

    def _hand_over(self, now: bool, until_written: bool) -> None:
        """On rank 0: let the writer have the newest copy, if it is idle."""
        assert self._copies is not None
        if now:
            self._copies.writer.wait()
        self._hear()
        if self._copies.writer.finished():
            self._copies.write(self.folder, self._keep, self._keep_every)
            self._writing = self._copied
        if until_written:
            self._copies.writer.wait()
            self._hear()

    def _hear(self) -> None:
        """Learn, on rank 0, what became of the state that was handed over last."""
        assert self._copies is not None
        if (failure := self._copies.writer.take_failure()) is not None:
            self._writing = None
            self._failed(failure)
        elif self._writing is not None and self._copies.writer.finished():
            self._written, self._writing = self._writing, None
            self._succeeded()

    def _failed(self, error: str) -> None:
        if self._failure is None:
            self._warn(f"{error}; training goes on, and the next save is another try")
        self._failure = error

    def _succeeded(self) -> None:
        self._failure = None

    def _contents(self) -> dict[str, Any]:
        """What `checkpoint.save` and `checkpoint.copy` are given; every rank must call it."""
        layout = self._layout
        contents = layout.contents()
        if self._is_plain and (difference := find_difference(contents["model"], self._comms)) is not None:
            raise CheckpointError(
                f"the weights of {difference} are not those of the other ranks, and one model is saved for all: "
                "mp.DataParallel keeps them the same"
            )
        states: dict[str, Any] = {}

        def describe() -> dict[str, Any]:
            states.update({name: one.state_dict() for name, one in self._others.items()})
            return {
                "random": random_state(),
                "not finite": not_finite(layout.named_parameters()),
                "states": {name: _digest(name, state) for name, state in states.items()},
            }

        everyones = self._ranks.do(describe)
        self._note_finite([one["not finite"] for one in everyones])
        others = {}
        for name, state in states.items():
            same = len({one["states"][name] for one in everyones}) == 1
            others[name] = {"all" if same else f"rank_{self._comms.rank}": state}
        return contents | {
            "step": self._step,
            "comms": self._comms,
            "finite": self._finite,
            "by_rank": contents["by_rank"] | {"others": others},
            "state": {
                "random": [one["random"] for one in everyones],
                "groups": self._groups,
                "optimizer": None if self._optimizer is None else _kind_of(self._optimizer),
                "loss_scale": None if self._loss_scale is None else self._loss_scale.state_dict(),
            },
        }

    def _note_finite(self, everyones: Sequence[Sequence[str]]) -> None:
        guilty = [(rank, names) for rank, names in enumerate(everyones) if names]
        if guilty and self._finite:
            rank, names = guilty[0]
            self._warn(
                f"after step {self._step} weights are not finite ({show_some(names)} on rank {rank}): they are saved, "
                "earlier checkpoints are kept, and nothing will go on from these"
            )
        self._finite = not guilty

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Return when the last save is on the disk, and let others have the folder; every rank calls it.

        Raises:
            CheckpointError: it could not be brought to the disk; the same on every rank.
        """
        if self._closed:
            return
        try:
            self._ranks.do(self._settle)
        finally:
            self._release()

    def _settle(self) -> None:
        """Bring the newest copy to the disk; what failed is tried once more."""
        if self._copies is None:
            if self._failure is not None:
                raise CheckpointError(self._failure)
            return
        if self._comms.rank != 0:
            return
        self._copies.writer.wait()
        self._hear()
        for _ in range(2):
            if self._written == self._copied:
                return
            self._copies.write(self.folder, self._keep, self._keep_every)
            self._writing = self._copied
            self._copies.writer.wait()
            self._failure = self._copies.writer.take_failure()
            if self._failure is None:
                self._written = self._copied
        if self._failure is not None:
            raise CheckpointError(self._failure)

    def _leave(self) -> None:
        """Without the other ranks, which may be gone: bring to the disk what there is, and say what failed."""
        if self._closed:
            return
        try:
            self._settle()
        except (MicroparallelError, OSError) as error:
            self._warn(str(error))
        finally:
            self._release()

    def _release(self) -> None:
        self._closed = True
        if self._copies is not None:
            self._copies.close()
        if self._lock is not None:
            self._lock.release()
        atexit.unregister(self._leave)
        if self._leave in self._comms.before_finishing:
            self._comms.before_finishing.remove(self._leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()

    # ── small things ────────────────────────────────────────────────────────────────────────────────────────────

    def _take_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder / "lock", str(self.folder))
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be used: {error.strerror or error}; choose a folder that you may write to"
            ) from error

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise UsageError(f"{call}: this Checkpointer is closed; make a new one")

    def _warn(self, text: str) -> None:
        if self._comms.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _on_first(comms: Comms, action: Any) -> None:
    """Do it on rank 0; what it refuses, every rank refuses."""
    refusal = None
    if comms.rank == 0:
        try:
            action()
        except ConfigError as error:
            refusal = str(error)
    if (told := gather_json(refusal, comms)[0]) is not None:
        raise ConfigError(told)


def _require_states(others: Mapping[str, Any]) -> None:
    for name, one in others.items():
        if not isinstance(one, HasState):
            raise UsageError(
                f"{name}={one!r}: a {type(one).__name__} has no state_dict() and load_state_dict(); wrap it in an "
                "object that has, or leave it out"
            )


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class; of one that shares its state out, that of the optimizer inside."""
    return getattr(optimizer, "_class", type(optimizer)).__name__


def _renumbered(found: Checkpoint, now: list[list[str]], where: str = "") -> dict[str, Any]:
    """The optimizer's state by the numbers that the parameters have now; they had others in another order."""
    then: list[list[str]] = found.state["groups"]
    # Weights with several names are stored once; which name is the first depends on the layout.
    old, new = ([[found.stored_model[name].name for name in group] for group in groups] for groups in (then, now))
    pairs: Iterable[tuple[list[str], list[str]]] = itertools.zip_longest(old, new, fillvalue=[])
    for number, (one, other) in enumerate(pairs):
        if different := sorted({*one} ^ {*other}):
            names = [name.removeprefix("model.") for name in different]
            raise CheckpointError(
                f"{where} does not fit the optimizer: group {number} had {len(one)} parameters, and has "
                f"{len(other)} now; the difference is {show_some(names)}"
            )
    stored = found.stored_optimizer
    place = {name: number for number, name in enumerate(itertools.chain.from_iterable(old))}
    order = [place[name] for name in itertools.chain.from_iterable(new)]
    numbers = itertools.count()
    return {
        "state": {number: stored["state"][before] for number, before in enumerate(order) if before in stored["state"]},
        "param_groups": [
            {**group, "params": [next(numbers) for _ in names]}
            for group, names in zip(stored["param_groups"], new, strict=True)
        ],
    }


def _digest(name: str, state: Any) -> str:
    """A checksum of a state: ranks whose states have the same have the same state."""
    table = TensorTable()
    digest = hashlib.sha256(json.dumps(encode(state, name, table)).encode())
    for key, part in table.parts.items():
        flat = part.tensor.detach().reshape(-1).cpu().contiguous()
        digest.update(f"{key} {flat.dtype} {part.shape}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _go_on_drawing(then: Sequence[dict[str, Any]], rank: int) -> None:
    """Let this rank draw the random numbers that come next: its own, or everybody's where all drew the same."""
    state = random_state()
    for generator in dict.fromkeys(key for one in then for key in one):
        had = [one[generator] for one in then if generator in one]
        if len(had) == len(then) and all(one == had[0] for one in had):
            state[generator] = had[0]
        elif rank < len(then) and generator in then[rank]:
            state[generator] = then[rank][generator]
    restore_random_state(state)


class _OwnBuffers:
    """The buffers of a model on one rank, where each rank keeps its own: rank 0's are those of the checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        parameters = {id(one) for one in self._model.parameters()}
        state = self._model.state_dict(keep_vars=True)
        return {
            name: one.detach()
            for name, one in state.items()
            if isinstance(one, torch.Tensor) and id(one) not in parameters
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._model.load_state_dict(state, strict=False)


def _own_buffers(model: Any, comms: Comms) -> dict[str, HasState]:
    """The buffers that ranks do not get from rank 0 before each step."""
    if comms.world_size == 1 or isinstance(model, Pipeline | FullyShardedDataParallel):
        return {}
    if isinstance(model, DataParallel) and model.broadcasts_buffers:
        return {}
    buffers = _OwnBuffers(model)
    return {_OWN_BUFFERS: buffers} if buffers.state_dict() else {}
