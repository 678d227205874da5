"""Hooks: is every gradient averaged, does it leave during backward, and is nothing left over between steps?"""

from __future__ import annotations

from typing import Any

from microparallel.learn.exam import Exam
from microparallel.learn.graders import _during_backward as during
from microparallel.learn.graders import _passes as passes
from microparallel.learn.graders._common_dp import combined, require_gradients
from microparallel.learn.graders._passes import Pass
from microparallel.learn.verdict import Wrong
from microparallel.learn.words import Suspect, flat, require_equal


def check(exam: Exam) -> None:
    """One step; two; without hooks; a frozen parameter and more ranks."""
    with exam.step("every hook averages the gradient it was called for"):
        watched = exam.run(_watch, 2, "plain", 2, allowed=("all_reduce",))
        for rank, mine in enumerate(watched):
            _require_own_gradient(mine[0], rank)
    with exam.step("all-reduces begin during backward, and are waited for in finish()") as notes:
        for rank, mine in enumerate(watched):
            _require_overlap(mine[0], rank)
        notes.append(passes.achieved(watched[0][0]))
    with exam.step("the gradients are those of one process, in two steps"):
        _require_steps(watched, "plain")
    with exam.step("after remove() the hooks are gone"):
        for mine in watched:
            passes.require_removed(mine[-1])
    with exam.step("three ranks, and a parameter that is frozen"):
        more = exam.run(_watch, 3, "frozen", 2, allowed=("all_reduce",))
        _require_steps(more, "frozen")


def _watch(learner: Any, comms: Any, kind: str, steps: int) -> list[Pass]:
    return during.watch(learner, comms, kind, steps, lambda model: learner.GradientHooks(model, comms))


def _require_own_gradient(one: Pass, rank: int) -> None:
    if not one.reduces:
        raise Wrong(
            f"rank {rank} still holds its own gradient: nothing was averaged, since no hook began an all-reduce"
        )
    passes.require_hooks_fit(one)


def _require_during(one: Pass) -> None:
    if "all_reduce" not in one.during:
        raise Wrong(
            "the first all-reduce begins after backward is over: then nothing travels while it computes; start each "
            "one in its hook"
        )


def _require_overlap(one: Pass, rank: int) -> None:
    _require_during(one)
    passes.require_asynchronous(one)
    passes.require_waited(one, rank)
    readies = [event.removeprefix("ready ") for event in one.events if event.startswith("ready ")]
    reduced = [reduce.gradient_of for reduce in one.reduces]
    missing = [name for name in readies if name not in reduced]
    if missing and all(reduced):
        raise Wrong(f"rank {rank}: nobody averages the gradient of {', '.join(missing)}: every parameter needs a hook")


def _require_steps(watched: list[list[Pass]], kind: str) -> None:
    steps = len(watched[0]) - 1
    for number, right in enumerate(during.averages(kind, len(watched), steps), 1):
        for rank, mine in enumerate(watched):
            one = mine[number - 1]
            passes.require_waited(one, rank)
            passes.require_old_requests_gone(one, number)
            found = flat(one.gradients.values())
            require_gradients(list(one.gradients.values()), list(one.gradients), f"step {number}: rank {rank}")
            require_equal(found, flat(right.mean), f"step {number}: rank {rank}'s gradient", _suspects(right, rank))


def _suspects(right: during.Averages, rank: int) -> list[Suspect]:
    ranks = len(right.own)
    table = {
        f"rank {rank} still holds its own gradient: nothing was averaged": right.own[rank],
        'this is the sum of the ranks\' gradients: divide it by the world size, or use op="mean"': (
            combined(right.own, [1.0] * ranks)
        ),
        'this was divided twice by the world size: op="mean" has done it already': combined([right.mean], [1 / ranks]),
    }
    return [Suspect(flat(value), words) for words, value in table.items()]
