"""Round the ring: is it the sum, on every rank, the same bits, with as few bytes as possible?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from microparallel.learn.exam import Exam
from microparallel.learn.graders._common_dp import contribution, counted, counted_in_words
from microparallel.learn.verdict import Wrong
from microparallel.learn.words import Suspect, listed, require_equal, require_like


def check(exam: Exam) -> None:
    """The sum; other sizes and dtypes; messages and bytes."""
    with exam.step("two ranks have the sum"):
        _require_sum(exam, 2, 4)
    with exam.step("so have three and four ranks"):
        _require_sum(exam, 3, 6)
        _require_sum(exam, 4, 8)
    with exam.step("also when the tensor does not divide evenly, and for integers"):
        _require_sum(exam, 3, 7)
        _require_sum(exam, 4, 2)
        _require_sum(exam, 3, 8, torch.int64)
    with exam.step("no rank sends more than 2(p−1)/p of the tensor, and all have the same bits") as notes:
        _require_few_bytes(exam, 4, 64, notes)
    with exam.step("a world of one is left alone"):
        _require_sum(exam, 1, 5)


@dataclass
class _Message:
    peer: int
    bytes: int
    slice: int | None  # None if it was not one of the tensor's slices


def _reduce(
    learner: Any, comms: Any, size: int, dtype: torch.dtype, divisor: int = 1
) -> tuple[torch.Tensor, list[_Message]]:
    tensor = contribution(comms.rank, size, dtype)
    if divisor != 1:
        tensor /= divisor
    learner.ring_all_reduce(tensor, comms)
    require_like(tensor, contribution(comms.rank, size, dtype), f"rank {comms.rank}'s tensor")
    unfinished = [entry.line for entry in comms.log if not entry.waited]
    if unfinished:
        raise Wrong(
            f"rank {comms.rank} began a send or receive in line {unfinished[0]} and never waited for it: keep the "
            "request, and wait before the tensor is written to again"
        )
    places = {(one.data_ptr(), one.nbytes): number for number, one in enumerate(tensor.tensor_split(comms.world_size))}
    sent = [_Message(entry.peer, entry.bytes, places.get((entry.address, entry.bytes))) for entry in comms.sent()]
    return tensor, sent


def _require_sum(exam: Exam, ranks: int, size: int, dtype: torch.dtype = torch.float64) -> None:
    results = exam.run(_reduce, ranks, size, dtype)
    own = [contribution(rank, size, dtype) for rank in range(ranks)]
    expected = torch.stack(own).sum(0)
    if ranks > 1 and size % ranks == 0 and any(not torch.equal(found, expected) for found, _ in results):
        _name_the_mistake(_Ring([found for found, _ in results], [sent for _, sent in results], own))
    for rank, (found, _) in enumerate(results):
        suspects = [Suspect(expected / ranks, _MEAN), Suspect(own[rank], _OWN.format(rank))]
        require_equal(found, expected, f"rank {rank}'s tensor, {ranks} ranks,", suspects)


_MEAN = "this is the mean: an all-reduce adds up, and whoever wants a mean divides later"
_OWN = (
    "rank {} still holds its own numbers: nothing was added to the tensor itself. The slices are views of it: write "
    "into them with add_ and copy_; `slices[i] = …` only puts another tensor into the list"
)


# ── what went wrong ─────────────────────────────────────────────────────────────────────────────────────────────────


class _Ring:
    """What the ranks have sent and what they have now, slice by slice."""

    def __init__(self, found: list[torch.Tensor], sent: list[list[_Message]], own: list[torch.Tensor]) -> None:
        self.ranks = len(own)
        self.found, self.sent, self.own = found, sent, own
        self.total = torch.stack(own).sum(0)
        parts = [one.tensor_split(self.ranks) for one in own]
        self.counts = [  # of each rank, for each slice: how often everybody is in it
            [
                counted(piece, [part[number] for part in parts])
                for number, piece in enumerate(one.tensor_split(self.ranks))
            ]
            for one in found
        ]

    def whole(self, rank: int) -> list[int]:
        """The slices whose whole sum a rank has."""
        return [number for number, counts in enumerate(self.counts[rank]) if counts == [1] * self.ranks]

    def only_own(self, rank: int, number: int) -> bool:
        """Whether a slice is still what the rank itself put in."""
        return self.counts[rank][number] == [int(other == rank) for other in range(self.ranks)]

    def messages(self) -> int:
        """The most that a rank has sent."""
        return max(map(len, self.sent))


def _name_the_mistake(ring: _Ring) -> None:
    if all(torch.allclose(one.double(), ring.total.double() / ring.ranks) for one in ring.found):
        raise Wrong(_MEAN)
    _require_written(ring)
    _require_second_half(ring)
    _require_passed_on(ring)
    _require_steps(ring)
    _require_right_places(ring)


def _require_written(ring: _Ring) -> None:
    """Refuse slices that are not views: rebound, or of a copy."""
    for rank in range(ring.ranks):
        rest = [number for number in range(ring.ranks) if number not in ring.whole(rank)]
        full_length = len(ring.sent[rank]) >= 2 * (ring.ranks - 1) or len(rest) == ring.ranks
        if rest and full_length and all(ring.only_own(rank, number) for number in rest):
            kept = "its own numbers" if len(rest) == ring.ranks else f"its own numbers in slice {listed(rest)}"
            raise Wrong(_OWN.replace("its own numbers", kept).format(rank))


def _require_second_half(ring: _Ring) -> None:
    owners = [ring.whole(rank) for rank in range(ring.ranks)]
    if all(len(one) == 1 for one in owners) and ring.messages() < 2 * (ring.ranks - 1):
        raise Wrong(
            f"every rank has the whole sum of one slice and of no other (rank 0 of slice {owners[0][0]}): that was the "
            "first half; in the second one the sums go round once more, and are copied"
        )


def _require_passed_on(ring: _Ring) -> None:
    """The rule of the ring: what a rank sends is the slice that it received the step before."""
    begins = [one[0].slice if one else None for one in ring.sent]
    for rank, begin in enumerate(begins):
        if begin is not None and begin in begins[:rank]:
            raise Wrong(
                f"wrong slice: in step 0 ranks {begins.index(begin)} and {rank} both send slice {begin}; each rank "
                "begins with another one, rank r with slice r"
            )
    for step in range(1, min(map(len, ring.sent))):
        for rank in range(ring.ranks):
            before = [other for other in range(ring.ranks) if ring.sent[other][step - 1].peer == rank]
            sends = ring.sent[rank][step].slice
            came = ring.sent[before[0]][step - 1].slice if before else None
            if sends is not None and came is not None and sends != came:
                raise Wrong(
                    f"wrong slice, {ring.ranks} ranks: in step {_in_half(step, ring.ranks)} rank {rank} sends slice "
                    f"{sends}, but in the step before it received slice {came} from rank {before[0]}: that is the one "
                    "to pass on"
                )


def _in_half(step: int, ranks: int) -> str:
    half = "first" if step < ranks - 1 else "second"
    return f"{step % (ranks - 1)} of the {half} half"


def _require_steps(ring: _Ring) -> None:
    steps, right = ring.messages(), 2 * (ring.ranks - 1)
    if steps != right:
        raise Wrong(
            f"with {ring.ranks} ranks each of them sends {right} slices, {ring.ranks - 1} in each half; these send "
            f"{steps}"
        )


def _require_right_places(ring: _Ring) -> None:
    """The right slices were sent; say what was done with them."""
    for words, first, second in _MISTAKES:
        for shift in range(1, ring.ranks):
            if all(map(torch.equal, ring.found, _round(ring.own, shift, first, second))):
                raise Wrong(words)
    for rank in range(ring.ranks):
        for number, counts in enumerate(ring.counts[rank]):
            if counts and counts != [1] * ring.ranks:
                raise Wrong(
                    f"rank {rank}'s slice {number} has what {counted_in_words(counts)} put in: in the first half what "
                    "arrives is added to its slice (add_), in the second it replaces what was there (copy_)"
                )


_WRONG_PLACE = "the right slices are sent, but in the {} half what arrives is {} the wrong one: in step s rank r {}"
_MISTAKES = (  # in words; what is done with what arrives in each half, and whether in the right place
    (
        "the second half adds: what arrives there is the whole sum already, and your own numbers are in it; copy it "
        "over your own slice (copy_)",
        ("add", False),
        ("add", False),
    ),
    (
        "the first half replaces your own slice by what arrives, and your numbers are lost: add it (add_)",
        ("copy", False),
        ("copy", False),
    ),
    (_WRONG_PLACE.format("first", "added to", "receives slice r−s−1"), ("add", True), ("copy", False)),
    (_WRONG_PLACE.format("second", "copied to", "receives slice r−s"), ("add", False), ("copy", True)),
)


def _round(
    own: list[torch.Tensor], shift: int, first: tuple[str, bool], second: tuple[str, bool]
) -> list[torch.Tensor]:
    """Go round the ring with a mistake, and return what all ranks have then."""
    ranks, tensors = len(own), [one.clone() for one in own]
    slices = [one.tensor_split(ranks) for one in tensors]
    for begin, (what, misplaced) in ((0, first), (1, second)):
        for step in range(ranks - 1):
            sent = [slices[rank][(rank + begin - step) % ranks].clone() for rank in range(ranks)]
            for rank in range(ranks):
                place = slices[rank][(rank + begin - step - 1 + misplaced * shift) % ranks]
                place.copy_(sent[rank - 1] + place if what == "add" else sent[rank - 1])
    return tensors


def _require_few_bytes(exam: Exam, ranks: int, size: int, notes: list[str]) -> None:
    results = exam.run(_reduce, ranks, size, torch.float64, 3)
    most = 2 * (ranks - 1) * 8 * size // ranks
    for rank, (found, sent) in enumerate(results):
        total = sum(message.bytes for message in sent)
        if total > most:
            advice = (
                "pass slices on, not whole tensors"
                if max(one.bytes for one in sent) > 8 * size // ranks
                else (f"{ranks - 1} steps in each half")
            )
            raise Wrong(
                f"the sum is right, but rank {rank} sent {total} bytes in {len(sent)} messages; {most} bytes in "
                f"{2 * (ranks - 1)} messages are enough: {advice}"
            )
        _require_a_ring(rank, ranks, sent, 8 * size // ranks)
        if not torch.equal(found, results[0][0]):
            raise Wrong(f"rank {rank}'s sum differs from rank 0's in the last digits: copy the sums in the second half")
    notes.append(f"{most} bytes in {2 * (ranks - 1)} messages a rank")


def _require_a_ring(rank: int, ranks: int, sent: list[_Message], size: int) -> None:
    """Refuse another way to the same sum: as cheap as a ring, perhaps, but not what this exercise is about."""
    strangers = [message.peer for message in sent if message.peer != (rank + 1) % ranks]
    if strangers:
        raise Wrong(
            f"the sum is right, but this is not the ring: rank {rank} sends to rank {strangers[0]}, which is not the "
            f"rank after it, {(rank + 1) % ranks}"
        )
    if len(sent) != 2 * (ranks - 1):
        raise Wrong(
            f"the sum is right, but rank {rank} sent {len(sent)} messages, and in a ring of {ranks} it sends "
            f"{2 * (ranks - 1)}: {ranks - 1} in each half"
        )
    odd = [message.bytes for message in sent if message.bytes != size]
    if odd:
        raise Wrong(f"the sum is right, but rank {rank} sent a message of {odd[0]} bytes, and a slice has {size}")
