"""Two levels: is it the sum on every rank, the same bits, and does no more than what must cross between the hosts?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from microparallel.learn.exam import Exam, Stuck
from microparallel.learn.graders._collectives import contribution, counted_in_words, counts_in
from microparallel.learn.graders._common import require_all_waited
from microparallel.learn.log import SENDS, Called, Row, calls
from microparallel.learn.requirements import listed, require_equal, require_like
from microparallel.learn.verdict import Wrong

Hosts = list[list[int]]


def check(exam: Exam) -> None:
    """Equal hosts; other hosts; what crosses between them; more hosts and fewer."""
    with exam.step("two hosts of two ranks have the sum"):
        _require_sum(exam, [[0, 1], [2, 3]], 6)
    with exam.step("so have hosts of other sizes, with ranks in any order"):
        _require_sum(exam, [[0, 1, 2], [3]], 6)
        _require_sum(exam, [[3, 0], [2, 4, 1]], 7)
    with exam.step("no more crosses between the hosts than what must, and all ranks have the same bits") as notes:
        for hosts in ([[0, 1], [2, 3]], [[0, 1, 2], [3, 4]]):
            _require_few_bytes(exam, hosts, 60, notes)
    with exam.step("three hosts, a single one, and a world of one"):
        _require_few_bytes(exam, [[0, 1], [2], [3, 4]], 60, [])
        for hosts in ([[0, 1], [2], [3, 4]], [[0, 1, 2]], [[0]]):
            _require_sum(exam, hosts, 6)


def _reduce(learner: Any, comms: Any, hosts: Hosts, size: int, divisor: int = 1) -> torch.Tensor:
    given = contribution(comms.rank, size) / divisor
    tensor = given.clone()
    own = [list(ranks) for ranks in hosts]
    learner.hierarchical_all_reduce(tensor, comms, own)
    require_like(tensor, given, f"rank {comms.rank}'s tensor")
    require_all_waited(comms)
    return tensor


def _run(exam: Exam, hosts: Hosts, size: int, divisor: int = 1) -> list[torch.Tensor]:
    try:
        return exam.run(_reduce, _ranks(hosts), hosts, size, divisor)
    except Stuck as stuck:
        raise Wrong(f"{_show(hosts)}: {stuck}") from None


def _ranks(hosts: Hosts) -> int:
    return sum(map(len, hosts))


# ── the sum ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _require_sum(exam: Exam, hosts: Hosts, size: int) -> None:
    ranks = _ranks(hosts)
    found = _run(exam, hosts, size)
    total = torch.stack([contribution(rank, size) for rank in range(ranks)]).sum(0)
    right = [rank for rank, one in enumerate(found) if torch.equal(one, total)]
    for rank, one in enumerate(found):
        if rank not in right and (counts := counts_in(one, ranks)) is not None:
            raise Wrong(f"{_show(hosts)}: {_in_words(rank, counts, hosts, right)}")
        require_equal(one, total, f"{_show(hosts)}: rank {rank}'s tensor")


def _in_words(rank: int, counts: Sequence[int], hosts: Hosts, right: Sequence[int]) -> str:
    """Name the mistake that leaves a rank with this sum; `counts` says how often each rank is in it."""
    mine = next(ranks for ranks in hosts if rank in ranks)
    inside = {other for other, count in enumerate(counts) if count}
    if max(counts) > 1:
        return (
            f"in rank {rank}'s sum there is what {counted_in_words(counts)} put in: every rank counts once; what is "
            "added must not be in the sum already"
        )
    if inside == {rank} and len(mine) > 1:
        back = f", though rank {right[0]} has the whole sum: spread it inside each host" if right else ""
        return f"rank {rank} still holds its own numbers{back or ': nothing was added to the tensor itself (add_)'}"
    if inside == set(mine):
        return (
            f"rank {rank} has the sum of its own host, ranks {listed(sorted(mine))}, and of no other: the hosts' sums "
            "must be added between the hosts, and on both sides"
        )
    if len(inside) == 1 and sum(map(len, hosts)) > 1:
        return (
            f"rank {rank} has only rank {inside.pop()}'s numbers: what came replaced what was there, and the rest is "
            "lost; add it (add_)"
        )
    if inside and inside.isdisjoint(mine):
        return (
            f"rank {rank} has only what {counted_in_words(counts)} put in, on another host: the sum that came replaced "
            "that of its own host; add it (add_)"
        )
    return (
        f"in rank {rank}'s sum there is only what {counted_in_words(counts)} put in: inside each host everybody's "
        "tensor is added before the sum crosses, and only a whole sum is spread"
    )


def _show(hosts: Hosts) -> str:
    return "hosts " + " and ".join(str(ranks) for ranks in hosts) if len(hosts) > 1 else f"one host {hosts[0]}"


# ── what crosses ────────────────────────────────────────────────────────────────────────────────────────────────────


def _crossing(rows: Sequence[Row], hosts: Hosts) -> list[Called]:
    """The messages that go from one host to another."""
    host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    sent = [message for row in rows for message in calls(row, *SENDS)]
    return [message for message in sent if host_of[message.rank] != host_of[message.peer]]


def _require_few_bytes(exam: Exam, hosts: Hosts, size: int, notes: list[str]) -> None:
    found = _run(exam, hosts, size, 3)
    crossing, tensor = _crossing(exam.rows, hosts), 8 * size
    most, total = 2 * (len(hosts) - 1) * tensor, sum(message.bytes for message in crossing)
    if total > most:
        why = _why_so_many(crossing, hosts, tensor)
        raise Wrong(
            f"{_show(hosts)}: the sum is right, but {total} bytes in {len(crossing)} messages cross between the hosts, "
            f"and {most} bytes are enough ({2 * (len(hosts) - 1)} times the tensor): {why}"
        )
    for rank, one in enumerate(found):
        if not torch.equal(one, found[0]):
            raise Wrong(
                f"{_show(hosts)}: rank {rank}'s sum differs from rank 0's in the last digits: add in the same order, "
                "or let one rank add and the others copy"
            )
    flat_ring = len(hosts) * 2 * (_ranks(hosts) - 1) * tensor // _ranks(hosts)
    notes.append(f"{_show(hosts)}: {total} bytes cross in {len(crossing)} messages, in a ring of all ranks {flat_ring}")


def _why_so_many(crossing: Sequence[Called], hosts: Hosts, tensor: int) -> str:
    """Which mistake sends more between the hosts than what must cross."""
    senders = {message.rank for message in crossing}
    if any(message.bytes != tensor for message in crossing):
        return (
            f"messages of {listed(sorted({message.bytes for message in crossing}))} bytes, from ranks "
            f"{listed(sorted(senders))}: a ring through all ranks knows nothing of hosts, and passes the network at "
            "every step"
        )
    if all(len(senders.intersection(ranks)) <= 1 for ranks in hosts):
        return (
            f"ranks {listed(sorted(senders))} speak for their hosts, as they should, but too often: let one of them "
            "add up the sums of all hosts, and send the total to each of the others once"
        )
    return (
        f"ranks {listed(sorted(senders))} send whole tensors to another host: add up inside each host first, and let "
        "one rank speak for it"
    )
