"""All-to-all: does every token meet its expert, and come back to its place, whatever the counts are?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from microparallel.errors import Mismatch
from microparallel.learn.exam import Exam, Stuck
from microparallel.learn.graders._common import require_all_waited
from microparallel.learn.log import SENDS, calls
from microparallel.learn.requirements import Suspect, listed, require_equal, require_tensor, require_type
from microparallel.learn.verdict import Wrong

_WIDTH = 3
Routes = Sequence[Sequence[int]]  # for each rank, its tokens' experts

_EVEN: Routes = [[1, 0], [0, 1]]
_MIXED: Routes = [[1, 0, 1, 2], [2, 2, 0, 1, 0], [0, 1, 2]]
_UNEVEN: dict[str, Routes] = {
    "a rank without tokens": [[1, 2, 0, 2], [], [0, 1]],
    "an expert without tokens": [[1, 0, 1], [0, 1], [1]],
    "all tokens for one expert": [[1, 1], [1], [1, 1, 1]],
    "no tokens at all": [[], [], []],
}


def check(exam: Exam) -> None:
    """The exchange alone; even counts; other counts; what was sent; a single rank."""
    with exam.step("exchange: every part comes to its rank, also an empty one"):
        exam.run(_exchange, 3, [[2, 1, 3], [0, 1, 2], [4, 0, 1]])
        exam.run(_exchange, 2, [[1, 0], [0, 1]])
    with exam.step("sort_by_rank: the order, and a count for every rank"):
        exam.run(_sort, 1)
    with exam.step("dispatch: every token is computed by its expert, and comes back to its place"):
        _require_outputs(exam, _EVEN)
        _require_outputs(exam, _MIXED)
    with exam.step("so it does with uneven counts, and with none"):
        for what, routes in _UNEVEN.items():
            _require_outputs(exam, routes, f"{what}: ")
    with exam.step("a token crosses once in each direction, and nothing else but counts") as notes:
        _require_few_bytes(exam, _MIXED, notes)
    with exam.step("a world of one is left alone"):
        _require_outputs(exam, [[0, 0, 0]])


# ── the exchange alone ──────────────────────────────────────────────────────────────────────────────────────────────


def _part(source: int, to: int, rows: int) -> torch.Tensor:
    return torch.arange(2.0 * rows).reshape(rows, 2) + 100 * source + 10 * to


def _exchange(learner: Any, comms: Any, rows: Sequence[Sequence[int]]) -> None:
    """Exchange parts of which rank s has rows[s][r] rows for rank r."""
    ranks, me = range(comms.world_size), comms.rank
    parts = [_part(me, to, rows[me][to]) for to in ranks]
    found = learner.exchange(parts, [rows[source][me] for source in ranks], comms)
    require_all_waited(comms)
    _require_list(found, comms.world_size, f"rank {me}: exchange")
    for source, one in enumerate(found):
        expected, what = _part(source, me, rows[source][me]), f"rank {me}: place {source} of what exchange returns"
        for sender in range(comms.world_size):
            if sender != source and rows[sender][me] and torch.equal(one, _part(sender, me, rows[sender][me])):
                raise Wrong(f"{what} came from rank {sender}: place r is for what rank r has sent")
        if source == me and len(one) != len(expected):
            raise Wrong(
                f"{what} should be this rank's own part, {len(expected)} rows, and has {len(one)}: it stays here"
            )
        known = [
            Suspect(_part(me, to, rows[me][to]), f"{what} is what this rank itself has for rank {to}")
            for to in ranks
            if to != me
        ]
        require_equal(one, expected, what, known)


def _require_list(found: object, places: int, who: str) -> None:
    for one in require_type(found, (list, tuple), f"{who}'s result", "a list of tensors"):
        require_tensor(one, f"{who}'s result has a place that")
    if isinstance(found, list | tuple) and len(found) != places:
        raise Wrong(f"{who} shall return a tensor for each of the {places} ranks, and returned {len(found)}")


def _sort(learner: Any, _: Any) -> None:
    for ranks, world_size in (([1, 0, 1, 2], 3), ([2, 0, 2, 1, 0], 3), ([1, 0, 1], 3), ([], 2)):
        tensor = torch.tensor(ranks, dtype=torch.int64)
        what = f"sort_by_rank({ranks}, {world_size})"
        order, counts = require_type(
            learner.sort_by_rank(tensor, world_size), (list, tuple), what, "a pair of the order and the counts"
        )
        found = [int(one) for one in counts]
        right = [ranks.count(rank) for rank in range(world_size)]
        if len(found) < world_size:
            raise Wrong(
                f"{what}: there are {len(found)} counts, {found}, for {world_size} ranks: a rank at the end that gets "
                "no token has the count 0 (bincount has an argument minlength)"
            )
        if found != right:
            raise Wrong(f"{what}: the counts are {found}, and should be {right}")
        places = require_tensor(order, f"{what}: the order").tolist()
        if sorted(places) != list(range(len(ranks))):
            raise Wrong(f"{what}: the order is {places}, and should have each of the {len(ranks)} places once")
        if [ranks[place] for place in places] != sorted(ranks):
            raise Wrong(
                f"{what}: in the order {places} the ranks are {[ranks[place] for place in places]}: those for rank 0 "
                "come first, then those for rank 1, and so on (argsort)"
            )


# ── tokens and experts ──────────────────────────────────────────────────────────────────────────────────────────────


def _tokens(rank: int, routes: Routes) -> torch.Tensor:
    count = len(routes[rank])
    return (torch.arange(float(_WIDTH * count)).reshape(count, _WIDTH) + 100 * (rank + 1)).double()


def _expert(rank: int, tokens: torch.Tensor) -> torch.Tensor:
    return tokens * (rank + 2) + 0.25 * rank


def _dispatch(learner: Any, comms: Any, routes: Routes) -> torch.Tensor:
    tokens, ranks = _tokens(comms.rank, routes), torch.tensor(routes[comms.rank], dtype=torch.int64)

    def expert(some: torch.Tensor) -> torch.Tensor:
        return _expert(comms.rank, require_tensor(some, "what the expert is given"))

    try:
        outputs = learner.dispatch(tokens, ranks, comms, expert)
    except Mismatch as error:
        raise Wrong(
            f"{str(error).splitlines()[0]}: a rank cannot know from its own tokens how many the others have for it; "
            "let every rank tell every other its count first"
        ) from None
    require_all_waited(comms)
    return require_tensor(outputs, f"rank {comms.rank}: what dispatch returns")


def _require_outputs(exam: Exam, routes: Routes, prefix: str = "") -> None:
    try:
        found = exam.run(_dispatch, len(routes), routes)
    except Stuck as stuck:
        raise Wrong(f"{prefix}{stuck}{_left_out(routes, stuck)}") from None
    for rank, one in enumerate(found):
        tokens, ranks = _tokens(rank, routes), torch.tensor(routes[rank], dtype=torch.int64)
        right = torch.cat([tokens[:0], *(_expert(to, row[None]) for to, row in zip(routes[rank], tokens, strict=True))])
        order = ranks.argsort(stable=True)
        returned = right[order]
        known = [
            Suspect(tokens, "these are the tokens as they were: no expert has computed them"),
            Suspect(_expert(rank, tokens), "every token was computed by this rank's own expert: none was sent away"),
            Suspect(returned, "the outputs are sorted by rank, as they came back: put each in the place of its token"),
            Suspect(
                returned[order],
                "the outputs were sorted once more instead of back: returned[order] sorts; result[order] = returned "
                "puts row n into place order[n]",
            ),
        ]
        require_equal(one, right, f"{prefix}rank {rank}'s outputs", known)


def _left_out(routes: Routes, stuck: Stuck) -> str:
    """What to say where a rank that has finished early has nothing to compute, and the others wait for it."""
    idle = [rank for rank in stuck.finished if not routes[rank] or not any(rank in mine for mine in routes)]
    if not idle:
        return ""
    return (
        f"\n  rank {listed(idle)} has no tokens here, or its expert has none: it takes part in the exchanges all the "
        "same, since the others cannot know that before"
    )


# ── what was sent ───────────────────────────────────────────────────────────────────────────────────────────────────


def _require_few_bytes(exam: Exam, routes: Routes, notes: list[str]) -> None:
    ranks = len(routes)
    exam.run(_dispatch, ranks, routes)
    for rank, row in enumerate(exam.rows):
        sent = calls(row, *SENDS)
        total = sum(message.bytes for message in sent)
        leaving = sum(to != rank for to in routes[rank])
        computed = sum(to == rank for other, mine in enumerate(routes) if other != rank for to in mine)
        tokens, counts = 8 * _WIDTH * (leaving + computed), 8 * ranks * (ranks - 1)
        if total > tokens + counts:
            raise Wrong(
                f"the outputs are right, but rank {rank} sent {total} bytes; {leaving} tokens leave it and {computed} "
                f"outputs go back, {tokens} bytes, and the counts: send every token to its expert's rank alone, and "
                "no padding"
            )
        if rank == 0:
            notes.append(f"rank 0 sends {leaving} tokens, {computed} outputs and the counts: {total} bytes")
