"""Everything that a test makes without saying where, on a GPU: with the numbers that it would have on the CPU."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

MAKERS = _device_constructors()
DRAWS = {
    getattr(torch.Tensor, name)
    for name in ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_")
}


class OnGpu(TorchFunctionMode):
    """Within this block new tensors are made on the CPU, and moved to a GPU; so are the numbers that are drawn."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in MAKERS and kwargs.get("device") is None:
            needs_gradient = kwargs.pop("requires_grad", False)
            made = func(*args, **kwargs).to(self._device)
            return made.requires_grad_() if needs_gradient else made
        if func in DRAWS and args[0].is_cuda:
            drawn = func(torch.empty_like(args[0], device="cpu"), *args[1:], **kwargs)
            with torch.no_grad():
                args[0].copy_(drawn)
            return args[0]
        return func(*args, **kwargs)


def on_gpu(comms, function, *arguments, **named_arguments):
    """Run a rank's function there; what it returns is brought back."""
    with OnGpu(comms.device):
        result = function(comms, *arguments, **named_arguments)
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, result)
