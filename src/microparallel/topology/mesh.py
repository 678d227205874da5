"""Mesh: ranks in a grid of named axes. Each row is one pipeline; each column holds the replicas of one rank of it.

```
Mesh(dp=2, pp=3)      pp →
                dp    0  1  2      a pipeline
                ↓     3  4  5      another, on other samples
                      │
                      replicas: they hold the same stages, and sum their gradients
```
"""

from __future__ import annotations

from dataclasses import dataclass

from microparallel.errors import UsageError


@dataclass(frozen=True, slots=True)
class Mesh:
    """How many pipelines there are (dp), and how many ranks each has (pp)."""

    dp: int
    pp: int

    def __post_init__(self) -> None:
        for name, value in (("dp", self.dp), ("pp", self.pp)):
            if value < 1:
                raise UsageError(f"{name}={value}: a mesh has at least 1 rank along each axis")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.dp * self.pp

    def rank(self, replica: int, place: int) -> int:
        """The rank at one place of one pipeline."""
        return replica * self.pp + place

    def row(self, replica: int) -> list[int]:
        """The ranks of one pipeline, in order."""
        return [self.rank(replica, place) for place in range(self.pp)]

    def column(self, place: int) -> list[int]:
        """The ranks at one place of all pipelines."""
        return [self.rank(replica, place) for replica in range(self.dp)]

    def where(self, rank: int) -> tuple[int, int]:
        """The pipeline a rank belongs to, and its place there."""
        return divmod(rank, self.pp)
