"""Distributed data parallelism (DDP): put hooks on a model once, then do steps with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.course.buckets import BucketedDDPHooks
from microparallel.course.hooks import GradientHooks
from microparallel.errors import UsageError
from microparallel.models.loss import LossFunction, mean_loss
from microparallel.torch_private import hooks_of_gradient


def register_ddp_hooks(
    model: nn.Module, comms: Comms, use_bucketing: bool = True, bucket_size_mb: float = 25.0
) -> GradientHooks:
    """Put hooks on a model's parameters that average its gradients over all ranks while backward still computes.

    Args:
        model: the same on every rank.
        comms: the ranks that average.
        use_bucketing: collect gradients in buckets; with False, each gradient has an all-reduce of its own.
        bucket_size_mb: a bucket that has so many MiB of gradients takes no more.

    Returns:
        The hooks: call `finish()` after each backward, `remove()` to take them off. `ddp_step` finds them by itself.
    """
    if registered_hooks(model) is not None:
        raise UsageError("the model has hooks already, and two sets of them would average twice; remove() the first")
    return BucketedDDPHooks(model, comms, bucket_size_mb) if use_bucketing else GradientHooks(model, comms)


def ddp_step(
    model: nn.Module,
    comms: Comms,
    inputs: Any,
    targets: torch.Tensor,
    loss_fn: LossFunction | None = None,
    *,
    samples: int | None = None,
) -> torch.Tensor:
    """Forward and backward on this rank's samples; gradients are averaged while backward still computes.

    The result is that of `naive_data_parallel_step`: each rank passes its own share of the batch, of any size;
    afterwards every rank holds the gradients of the mean loss over all samples of all ranks. Gradients that were there
    before are averaged too, and the new ones add to them; the caller's optimizer steps.

    Args:
        model: the same on every rank, with the hooks of `register_ddp_hooks`; without them, buckets are made for this
            step alone, which costs time in every step.
        comms: the ranks that share the batch.
        inputs: this rank's inputs.
        targets: this rank's targets, one a sample.
        loss_fn: the mean loss of outputs and targets; without it, `model(inputs, targets)` is the loss.
        samples: how many samples all ranks have together, if the caller knows; otherwise an all-reduce adds them up.

    Returns:
        The mean loss of the whole batch, the same on every rank.
    """
    registered = registered_hooks(model)
    if registered is not None and registered.comms is not comms:
        raise UsageError("the hooks on this model average over another Comms; pass the one they were registered with")
    mine = len(targets)
    if samples is None:
        samples = int(comms.all_reduce(torch.tensor(mine)).item())
    hooks = registered or register_ddp_hooks(model, comms)
    try:
        if not mine:
            return hooks.finish()
        # Shares may differ in size, so a rank's loss counts by its number of samples; the average over the ranks is
        # then the mean over all samples.
        loss = mean_loss(model, inputs, targets, loss_fn) * (mine * comms.world_size / samples)
        loss.backward()  # type: ignore[no-untyped-call]
        return hooks.finish(loss.detach())
    finally:
        if registered is None:
            hooks.remove()


def registered_hooks(model: nn.Module) -> GradientHooks | None:
    """The hooks that `register_ddp_hooks` put on a model's parameters, if there are any."""
    for parameter in model.parameters():
        for hook in hooks_of_gradient(parameter):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, GradientHooks):
                return owner
    return None
