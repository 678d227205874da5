"""When ranks fail: whether to start them again, and with how many.

```
attempt 0   step 0 ─── 1 ─── 2 ─── 3 ✗ rank 1 was killed
attempt 1                    2 ─── 3 ─── 4 ─── 5 ✗ rank 0 was killed     further than before: go on
attempt 2                                4 ─── 5 ✗ rank 0 raised         …
attempt 3                                4 ─── 5 ✗ rank 0 raised         the same again, no further: end
```

What fails again at the same step in the same way would fail for ever: an exception that comes a second time ends it, a
process that dies or hangs a third time, since that may be chance.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from microparallel.errors import LaunchError, RankFailed
from microparallel.text import count

OnRestart = Callable[[LaunchError, int, int], None]  # (what failed, which restart this is, with how many ranks)
_TIMES_RAISED, _TIMES_DIED = 2, 3  # the same failure at the same step, after which there is no other try


@dataclass(frozen=True)
class _Failure:
    error: LaunchError
    step: int | None

    @property
    def kind(self) -> str:
        """What failed, without numbers: they may be those of processes or times."""
        reason = self.error.reason if isinstance(self.error, RankFailed) else "timed out"
        return re.sub(r"\d+", "#", reason.partition("\n")[0])

    @property
    def raised(self) -> bool:
        return isinstance(self.error, RankFailed) and bool(self.error.traceback)


class Restarts:
    """Counts the attempts of one call of `launch`, and decides whether there is another.

    Args:
        most: how often the ranks are started again.
        on_restart: told before each restart; by default a line is printed.
    """

    def __init__(self, most: int, on_restart: OnRestart | None = None) -> None:
        self._most = most
        self._tell = on_restart or self._print
        self._failures: list[_Failure] = []

    def after(self, error: LaunchError, step: int | None, ranks: int) -> None:
        """Return if there is to be another attempt with so many ranks, or raise: this error, or the first like it.

        `step` is the training step that the ranks had come to, where they count steps (`comms.flight.at_step`).
        """
        refused = isinstance(error, RankFailed) and error.refusal is not None
        if refused or len(self._failures) >= self._most:
            if self._failures and not refused:
                error.add_note(f"{count(self._most, 'restart')} came before this, and no more are allowed")
            raise error
        self._failures.append(_Failure(error, step))
        alike = self._alike()
        if len(alike) >= (_TIMES_RAISED if alike[-1].raised else _TIMES_DIED):
            alike[0].error.add_note(f"after step {step} this came {len(alike)} times: there is no other restart")
            raise alike[0].error
        self._tell(error, len(self._failures), ranks)

    def _alike(self) -> list[_Failure]:
        """The last failures that are of one kind, at one step."""
        last = self._failures[-1]
        alike: list[_Failure] = []
        for failure in reversed(self._failures):
            if last.step is not None and (failure.kind, failure.step) != (last.kind, last.step):
                break
            if last.step is None and failure is not last:  # nobody counts steps: only their number bounds the attempts
                break
            alike.insert(0, failure)
        return alike

    def _print(self, error: LaunchError, number: int, ranks: int) -> None:
        first_line = str(error).partition("\n")[0]
        print(
            f"{first_line}; starting again with {count(ranks, 'rank')} (restart {number} of {self._most})",
            file=sys.stderr,
            flush=True,
        )
