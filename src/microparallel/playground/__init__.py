"""The course in a browser: what the playground's pages ask of Python, and the puzzles.

A page has a worker, in which a WebAssembly Python runs this package, unchanged. They speak JSON, one answer for each
question (`answers.py`):

    page    {"id": 7, "ask": "look", "text": "program …", "costs": {"forward": 2}}
    worker  {"id": 7, "answer": {"marks": […], "figure": "<div…", …}}        or {"id": 7, "trouble": "one line"}

- While a question is with the worker, the page keeps only the newest of those that came meanwhile: typing never
  waits, and no answer is shown that is older than what is on the page. A worker that does not answer in time is ended,
  and a new one is started. What is too large to be answered in time is refused here, by its size (`reading.py`).
- A text is from a stranger (it may come with an address). What is drawn is escaped by `drawing/markup.py`, and the
  page lets nothing through but elements and attributes on a list.
- Nothing is judged in the page. A program is judged by `verifier.verify`, and a move in a puzzle by
  `verifier.verify_beginning`: both walk through it by the same rules as ranks do.

A puzzle (`levels.py`) is a goal and costs, what can be placed, and limits. Its state is the list of moves that made it
(`board.py`), so undo takes the last one away, and a solution is a list of moves. What is known of each level (the best
builder, the best solution that a search has found, a bound that none can beat) is computed by `solving.py`, and stored
in `levels/solved.json`.
"""

from microparallel.playground.answers import answer
from microparallel.playground.board import Board, Move, Refused
from microparallel.playground.levels import Level, all_levels, level_named

__all__ = ["Board", "Level", "Move", "Refused", "all_levels", "answer", "level_named"]
