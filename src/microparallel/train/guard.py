"""Numbers that are not finite: where they come from, and what is done about them.

A loss that is NaN or infinite is seen before the optimizer steps, so the weights are still those of the step before.
Each rank then computes its share once more, alone, and tells the others what it saw: the loss of its own share, the
first layer whose output was not finite, the parameters whose gradients or weights are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.pipeline.member import GradientOfStage
from microparallel.text import show_some
from microparallel.train.batch import Batch, ModelWithLoss


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite."""
    # A sum is several times quicker than looking at each; it may overflow where all elements are finite.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def not_finite(named: Iterable[tuple[str, Any]]) -> list[str]:
    """The names of the plain tensors that are not finite; gradients of which a rank has but parts are left out."""
    found = []
    for name, tensor in named:
        plain = type(tensor) in (torch.Tensor, nn.Parameter, GradientOfStage) and tensor.is_floating_point()
        if plain and not is_finite(tensor.detach().as_subclass(torch.Tensor)):
            found.append(name)
    return found


def explain(model: nn.Module, with_loss: Any, batches: Sequence[Batch], comms: Comms, step: int) -> str:
    """Say which rank and which parameters a number that is not finite comes from; every rank calls this.

    Args:
        model: this rank's layers.
        with_loss: the model with its loss; ranks that have it can compute their shares again.
        batches: this rank's share of the step.
        comms: the ranks.
        step: the number of the step, counted from 1.
    """
    weights = not_finite(model.named_parameters())
    gradients = not_finite((name, parameter.grad) for name, parameter in model.named_parameters())
    seen: dict[str, Any] = {"weights": weights, "gradients": gradients}
    if isinstance(with_loss, ModelWithLoss) and batches and not weights:
        seen |= _compute_again(model, with_loss, batches)
    everyone = gather_json(seen, comms)
    guilty = [rank for rank, one in enumerate(everyone) if one.get("own")]
    lines = [f"  {_words(rank, everyone[rank], step)}" for rank in guilty or range(len(everyone))]
    return "\n".join(dict.fromkeys(lines))


def _compute_again(model: nn.Module, with_loss: ModelWithLoss, batches: Sequence[Batch]) -> dict[str, Any]:
    """Forward and backward of this rank's share without the others; no gradient of the model's is touched."""
    names, parameters = zip(*((name, one) for name, one in model.named_parameters() if one.requires_grad), strict=True)
    for batch in batches:
        with _first_layer(model) as layers:
            loss = with_loss(batch)
        whole = loss[0] if isinstance(loss, tuple) else loss
        gradients = torch.autograd.grad(whole, parameters, allow_unused=True)
        found = not_finite(zip(names, gradients, strict=True))
        value = float(whole.detach())
        if found or not math.isfinite(value):
            return {"own": True, "loss": str(value), "layer": layers[:1], "gradients": found}
    return {"own": False}


@contextmanager
def _first_layer(model: nn.Module) -> Iterator[list[str]]:
    """Within this block, collect the names of layers whose output is not finite, in the order of their calls."""
    found: list[str] = []

    def look(name: str) -> Any:
        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            found.extend(not_finite([(name, output)]))

        return after

    hooks = [
        module.register_forward_hook(look(name))
        for name, module in model.named_modules()
        if name and not any(True for _ in module.children())
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _words(rank: int, seen: dict[str, Any], step: int) -> str:
    if seen["weights"]:
        return f"rank {rank}: weights are not finite since step {step - 1} or before: {show_some(seen['weights'])}"
    parts = []
    if "loss" in seen:
        parts.append(f"the loss of its own share is {float(seen['loss']):g}")
    if seen.get("layer"):
        parts.append(f"first in the output of {seen['layer'][0]}")
    if seen["gradients"]:
        parts.append(f"gradients that are not finite: {show_some(seen['gradients'])}")
    return f"rank {rank}: {'; '.join(parts) if parts else 'its weights and gradients are finite'}"
