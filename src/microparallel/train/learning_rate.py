"""How large the optimizer's steps are, from the first to the last."""

from __future__ import annotations

from dataclasses import dataclass

_WARM_UP = 0.1  # the part of a run in which a linear schedule goes up


@dataclass(frozen=True)
class LearningRate:
    """A learning rate over a run of so many steps: constant, or linear.

    ```
    linear   peak    ╱╲__
                    ╱    ╲__
             0     ╱        ╲__
                   0  10 %    100 % of the steps
    ```

    It is a function of the step alone, so a resumed run needs to remember nothing; one that is made longer follows the
    longer schedule from there on.
    """

    schedule: str
    peak: float
    steps: int

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if self.schedule == "constant":
            return self.peak
        up = max(1, round(_WARM_UP * self.steps))
        if step < up:
            return self.peak * (step + 1) / up
        return self.peak * max(0, self.steps - step) / max(1, self.steps - up)
