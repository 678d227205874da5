"""What came of a check: the steps of the grader, and whether the answer is right."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from microparallel.errors import UsageError


class Wrong(UsageError):
    """What is wrong with a learner's answer, in words that help."""


class NotAllowed(Wrong):
    """The learner called a function that does what the learner is to write."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a grader looked at."""

    title: str
    passed: bool
    note: str = ""  # what was measured


@dataclass(slots=True)
class Verdict:
    """Whether an answer is right, and if not, what is wrong with it."""

    exercise: str
    passed: bool
    steps: list[Step] = field(default_factory=list)
    message: str = ""
    printed: str = ""  # what the learner's own code wrote
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Verdict:
        """From JSON."""
        return cls(**{**values, "steps": [Step(**step) for step in values["steps"]]})
