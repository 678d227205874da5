"""Give every rank its own layers.

A model that is too large for one rank is cut into contiguous runs of layers, one for each rank. Where that does not
come out even, the first ranks take one layer more; with fewer layers than ranks, the last ranks have none.

    seven layers, three ranks      0  1  2 │ 3  4 │ 5  6
                                   rank 0    rank 1  rank 2

A rank's layers are its *shard*. All shards together must be the whole model: after the same torch.manual_seed they have
the same weights, bit for bit, under the same names (layers.3.weight is on rank 1, and has that name there too). Only
then can a pipeline be compared with one process, and a checkpoint be shared. But no rank may ever hold the whole model:
a rank is too small for it.

Lesson: docs/pipeline/04_naive.md            Check it: microparallel learn check sharded-model
"""

import torch
from torch import nn


class Layer(nn.Linear):
    """A linear layer and a ReLU. It draws its weights at random when it is made."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(inputs))


class WholeModel(nn.Module):
    """All layers, in one place."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def my_layers(depth: int, rank: int, world_size: int) -> range:
    """Which of the layers 0 to depth - 1 a rank has; the first ranks have one more where it does not come out even."""
    # ┌ hole
    #: # How many layers does every rank have at least, and how many are left over? Where does this rank's run begin?
    #: raise NotImplementedError("a contiguous run of layers for every rank")
    size, left_over = divmod(depth, world_size)
    start = rank * size + min(rank, left_over)
    stop = start + size + (1 if rank < left_over else 0)
    return range(start, stop)
    # └


class ShardedModel(nn.Module):
    """One rank's layers of a WholeModel, under the names that they have there."""

    def __init__(self, width: int, depth: int, rank: int, world_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()  # from the number of a layer in the whole model, as a text, to the layer
        # ┌ hole
        #: # Keep Layer(width) under str(number), for the layers of this rank. Their random numbers must be the whole
        #: # model's: what has the whole model drawn before it comes to your first layer?
        #: raise NotImplementedError("make this rank's layers")
        mine = my_layers(depth, rank, world_size)
        for number in range(depth):
            layer = Layer(width)  # every rank draws for every layer, but holds on to its own
            if number in mine:
                self.layers[str(number)] = layer
        # └

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            inputs = layer(inputs)
        return inputs


if __name__ == "__main__":
    for each in range(3):
        torch.manual_seed(0)
        shard = ShardedModel(4, 7, each, 3)
        print(f"rank {each}:", *(name for name, _ in shard.named_parameters()))
