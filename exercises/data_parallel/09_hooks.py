"""Average each gradient as soon as it is there.

Backward makes the gradients of the last layer first, and nobody needs them before the optimizer steps. So they can
travel while backward computes the layers before. torch calls a *hook*, a function of yours, the moment a gradient is
complete:

    compute   forward │ backward of layer 2 │ of layer 1 │ of layer 0 │ finish
    travel                                  [ g2 ]       [ g1 ]       [ g0 ]

    hooks = GradientHooks(model, comms)
    for every batch:
        loss.backward()         starts the all-reduce of every gradient, one by one
        hooks.finish()          waits until all of them are back, averaged
        optimizer.step()
    hooks.remove()

Lesson: docs/data_parallel/08_hooks.md                 Check it: microparallel learn check hooks
"""

import torch
from torch import nn

import microparallel as mp


class GradientHooks:
    """Hooks on a model's parameters that average every gradient over the ranks, during backward.

    You have parameter.register_post_accumulate_grad_hook(function), which returns a handle with a `remove()`; and
    comms.all_reduce(tensor, op="mean", async_op=True), which returns a request at once; its `wait()` comes back when
    the tensor has been averaged, in place.
    """

    def __init__(self, model: nn.Module, comms: mp.Comms) -> None:
        self.comms = comms
        self.requests: list = []  # the all-reduces that have begun and were not waited for
        self.handles: list = []  # of all hooks, to remove them
        for parameter in model.parameters():
            # Have self.on_gradient called when this parameter's gradient is complete, and keep the handle.
            # A parameter without requires_grad gets no gradient, and no hook.
            raise NotImplementedError("register a hook for this parameter")

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """torch calls this with the parameter (not with its gradient) when parameter.grad is complete."""
        # Start averaging the gradient over the ranks, do not wait, and keep the request.
        raise NotImplementedError("start the all-reduce of this gradient")

    def finish(self) -> None:
        """Come back when every gradient is the average; be ready for the next backward."""
        raise NotImplementedError("wait for all requests")

    def remove(self) -> None:
        """Take the hooks off the model."""
        raise NotImplementedError("remove the hooks")


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        hooks = GradientHooks(model, comms)
        model(torch.full((1, 2), float(comms.rank))).sum().backward()
        hooks.finish()
        return model[0].bias.grad.tolist()

    for gradient in mp.launch(try_it, ranks=2):
        print(gradient)  # twice the same: other inputs, and the average of the gradients
