"""The shares of a batch: fixed when a run begins, whatever becomes of its ranks.

```
global batch      5 0 3 6 9 7 2 8        a run that began with 4 ranks has 4 shares
shares            5 0│3 6│9 7│2 8        each with random numbers of its own
4 ranks            0   1   2   3
3 ranks            0   0   1   2         rank 0 computes two of them, one after another
```

So a run that goes on with fewer ranks computes the same sums, up to the order in which they are added, with the same
dropout. Of a pipeline, all ranks compute the shares of their replica, of which there may be fewer or more.

Buffers, such as BatchNorm's running statistics, are what share 0 makes of them: rank 0 has that share, and leaves
buffers alone when it computes another.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from microparallel.pipeline.layers import buffers_left_as_found
from microparallel.train.random_state import random_state, restore_random_state, seed_generators
from microparallel.train.sampler import share


class Shares:
    """The shares of every batch that one rank computes.

    Args:
        total: how many there are; with more ranks than that, there are as many as ranks.
        rank: which rank this is; in a pipeline, which replica.
        world_size: how many ranks there are, or replicas.
        seed: of the run: what a share draws first depends on it.
    """

    def __init__(self, total: int, rank: int, world_size: int, seed: int = 0) -> None:
        self.total = max(total, world_size)
        self.seed = seed
        self._rank = rank
        self._by_rank: list[list[int]] = [share([*range(self.total)], one, world_size) for one in range(world_size)]
        self.mine = self._by_rank[rank]
        self._current = self.mine[0]  # the share whose random numbers this process draws
        self._states: dict[int, dict[str, Any]] = {}  # of the other shares of this rank
        self._to_compute: list[int] = []
        self._buffers = ExitStack()  # during a call of the model that is to leave them as they are

    def cut(self, batch: Sequence[Any]) -> list[tuple[int, list[Any]]]:
        """Cut a global batch, and return this rank's shares: the number of each, and its samples."""
        return [(number, share([*batch], number, self.total)) for number in self.mine]

    def fresh(self) -> Shares:
        """The same shares, for another loader: its random numbers are none of this one's."""
        return Shares(self.total, self._rank, len(self._by_rank), self.seed)

    @property
    def most_of_a_rank(self) -> int:
        """How many shares the rank has that has most."""
        return max(map(len, self._by_rank))

    def most_microbatches(self, samples: int, microbatches: int) -> int:
        """How many micro-batches with samples the rank has that has most, if each share is cut into so many."""
        sizes = [len(share([*range(samples)], number, self.total)) for number in range(self.total)]
        return max(sum(min(microbatches, sizes[number]) for number in numbers) for numbers in self._by_rank)

    # ── random numbers ──────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Draw from here on what this rank's first share draws in a new run."""
        seed_generators(self._first_seed(self._current))

    def _first_seed(self, number: int) -> str:
        return f"seed {self.seed}, share {number}"

    def draw_as(self, number: int) -> None:
        """From now on, draw the random numbers of this share."""
        if number == self._current:
            return
        self._states[self._current] = random_state()
        if number in self._states:
            restore_random_state(self._states.pop(number))
        else:
            seed_generators(self._first_seed(number))
        self._current = number

    def will_compute(self, numbers: Sequence[int]) -> None:
        """The next calls of the model are with micro-batches of these shares."""
        self._to_compute = [*numbers]

    def draw_apart(self, model: nn.Module) -> None:
        """Let each call of the model draw the random numbers of the share it computes."""
        if len(self.mine) > 1:
            model.register_forward_pre_hook(self._before_call)
            model.register_forward_hook(self._after_call, always_call=True)

    def _before_call(self, module: nn.Module, _inputs: Any) -> None:
        if self._to_compute:
            self.draw_as(self._to_compute.pop(0))
            if self._current != self.mine[0]:
                self._buffers.enter_context(buffers_left_as_found([module]))

    def _after_call(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._buffers.close()

    def random_states(self) -> list[dict[str, Any]]:
        """The state of each of this rank's shares, in their order."""
        here = random_state()
        return [here if number == self._current else self._states.get(number, here) for number in self.mine]

    def restore_random_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on with what all shares had, as long as there are as many as then."""
        if len(states) == self.total:
            self._states = {number: states[number] for number in self.mine[1:]}
            self._current = self.mine[0]
            restore_random_state(states[self._current])
