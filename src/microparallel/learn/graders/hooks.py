"""Hooks: is every gradient averaged, does it leave during backward, and is nothing left over between steps?"""

from __future__ import annotations

from typing import Any

from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders import _during_backward as during
from microparallel.learn.graders._common import require_no_gradient_lost
from microparallel.learn.graders._during_backward import Pass
from microparallel.learn.requirements import flat, require_equal, suspects
from microparallel.learn.verdict import Wrong
from microparallel.program import AllReduce, Bucket
from microparallel.verifier import NeverReduced, verify


def check(exam: Exam) -> None:
    """One step; two; without hooks; a frozen parameter and more ranks."""
    with exam.step("every hook averages the gradient it was called for"):
        watched = exam.run(_watch, 2, "plain", 2, allowed=("all_reduce",))
        for rank, mine in enumerate(watched):
            if not mine[0].reduces:
                raise Wrong(
                    f"rank {rank} still holds its own gradient: nothing was averaged, since no hook began an all-reduce"
                )
            during.require_hooks_fit(mine[0])
    with exam.step("all-reduces begin during backward, and are waited for in finish()") as notes:
        for rank, mine in enumerate(watched):
            _require_overlap(mine[0], rank)
        _require_all_averaged([mine[0] for mine in watched])
        notes.append(during.achieved(watched[0][0]))
    with exam.step("the gradients are those of one process, in two steps"):
        _require_steps(watched, "plain")
    with exam.step("after remove() the hooks are gone"):
        for mine in watched:
            if left := len(mine[-1].reduces):
                raise Wrong(
                    f"after remove() a backward still began {left} all-reduces: keep the handle of every hook, and "
                    "remove each of them"
                )
    with exam.step("three ranks, and a parameter that is frozen"):
        more = exam.run(_watch, 3, "frozen", 2, allowed=("all_reduce",))
        _require_steps(more, "frozen")


def _watch(learner: Any, comms: Any, kind: str, steps: int) -> list[Pass]:
    return during.watch(comms, kind, steps, lambda model: learner.GradientHooks(model, comms))


def _require_overlap(one: Pass, rank: int) -> None:
    if one.begun[0] >= one.over:
        raise Wrong(
            "the first all-reduce begins after backward is over: then nothing travels while it computes; start each "
            "one in its hook"
        )
    during.require_asynchronous(one)
    during.require_waited(one, rank)


def _require_all_averaged(passes: list[Pass]) -> None:
    """Every parameter is a bucket of its own, and an all-reduce takes the one that was ready last, if not another."""
    groups = [[name] for name in passes[0].names]

    def bucket(one: Pass, number: int) -> int:
        return one.names.index(one.reduces[number].gradient_of or one.came(one.begun[number])[-1])

    program = during.program_of(passes, groups, bucket)
    try:
        verify(program, completed=False)
    except NeverReduced as error:
        averaged = {op.value for op in program.ranks[error.rank] if isinstance(op, AllReduce)}
        missing = [name for name in passes[error.rank].came() if Bucket(groups.index([name])) not in averaged]
        raise Wrong(
            f"rank {error.rank}: nobody averages the gradient of {', '.join(missing)}: every parameter needs a hook"
        ) from None
    except ProgramError as error:
        raise Wrong(str(error)) from None


def _require_steps(watched: list[list[Pass]], kind: str) -> None:
    steps = len(watched[0]) - 1
    for number, right in enumerate(during.averages(kind, len(watched), steps), 1):
        for rank, mine in enumerate(watched):
            one = mine[number - 1]
            during.require_waited(one, rank)
            during.require_old_requests_gone(one, number)
            found = flat(one.gradients.values())
            require_no_gradient_lost(list(one.gradients.values()), list(one.gradients), f"step {number}: rank {rank}")
            mistakes = {
                f"rank {rank} still holds its own gradient: nothing was averaged": right.own[rank],
                'this is the sum of the ranks\' gradients: divide it by the world size, or use op="mean"': right.sum,
                'this was divided twice by the world size: op="mean" has done it already': right.divided_twice,
            }
            require_equal(found, flat(right.mean), f"step {number}: rank {rank}'s gradient", suspects(mistakes))
