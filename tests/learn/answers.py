"""A typical wrong answer: the solution with some of its text replaced, and the words it must be refused with."""

from dataclasses import dataclass

from microparallel.learn.holes import solved


@dataclass(frozen=True)
class Answer:
    mistake: str
    changes: dict[str, str]
    words: str
    quick: bool = False  # `make test`, which has no time for all of them, looks at the first two of these

    def of(self, exercise):
        text = solved(exercise.solution.read_text("utf-8"))
        for old, new in self.changes.items():
            assert text.count(old) >= 1, f"{exercise.name}, {self.mistake}: the solution has no {old!r}"
            text = text.replace(old, new)
        return text
