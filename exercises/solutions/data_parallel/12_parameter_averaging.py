"""Average weights every few steps, with all their state.

Averaging gradients costs an all-reduce in every step. Here every rank trains on its own for some steps, as if it were
alone, and then the ranks average their *weights*:

    rank 0   step  step  step ┐           ┌ step  step  step ┐
                              ├─ average ─┤                  ├─ average …            every = 3
    rank 1   step  step  step ┘           └ step  step  step ┘
             nothing is sent    all ranks are the same again

After an average all ranks shall be the same in everything that training has changed, so that a checkpoint of one rank
is the whole run. (mp.course.ParameterAveraging leaves the optimizer's state with each rank; you average it, too.)

Is that the same training as averaging gradients? An example with one weight, learning rate 1 and both ranks at w = 8:
rank 0's gradient is 2, rank 1's is 4. Averaged gradients lead to 8 − 3 = 5, and averaged weights to (6 + 4) / 2 = 5.
The last function says for which optimizers, and for which `every`, the two agree after several steps. The check
measures whether that is so.

Lesson: docs/data_parallel/10_batching.md              Check it: microparallel learn check parameter-averaging
"""

import torch
from torch import nn

import microparallel as mp


class ParameterAveraging:
    """Make all ranks the same after every few steps; in between they train alone.

    You have comms.all_reduce(tensor, op="mean"), which replaces the tensor by its average over the ranks, in place. If
    you write into a parameter yourself, write into parameter.detach(): the same memory, which autograd does not watch.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: mp.Comms, every: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.comms = comms
        self.every = every
        self.steps = 0  # how many times after_step was called

    def after_step(self) -> None:
        """Count a step, and average after every `every` steps; all ranks call this after each optimizer.step()."""
        # ┌ hole
        #: # With every = 3: after steps 3, 6, 9, …
        #: raise NotImplementedError("count the step, and call self.average() when it is time")
        self.steps += 1
        if self.steps % self.every == 0:
            self.average()
        # └

    def average(self) -> None:
        """Replace everything that differs between the ranks by its average."""
        for tensor in [*self.parameters(), *self.buffers(), *self.optimizer_state()]:
            # ┌ hole
            #: raise NotImplementedError("average this tensor over the ranks, in place")
            self.comms.all_reduce(tensor, op="mean")
            # └

    def parameters(self) -> list[torch.Tensor]:
        """The weights, as tensors that may be written to."""
        # ┌ hole
        #: raise NotImplementedError("the model's parameters")
        return [parameter.detach() for parameter in self.model.parameters()]
        # └

    def optimizer_state(self) -> list[torch.Tensor]:
        """What the optimizer keeps for the parameters: momentum, Adam's moments."""
        # ┌ hole
        #: # self.optimizer.state[parameter] is a dictionary; it has other keys for other optimizers, and is empty for
        #: # plain SGD. All ranks must take the tensors in the same order.
        #: raise NotImplementedError("the tensors in the optimizer's state")
        return [
            value
            for parameter in self.model.parameters()
            for value in self.optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor)
        ]
        # └

    def buffers(self) -> list[torch.Tensor]:
        """What else the model keeps, and what differs between the ranks: BatchNorm's running mean and variance."""
        # ┌ hole
        #: # model.buffers() has them all. BatchNorm also counts its batches, in a tensor of whole numbers. That is the
        #: # same on all ranks, and has no average (tensor.is_floating_point()).
        #: raise NotImplementedError("the model's buffers that can be averaged")
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        # └


def same_as_gradients(optimizer: str, every: int) -> bool:
    """Whether this is the same training as averaging gradients in every step, but for rounding.

    All ranks have equally many samples, and the model has no BatchNorm.

    optimizer: "sgd", "momentum" (SGD with momentum), "weight decay" (SGD with weight decay) or "adam"
    """
    # ┌ hole
    #: # Calculate two steps with one weight and two ranks. After the first step, where does each rank ask for its next
    #: # gradient? And is the step twice as long if the gradient is twice as long?
    #: raise NotImplementedError("predict when the two are the same")
    return every == 1 and optimizer != "adam"
    # └


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        averaging = ParameterAveraging(model, optimizer, comms, every=3)
        torch.manual_seed(comms.rank)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 2)).square().mean().backward()
            optimizer.step()
            averaging.after_step()
        momentum = optimizer.state[model[2].weight]["momentum_buffer"]
        return [*model[2].weight[0].tolist(), *momentum[0].tolist(), *model[1].running_mean.tolist()]

    for state in mp.launch(try_it, ranks=2):
        print([round(number, 6) for number in state])  # twice the same, after six steps on other samples
