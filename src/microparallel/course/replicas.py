"""Data parallelism in one process: the same model on several devices, each with its share of the batch.

```
                  ┌─ replica 0   share 0   forward, backward ─┐
CPU master copy ──┼─ replica 1   share 1   forward, backward ─┼── average ── update, the same on every replica
                  └─ replica 2   share 2   forward, backward ─┘
     once                        every step
```

Each step of the picture is a function below, in that order; `Replicas` only calls them. On GPUs the replicas compute at
the same time: Python queues the work of one GPU and goes on to the next. On the CPU they compute one after another,
which is no faster than one model, and shows the same algorithm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from microparallel.comms.calls import describe
from microparallel.comms.in_process import all_reduce_in_process
from microparallel.errors import UsageError
from microparallel.models.loss import LossFunction, mean_loss

Share = tuple[Any, torch.Tensor]  # (inputs, targets) of one replica


class Replicas:
    """Copies of a model on several devices of this process, which learn what one model would learn from whole batches.

    One optimizer updates all replicas, each on its own device. It must update every number on its own, as SGD and Adam
    do. (To clip gradients, clip those of each of `models`; all of them together have a larger norm.)

    Args:
        model: what to replicate. It is copied, and not changed.
        devices: one for each replica: GPUs, as in `["cuda:0", "cuda:1"]`, or the CPU several times.
        averaging: how gradients are averaged: "cpu" (every device → CPU → every device) or "ring" (device to device).

    Attributes:
        master: the copy on the CPU that all replicas start from; `state_dict` brings it up to date.
        models: the replicas, in the order of the devices.
        devices: where they are.

    Example:
        ```python
        replicas = mp.course.Replicas(model, devices=["cpu", "cpu"], averaging="ring")
        optimizer = torch.optim.SGD(replicas.parameters(), lr=0.1)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = replicas.step(inputs, targets, torch.nn.functional.cross_entropy)
            optimizer.step()
        model.load_state_dict(replicas.state_dict())
        ```
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device | str | int], averaging: str = "cpu") -> None:
        if averaging not in AVERAGES:
            raise UsageError(f"averaging={averaging!r}: choose one of {', '.join(AVERAGES)}")
        _require_replicable(model)
        self.averaging = averaging
        self.devices = usable_devices(devices)
        self.master = device_copy(model, torch.device("cpu"))
        self.models = create_replicas(self.master, self.devices)

    def step(self, inputs: Any, targets: torch.Tensor, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Forward and backward of a whole batch; afterwards every replica holds the same gradients, those of the batch.

        Shares may differ in size, and replicas may have no sample at all. Gradients accumulate as after
        `loss.backward()`; the caller's optimizer steps. If a replica fails, all gradients are dropped, so that the
        replicas stay the same.

        Args:
            inputs: a tensor, or a nest of tuples, lists and dictionaries of them, a row for each sample.
            targets: a row for each sample.
            loss_fn: the mean loss of outputs and targets; without it, `model(inputs, targets)` is the loss.

        Returns:
            The mean loss of the whole batch.
        """
        shares = share_out(inputs, targets, self.devices)
        # In the mean over the batch, a replica counts by its number of samples.
        weights = [len(own_targets) / len(targets) for _, own_targets in shares]
        try:
            losses = [local_pass(model, share, loss_fn) for model, share in zip(self.models, shares, strict=True)]
            average_gradients(self.models, weights, AVERAGES[self.averaging])
        except BaseException:
            self.zero_grad()
            raise
        finally:
            share_buffers(self.models)
        # Read only now: item() waits for a GPU, and the replicas would have computed one after another.
        total = sum(weight * loss.item() for weight, loss in zip(weights, losses, strict=True))
        return torch.tensor(total, dtype=torch.float64)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter of every replica, for the optimizer."""
        for model in self.models:
            yield from model.parameters()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for model in self.models:
            model.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The trained parameters and buffers, on the CPU and under the model's own names."""
        self.master.load_state_dict(self.models[0].state_dict())
        return self.master.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put these weights into every replica."""
        for model in [self.master, *self.models]:
            model.load_state_dict(state)


# ── once: copy the model to every device ────────────────────────────────────────────────────────────────────────────


def usable_devices(devices: Sequence[torch.device | str | int]) -> list[torch.device]:
    """The devices that the caller named, checked: each exists, and all are of one type."""
    if isinstance(devices, str) or not isinstance(devices, Iterable) or not (devices := list(devices)):
        raise UsageError(f"devices={devices!r}: give a list with one device for each replica, such as ['cpu', 'cpu']")
    found = [_usable_device(device) for device in devices]
    if kinds := {device.type for device in found} - {found[0].type}:
        raise UsageError(
            f"devices={[str(device) for device in found]}: {found[0].type} and {kinds.pop()} round differently, "
            "and the replicas would drift apart; use GPUs only, or the CPU only"
        )
    return found


def _usable_device(name: torch.device | str | int) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"devices: {name!r} is no device; use 'cpu', or 'cuda:0', 'cuda:1', … for GPUs") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UsageError(
            f"devices: replicas cannot be on {str(device)!r}; use 'cpu', or 'cuda:0', 'cuda:1', … for GPUs"
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        raise UsageError(f"devices: {str(device)!r} was asked for, and torch sees no GPU; use 'cpu'")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= gpus:
        raise UsageError(f"devices: {str(device)!r} was asked for, and the last of {gpus} GPUs here is cuda:{gpus - 1}")
    return torch.device("cuda", index)


def _require_replicable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: a torch.nn.Module is needed, and this is {type(model).__name__}")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(f"model: {name} has no shape before the first batch; run one through the model first")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("model: it has no trainable parameters, so there is nothing to train")


def device_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a model on a device, without gradients; parameters that are tied in the model are tied in the copy."""
    try:
        return copy.deepcopy(model).to(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"model: {type(model).__name__} cannot be copied to {device}: {reason}") from error


def create_replicas(master: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """One copy of the master for each device: all of them start from the same weights."""
    return [device_copy(master, device) for device in devices]


# ── every step: share out, compute, average ─────────────────────────────────────────────────────────────────────────


def share_out(inputs: Any, targets: torch.Tensor, devices: Sequence[torch.device]) -> list[Share]:
    """Cut a batch into a share for each device and copy it there; sizes differ by at most one, and may be 0."""
    if not isinstance(targets, torch.Tensor) or targets.dim() == 0:
        kind = describe(targets) if isinstance(targets, torch.Tensor) else type(targets).__name__
        raise UsageError(f"targets: a tensor with a row for each sample is needed, and this is {kind}")
    if len(targets) == 0:
        raise UsageError("targets: the batch is empty, and the mean of nothing is not a number; give at least 1 sample")

    def share(batch: Any, replica: int) -> Any:
        if isinstance(batch, torch.Tensor):
            _require_rows(batch, len(targets))
            return batch.tensor_split(len(devices))[replica].to(devices[replica])
        if isinstance(batch, Mapping):
            return {key: share(part, replica) for key, part in batch.items()}
        if isinstance(batch, list | tuple):
            parts = [share(part, replica) for part in batch]  # a named tuple takes them one by one
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return batch

    return [(share(inputs, replica), share(targets, replica)) for replica in range(len(devices))]


def _require_rows(tensor: torch.Tensor, samples: int) -> None:
    if tensor.dim() == 0 or len(tensor) != samples:
        raise UsageError(f"inputs: {describe(tensor)} has no row for each of the {samples} targets; give one for each")


def local_pass(model: nn.Module, share: Share, loss_fn: LossFunction | None) -> torch.Tensor:
    """Forward and backward of one replica on its share; returns the mean loss of that share."""
    inputs, targets = share
    if len(targets) == 0:
        return torch.zeros(())  # the mean of no samples would be NaN
    loss = mean_loss(model, inputs, targets, loss_fn)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


# Averages one gradient, given the same parameter of every replica, and the weight of each replica.
Average = Callable[[Sequence[nn.Parameter], Sequence[float]], None]


def average_gradients(models: Sequence[nn.Module], weights: Sequence[float], average: Average) -> None:
    """Replace every gradient by its weighted mean over the replicas; one that no replica has stays None.

    The weights add up to one, so a gradient that was accumulated before, the same on every replica, is not changed.
    """
    for copies in zip(*(model.parameters() for model in models), strict=True):
        if copies[0].requires_grad and any(parameter.grad is not None for parameter in copies):
            average(copies, weights)


def average_through_cpu(copies: Sequence[nn.Parameter], weights: Sequence[float]) -> None:
    """The naive way: copy all gradients to the CPU, add them up there, and copy the mean to every device."""
    arrived = [
        parameter.grad.cpu() * weight
        for parameter, weight in zip(copies, weights, strict=True)
        if parameter.grad is not None  # a replica that did not use the parameter adds nothing
    ]
    mean = arrived[0]
    for gradient in arrived[1:]:
        mean += gradient
    for parameter in copies:
        parameter.grad = mean.to(parameter.device, copy=True)


def average_by_ring(copies: Sequence[nn.Parameter], weights: Sequence[float]) -> None:
    """The decentralised way: slices of the gradients go round from device to device, and no device holds them all."""
    gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in copies]
    if any(gradient.is_sparse for gradient in gradients):
        raise UsageError(
            f"the gradient of a {describe(copies[0])} is sparse, and a ring passes slices of dense ones; "
            "use averaging='cpu', or sparse=False in the layer"
        )
    weighted = [gradient * weight for gradient, weight in zip(gradients, weights, strict=True)]
    all_reduce_in_process("ring", weighted)
    for parameter, mean in zip(copies, weighted, strict=True):
        parameter.grad = mean


AVERAGES: dict[str, Average] = {"cpu": average_through_cpu, "ring": average_by_ring}


@torch.no_grad()
def share_buffers(models: Sequence[nn.Module]) -> None:
    """Give the first replica's buffers, such as BatchNorm's statistics, to all others, as `nn.DataParallel` does."""
    first = dict(models[0].named_buffers())
    for model in models[1:]:
        for name, buffer in model.named_buffers():
            if buffer.shape == first[name].shape:  # a buffer with the shape of its share is temporary
                buffer.copy_(first[name])
