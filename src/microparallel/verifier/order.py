"""Does every send have its receive, and does every rank come to its end? If not, which rank waits for which?"""

from __future__ import annotations

from collections import defaultdict, deque

from microparallel.errors import ProgramError
from microparallel.program import Collective, Part, Policy, Program, Recv, Send, Sends, Slices, Value, Wait, Walk
from microparallel.verifier.findings import Deadlock, Unmatched, show_place

Channel = tuple[int, int]  # sender, receiver


def check_matching(program: Program) -> None:
    """Raise `Unmatched` unless the sends and receives of each channel match, in order and in content."""
    sent: dict[Channel, list[Send]] = defaultdict(list)
    received: dict[Channel, list[Recv]] = defaultdict(list)
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if isinstance(op, Send):
                _require_other(program, rank, op.to, str(op))
                sent[rank, op.to].append(op)
            elif isinstance(op, Recv):
                _require_other(program, rank, op.source, str(op))
                received[op.source, rank].append(op)
    for channel in sorted(sent.keys() | received.keys()):
        _check_channel(program, channel, sent[channel], received[channel])


def _check_channel(program: Program, channel: Channel, sent: list[Send], received: list[Recv]) -> None:
    sender, receiver = channel
    for number, (send, receive) in enumerate(zip(sent, received, strict=False), start=1):
        if not _same_content(program, send.value, receive.value, sender):
            words = (
                f"message {number} from rank {sender} to rank {receiver} is sent as {send} and received as {receive}"
            )
            raise Unmatched(words, sender, receiver, number, send, receive)
    if len(sent) > len(received):
        send, number = sent[len(received)], len(received) + 1
        words = f"rank {sender} does {send}, which rank {receiver} never receives"
        raise Unmatched(words, sender, receiver, number, send, None)
    if len(received) > len(sent):
        receive, number = received[len(sent)], len(sent) + 1
        words = f"rank {receiver} does {receive}, which rank {sender} never sends"
        raise Unmatched(words, sender, receiver, number, None, receive)


def _same_content(program: Program, sent: Value, received: Value, sender: int) -> bool:
    """A value arrives under its own name; a whole contribution may be kept apart under its sender's."""
    if sent == received:
        return True
    whole = isinstance(program.goal, Collective) and sent == Slices(0, program.goal.slices)
    return whole and received == Part(sender)


def _require_other(program: Program, rank: int, other: int, op: str) -> None:
    if not 0 <= other < program.world_size:
        raise ProgramError(f"rank {rank} does {op}, and there are only ranks 0 to {program.world_size - 1}")
    if other == rank:
        raise ProgramError(f"rank {rank} does {op}, a message to itself")


# ── deadlocks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def check_order(program: Program, sends: Sends) -> None:
    """Raise `Deadlock` when ranks wait for each other for ever, naming the circle and drawing where they stand."""
    walk = Walk(program, Policy(sends))
    deque(walk, maxlen=0)
    waits = walk.waits()
    if not waits:
        return
    circle, last = find_circle(waits)
    end = "" if last is None else f", and rank {last} has finished"
    where = "".join(f"\n  {show_place(program, wait.rank, wait.place)}" for wait in circle)
    raise Deadlock(f"deadlock under {sends} sends: {', '.join(map(str, circle))}{end}{where}", waits)


def find_circle(waits: list[Wait]) -> tuple[list[Wait], int | None]:
    """Ranks of which each waits for the next, in a circle; or one that waits for a finished rank, and that rank."""
    waiting = {wait.rank: wait for wait in waits}
    chain: list[Wait] = []
    rank = waits[0].rank
    while rank in waiting:
        wait = waiting[rank]
        if wait in chain:
            return chain[chain.index(wait) :], None
        chain.append(wait)
        rank = wait.on
    return chain[-1:], rank
