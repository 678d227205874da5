"""A multi-layer perceptron, whole (`FullMLP`) or cut into one piece per rank (`ShardedMLP`).

```
FullMLP(dim, depth=4)              layers.0   layers.1   layers.2   layers.3
                                  in → dim   dim → dim  dim → dim  dim → out
ShardedMLP(…, world_size=2)       └────── rank 0 ─────┘ └────── rank 1 ─────┘
```

After the same `torch.manual_seed`, the shards of all ranks together are exactly the full model, bit for bit, under
the same parameter names. That is what lets a test compare a pipeline with a single process.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from microparallel.errors import PartitionError, UsageError
from microparallel.models.loss import cross_entropy


class Layer(nn.Linear):
    """A linear layer followed by ReLU, which the last layer of a model leaves out."""

    def __init__(self, in_features: int, out_features: int, *, last: bool) -> None:
        super().__init__(in_features, out_features)
        self.last = last

    def reset_parameters(self) -> None:
        """Draw He's initial weights; `nn.Linear` calls this when it is built.

        torch's default shrinks the signal at every ReLU, and sixteen layers deep nothing of it is left to learn from.
        He's keeps its size.
        """
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        nn.init.zeros_(self.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the layer to a batch."""
        outputs = super().forward(inputs)
        return outputs if self.last else functional.relu(outputs)

    def extra_repr(self) -> str:
        """Say, when printed, whether a ReLU follows."""
        return super().extra_repr() + (", last" if self.last else ", relu")


class FullMLP(nn.Module):
    """A multi-layer perceptron that lives whole on one rank.

    `depth` counts the linear layers: in → dim, dim → dim, …, dim → out; a depth of 1 is the single layer in → out.
    """

    def __init__(self, dim: int, depth: int = 16, in_features: int | None = None, out_features: int = 2) -> None:
        super().__init__()
        shapes = _layer_shapes(dim, depth, in_features, out_features)
        self.layers = nn.ModuleList(Layer(*shape, last=index == depth - 1) for index, shape in enumerate(shapes))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outputs, or with targets the mean cross-entropy loss."""
        outputs = inputs
        for layer in self.layers:
            outputs = layer(outputs)
        return outputs if targets is None else cross_entropy(outputs, targets)

    def pipeline_layers(self) -> nn.ModuleList:
        """Return the layers, between any two of which a pipeline may cut."""
        return self.layers


class ShardedMLP(nn.Module):
    """One rank's share of the layers of a `FullMLP`, under the names they have there.

    Rank 0 takes the inputs, every other rank what the rank before it returned; the last rank takes targets too.
    """

    def __init__(
        self,
        dim: int,
        depth: int = 16,
        in_features: int | None = None,
        out_features: int = 2,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        shapes = _layer_shapes(dim, depth, in_features, out_features)
        bounds = shard_bounds(depth, rank, world_size)
        self.rank = rank
        self.world_size = world_size
        self.layers = nn.ModuleDict()
        for index, shape in enumerate(shapes):
            # Every rank draws the random numbers of every layer, or else its own would not be those of the full
            # model; it lets go of a layer it does not own before it draws the next, so at most one too many is held.
            self.layers[str(index)] = Layer(*shape, last=index == depth - 1)
            if index not in bounds:
                del self.layers[str(index)]

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return this shard's outputs, or with targets (on the last rank only) the mean cross-entropy loss."""
        if targets is not None and self.rank != self.world_size - 1:
            raise UsageError(
                f"rank {self.rank} of {self.world_size} was given targets, and only the last shard knows the loss: "
                f"pass targets on rank {self.world_size - 1}, and inputs alone elsewhere"
            )
        outputs = inputs
        for layer in self.layers.values():
            outputs = layer(outputs)
        return outputs if targets is None else cross_entropy(outputs, targets)


def shard_bounds(layers: int, rank: int, world_size: int) -> range:
    """Say which layers a rank owns: a contiguous run, the early ranks one longer where it does not come out even.

    >>> [list(shard_bounds(5, rank, 2)) for rank in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    if world_size < 1:
        raise UsageError(f"world_size={world_size}: a world has at least 1 rank")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank={rank} is outside a world of {world_size}: ranks go from 0 to {world_size - 1}")
    if world_size > layers:
        raise PartitionError(
            f"{world_size} ranks need at least {world_size} layers, and this model has {layers}\n"
            f"  asked for: depth={layers}, world_size={world_size}\n"
            f"  try: world_size={layers}, or a deeper model (depth={world_size})"
        )
    size, longer = divmod(layers, world_size)
    start = rank * size + min(rank, longer)
    return range(start, start + size + (rank < longer))


def _layer_shapes(dim: int, depth: int, in_features: int | None, out_features: int) -> list[tuple[int, int]]:
    """List the (inputs, outputs) of every layer."""
    in_features = dim if in_features is None else in_features
    for name, value in [("dim", dim), ("depth", depth), ("in_features", in_features), ("out_features", out_features)]:
        if value < 1:
            raise UsageError(f"{name}={value}: an MLP needs {name} of at least 1")
    widths = [in_features, *[dim] * (depth - 1), out_features]
    return list(itertools.pairwise(widths))
