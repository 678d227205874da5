"""Average each gradient as soon as it is there.

Backward makes the gradients of the last layer first, and they are not needed before the optimizer steps. So they can
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

An all-reduce needs every rank, and the first one that a rank begins meets the first one of every other rank, whatever
is in it. But ranks have different samples, so a rank may skip a layer, or use two layers in another order. Then its
gradients come in another order, and some do not come at all:

    rank 0   backward of    layer 3    spare    layer 0              g3  gs  g0
    rank 1   backward of    layer 3    layer 0                       g3  g0    gs meets g0, and rank 0 waits for ever

So all ranks agree on one order before the first step. A gradient that comes early waits until those before it have
left. A gradient that has not come when backward is over counts as zero, and is all-reduced all the same.

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
        self.requests: list = []  # the all-reduces that have begun in this step, in their order
        self.ready: set = set()  # the parameters whose gradients have come in this step
        # ┌ hole
        #: # self.order: the parameters that need a gradient, in the order in which all ranks all-reduce. Which order is
        #: # the same on every rank, and close to that of backward? Then give each of them a hook, self.on_gradient, and
        #: # keep the handles in self.handles.
        #: raise NotImplementedError("an order that all ranks share, and a hook for each parameter")
        self.order = [parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]
        self.handles = [parameter.register_post_accumulate_grad_hook(self.on_gradient) for parameter in self.order]
        # └

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """torch calls this with the parameter (not with its gradient) when parameter.grad is complete."""
        self.ready.add(parameter)
        self.start_next()

    def start_next(self) -> None:
        """Start the all-reduces whose turn it is: those that are next in the order, as long as they are ready."""
        # ┌ hole
        #: # As many have begun as there are requests. Is the gradient ready of the parameter that comes next?
        #: # Start averaging it over the ranks, do not wait, and keep the request. How many may start in one call?
        #: raise NotImplementedError("start the all-reduces whose turn it is")
        while len(self.requests) < len(self.order) and self.order[len(self.requests)] in self.ready:
            gradient = self.order[len(self.requests)].grad
            self.requests.append(self.comms.all_reduce(gradient, op="mean", async_op=True))
        # └

    def finish(self) -> None:
        """Come back when every gradient is the average; be ready for the next backward."""
        # ┌ hole
        #: # 1. A parameter whose gradient has not come: the other ranks wait for this rank's all-reduce of it.
        #: # 2. Wait for all requests.
        #: # 3. What must the next backward not find?
        #: raise NotImplementedError("let the rest leave, wait for all requests, and forget this step")
        for parameter in self.order:
            if parameter not in self.ready:
                parameter.grad = torch.zeros_like(parameter)
                self.ready.add(parameter)
        self.start_next()
        for request in self.requests:
            request.wait()
        self.requests.clear()
        self.ready.clear()
        # └

    def remove(self) -> None:
        """Take the hooks off the model."""
        # ┌ hole
        #: raise NotImplementedError("remove the hooks")
        for handle in self.handles:
            handle.remove()
        # └


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
