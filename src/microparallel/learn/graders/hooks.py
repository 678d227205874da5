"""Hooks: is every gradient averaged, does it leave during backward, and do ranks that differ stay in step?"""

from __future__ import annotations

from typing import Any

from torch import nn

from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam, Stuck
from microparallel.learn.graders import _during_backward as during
from microparallel.learn.graders._common import require_no_gradient_lost
from microparallel.learn.graders._during_backward import Pass
from microparallel.learn.log import Row, calls, waited_for
from microparallel.learn.requirements import flat, require_equal, suspects
from microparallel.learn.verdict import Wrong
from microparallel.program import AllReduce, Bucket
from microparallel.verifier import NeverReduced, verify

_ALLOWED = ("all_reduce",)


def check(exam: Exam) -> None:
    """One step; two; without hooks; a frozen parameter and more ranks; ranks whose gradients are not alike."""
    with exam.step("every hook averages the gradient it was called for"):
        watched = exam.run(_watch, 2, "plain", 2, allowed=_ALLOWED)
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
        more = exam.run(_watch, 3, "frozen", 2, allowed=_ALLOWED)
        _require_steps(more, "frozen")
    with exam.step("on one rank the gradients come in another order, and all ranks all-reduce in the same order"):
        turned = _run_alike(exam, "turned", 1)
        _require_steps(turned, "turned")
    with exam.step("one rank skips a layer: no rank hangs, and the missing gradients count as zero"):
        _require_steps(_run_alike(exam, "skipped", 1), "skipped")
        _require_steps(_run_alike(exam, "skipped", 3), "skipped")


def _watch(learner: Any, comms: Any, kind: str, steps: int, removes: bool = True) -> list[Pass]:
    def attach(model: nn.Module) -> Any:
        hooks = learner.GradientHooks
        if on_gradient := getattr(hooks, "on_gradient", None):

            def look_first(self: Any, parameter: Any) -> Any:
                during.require_own_parameter(parameter, model, comms.row)
                return on_gradient(self, parameter)

            hooks.on_gradient = look_first  # the learner's module is loaded anew for each rank of each run
        return hooks(model, comms)

    return during.watch(comms, kind, steps, attach, removes=removes)


# ── ranks whose gradients are not alike ─────────────────────────────────────────────────────────────────────────────


def _run_alike(exam: Exam, kind: str, steps: int) -> list[list[Pass]]:
    """Let two ranks do different backwards; refuse ranks that wait for ever, or whose all-reduces do not belong."""
    try:
        watched = exam.run(_watch, 2, kind, steps, False, allowed=_ALLOWED)
    except Stuck as stuck:
        raise Wrong(_hang(stuck, exam.rows)) from None
    for number in range(steps):
        _require_same_order([mine[number] for mine in watched])
    return list(watched)


def _hang(stuck: Stuck, rows: list[Row]) -> str:
    begun = [len(calls(row, *_ALLOWED)) for row in rows]
    wait, fewest = stuck.waits[0], begun.index(min(begun))
    line = waited_for(rows, wait).waits_in
    return (
        f"this hangs: rank {wait.rank} waits (line {line}) for an all-reduce that rank {fewest} never begins\n"
        f"  rank 0 began {begun[0]} all-reduces, and rank 1 {begun[1]}\n"
        "  A rank that skips a layer gets no gradient for it, and torch does not call the hook. The other rank waits "
        "all the same. Begin, in finish(), the all-reduces that are missing, with gradients of zeros"
    )


def _require_same_order(passes: list[Pass]) -> None:
    """Refuse an all-reduce in which two ranks give gradients of different parameters."""
    for place, (one, other) in enumerate(zip(*(mine.reduces for mine in passes), strict=False)):
        first, second = one.gradient_of, other.gradient_of
        if first and second and first != second:
            raise Wrong(
                f"all-reduce number {place} averages the gradient of {first} on rank 0 (line {one.call.line}) and that "
                f"of {second} on rank 1 (line {other.call.line}): the first one that a rank begins meets the first one "
                "of every other rank, whatever is in it. Begin them in an order that all ranks share, whenever the "
                "gradients come"
            )


def _require_overlap(one: Pass, rank: int) -> None:
    if one.begun[0] >= one.over:
        raise Wrong(
            "the first all-reduce begins after backward is over: then nothing travels while it computes; start each "
            "one in its hook"
        )
    during.require_early(one)
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
            f"rank {error.rank}: no hook averages the gradient of {', '.join(missing)}: every parameter needs a hook"
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
                "the mean is over all ranks, also over those that skipped a layer: their gradient counts as zero": (
                    right.of_users
                ),
            }
            require_equal(found, flat(right.mean), f"step {number}: rank {rank}'s gradient", suspects(mistakes))
