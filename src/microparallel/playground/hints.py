"""What to do next in a puzzle, in three steps that say more and more: a direction, a place, a move.

The move is one of the solution that is known, as long as the board is a beginning of it. Where it is not, the place is
where the two differ, and the move is to undo as many moves as lead away from it.
"""

from __future__ import annotations

from typing import Any

from microparallel.playground.board import NEXT, Board, Refused
from microparallel.playground.levels import solved
from microparallel.playground.showing import move_words, place_words
from microparallel.playground.words import named, sentence
from microparallel.text import count

STEPS = 3


def hint(board: Board, step: int = STEPS) -> dict[str, Any]:
    """What to do next, in words; in the last step with the move, if the board is a beginning of the known solution."""
    level = board.level
    best = solved().get(level.id, {}).get("best")
    if not board.missing():
        return {"words": "This is solved. Can it be done in less?"}
    if best is None or step <= 1:
        return {"words": level.hint}
    known = Board(level, best["moves"])
    following = _following(board, known)
    if following is None:
        return {"words": _where(board, known) if step < STEPS else _way_back(board, known)}
    if step < STEPS:
        return {"words": sentence(f"in the solution that is known, {place_words(level, following)}")}
    return {"words": sentence(f"Next: {move_words(level, following)}"), "move": following}


def _following(board: Board, best: Board) -> str | None:
    """The next move of a solution of which the board is a beginning."""
    if board.level.kind == "messages":
        done = [set(hop) for hop in board.hops]
        for number, hop in enumerate(best.hops):
            if number >= len(done):
                return NEXT
            if number < len(done) - 1 and done[number] != set(hop):
                return None
            if number == len(done) - 1:
                if done[number] - set(hop):
                    return None
                left = [move for move in hop if move not in done[number]]
                return left[0] if left else NEXT
        return None
    if any(mine != right[: len(mine)] for mine, right in zip(board.lists, best.lists, strict=True)):
        return None
    lengths = [len(mine) for mine in board.lists]
    for which, right in enumerate(best.lists):
        if lengths[which] < len(right):
            move = f"{which}:{right[lengths[which]]}"
            try:
                board.after(move)
            except Refused:
                continue
            return move
    return None


def _where(board: Board, known: Board) -> str:
    """The first place in which a board differs from the solution that is known."""
    another = "So far this is another way than the solution that is known, and it may be as good."
    for which, (mine, other) in enumerate(zip(board.lists, known.lists, strict=True)):
        for at, (one, two) in enumerate(zip(mine, other, strict=False)):
            if one != two:
                who = f"on rank {which}, " if board.level.kind == "pipeline" else ""
                differs = sentence(f"{who}number {at + 1} is {named(one)}, and there it is {named(two)}")
                return f"{another} {differs}"
    for number, (hop, known_hop) in enumerate(zip(board.hops, known.hops, strict=False)):
        if set(hop) != set(known_hop):
            return f"{another} They differ in hop {number + 1}."
    return another


def _way_back(board: Board, known: Board) -> str:
    """How many moves to undo, until the board is a beginning of the solution that is known."""
    for number in range(1, len(board.moves)):
        if _following(Board(board.level, board.moves[:-number]), known) is not None:
            return f"Undo {count(number, 'move')}: what is left is a beginning of the solution that is known."
    return "Start again: the solution that is known begins in another way."
