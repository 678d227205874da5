"""Broadcast, gather and barrier: does every rank get the right tensor, and does none leave too early?"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any

import torch

from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders._collectives import program_of
from microparallel.learn.log import RECEIVES, SENDS, Called, Row, calls
from microparallel.learn.requirements import Suspect, require_equal, require_like, shown
from microparallel.learn.verdict import Wrong
from microparallel.program import Collective, Op, Program, Recv, Send, Slices
from microparallel.text import count
from microparallel.verifier import Unreached, verify

_ALLOWED = ("send_tensor", "recv_tensor")
_RANKS = 4


def check(exam: Exam) -> None:
    """Each of the three; then all-gather, which is made of them."""
    with exam.step("broadcast: every rank has rank 0's tensor") as notes:
        _require_broadcast(exam, 0, torch.float32, notes)
    with exam.step("broadcast: from another rank, and of another dtype"):
        _require_broadcast(exam, 2, torch.int64, [])
    with exam.step("gather: rank 0 has every rank's tensor, in the order of ranks") as notes:
        _require_gather(exam, 0, torch.float32, notes)
    with exam.step("gather: to another rank, and of another dtype"):
        _require_gather(exam, 1, torch.float64, [])
    with exam.step("barrier: no rank leaves before all ranks have arrived") as notes:
        _require_barrier(exam, notes)
    with exam.step("with them, all-gather works by itself; and in a world of one rank nothing changes"):
        exam.run(_all_gather, _RANKS, allowed=_ALLOWED)
        exam.run(_all_gather, 1, allowed=_ALLOWED)


def _tensor(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6).reshape(2, 3) + 100 * (rank + 1)).to(dtype)


# ── broadcast ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _broadcast(learner: Any, comms: Any, src: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = _tensor(comms.rank, dtype)
    comms.log.watched = tensor
    learner.broadcast(tensor, src, comms)
    return tensor


def _require_broadcast(exam: Exam, src: int, dtype: torch.dtype, notes: list[str]) -> None:
    found = exam.run(_broadcast, _RANKS, src, dtype, allowed=_ALLOWED)
    expected = _tensor(src, dtype)
    for rank in [src, *(other for other in range(_RANKS) if other != src)]:
        suspects = [
            Suspect(
                _tensor(rank, dtype),
                f"rank {rank} still holds its own tensor: write what arrives into the tensor you were given "
                "(tensor.copy_); `tensor = …` only gives a new tensor that name",
            ),
            *_from_wrong_rank(rank, src, dtype),
            Suspect(_tensor(src, dtype) + _tensor(rank, dtype), "the tensor was added: a broadcast replaces"),
        ]
        require_equal(found[rank], expected, f"broadcast from rank {src}: rank {rank}'s tensor", suspects)
    _require_few_messages("broadcast", exam.rows, notes)
    for rank, row in enumerate(exam.rows):
        if (received := len(calls(row, *RECEIVES))) != (rank != src):
            counts = f"rank {rank} received {count(received, 'message')}, and should receive {int(rank != src)}"
            raise Wrong(f"broadcast from rank {src}: {counts}")
    given = [_tensor(rank, dtype) for rank in range(_RANKS)]
    program = program_of(Collective("broadcast", 1, src), given, exam.rows, found)
    try:
        if program is not None:
            verify(program, completed=False)
    except ProgramError as error:
        raise Wrong(f"every rank has the right tensor, but not by what was sent: {error}") from None


def _from_wrong_rank(rank: int, src: int, dtype: torch.dtype) -> list[Suspect]:
    words = f"rank {rank} has rank {{}}'s tensor, but the broadcast was to come from rank {src}: look at src"
    wrong = [other for other in range(_RANKS) if other not in (rank, src)]
    return [Suspect(_tensor(other, dtype), words.format(other)) for other in wrong]


# ── gather ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _gather(learner: Any, comms: Any, dst: int, dtype: torch.dtype) -> None:
    """Call the learner's gather on one rank, and refuse what it returns if it is wrong."""
    tensor = _tensor(comms.rank, dtype)
    found = learner.gather(tensor, dst, comms)
    if not torch.equal(require_like(tensor, _tensor(comms.rank, dtype), _PASSED), _tensor(comms.rank, dtype)):
        raise Wrong(f"gather changed the tensor that rank {comms.rank} passed: it is to be read, not written to")
    if comms.rank != dst and found is not None:
        raise Wrong(f"gather to rank {dst}: rank {comms.rank} should return None, and returned {shown(found)}")
    if comms.rank == dst:
        _require_list(found, f"gather: rank {dst}", dst, dtype)


_PASSED = "the tensor that was passed to gather"


def _require_gather(exam: Exam, dst: int, dtype: torch.dtype, notes: list[str]) -> None:
    exam.run(_gather, _RANKS, dst, dtype, allowed=_ALLOWED)
    _require_few_messages("gather", exam.rows, notes)
    for rank, row in enumerate(exam.rows):
        if (sent := len(calls(row, *SENDS))) != (rank != dst):
            should = int(rank != dst)
            raise Wrong(f"gather to rank {dst}: rank {rank} sent {count(sent, 'message')}, and should send {should}")


def _require_list(found: Any, who: str, owner: int, dtype: torch.dtype, ranks: int = _RANKS) -> None:
    """The list that a rank returned must have a tensor of every rank, in their order."""
    if not isinstance(found, list | tuple):
        raise Wrong(f"{who} should return a list of tensors, and returned {shown(found)}")
    whose = [_whose(one, dtype, ranks) for one in found]
    if len(found) != ranks:
        missing = "; its own is missing" if owner not in whose else ""
        raise Wrong(f"{who} returned {len(found)} tensors, and there are {ranks} ranks{missing}")
    if whose != list(range(ranks)) and sorted(map(str, whose)) == list(map(str, range(ranks))):
        order = ", ".join(map(str, whose))
        raise Wrong(f"{who} has every rank's tensor, but in the order of ranks {order}: place r is for rank r")
    for rank, (one, owned_by) in enumerate(zip(found, whose, strict=True)):
        words = f"{who} has rank {owned_by}'s tensor in place {rank}, which is for rank {rank}'s"
        suspects = [] if owned_by is None else [Suspect(_tensor(owned_by, dtype), words)]
        require_equal(one, _tensor(rank, dtype), f"{who}: tensor {rank} of its list", suspects)


def _whose(tensor: Any, dtype: torch.dtype, ranks: int) -> int | None:
    """The rank whose tensor that is; None if it is no rank's."""
    for rank in range(ranks):
        if isinstance(tensor, torch.Tensor) and torch.equal(tensor.double(), _tensor(rank, dtype).double()):
            return rank
    return None


def _require_few_messages(name: str, rows: list[Row], notes: list[str]) -> None:
    least, sent = _RANKS - 1, [len(calls(row, *SENDS)) for row in rows]
    if sum(sent) > least:
        most = max(range(_RANKS), key=sent.__getitem__)
        raise Wrong(
            f"{name}: {sum(sent)} messages were sent ({sent[most]} of them by rank {most}), and {least} are enough: "
            "one for each rank but the one in the middle"
        )
    notes.append(f"{least} messages for {_RANKS} ranks, the least there is")


# ── barrier ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _barrier(learner: Any, comms: Any) -> None:
    learner.barrier(comms)


def _require_barrier(exam: Exam, notes: list[str]) -> None:
    """A rank may leave when it has heard, from any rank, that all have arrived: an all-gather of what the ranks know.

    A send that returns says that its receiver has arrived, unless the message was so small that it left before. So the
    barrier must be right with such answers, and without them.
    """
    exam.run(_barrier, _RANKS, allowed=_ALLOWED)
    for answered in (True, False):
        try:
            verify(_knowledge(exam.rows, answered), completed=False)
        except Unreached as error:
            raise Wrong(
                f"rank {error.rank} left the barrier before rank {error.index} had arrived: "
                f"{_why(error.rank, exam.rows)}"
            ) from None
    notes.append(f"{sum(len(calls(row, *SENDS)) for row in exam.rows)} messages for {_RANKS} ranks")


def _knowledge(rows: list[Row], answered: bool) -> Program:
    """The program in which every message carries what its sender knows and its receiver does not.

    Slice r is that rank r has arrived. A receive that begins is an answer to its sender.
    """
    known = [{rank} for rank in range(len(rows))]
    ops: list[list[list[Op]]] = [[] for _ in rows]  # those of a message are known when it arrives
    under_way: dict[tuple[int, int, bool], deque[tuple[set[int], list[Op]]]] = defaultdict(deque)
    for moment in sorted(itertools.chain(*rows), key=lambda moment: moment.number):
        call = moment.op
        if not isinstance(call, Called) or moment.phase == "waits":
            continue
        rank, peer, is_answer = call.rank, call.peer, (call.call in SENDS) == (moment.phase == "ends")
        ops[rank].append([])
        if is_answer and not answered:
            continue
        if moment.phase == "begins":
            under_way[rank, peer, is_answer].append((set(known[rank]), ops[rank][-1]))
        else:
            told, sends = under_way[peer, rank, is_answer].popleft()
            for one in sorted(told - known[rank]):
                sends.append(Send(Slices(one, one + 1), rank))
                ops[rank][-1].append(Recv(Slices(one, one + 1), peer))
            known[rank] |= told
    flat = tuple(tuple(itertools.chain(*mine)) for mine in ops)
    return Program("your barrier", Collective("all-gather", len(rows)), flat)


def _why(rank: int, rows: list[Row]) -> str:
    sent = [[call.peer for call in calls(row, *SENDS)] for row in rows]
    received = [len(calls(row, *RECEIVES)) for row in rows]
    if not any(sent):
        return "no rank has sent anything, so none can know about another"
    if all(peers == [(other + 1) % _RANKS] for other, peers in enumerate(sent)):
        return (
            "when a token comes round, those before you have arrived, and those after you perhaps not; the token must "
            "go round a second time"
        )
    if rank == 0:
        return (
            "rank 0 may only go on when it has heard from all others; that its sends have returned says nothing, since "
            "a small tensor may leave before its receiver asks for it"
        )
    if not received[rank]:
        return "to tell rank 0 that you are there is not enough: wait until rank 0 answers that all have arrived"
    if received[0] < _RANKS - 1:
        return "rank 0 answered, but it never heard from all others: first it must know that all have arrived"
    return "rank 0 may answer only after it has heard from all others"


# ── all three together ──────────────────────────────────────────────────────────────────────────────────────────────


def _all_gather(learner: Any, comms: Any) -> None:
    rank, ranks = comms.rank, comms.world_size
    tensor = _tensor(rank, torch.float64)
    learner.barrier(comms)
    found = learner.all_gather(tensor, comms)
    tensor.zero_()  # what was gathered is a copy
    mine = found[rank] if isinstance(found, list) and len(found) == ranks else None
    if isinstance(mine, torch.Tensor) and not mine.any():
        raise Wrong(
            f"what rank {rank} gathered of itself is the very tensor it passed, so it changes when that does: "
            "put a clone into the list"
        )
    _require_list(found, f"all_gather: rank {rank}", rank, torch.float64, ranks)
