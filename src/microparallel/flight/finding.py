"""Something that is wrong with a world, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from microparallel.flight.place import Place


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: death, stopped, wrong order, mismatched shape (dtype, op, root, call), deadlock, missing rank, straggler,
            or transfer (everybody is in the same call, and it takes long).
        ranks: whose doing it is.
        place: where in the user's code, as far as that is known.
        text: a sentence that begins with the kind.
    """

    kind: str
    ranks: tuple[int, ...]
    place: Place | None
    text: str

    def __str__(self) -> str:
        return self.text
