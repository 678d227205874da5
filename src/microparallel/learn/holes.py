"""An exercise is its solution with a hole in it: one text is written by hand, and what people see is made of it.

```
    # ┌ hole                                    what the learner gets        what `learn solution` shows
    #: raise NotImplementedError("add them")  →  raise NotImplementedError…
    total = sum(tensors)                      →                               total = sum(tensors)
    # └
```
"""

from __future__ import annotations

from collections.abc import Iterator

from microparallel.errors import DataError

_OPEN, _CLOSE, _GIVEN = "# ┌ hole", "# └", "#:"


def unsolved(text: str) -> str:
    """The text with its holes: in each, only what is given to the learner is left."""
    return _join(
        line.replace("#: ", "", 1).replace("#:", "", 1) if in_hole else line
        for line, in_hole in _lines(text)
        if not in_hole or line.lstrip().startswith(_GIVEN)
    )


def solved(text: str) -> str:
    """The text without holes and marks."""
    return _join(line for line, in_hole in _lines(text) if not (in_hole and line.lstrip().startswith(_GIVEN)))


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Every line with whether it stands in a hole; the marks themselves are left out."""
    in_hole, found = False, False
    for number, line in enumerate(text.splitlines(), 1):
        mark = line.strip()
        if mark in (_OPEN, _CLOSE):
            if in_hole == (mark == _OPEN):
                raise DataError(f"line {number}: {mark!r} where a hole {'is' if in_hole else 'is not'} open")
            in_hole, found = not in_hole, True
        else:
            yield line, in_hole
    if in_hole or not found:
        raise DataError("a hole is not closed" if in_hole else "there is no hole in this exercise")


def _join(lines: Iterator[str]) -> str:
    return "".join(line.rstrip() + "\n" for line in lines).rstrip("\n") + "\n"  # a hole may be all but a docstring


def _main() -> None:
    """Make the files that learners get, from the solutions."""
    from microparallel.learn.catalogue import EXERCISES

    for exercise in EXERCISES:
        if exercise.solution.exists():
            exercise.task.parent.mkdir(parents=True, exist_ok=True)
            exercise.task.write_text(unsolved(exercise.solution.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    _main()
