"""Add up gradients over micro-batches, and send them once.

A batch that does not fit into memory is computed in micro-batches. `backward()` adds to parameter.grad, so the
gradients of all of them add up by themselves. But hooks fire in *every* backward: without care the ranks average after
every micro-batch, and here they send everything three times:

    with no care   F0 B0 ▓▓▓▓  F1 B1 ▓▓▓▓  F2 B2 ▓▓▓▓  update        ▓ all-reduces
    no_sync        F0 B0  F1 B1  F2 B2 ▓▓▓▓  update
                   └─ no_sync ─┘    └ they begin during the last backward, and carry what has added up

The result is the gradient of the mean over *all* samples, as if the batch had been computed at once. An example: a rank
has 10 samples, in micro-batches of 4, 4 and 2. Their mean losses count 4/10, 4/10 and 2/10.

All ranks have equally many samples and micro-batches, and use the same layers in the same micro-batch. A layer that the
last micro-batch does not use has gradients all the same, if an earlier one has used it.

Lesson: docs/data_parallel/10_batching.md              Check it: microparallel learn check accumulation
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

import microparallel as mp

MicroBatch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets


class AccumulatingHooks:
    """Hooks that average each gradient over the ranks as soon as it is complete, but not within `no_sync`.

    You have comms.all_reduce(tensor, op="mean", async_op=True), which returns a request with a `wait()`.
    """

    def __init__(self, model: nn.Module, comms: mp.Comms) -> None:
        self.comms = comms
        self.quiet = False  # whether hooks begin nothing now
        self.requests: dict = {}  # by parameter: its all-reduce of this step
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within `with hooks.no_sync():` a backward adds to the gradients, and no hook begins an all-reduce.

        However the block ends, also with an exception, it is as before afterwards; one may stand within another.
        """
        # ┌ hole
        #: # The block of the caller runs where this function says `yield`; an exception in the block is raised there.
        #: raise NotImplementedError("keep the hooks quiet while the block runs")
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before
        # └

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """torch calls this when a backward has added to parameter.grad."""
        # ┌ hole
        #: # Start averaging what has added up, do not wait, and keep the request; within no_sync do nothing.
        #: raise NotImplementedError("start the all-reduce of this gradient, unless the hooks are to be quiet")
        if not self.quiet:
            self.requests[parameter] = self.comms.all_reduce(parameter.grad, op="mean", async_op=True)
        # └

    def finish(self) -> None:
        """Come back when every gradient is the average; be ready for the next step."""
        # ┌ hole
        #: # Whose hook has not fired in the last backward, and has a gradient all the same? All ranks must begin the
        #: # all-reduces in the same order.
        #: raise NotImplementedError("send what has not left yet, wait for everything, and forget the requests")
        for parameter in self.parameters:
            if parameter not in self.requests and parameter.grad is not None:
                self.requests[parameter] = self.comms.all_reduce(parameter.grad, op="mean", async_op=True)
        for request in self.requests.values():
            request.wait()
        self.requests.clear()
        # └


def accumulate(
    model: nn.Module,
    hooks: AccumulatingHooks,
    micro_batches: list[MicroBatch],
    loss_fn: Callable[..., torch.Tensor],
) -> float:
    """Leave the gradients of the mean loss over all samples of all ranks; returns this rank's mean loss.

    loss_fn(outputs, targets) is the mean over a micro-batch. Gradients are None before.
    """
    # ┌ hole
    #: # All micro-batches but one within hooks.no_sync(). Which one is not, and how much does each loss count?
    #: raise NotImplementedError("forward and backward of every micro-batch, then finish")
    samples, total = sum(len(targets) for _, targets in micro_batches), 0.0
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        with hooks.no_sync() if number < len(micro_batches) else contextlib.nullcontext():
            loss = loss_fn(model(inputs), targets) * (len(targets) / samples)
            loss.backward()
        total += loss.item()
    hooks.finish()
    return total
    # └


if __name__ == "__main__":

    def try_it(comms: mp.Comms, micro_batches: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        hooks = AccumulatingHooks(model, comms)
        torch.manual_seed(comms.rank)
        inputs, targets = torch.randn(10, 2), torch.randn(10, 1)
        parts = list(zip(inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches), strict=True))
        accumulate(model, hooks, parts, nn.functional.mse_loss)
        return model[0].bias.grad.tolist()

    for micro_batches in (1, 3):
        for gradient in mp.launch(try_it, 2, micro_batches):
            print(micro_batches, gradient)  # four times the same, but for rounding
