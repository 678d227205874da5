"""Something that is wrong with a world, in a sentence."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from microparallel.observe.flight_file import RECORDS, Record, Snapshot
from microparallel.observe.place import Place
from microparallel.observe.processes import ENDED_BY_PARENT
from microparallel.text import show_age


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: death, stopped, wrong order, mismatched shape (dtype, op, root, call), deadlock, missing rank, straggler,
            or transfer (everybody is in the same call, and it takes long).
        ranks: whose doing it is.
        place: where in the user's code, as far as that is known.
        text: a sentence that begins with the kind.
    """

    kind: str
    ranks: tuple[int, ...]
    place: Place | None
    text: str

    def __str__(self) -> str:
        return self.text


# Ranks, times and numbers, as a sentence has them.


def names(ranks: Iterable[int]) -> str:
    """As in `rank 2` and `ranks 0, 1`."""
    listed = list(ranks)
    return f"{'rank' if len(listed) == 1 else 'ranks'} {', '.join(map(str, listed))}"


def verb(ranks: Sequence[int], one: str, several: str) -> str:
    """The form that goes with so many ranks."""
    return one if len(ranks) == 1 else several


def ordinal(number: int) -> str:
    """As in `41st`."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def age(record: Record, now: float) -> str:
    """For how long a call has been waited for."""
    return show_age((record.end or now) - record.since)


def whereabouts(one: Snapshot) -> str:
    """What a rank does that is in no call, in words that follow "it is"."""
    if one.here is not None:
        doing = f", doing {one.doing}" if one.doing else ""
        return f"in {one.here.in_words}{doing}"
    if one.doing:
        return f"doing {one.doing}"
    if one.stack:
        return f"inside of a library, in {one.stack[0].in_words}, where no line of your code led"
    return "somewhere that it does not tell"


def last_call(one: Snapshot) -> str:
    """The newest call of a rank, with its time."""
    last = one.last
    if last is None:
        return "it has made no call"
    return f"its last call was {last}, {show_age(one.now - (last.end or last.begin))} ago"


def at_step(one: Snapshot) -> str:
    """As in ` at step 120`; empty where nobody counts."""
    return "" if one.step is None else f" at step {one.step}"


# Calls that do not belong together: the ranks of a group made different ones, or the same with other tensors.


_CONTENT = re.compile(r"(?P<dtype>\b(?:bool|b?float|u?int|complex)\w*)\[(?P<shape>[^\]]*)\]")
_OP = re.compile(r"op=[^,)]*")
_ROOT = re.compile(r"(?:src|dst)=\d+")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Calls that do not belong together; of an old one, every rank has come out of its call all the same."""

    finding: Finding
    old: bool


def find_mismatches(ranks: Mapping[int, Snapshot]) -> list[Mismatch]:
    """The first place in each group where calls differ, and in each row of messages between two ranks."""
    return [*_of_collectives(ranks), *_of_messages(ranks)]


def _of_collectives(ranks: Mapping[int, Snapshot]) -> Iterator[Mismatch]:
    made: dict[str, dict[int, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    for rank, one in ranks.items():
        for record in one.records:
            if record.kind == "collective":
                made[record.group_name][record.sequence][rank] = record
    for sequences in made.values():
        for sequence in sorted(sequences):
            calls = sequences[sequence]
            if len({record.agreement for record in calls.values()}) > 1:
                yield _difference(sequence, calls)
                break


def _difference(sequence: int, calls: Mapping[int, Record]) -> Mismatch:
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(calls):
        ranks_of[calls[rank].agreement].append(rank)
    # Those who are most are right; of equally many, those with the lowest rank.
    usual = max(ranks_of.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = [ranks for ranks in ranks_of.values() if ranks is not usual]
    guilty = tuple(sorted(rank for ranks in odd for rank in ranks))
    kind = _kind(calls[odd[0][0]].text, calls[usual[0]].text)
    entered = " and ".join(f"{names(ranks)} entered {calls[ranks[0]]}" for ranks in odd)
    others = f"{names(usual)} entered {calls[usual[0]]}"
    size = len(calls[usual[0]].group)
    count = f"the {ordinal(sequence)} collective of {'their group' if size > len(usual) + len(guilty) else 'the group'}"
    finding = Finding(kind, guilty, calls[guilty[0]].place, f"{kind}: {entered} while {others}: {count}")
    return Mismatch(finding, old=all(call.outcome == "well" for call in calls.values()))


def _of_messages(ranks: Mapping[int, Snapshot]) -> Iterator[Mismatch]:
    for rank, one in ranks.items():
        if any(record.kind == "recv" and record.peer is None for record in one.records):
            continue  # it takes what comes, so its messages cannot be counted
        for record in one.records:
            if record.kind != "recv" or record.peer is None or record.peer not in ranks:
                continue
            sent = _counterpart(record, rank, ranks[record.peer])
            if sent is not None and not _fit(sent, record):
                yield _misfit(rank, record, sent)
                break


def _fit(sent: Record, received: Record) -> bool:
    """Whether a message fits: as many bytes in another shape do."""
    return sent.agreement == received.agreement or sent.size == received.size != 0


def _misfit(rank: int, record: Record, sent: Record) -> Mismatch:
    kind = _kind(f"message({record.agreement})", f"message({sent.agreement})")
    text = (
        f"{kind}: rank {rank} receives {record} and rank {record.peer} sent {sent}: "
        f"the {ordinal(record.sequence)} message from rank {record.peer} to rank {rank}"
    )
    guilty = (rank,) if record.peer is None else (rank, record.peer)
    return Mismatch(Finding(kind, guilty, record.place, text), old=record.outcome == sent.outcome == "well")


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


# Who waits for whom: what each rank's files say about the calls of the others.


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot go on, in a call, until these ranks have made theirs.

    A weak one is a call that was left to itself: the rank may have other things to do meanwhile.
    """

    rank: int
    record: Record
    missing: tuple[int, ...]
    weak: bool = False


def find_waits(ranks: Mapping[int, Snapshot], patience: float) -> dict[int, Wait]:
    """Every rank that has waited for at least so many seconds, by rank."""
    found = {}
    for rank, one in ranks.items():
        gone = one.state not in ("running", "unknown") and one.exit != ENDED_BY_PARENT
        if gone and one.ending == "running":
            continue  # stopped, or dead: it does not wait
        record = one.current
        if record is not None:
            if (record.end or one.now) - record.since >= patience:
                found[rank] = Wait(rank, record, missing_in(record, rank, ranks))
        elif (pending := _left_to_itself(one, ranks, max(patience, 1.0))) is not None:
            found[rank] = pending
    return found


def _left_to_itself(one: Snapshot, ranks: Mapping[int, Snapshot], patience: float) -> Wait | None:
    """The oldest collective under way that somebody has not entered: torch's DDP waits for such ones in C++."""
    if one.ending != "running":
        return None
    for record in one.records:
        if record.kind == "collective" and record.end is None and one.now - record.begin >= patience:
            missing = missing_in(record, one.rank, ranks)
            if missing:
                return Wait(one.rank, record, missing, weak=True)
    return None


def missing_in(record: Record, rank: int, ranks: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """The ranks that have not made their part of a call."""
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
    return max(made) >= record.sequence if made else _is_forgetful(other)


def _has_answered(other: Snapshot | None, record: Record, kind: str, rank: int) -> bool:
    if other is None or not other.pid:
        return False
    channel = (record.group_name, kind, rank, record.tag)
    made = [one.sequence for one in other.records if one.channel == channel]
    from_anybody = [one for one in other.records if one.kind == "recv" and one.peer is None and one.waits]
    if kind == "recv" and any(one.group_name == record.group_name and one.tag == record.tag for one in from_anybody):
        return True
    return max(made) >= record.sequence if made else _is_forgetful(other)


def _is_forgetful(one: Snapshot) -> bool:
    """Whether it has made more calls than its file holds: then one that is not there may have been made."""
    return len(one.records) >= RECORDS - 1


def find_cycle(waits: Mapping[int, Wait]) -> tuple[int, ...]:
    """Ranks that wait for each other in a circle, beginning with the lowest; empty if there is none."""
    edges = {
        rank: [other for other in wait.missing if other in waits and not waits[other].weak]
        for rank, wait in waits.items()
        # One that takes a message from anybody is helped by any of them.
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


# Why does it hang? The ranks' last words, read side by side, say so.
#
# The rules, the weightiest first:
#
# 1. A process that has ended without leaving the world is dead, and a stopped one is stopped, whatever else is true.
# 2. Ranks of one group make the same collectives in the same order: the first place where they did not is the cause.
# 3. Ranks that wait for each other in a circle wait for ever.
# 4. Whoever waits, waits for ranks that have not made their part of the call. Following that to its end finds the ranks
# that wait for nobody: those that have left are missing, those that compute are stragglers.


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
