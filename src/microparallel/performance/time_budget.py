"""How to spend a given time on measurements: what is worth a try, and when it is enough."""

from __future__ import annotations

from collections.abc import Mapping

FEWEST_REPEATS = 5  # a median with a spread needs as many
MOST_REPEATS = 50


class TimeBudget:
    """So many seconds for all sizes together; or, with `repeats`, as long as so many repeats take.

    A larger size gets a larger share: the second four times that of the first, the third nine times. What a size
    leaves over is shared by those after it.
    """

    def __init__(self, seconds: float, sizes: int, repeats: int | None = None) -> None:
        self._seconds = seconds
        self._sizes = sizes
        self._repeats = repeats
        self._spent = 0.0
        self._sizes_done = 0

    @property
    def share(self) -> float:
        """The seconds for the next size."""
        weights = [position**2 for position in range(self._sizes_done + 1, self._sizes + 1)]
        return max(0.0, self._seconds - self._spent) * weights[0] / sum(weights)

    def too_slow(self, calls: Mapping[str, float], repeats: int, spent_here: float) -> set[str]:
        """Choose methods to repeat no more at this size, slowest first, so that the others get their fewest repeats.

        Args:
            calls: what a call of each method takes.
            repeats: how many there have been.
            spent_here: what all of them took together.
        """
        missing = FEWEST_REPEATS - repeats
        if self._repeats is not None or missing <= 0:
            return set()
        fastest_first = sorted(calls, key=lambda method: calls[method])
        kept = len(fastest_first)
        while kept and spent_here + missing * sum(calls[method] for method in fastest_first[:kept]) > self.share:
            kept -= 1
        return set(fastest_first[kept:])

    def goes_on(self, repeats: int, spent_here: float, next_round: float) -> bool:
        """Whether to measure this size once more, after so many repeats, if a round takes so long."""
        if self._repeats is not None:
            return repeats < self._repeats
        return repeats < FEWEST_REPEATS or (repeats < MOST_REPEATS and spent_here + next_round < self.share)

    def fraction(self, repeats: int, spent_here: float) -> float:
        """How much of it all is done."""
        if self._repeats is not None:
            return (self._sizes_done + repeats / self._repeats) / self._sizes
        return min(1.0, (self._spent + spent_here) / self._seconds)

    def end_size(self, spent_here: float) -> None:
        """A size is done, after so many seconds."""
        self._spent += spent_here
        self._sizes_done += 1
