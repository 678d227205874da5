"""Why does it hang? Read the flight files of all ranks side by side, and say what is wrong.

The rules, the most important first:

1. A process that has ended without leaving the world is dead, and a stopped one is stopped, whatever else is true.
2. Ranks of one group make the same collectives in the same order: the first call in which they differ is the cause.
3. Ranks that wait for each other in a circle wait for ever.
4. A rank that waits, waits for the ranks that have not made their part of the call. Following that to its end leads to
   the ranks that wait for no other: those that have left are missing, those that compute are stragglers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from microparallel.observe.flight_file import RECORDS, Record, Snapshot
from microparallel.observe.place import Place
from microparallel.observe.processes import ENDED_BY_PARENT
from microparallel.text import show_age, show_ranks

# What a call's text says of its tensors, its reduction and its root.
_CONTENT = re.compile(r"(?P<dtype>\b(?:bool|b?float|u?int|complex)\w*)\[(?P<shape>[^\]]*)\]")
_OP = re.compile(r"op=[^,)]*")
_ROOT = re.compile(r"(?:src|dst)=\d+")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: death, stopped, wrong order, mismatched shape (dtype, op, root, call), deadlock, missing rank, straggler,
            transfer (all ranks are in the same call, and it takes long), or out of sight (ranks of another host).
        ranks: the ranks that caused it.
        place: the line of the user's code, where it is known.
        text: a sentence that begins with the kind.
    """

    kind: str
    ranks: tuple[int, ...]
    place: Place | None
    text: str

    def __str__(self) -> str:
        return self.text


def diagnose(snapshots: Sequence[Snapshot], longer_than: float = 1.0) -> list[Finding]:
    """What is wrong with a world, the most important first; an empty list if its ranks make progress.

    Args:
        snapshots: one of each rank.
        longer_than: a rank that has waited for fewer seconds does not count as waiting.
    """
    ranks = {one.rank: one for one in snapshots}
    waits = find_waits(ranks, longer_than)
    deaths, differences = _deaths(ranks, waits), find_call_differences(ranks)
    mismatches = [one.finding for one in differences if not one.old]
    # In gloo, a message of an unexpected size ends the process that receives it: then the size is the cause.
    aborted = bool(mismatches) and all(ranks[finding.ranks[0]].exit == "SIGABRT" for finding in deaths)
    findings = [*mismatches, *deaths] if aborted else [*deaths, *_stopped(ranks, waits), *mismatches]
    findings += _deadlock(ranks, waits)
    blamed = {rank for finding in findings for rank in finding.ranks}
    if not mismatches:
        findings += _missing_and_stragglers(ranks, waits, blamed)
    return findings + [one.finding for one in differences if one.old]


def show_findings(findings: Sequence[Finding], most: int = 4) -> str:
    """The findings, a line each; of many, the first `most`."""
    lines = [finding.text for finding in findings[:most]]
    if len(findings) > most:
        lines.append(f"and {len(findings) - most} more; see `microparallel why`")
    return "\n".join(lines)


# ── ranks that died or were stopped ─────────────────────────────────────────────────────────────────────────────────


def _deaths(ranks: Mapping[int, Snapshot], waits: Mapping[int, WaitingRank]) -> list[Finding]:
    found = []
    for rank, one in sorted(ranks.items(), key=lambda item: (_follows_another(item[1], ranks), item[0])):
        if one.ending == "raised":
            place = one.end_place
            where = f" ({place})" if place is not None else ""
            text = f"death: rank {rank} raised {one.end_reason}{where}{_at_step(one)}"
        elif _is_dead(one):
            how = one.end_reason or one.exit or "killed, or it crashed"
            last = one.current or one.last
            place = one.end_place or (last.place if last is not None else None)
            text = f"death: rank {rank} died ({how}){_at_step(one)}; {_where_it_was(one)}"
        else:
            continue
        found.append(Finding("death", (rank,), place, text + _waiting_for(rank, ranks, waits)))
    return found


def _follows_another(one: Snapshot, ranks: Mapping[int, Snapshot]) -> bool:
    """Whether a rank was waiting for one that died: launchers such as torchrun end all ranks when one has died."""
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
    return f"it was doing {one.doing}; {_last_call(one)}" if one.doing else _last_call(one)


def _stopped(ranks: Mapping[int, Snapshot], waits: Mapping[int, WaitingRank]) -> list[Finding]:
    found = []
    for rank, one in ranks.items():
        if one.state == "stopped":
            last = one.current or one.last
            place = last.place if last is not None else None
            text = f"stopped: rank {rank} is stopped (SIGSTOP, or a debugger){_at_step(one)}; {_where_it_was(one)}"
            found.append(Finding("stopped", (rank,), place, text + _waiting_for(rank, ranks, waits)))
    return found


# ── deadlocks, missing ranks and stragglers ─────────────────────────────────────────────────────────────────────────


def _deadlock(ranks: Mapping[int, Snapshot], waits: Mapping[int, WaitingRank]) -> list[Finding]:
    cycle = find_cycle(waits)
    if not cycle:
        return []
    circle = " → ".join(map(str, (*cycle, cycle[0])))
    parts = [
        f"rank {rank} {'waits ' if number == 0 else ''}in {waits[rank].record} "
        f"since {_age(waits[rank].record, ranks[rank].now)}"
        for number, rank in enumerate(cycle)
    ]
    outside = _follow(cycle, waits)
    rest = f"; {show_ranks(outside)} {_verb(outside, 'waits', 'wait')} for them" if outside else ""
    return [
        Finding("deadlock", cycle, waits[cycle[0]].record.place, f"deadlock: {circle}: {', '.join(parts)}{rest}"),
    ]


def _missing_and_stragglers(
    ranks: Mapping[int, Snapshot], waits: Mapping[int, WaitingRank], blamed: set[int]
) -> list[Finding]:
    """The ranks at the end of the chains of waiting ranks."""
    found: list[Finding] = []
    roots = sorted({other for wait in waits.values() for other in wait.missing} - set(waits) - blamed)
    weak = [rank for rank, wait in waits.items() if wait.weak and rank not in blamed]
    for rank in roots or [rank for rank in weak if any(rank in wait.missing for wait in waits.values())]:
        one = ranks.get(rank)
        if one is not None and not _out_of_sight(one):
            found.append(_missing(one, ranks, waits) or _straggler(one, ranks, waits))
    if not found and not blamed:
        found += _seen_elsewhere([ranks[rank] for rank in roots if rank in ranks], ranks, waits)
    if not found and not blamed and (stuck := [wait for wait in waits.values() if not wait.missing and not wait.weak]):
        found.append(_transfer(stuck, ranks))
    return found


def _out_of_sight(one: Snapshot) -> bool:
    """Whether a rank is known to be on another host, where its flight file is."""
    return not one.pid and bool(one.host)


def _seen_elsewhere(
    roots: Sequence[Snapshot], ranks: Mapping[int, Snapshot], waits: Mapping[int, WaitingRank]
) -> Iterator[Finding]:
    """What can be said of ranks whose files are on another host: where to ask."""
    for host in dict.fromkeys(one.host for one in roots if _out_of_sight(one)):
        there = [one.rank for one in roots if _out_of_sight(one) and one.host == host]
        text = (
            f"out of sight: {show_ranks(there)} {_verb(there, 'is', 'are')} on {host}, and what happens there cannot "
            f"be seen from here: {_verb(there, 'it is', 'they are')} busy, or stopped, or the link to {host} is down; "
            f"ask there: microparallel why{_waiting_for(there[0], ranks, waits)}"
        )
        yield Finding("out of sight", tuple(there), None, text)


def _missing(one: Snapshot, ranks: Mapping[int, Snapshot], waits: Mapping[int, WaitingRank]) -> Finding | None:
    waiting = [wait for wait in waits.values() if one.rank in wait.missing]
    if one.ending in ("finished", "closed"):
        words = "has returned from its function" if one.ending == "finished" else "has left the world"
    elif not one.pid:
        words = "has left no flight file: it never joined, or is on another machine"
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
        f"missing rank: rank {one.rank} {words}; {_last_call(one)}{_waiting_for(one.rank, ranks, waits)}",
    )


def _calls_since(begin: float, one: Snapshot) -> int:
    """How many calls a rank has made since others began to wait, if it is still making some; else 0."""
    later = [record.begin for record in one.records if record.begin > begin]
    busy = len(later) >= 3 and max(later) > (begin + one.now) / 2
    return len(later) if busy else 0


def _straggler(one: Snapshot, ranks: Mapping[int, Snapshot], waits: Mapping[int, WaitingRank]) -> Finding:
    last = one.last
    place = one.user_place or (last.place if last is not None else None)
    text = f"straggler: rank {one.rank} is in no call: it is {_what_it_does(one)}{_at_step(one)}; {_last_call(one)}"
    return Finding("straggler", (one.rank,), place, text + _waiting_for(one.rank, ranks, waits))


def _transfer(stuck: Sequence[WaitingRank], ranks: Mapping[int, Snapshot]) -> Finding:
    oldest = min(stuck, key=lambda wait: wait.record.since)
    inside = tuple(sorted(wait.rank for wait in stuck))
    duration = _age(oldest.record, ranks[oldest.rank].now)
    hosts = list(dict.fromkeys(one.host for one in ranks.values() if one.host))
    network = "network, or the machine, is slow"
    if len(hosts) > 1:
        network = f"network between {' and '.join(hosts)} is down or slow, or a machine is slow"
    return Finding(
        "transfer",
        inside,
        oldest.record.place,
        f"transfer: {show_ranks(inside)} {_verb(inside, 'is', 'are')} in {oldest.record} since {duration}, "
        f"and all ranks have made the call: the {network}",
    )


def _waiting_for(rank: int, ranks: Mapping[int, Snapshot], waits: Mapping[int, WaitingRank]) -> str:
    """Which ranks wait for this one, by call, and which wait for those; each part begins with a semicolon."""
    groups: dict[str, list[WaitingRank]] = defaultdict(list)
    for wait in waits.values():
        if rank in wait.missing or _is_inside(rank, wait, ranks):
            groups[str(wait.record)].append(wait)
    parts = []
    for call, waiting in groups.items():
        who = [wait.rank for wait in waiting]
        first = min(waiting, key=lambda wait: wait.record.since)
        number = f", the {_ordinal(first.record.sequence)} of the group," if first.record.kind == "collective" else ""
        duration = _age(first.record, ranks[first.rank].now)
        parts.append(f"{show_ranks(who)} {_verb(who, 'waits', 'wait')} for it in {call}{number} since {duration}")
    direct = [wait.rank for waiting in groups.values() for wait in waiting]
    behind = _follow((rank, *direct), waits)
    if behind:
        parts.append(f"{show_ranks(behind)} {_verb(behind, 'waits', 'wait')} for {show_ranks(direct)}")
    return "".join(f"; {part}" for part in parts)


def _is_inside(rank: int, wait: WaitingRank, ranks: Mapping[int, Snapshot]) -> bool:
    """Whether a rank that is stopped or has ended is in the very call that is waited for."""
    one = ranks[rank]
    gone = one.state in ("stopped", "ended") or one.ending not in ("running", "finished")
    return gone and not wait.missing and rank in wait.record.group


def _follow(ranks: Sequence[int], waits: Mapping[int, WaitingRank]) -> list[int]:
    """The ranks that wait for these, directly or through other ranks."""
    reached = set(ranks)
    before = -1
    while before != len(reached):
        before = len(reached)
        reached |= {wait.rank for wait in waits.values() if reached & set(wait.missing)}
    return sorted(reached - set(ranks))


# ── which rank waits for which ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WaitingRank:
    """A rank that is in a call, and cannot go on before the missing ranks have made theirs.

    Attributes:
        rank: the rank that waits.
        record: the call that it is in.
        missing: the ranks that have not made their part of the call.
        weak: no thread of Python's waits for the call, so the rank may be doing something else meanwhile.
    """

    rank: int
    record: Record
    missing: tuple[int, ...]
    weak: bool = False


def find_waits(ranks: Mapping[int, Snapshot], longer_than: float) -> dict[int, WaitingRank]:
    """Every rank that has waited for at least `longer_than` seconds, by rank."""
    found = {}
    for rank, one in ranks.items():
        gone = one.state not in ("running", "unknown") and one.exit != ENDED_BY_PARENT
        if gone and one.ending == "running":
            continue  # stopped, or dead: it does not wait
        record = one.current
        if record is not None:
            if (record.end or one.now) - record.since >= longer_than:
                found[rank] = WaitingRank(rank, record, missing_in(record, rank, ranks))
        elif (pending := _unwaited_call(one, ranks, max(longer_than, 1.0))) is not None:
            found[rank] = pending
    return found


def _unwaited_call(one: Snapshot, ranks: Mapping[int, Snapshot], longer_than: float) -> WaitingRank | None:
    """The oldest unfinished collective that some rank has not entered: torch's DDP waits for such calls in C++."""
    if one.ending != "running":
        return None
    for record in one.records:
        if record.kind == "collective" and record.end is None and one.now - record.begin >= longer_than:
            missing = missing_in(record, one.rank, ranks)
            if missing:
                return WaitingRank(one.rank, record, missing, weak=True)
    return None


def missing_in(record: Record, rank: int, ranks: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """The ranks that have not made their part of a rank's call."""
    if record.kind == "collective":
        others = [other for other in record.group if other != rank]
        return tuple(other for other in others if not _has_entered(ranks.get(other), record))
    opposite = "recv" if record.kind == "send" else "send"
    others = [record.peer] if record.peer is not None else [other for other in record.group if other != rank]
    return tuple(other for other in others if not _has_answered(ranks.get(other), record, opposite, rank))


def _has_entered(other: Snapshot | None, record: Record) -> bool:
    if other is None or not other.pid:
        return False
    made = [one.sequence for one in other.records if one.channel == record.channel]
    return max(made) >= record.sequence if made else _has_overwritten_calls(other)


def _has_answered(other: Snapshot | None, record: Record, kind: str, rank: int) -> bool:
    if other is None or not other.pid:
        return False
    channel = (record.group_name, kind, rank, record.tag)
    made = [one.sequence for one in other.records if one.channel == channel]
    from_any = [one for one in other.records if one.kind == "recv" and one.peer is None and one.waits]
    if kind == "recv" and any(one.group_name == record.group_name and one.tag == record.tag for one in from_any):
        return True
    return max(made) >= record.sequence if made else _has_overwritten_calls(other)


def _has_overwritten_calls(one: Snapshot) -> bool:
    """Whether a rank has made more calls than its file holds, so that one not in the file may have been made."""
    return len(one.records) >= RECORDS - 1


def find_cycle(waits: Mapping[int, WaitingRank]) -> tuple[int, ...]:
    """Ranks that wait for each other in a circle, beginning with the lowest; empty if there is none."""
    edges = {
        rank: [other for other in wait.missing if other in waits and not waits[other].weak]
        for rank, wait in waits.items()
        # A receive from any rank can be completed by each of them, so it is part of no circle.
        if not wait.weak and (wait.record.peer is not None or wait.record.kind == "collective")
    }
    cycles = [cycle for rank in edges if (cycle := _shortest_back_to(rank, edges))]
    return min(cycles, key=lambda cycle: (len(cycle), cycle), default=())


def _shortest_back_to(start: int, edges: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    paths: list[tuple[int, ...]] = [(start,)]
    seen: set[int] = set()
    while paths:
        path = paths.pop(0)
        for other in edges.get(path[-1], ()):
            if other == start:
                lowest = path.index(min(path))
                return path[lowest:] + path[:lowest]
            if other not in seen:
                seen.add(other)
                paths.append((*path, other))
    return ()


# ── calls that differ between the ranks of a group ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CallDifference:
    """Calls that ranks should have made alike and did not; `old` if every rank has completed its call all the same."""

    finding: Finding
    old: bool


def find_call_differences(ranks: Mapping[int, Snapshot]) -> list[CallDifference]:
    """The first difference in each group's collectives, and in the messages from each rank to each other."""
    return [*_in_collectives(ranks), *_in_messages(ranks)]


def _in_collectives(ranks: Mapping[int, Snapshot]) -> Iterator[CallDifference]:
    made: dict[str, dict[int, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    for rank, one in ranks.items():
        for record in one.records:
            if record.kind == "collective":
                made[record.group_name][record.sequence][rank] = record
    for sequences in made.values():
        for sequence in sorted(sequences):
            calls = sequences[sequence]
            if len({record.agreement for record in calls.values()}) > 1:
                yield _collective_difference(sequence, calls)
                break


def _collective_difference(sequence: int, calls: Mapping[int, Record]) -> CallDifference:
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(calls):
        ranks_of[calls[rank].agreement].append(rank)
    # The call that most ranks made counts as the right one; of two made equally often, that of the lowest rank.
    usual = max(ranks_of.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = [ranks for ranks in ranks_of.values() if ranks is not usual]
    guilty = tuple(sorted(rank for ranks in odd for rank in ranks))
    kind = _kind(calls[odd[0][0]].text, calls[usual[0]].text)
    entered = " and ".join(f"{show_ranks(ranks)} entered {calls[ranks[0]]}" for ranks in odd)
    others = f"{show_ranks(usual)} entered {calls[usual[0]]}"
    size = len(calls[usual[0]].group)
    group = "their group" if size > len(usual) + len(guilty) else "the group"
    count = f"the {_ordinal(sequence)} collective of {group}"
    finding = Finding(kind, guilty, calls[guilty[0]].place, f"{kind}: {entered} while {others}: {count}")
    return CallDifference(finding, old=all(call.outcome == "well" for call in calls.values()))


def _in_messages(ranks: Mapping[int, Snapshot]) -> Iterator[CallDifference]:
    for rank, one in ranks.items():
        if any(record.kind == "recv" and record.peer is None for record in one.records):
            continue  # this rank receives from any rank, so its messages cannot be counted by sender
        for record in one.records:
            if record.kind != "recv" or record.peer is None or record.peer not in ranks:
                continue
            sent = _counterpart(record, rank, ranks[record.peer])
            if sent is not None and not _fit(sent, record):
                yield _message_difference(rank, record, sent)
                break


def _fit(sent: Record, received: Record) -> bool:
    """Whether a message is what its receiver expects; as many bytes in another shape are."""
    return sent.agreement == received.agreement or sent.size == received.size != 0


def _message_difference(rank: int, record: Record, sent: Record) -> CallDifference:
    kind = _kind(f"message({record.agreement})", f"message({sent.agreement})")
    text = (
        f"{kind}: rank {rank} receives {record} and rank {record.peer} sent {sent}: "
        f"the {_ordinal(record.sequence)} message from rank {record.peer} to rank {rank}"
    )
    guilty = (rank,) if record.peer is None else (rank, record.peer)
    return CallDifference(Finding(kind, guilty, record.place, text), old=record.outcome == sent.outcome == "well")


def _counterpart(record: Record, rank: int, sender: Snapshot) -> Record | None:
    channel = (record.group_name, "send", rank, record.tag)
    return next((sent for sent in sender.records if (sent.channel, sent.sequence) == (channel, record.sequence)), None)


def _kind(odd: str, usual: str) -> str:
    if odd.partition("(")[0] != usual.partition("(")[0]:
        return "wrong order"
    mine, theirs = _CONTENT.findall(odd), _CONTENT.findall(usual)
    if [dtype for dtype, _ in mine] != [dtype for dtype, _ in theirs]:
        return "mismatched dtype"
    if mine != theirs:
        return "mismatched shape"
    if _OP.findall(odd) != _OP.findall(usual):
        return "mismatched op"
    return "mismatched root" if _ROOT.findall(odd) != _ROOT.findall(usual) else "mismatched call"


# ── ranks, times and places, as a sentence has them ─────────────────────────────────────────────────────────────────


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    """The verb in the singular or the plural, as these ranks need it."""
    return one if len(ranks) == 1 else several


def _ordinal(number: int) -> str:
    """A number with its ending: `41st`."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _age(record: Record, now: float) -> str:
    """For how long a rank has waited in a call, or did before the call ended."""
    return show_age((record.end or now) - record.since)


def _what_it_does(one: Snapshot) -> str:
    """What a rank that is in no call does, in words that follow "it is"."""
    if one.user_place is not None:
        doing = f", doing {one.doing}" if one.doing else ""
        return f"in {one.user_place.with_function}{doing}"
    if one.doing:
        return f"doing {one.doing}"
    if one.stack:
        return f"inside a library, in {one.stack[0].with_function}, which no line of your code called"
    if one.state == "unknown" and one.host:
        return f"on {one.host}, whose processes cannot be seen from here"
    return "at a line that is not known"


def _last_call(one: Snapshot) -> str:
    """The newest call of a rank, with its time."""
    last = one.last
    if last is None:
        return "it has made no call"
    return f"its last call was {last}, {show_age(one.now - (last.end or last.begin))} ago"


def _at_step(one: Snapshot) -> str:
    """The training step of a rank: ` at step 120`; empty where steps are not counted."""
    return "" if one.step is None else f" at step {one.step}"
