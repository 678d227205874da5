"""How far apart the clocks of two machines are, and how sure that is.

```
    this machine    asked ─────────────────▶ answered        on this machine's clock
                         ╲                 ╱
    the other one         ╲──── theirs ───╱                  what its clock said meanwhile
```

The other clock was read somewhere between `asked` and `answered`. In the middle, the best guess, it is wrong by at most
half of the round trip, whichever way took longer. So the quickest of several round trips leaves the least doubt.

Clocks also run at different speeds. Two measurements, one before and one after, give the drift. A clock that drifts
steadily is a straight line over another one; where two lines differ by at most so much at both ends, they do so in
between. That is why the error of what `OtherClock` says is no larger than that of the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# Seconds in a second: a kernel makes its clock faster or slower by at most half of this, to put it right.
FASTEST_DRIFT = 1e-3


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A question to another machine, what its clock says.

    Attributes:
        asked: when the question left, on this machine's clock.
        theirs: what the other clock said.
        answered: when the answer was here, on this machine's clock.
    """

    asked: float
    theirs: float
    answered: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.answered - self.asked

    @property
    def at(self) -> float:
        """When the other clock was read, as far as one can guess."""
        return self.asked + self.seconds / 2

    @property
    def offset(self) -> float:
        """How much to add to this machine's clock to have the other's."""
        return self.theirs - self.at

    @property
    def error(self) -> float:
        """How wrong that may be; the last term is what two such large numbers cannot hold."""
        rounding = 2 * (math.ulp(self.theirs) + math.ulp(self.answered))
        return self.seconds / 2 * (1 + FASTEST_DRIFT) + rounding


def quickest(rounds: Iterable[RoundTrip]) -> RoundTrip:
    """The round trip that leaves the least doubt."""
    return min(rounds, key=lambda one: one.seconds)


@dataclass(frozen=True, slots=True)
class OtherClock:
    """What another machine's clock says at any moment between two measurements.

    Attributes:
        since: the moment of the first measurement, on this machine's clock.
        offset: how much the other clock was ahead then.
        drift: how many seconds it gains on this one in a second.
        error: how wrong what it says may be, in seconds.
        drift_error: how wrong the drift may be: much, if little time passed between the measurements.
    """

    since: float = 0.0
    offset: float = 0.0
    drift: float = 0.0
    error: float = 0.0
    drift_error: float = 0.0

    def at(self, moment: float) -> float:
        """What the other clock says when this one says `moment`."""
        return moment + self.offset + self.drift * (moment - self.since)

    @classmethod
    def between(cls, before: RoundTrip, after: RoundTrip) -> OtherClock:
        """The clock that two measurements describe.

        No clock drifts by more than `FASTEST_DRIFT`. One that seems to was set meanwhile, or stood still with its
        machine: nobody knows when, so all of that is doubt.
        """
        gained, passed = after.offset - before.offset, after.at - before.at
        error, doubt = max(before.error, after.error), before.error + after.error
        if abs(gained) > doubt + FASTEST_DRIFT * passed:
            error += abs(gained)
        if passed <= 0:
            return cls(before.at, before.offset, 0.0, error, FASTEST_DRIFT)
        return cls(before.at, before.offset, gained / passed, error, doubt / passed)
