"""What to do next in a puzzle: a move of the solution that is known, as long as the board is a beginning of it."""

from __future__ import annotations

from typing import Any

from microparallel.playground.board import NEXT, Board, Refused
from microparallel.playground.levels import solved
from microparallel.playground.showing import move_words


def hint(board: Board) -> dict[str, Any]:
    """What to do next: a move of the stored solution, as long as the board is a beginning of it; else a word."""
    level = board.level
    best = solved().get(level.id, {}).get("best")
    if not board.missing():
        return {"words": "This is solved. Can it be done in less?" if board.moves else level.hint}
    if best is None or not board.moves:
        return {"words": level.hint, "move": best["moves"][0] if best and board.moves else None}
    following = _following(board, Board(level, best["moves"]))
    if following is None:
        another = "So far, this is another way than the solution that is known."
        return {"words": f"{level.hint} ({another} {_where(board, best)})"}
    return {"words": f"Next, in the solution that is known: {move_words(level, following)}.", "move": following}


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


def _where(board: Board, best: dict[str, Any]) -> str:
    """The first place in which a board differs from the solution that is known."""
    right = Board(board.level, best["moves"])
    for which, (mine, other) in enumerate(zip(board.lists, right.lists, strict=True)):
        for at, (one, two) in enumerate(zip(mine, other, strict=False)):
            if one != two:
                who = f"on rank {which}, " if board.level.kind == "pipeline" else ""
                where = f"{who}number {at + 1} is {one}, and there it is {two}"
                return f"It may be as good; if you are stuck: {where}."
    return "It may be as good; if you are stuck, undo some moves."
