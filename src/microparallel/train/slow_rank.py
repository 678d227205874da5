"""A rank that computes more slowly than it could, to see what a straggler does to a run."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


def slow_down_model(model: nn.Module, factor: float) -> None:
    """Make every layer of a model take `factor` times as long, forward and backward, from now on.

    A layer sleeps for what it is to take longer, before its result is passed on: before its output leaves, and before
    its gradients do. Hooks that are registered later, such as those of `DataParallel`, see the gradients later.
    """
    for module in model.modules():
        if not any(True for _ in module.children()):
            _Slow(module, factor - 1)


class _Slow:
    def __init__(self, module: nn.Module, more: float) -> None:
        self._more = more
        self._begun: float | None = None
        module.register_forward_pre_hook(self._forward_begins)
        module.register_forward_hook(self._forward_ends)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_is_there)  # type: ignore[no-untyped-call]

    def _forward_begins(self, _module: nn.Module, _inputs: Any) -> None:
        self._begun = time.perf_counter()

    def _forward_ends(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._sleep()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, _: torch.Tensor) -> None:
        self._begun = time.perf_counter()

    def _gradient_is_there(self, _: nn.Parameter) -> None:
        self._sleep()
        self._begun = time.perf_counter()

    def _sleep(self) -> None:
        if self._begun is not None:
            time.sleep((time.perf_counter() - self._begun) * self._more)
            self._begun = None
