"""The training of the exercise, both ranks in one process; and what it would do with something forgotten.

```
true run        1 ─ 2 ─ 3 ─ 4 ─ 5 ─ 6 ─ 7          states[4]: weights, optimizer, schedule, random, order
with a mistake              └─ 5'─ 6'─ 7'           from states[4] without the optimizer, say: are these the learner's?
```
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from microparallel.learn.graders._killing import INPUTS, SAMPLES, Row, table
from microparallel.train.random_state import own_randomness

RANKS, BATCH = 2, 4
State = dict[str, Any]  # of one rank: weights, optimizer, schedule, random, epoch, place
_MEANING = {
    "random": "the state of the random numbers",
    "order": "the place in the epoch",
    "optimizer": "the optimizer's state",
    "schedule": "the learning rate's schedule",
    "weights": "the weights",
}
_CONSEQUENCE = {
    "random": "dropout draws other numbers than it would have drawn. Each rank's torch.get_rng_state() belongs into "
    "the checkpoint",
    "order": "the order of samples begins anew, so some are used twice in an epoch, and others not at all",
    "optimizer": "Adam begins without its moments. optimizer.state_dict() belongs into the checkpoint",
    "schedule": "the learning rate begins where it began at step 1. schedule.state_dict() belongs into the checkpoint",
    "weights": "the model begins anew. model.state_dict() belongs into the checkpoint",
}


class _Rank:
    """One rank, as the exercise's file makes it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 1)).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule = self._new_schedule()
        self.epoch = self.place = 0
        torch.manual_seed(1 + rank)
        self.random = torch.get_rng_state()

    def _new_schedule(self) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 10))

    def state(self) -> State:
        return copy.deepcopy(
            {
                "weights": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "random": self.random,
                "epoch": self.epoch,
                "place": self.place,
            }
        )

    def load(self, state: State, without: Sequence[str] = (), schedule_last: bool = False) -> None:
        state = copy.deepcopy(state)
        if "weights" not in without:
            self.model.load_state_dict(state["weights"])
        if "optimizer" not in without:
            self.optimizer.load_state_dict(state["optimizer"])
        if "schedule" not in without:
            self.schedule.load_state_dict(state["schedule"])
        elif schedule_last:
            self.schedule = self._new_schedule()  # made when the optimizer was there: it sets the rate itself
        if "random" not in without:
            self.random = state["random"]
        if "order" not in without:
            self.epoch, self.place = state["epoch"], state["place"]

    def draw(self) -> tuple[int, ...]:
        if self.place >= SAMPLES:
            self.epoch, self.place = self.epoch + 1, 0
        shuffled = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        mine = self.place + BATCH * self.rank
        self.place += BATCH * RANKS
        return tuple(shuffled[mine : mine + BATCH])

    def backward(self, samples: tuple[int, ...]) -> float:
        inputs, targets = table()
        torch.set_rng_state(self.random)
        self.optimizer.zero_grad()
        loss = (self.model(inputs[[*samples]]) - targets[[*samples]]).square().mean()
        loss.backward()
        self.random = torch.get_rng_state()
        return float(loss.item())


def _step(ranks: Sequence[_Rank], number: int, between: Callable[[], None] = lambda: None) -> list[Row]:
    """One step of all ranks; `between` is called after the backward, before the update."""
    samples = [rank.draw() for rank in ranks]
    rows = [Row(number, mine, rank.backward(mine)) for rank, mine in zip(ranks, samples, strict=True)]
    between()
    for same in zip(*(rank.model.parameters() for rank in ranks), strict=True):
        mean = sum(one.grad for one in same if one.grad is not None) / len(same)
        for one in same:
            one.grad = mean.clone()
    for rank in ranks:
        rank.optimizer.step()
        rank.schedule.step()
    return rows


def _ranks() -> list[_Rank]:
    return [_Rank(rank) for rank in range(RANKS)]


class TrueRun:
    """The undisturbed training: its rows, and the state of each rank after each step."""

    def __init__(self, steps: int) -> None:
        self.rows: list[list[Row]] = [[] for _ in range(RANKS)]
        self.before_update: list[list[State]] = [[]]  # of each step: after its backward
        with own_randomness():
            ranks = _ranks()
            self.states = [[rank.state() for rank in ranks]]
            for number in range(1, steps + 1):
                rows = _step(ranks, number, lambda: self.before_update.append([rank.state() for rank in ranks]))
                for mine, row in zip(self.rows, rows, strict=True):
                    mine.append(row)
                self.states.append([rank.state() for rank in ranks])

    def explanation(self, found: Sequence[Sequence[Row]], saved: int) -> str | None:
        """The mistake after which ranks that should go on from step `saved` do what was found; None if unknown."""
        with own_randomness():
            for words, ranks, first in self._suspects(saved):
                if all(_same(mine, rows) for mine, rows in zip(found, _rows(ranks, first, found), strict=True)):
                    return words
        return None

    def _suspects(self, saved: int) -> Iterator[tuple[str, list[_Rank], int]]:
        """Words, the ranks as the mistake leaves them, and the number of their first step."""
        whole = self.states[saved]
        for missing in itertools.chain(*(itertools.combinations(_MEANING, count) for count in (1, 2, 3, 4, 5))):
            words = _forgotten(missing)
            yield words, self._loaded(whole, missing), saved + 1
            if "schedule" in missing:
                yield words, self._loaded(whole, missing, schedule_last=True), saved + 1
        yield from self._in_another_place(saved)
        yield from self._of_one_rank(saved)
        yield from self._miscounted(saved)

    def _in_another_place(self, saved: int) -> Iterator[tuple[str, list[_Rank], int]]:
        ranks = self._loaded(self.states[saved])
        for rank in ranks:
            rank.place = 0
        anew = "the epoch begins anew: samples that were used before the kill are used again. The place in the epoch "
        yield anew + "belongs into the checkpoint", ranks, saved + 1
        ranks = self._loaded(self.states[saved])
        for rank in ranks:
            rank.epoch = 0
        words = "it is at the right place, but in the order of the first epoch: the number of the epoch is forgotten"
        yield words, ranks, saved + 1

    def _of_one_rank(self, saved: int) -> Iterator[tuple[str, list[_Rank], int]]:
        ranks = self._loaded(self.states[saved])
        for rank in ranks:
            rank.random = ranks[0].random.clone()
        words = (
            "all ranks go on with the random numbers of rank 0: each rank has a state of its own, and all of them "
            "belong into the checkpoint"
        )
        yield words, ranks, saved + 1
        for missing in itertools.chain(*(itertools.combinations(_MEANING, count) for count in (5, 4, 3, 2, 1))):
            ranks = self._loaded(self.states[saved])
            ranks[1] = self._loaded(self.states[saved], missing)[1]
            what = " and ".join(_MEANING[name] for name in missing if name != "order") or _MEANING["order"]
            words = f"only rank 0 loads {what}: rank 1 goes on with what it has when it begins, and the ranks differ"
            yield words, ranks, saved + 1

    def _miscounted(self, saved: int) -> Iterator[tuple[str, list[_Rank], int]]:
        if saved == 0:
            return
        again = (
            f"step {saved} is counted twice: its update is in the weights of the checkpoint, and then a step {saved} "
            f"is done once more. Go on with step {saved + 1}"
        )
        yield again, self._loaded(self.states[saved]), saved
        ranks = self._loaded(self.states[saved])
        for rank in ranks:
            rank.epoch, rank.place = (self.states[saved - 1][0][name] for name in ("epoch", "place"))
        yield again, ranks, saved
        yield (
            f"step {saved + 1} is left out: after the kill it begins with {saved + 2}",
            self._loaded(self.states[saved]),
            saved + 2,
        )
        early = (
            f"the checkpoint is that of step {saved} before optimizer.step(), and counts this step as done: its update "
            "is lost"
        )
        yield early, self._loaded(self.before_update[saved]), saved + 1
        ranks = self._loaded(self.before_update[saved])
        for rank, state in zip(ranks, self.states[saved], strict=True):
            rank.schedule.load_state_dict(copy.deepcopy(state["schedule"]))
        yield early, ranks, saved + 1
        behind = [
            state | {name: before[name] for name in ("schedule",)} | {"optimizer": _with_rate_of(state, before)}
            for state, before in zip(self.states[saved], self.states[saved - 1], strict=True)
        ]
        words = "the schedule is one step behind: the checkpoint is taken between optimizer.step() and schedule.step()"
        yield words, self._loaded(behind), saved + 1

    def _loaded(self, states: Sequence[State], without: Sequence[str] = (), schedule_last: bool = False) -> list[_Rank]:
        ranks = _ranks()
        for rank, state in zip(ranks, states, strict=True):
            rank.load(state, without, schedule_last)
        return ranks


def _with_rate_of(state: State, before: State) -> Any:
    optimizer = copy.deepcopy(state["optimizer"])
    for group, old in zip(optimizer["param_groups"], before["optimizer"]["param_groups"], strict=True):
        group["lr"] = old["lr"]
    return optimizer


def _forgotten(missing: Sequence[str]) -> str:
    if len(missing) == len(_MEANING):
        return "nothing but the number of the step is restored: it goes on with a new model. Load the checkpoint"
    what = " and ".join(_MEANING[name] for name in missing)
    verb = "is" if len(missing) == 1 and missing[0] != "weights" else "are"
    return f"{what} {verb} forgotten: {'; '.join(_CONSEQUENCE[name] for name in missing)}"


def _rows(ranks: Sequence[_Rank], first: int, found: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """As many rows as were found; no more of them are computed when one is another."""
    rows: list[list[Row]] = [[] for _ in ranks]
    for number in range(max(map(len, found))):
        for mine, row in zip(rows, _step(ranks, first + number), strict=True):
            mine.append(row)
        if not all(_same(theirs[: number + 1], mine) for theirs, mine in zip(found, rows, strict=True)):
            break
    return rows


def _same(found: Sequence[Row], rows: Sequence[Row]) -> bool:
    """Whether the rows that were found are the first of these, but for rounding."""
    return len(found) <= len(rows) and all(
        one.step == other.step and one.samples == other.samples and math.isclose(one.loss, other.loss, rel_tol=1e-7)
        for one, other in zip(found, rows, strict=False)
    )
