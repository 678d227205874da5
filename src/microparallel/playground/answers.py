"""The one door: a question from a page, as JSON, and its answer. Everything here may be asked by a stranger's page."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from microparallel.errors import UsageError
from microparallel.playground import showing
from microparallel.playground.board import Board, Refused
from microparallel.playground.hints import STEPS, hint
from microparallel.playground.levels import level_named
from microparallel.playground.looking import file_of, look
from microparallel.playground.reading import read
from microparallel.playground.starts import start, starts, with_messages
from microparallel.playground.words import sentence
from microparallel.program import to_text

Question = dict[str, Any]


def answer(question: str) -> str:
    """Answer one question; what is wrong with the question itself comes back in one line, as `trouble`."""
    try:
        asked = json.loads(question)
        name = asked.get("ask") if isinstance(asked, dict) else None
        if name not in _ANSWERS:
            raise UsageError(f"{name!r} is no question; choose one of {', '.join(_ANSWERS)}")
        return json.dumps({"answer": _ANSWERS[name](asked)})
    except (UsageError, RecursionError) as error:
        return json.dumps({"trouble": str(error)})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return json.dumps({"trouble": f"this cannot be answered: {type(error).__name__}: {error}"[:300]})


def _look(asked: Question) -> dict[str, Any]:
    return look(asked["text"], asked.get("costs", {}))


def _start(asked: Question) -> dict[str, str]:
    return {"text": to_text(start(asked["kind"], asked["name"], asked.get("numbers", {})))}


def _messages(asked: Question) -> dict[str, str]:
    """A schedule with the messages that are added for it."""
    program = read(asked["text"])
    return {"text": with_messages(program) or to_text(program)}


def _file(asked: Question) -> dict[str, str]:
    return file_of(asked["text"], asked.get("costs", {}), asked["form"])


def _starts(_: Question) -> list[dict[str, Any]]:
    return starts()


def _levels(_: Question) -> list[dict[str, Any]]:
    return showing.sets()


def _board(asked: Question) -> Board:
    moves = asked.get("moves", [])
    if not isinstance(moves, list) or not all(isinstance(move, str) for move in moves):
        raise UsageError("moves: a list of texts is needed")
    board = Board(level_named(asked["level"]))
    for move in moves:  # each is judged: saved progress may come from anywhere
        board = board.after(move)
    return board


def _open(asked: Question) -> dict[str, Any]:
    return showing.shown(_board(asked))


def _move(asked: Question) -> dict[str, Any]:
    """A move, judged: the board after it, or why it cannot be made."""
    board = Board(level_named(asked["level"]), asked.get("moves", []))  # the page has had each of them judged
    try:
        after = board.after(asked["move"])
        return {"board": showing.shown(after), "words": showing.done(after)}
    except Refused as error:
        return {"refused": sentence(str(error))}


def _hint(asked: Question) -> dict[str, Any]:
    return hint(_board(asked), asked.get("step", STEPS))


_ANSWERS: dict[str, Callable[[Question], Any]] = {
    "starts": _starts,
    "start": _start,
    "look": _look,
    "messages": _messages,
    "file": _file,
    "levels": _levels,
    "open": _open,
    "move": _move,
    "hint": _hint,
}
