"""Flights of runs that hung: is the right rank named, for the right reason, in runs that the file does not show?"""

from __future__ import annotations

from typing import Any

from microparallel.learn.exam import Exam
from microparallel.learn.graders._flights import HungRun, hung_runs
from microparallel.learn.requirements import listed, require_type
from microparallel.learn.verdict import Wrong
from microparallel.observe.flight_file import Snapshot

_REASONS = ("still computing", "missing call", "dead", "other order", "other shape")
_LAST = 2  # calls of a rank that are shown


def check(exam: Exam) -> None:
    """One reason after another; and all runs with other numbers for their ranks."""
    for reason in _REASONS:
        runs = [run for run in hung_runs() if run.reason == reason]
        with exam.step(f"{reason}: {len(runs)} runs"):
            _require_right(exam, runs)
    with exam.step("the same runs, if the ranks had other numbers") as notes:
        rotated = [
            run.renumbered([*range(turn, ranks), *range(turn)])
            for run in hung_runs()
            for ranks in [len(run.flights)]
            for turn in range(1, ranks)
        ]
        _require_right(exam, rotated)
        notes.append(f"{len(rotated)} runs")


def _read(learner: Any, _: Any, runs: list[HungRun]) -> None:
    what = "read_a_hang"
    for run in runs:
        try:
            returned = learner.read_a_hang(list(run.flights))
        except NotImplementedError:
            raise
        except Exception:
            print("the flights at which it stopped:", *_drawn(run), sep="\n")
            raise
        found = require_type(returned, (tuple, list), what, "a pair (rank, reason)")
        if len(found) != 2:
            raise Wrong(f"{what} shall return a pair (rank, reason), and returned {found!r:.80}")
        rank, reason = found
        if reason not in _REASONS:
            raise Wrong(f"{what} gives {reason!r:.40} as the reason; there are {listed(map(repr, _REASONS))}")
        if (rank, reason) != (run.culprit, run.reason):
            head = f"you blame rank {rank}, {reason!r}; it is rank {run.culprit}, {run.reason!r}"
            raise Wrong("\n".join([f"{head}: {_why(run, rank, reason)}", *(f"  {line}" for line in _drawn(run))]))


def _require_right(exam: Exam, runs: list[HungRun]) -> None:
    exam.run(_read, 1, runs, allowed=())


# ── words ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _why(run: HungRun, rank: object, reason: str) -> str:
    """Why the answer is wrong, for the difference between it and the right one."""
    accused = next((one for one in run.flights if one.rank == rank), None)
    culprit = run.flights[run.culprit]
    if accused is None:
        return f"there is no rank {rank!r:.20}"
    if accused is culprit:
        return _why_reason(run)
    if run.reason.startswith("other"):
        if reason == "dead":
            return (
                f"rank {rank} has died of it. Its process was ended when more bytes came than it had asked for, so "
                "compare the calls before you look for the dead"
            )
        if reason.startswith("other"):
            return (
                f"most ranks make another call in that place than rank {run.culprit} does; rank {rank} is one of them"
            )
        return f"the calls of the ranks differ: rank {run.culprit}'s {culprit.current} is not what most ranks are in"
    if reason.startswith("other"):
        return (
            "the n-th collective of a rank is to be compared with the n-th of the others. A rank that has made fewer "
            "makes no other call, and messages belong to two ranks only"
        )
    if accused.current is not None and accused.state == "running":
        return f"rank {rank} waits itself. Follow the waiting to its end: to a rank that waits for nobody"
    if run.reason == "dead":
        return f"rank {run.culprit}'s process has ended, and all others can only wait for it"
    return f"nobody waits for rank {rank}: of ranks that are in no call, one is to blame that another waits for"


def _why_reason(run: HungRun) -> str:
    """What in the flights says that this is the reason."""
    rank = run.culprit
    words = {
        "other order": f"rank {rank} makes another call than the others (call.name), which comes first in the list",
        "other shape": f"rank {rank} makes the same call as the others (call.name), but with another tensor",
        "dead": f"rank {rank}'s process has ended (one.state), and one.ending says that it had not returned",
        "missing call": f"rank {rank} has returned from its function (one.ending): it will never make the call",
        "still computing": f"rank {rank} runs, and has not returned from its function (one.ending): it may still come",
    }
    return words[run.reason]


def _drawn(run: HungRun) -> list[str]:
    """The flights of a run, a line for each rank."""
    return [f"rank {one.rank}   {_state(one):<12}{_calls(one)}" for one in run.flights]


def _state(one: Snapshot) -> str:
    return one.state if one.ending == "running" else one.ending


def _calls(one: Snapshot) -> str:
    shown = [f"{call.sequence}. {call.text}" for call in one.records[-_LAST:]]
    return "   ".join([*shown, "▒ in it" if one.current is not None else "in no call"])
