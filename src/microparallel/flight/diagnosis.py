"""Why does it hang? The ranks' last words, read side by side, say so.

The rules, the weightiest first:

1. A process that has ended without leaving the world is dead, and a stopped one is stopped, whatever else is true.
2. Ranks of one group make the same collectives in the same order: the first place where they did not is the cause.
3. Ranks that wait for each other in a circle wait for ever.
4. Whoever waits, waits for ranks that have not made their part of the call. Following that to its end finds the ranks
   that wait for nobody: those that have left are missing, those that compute are stragglers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from microparallel.flight.finding import Finding
from microparallel.flight.mismatches import find_mismatches
from microparallel.flight.processes import ENDED_BY_PARENT
from microparallel.flight.record import Snapshot
from microparallel.flight.waits import Wait, find_cycle, find_waits, missing_in
from microparallel.flight.words import age, at_step, last_call, names, ordinal, verb, whereabouts


def diagnose(snapshots: Sequence[Snapshot], patience: float = 1.0) -> list[Finding]:
    """What is wrong with a world, the most important first; nothing if it makes progress.

    Args:
        snapshots: one of each rank.
        patience: how many seconds of waiting are nothing to speak of.
    """
    ranks = {one.rank: one for one in snapshots}
    waits = find_waits(ranks, patience)
    deaths, differences = _deaths(ranks, waits), find_mismatches(ranks)
    mismatches = [one.finding for one in differences if not one.old]
    # A message of another size than was expected ends a rank inside gloo: then the death is what follows.
    aborted = bool(mismatches) and all(ranks[finding.ranks[0]].exit == "SIGABRT" for finding in deaths)
    findings = [*mismatches, *deaths] if aborted else [*deaths, *_stopped(ranks, waits), *mismatches]
    findings += _deadlock(ranks, waits)
    blamed = {rank for finding in findings for rank in finding.ranks}
    if not mismatches:
        findings += _others(ranks, waits, blamed)
    return findings + [one.finding for one in differences if one.old]


def _deaths(ranks: Mapping[int, Snapshot], waits: Mapping[int, Wait]) -> list[Finding]:
    found = []
    for rank, one in sorted(ranks.items(), key=lambda item: (_follows_another(item[1], ranks), item[0])):
        if one.ending == "raised":
            place = one.end_place
            where = f" ({place})" if place is not None else ""
            text = f"death: rank {rank} raised {one.last_words}{where}{at_step(one)}"
        elif _is_dead(one):
            how = one.last_words or one.exit or "killed, or it crashed"
            last = one.current or one.last
            place = one.end_place or (last.place if last is not None else None)
            text = f"death: rank {rank} died ({how}){at_step(one)}; {_where_it_was(one)}"
        else:
            continue
        found.append(Finding("death", (rank,), place, text + _who_waits(rank, ranks, waits)))
    return found


def _follows_another(one: Snapshot, ranks: Mapping[int, Snapshot]) -> bool:
    """Whether a rank was waiting for one that died: whoever starts ranks ends them all when the first has died."""
    missing = missing_in(one.current, one.rank, ranks) if one.current is not None else ()
    return any(_is_dead(ranks[other]) for other in missing if other in ranks)


def _is_dead(one: Snapshot) -> bool:
    if one.exit == ENDED_BY_PARENT:
        return False
    if one.ending == "exited" or (one.state == "ended" and one.ending == "running"):
        return True
    return one.ending in ("finished", "closed") and one.exit not in ("", "exit code 0")


def _where_it_was(one: Snapshot) -> str:
    current = one.current
    if current is not None:
        return f"it was in {current}"
    return f"it was doing {one.doing}; {last_call(one)}" if one.doing else last_call(one)


def _stopped(ranks: Mapping[int, Snapshot], waits: Mapping[int, Wait]) -> list[Finding]:
    found = []
    for rank, one in ranks.items():
        if one.state == "stopped":
            last = one.current or one.last
            place = last.place if last is not None else None
            text = f"stopped: rank {rank} is stopped (SIGSTOP, or a debugger){at_step(one)}; {_where_it_was(one)}"
            found.append(Finding("stopped", (rank,), place, text + _who_waits(rank, ranks, waits)))
    return found


def _deadlock(ranks: Mapping[int, Snapshot], waits: Mapping[int, Wait]) -> list[Finding]:
    cycle = find_cycle(waits)
    if not cycle:
        return []
    circle = " → ".join(map(str, (*cycle, cycle[0])))
    parts = [
        f"rank {rank} {'waits ' if number == 0 else ''}in {waits[rank].record} "
        f"since {age(waits[rank].record, ranks[rank].now)}"
        for number, rank in enumerate(cycle)
    ]
    outside = _follow(cycle, waits)
    rest = f"; {names(outside)} {verb(outside, 'waits', 'wait')} for them" if outside else ""
    return [
        Finding("deadlock", cycle, waits[cycle[0]].record.place, f"deadlock: {circle}: {', '.join(parts)}{rest}"),
    ]


def _others(ranks: Mapping[int, Snapshot], waits: Mapping[int, Wait], blamed: set[int]) -> list[Finding]:
    """The ranks at the end of the chains of those who wait."""
    found: list[Finding] = []
    roots = sorted({other for wait in waits.values() for other in wait.missing} - set(waits) - blamed)
    weak = [rank for rank, wait in waits.items() if wait.weak and rank not in blamed]
    for rank in roots or [rank for rank in weak if any(rank in wait.missing for wait in waits.values())]:
        one = ranks.get(rank)
        if one is not None:
            found.append(_missing(one, ranks, waits) or _straggler(one, ranks, waits))
    if not found and not blamed and (stuck := [wait for wait in waits.values() if not wait.missing and not wait.weak]):
        found.append(_transfer(stuck, ranks))
    return found


def _missing(one: Snapshot, ranks: Mapping[int, Snapshot], waits: Mapping[int, Wait]) -> Finding | None:
    waiting = [wait for wait in waits.values() if one.rank in wait.missing]
    if one.ending in ("finished", "closed"):
        words = "has returned from its function" if one.ending == "finished" else "has left the world"
    elif not one.pid:
        words = "has left no flight file: it never came, or is on another machine"
    elif made := _calls_since(min(wait.record.since for wait in waiting), one):
        words = f"has gone on without that call, and made {made} others since"
    else:
        return None
    last = one.last
    place = last.place if last is not None else None
    return Finding(
        "missing rank",
        (one.rank,),
        place,
        f"missing rank: rank {one.rank} {words}; {last_call(one)}{_who_waits(one.rank, ranks, waits)}",
    )


def _calls_since(begin: float, one: Snapshot) -> int:
    """How many calls a rank has made since others began to wait, if it is still making some; else 0."""
    later = [record.begin for record in one.records if record.begin > begin]
    busy = len(later) >= 3 and max(later) > (begin + one.now) / 2
    return len(later) if busy else 0


def _straggler(one: Snapshot, ranks: Mapping[int, Snapshot], waits: Mapping[int, Wait]) -> Finding:
    last = one.last
    place = one.here or (last.place if last is not None else None)
    text = f"straggler: rank {one.rank} is in no call: it is {whereabouts(one)}{at_step(one)}; {last_call(one)}"
    return Finding("straggler", (one.rank,), place, text + _who_waits(one.rank, ranks, waits))


def _transfer(stuck: Sequence[Wait], ranks: Mapping[int, Snapshot]) -> Finding:
    oldest = min(stuck, key=lambda wait: wait.record.since)
    inside = tuple(sorted(wait.rank for wait in stuck))
    duration = age(oldest.record, ranks[oldest.rank].now)
    return Finding(
        "transfer",
        inside,
        oldest.record.place,
        f"transfer: {names(inside)} {verb(inside, 'is', 'are')} in {oldest.record} since {duration}, "
        "and everybody has made the call: the network, or the machine, is slow",
    )


def _who_waits(rank: int, ranks: Mapping[int, Snapshot], waits: Mapping[int, Wait]) -> str:
    """Those who wait for a rank, by call, and those who wait for them; begins with a semicolon."""
    groups: dict[str, list[Wait]] = defaultdict(list)
    for wait in waits.values():
        if rank in wait.missing or _is_inside(rank, wait, ranks):
            groups[str(wait.record)].append(wait)
    parts = []
    for call, waiting in groups.items():
        who = [wait.rank for wait in waiting]
        first = min(waiting, key=lambda wait: wait.record.since)
        number = f", the {ordinal(first.record.sequence)} of the group," if first.record.kind == "collective" else ""
        duration = age(first.record, ranks[first.rank].now)
        parts.append(f"{names(who)} {verb(who, 'waits', 'wait')} for it in {call}{number} since {duration}")
    direct = [wait.rank for waiting in groups.values() for wait in waiting]
    behind = _follow((rank, *direct), waits)
    if behind:
        parts.append(f"{names(behind)} {verb(behind, 'waits', 'wait')} for {names(direct)}")
    return "".join(f"; {part}" for part in parts)


def _is_inside(rank: int, wait: Wait, ranks: Mapping[int, Snapshot]) -> bool:
    """Whether a rank that can do no more is in the very call that is waited for."""
    one = ranks[rank]
    gone = one.state in ("stopped", "ended") or one.ending not in ("running", "finished")
    return gone and not wait.missing and rank in wait.record.group


def _follow(ranks: Sequence[int], waits: Mapping[int, Wait]) -> list[int]:
    """Those who wait for these ranks, or for ranks that do."""
    reached = set(ranks)
    before = -1
    while before != len(reached):
        before = len(reached)
        reached |= {wait.rank for wait in waits.values() if reached & set(wait.missing)}
    return sorted(reached - set(ranks))


def in_words(findings: Sequence[Finding], most: int = 4) -> str:
    """The findings, a line each; of many, the most important."""
    lines = [finding.text for finding in findings[:most]]
    if len(findings) > most:
        lines.append(f"and {len(findings) - most} more; see `microparallel why`")
    return "\n".join(lines)
