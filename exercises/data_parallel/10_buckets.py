"""Send gradients in buckets, while backward still computes.

A message for every gradient is many small messages, and each costs its latency. So gradients are collected in buckets,
a flat buffer each. A bucket leaves, as one message, when its last gradient has come, and travels while backward still
computes:

    compute   forward │ B5   │ B4   │ B3   │ B2   │ B1   │ B0   │ finish
    travel                          [ bucket 0 ]  [ bucket 1 ]  [ bucket 2 ]
                                      g5 and g4     g3 and g2     g1 and g0

`finish` waits for all of them, gives every parameter its averaged gradient, and makes the buckets ready for the next
step.

Lesson: docs/data_parallel/09_bucketing.md             Check it: microparallel learn check buckets
"""

import torch
from torch import nn

import microparallel as mp


class Bucket:
    """The gradients of some parameters, one after another in a flat buffer.

    buffer   │ bias of 5 │ weight of 5               │ bias of 4 │ weight of 4               │
               views[parameter] is a parameter's place in it, in that parameter's shape
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.parameters = parameters
        self.buffer = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
        parts = zip(parameters, self.buffer.split(sizes), strict=True)
        self.views = {parameter: part.view(parameter.shape) for parameter, part in parts}
        self.ready = 0  # how many gradients have come in this step
        self.request = None  # of its all-reduce, once that has begun


def in_buckets(parameters: list[nn.Parameter], numbers: int) -> list[list[nn.Parameter]]:
    """Which parameters share a bucket: the one that leaves first comes first.

    A bucket that has `numbers` numbers or more (parameter.numel()) takes no further parameter; the last may have less.
    """
    # In which order do gradients come? The first layer's parameters come first here; where does backward begin?
    raise NotImplementedError("share the parameters among buckets")


class BucketHooks:
    """Hooks that collect gradients in buckets; a full bucket leaves while backward goes on.

    You have comms.all_reduce(tensor, op="mean", async_op=True), which returns a request with a `wait()`.
    """

    def __init__(self, model: nn.Module, comms: mp.Comms, numbers: int) -> None:
        self.comms = comms
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buckets = [Bucket(group) for group in in_buckets(parameters, numbers)]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self.handles = [parameter.register_post_accumulate_grad_hook(self.on_gradient) for parameter in parameters]

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """torch calls this when parameter.grad is complete."""
        bucket = self.bucket_of[parameter]
        # Put the gradient into its place in the bucket, and count it. If it was the last one that was missing, start
        # the all-reduce of the bucket's buffer, without waiting for it.
        raise NotImplementedError("put the gradient into its bucket, and let a full bucket leave")

    def finish(self) -> None:
        """Come back when every gradient is the average; be ready for the next step."""
        for bucket in self.buckets:
            # A bucket may not have left: if a parameter was not used in this step, its gradient never came, and
            # counts as zero (on all ranks alike). Let it leave now. Wait; give every parameter its average;
            # and leave nothing of this step behind: the next one begins with ready, request and buffer as new.
            raise NotImplementedError("wait for the bucket, hand its gradients out, and empty it")

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self.handles:
            handle.remove()


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        hooks = BucketHooks(model, comms, numbers=4)
        model(torch.full((1, 2), float(comms.rank))).sum().backward()
        hooks.finish()
        return model[0].bias.grad.tolist()

    for gradient in mp.launch(try_it, ranks=2):
        print(gradient)  # twice the same: other inputs, and the average of the gradients
