"""Calls that do not belong together: the ranks of a group made different ones, or the same with other tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from microparallel.flight.finding import Finding
from microparallel.flight.record import Record, Snapshot
from microparallel.flight.words import names, ordinal

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
