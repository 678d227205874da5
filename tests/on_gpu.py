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
        if (func in DRAWS or getattr(func, "__module__", "") == "torch.nn.init") and _first(args, kwargs).is_cuda:
            place, rest = _first(args, kwargs), {name: value for name, value in kwargs.items() if name != "tensor"}
            drawn = func(place.detach().cpu(), *args[1:], **rest)
            with torch.no_grad():
                place.copy_(drawn)
            return place
        return func(*args, **kwargs)


def _first(args, kwargs):
    return args[0] if args else kwargs["tensor"]


def on_gpu(comms, function, *arguments, **named_arguments):
    """Run a rank's function there; what it returns is brought back."""
    with OnGpu(comms.device):
        result = function(comms, *arguments, **named_arguments)
    result = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, result)
    return torch.utils._pytree.tree_map_only(str, without_device, result)


def without_device(text):
    """What is said of a call, without the device that it is said of where ranks use two."""
    return text.replace(" on cuda", "").replace(" on cpu", "")
