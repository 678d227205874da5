"""What torch computes in this process: forwards, backwards and updates, as they begin and end.

To hear of a forward costs some microseconds, and a model has many modules in each other. So only the outermost is
listened to: the hook that all modules share is taken away when a forward begins, and put back when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers
from torch.utils.hooks import RemovableHandle

from microparallel.program import OptimizerStep
from microparallel.torch_private import (
    Engine,
    backward_engine,
    forward_hooks_of,
    forward_pre_hooks_of_all_modules,
    replace_backward_engine,
)
from microparallel.trace import Observed


class Computing:
    """Tells what torch computes.

    Args:
        begin: is told that something begins; what it returns is handed to `end`.
        end: is told that it has ended.
    """

    def __init__(self, begin: Callable[[Observed | OptimizerStep], Any], end: Callable[[Any], None]) -> None:
        self._begin = begin
        self._end = end
        self._listens = False
        self._muted = 0
        self._handles: list[RemovableHandle] = []
        self._hooks: dict[int, Any] = {}  # torch's own, those that all modules share
        self._key = 0  # and our place in it
        self._forward: Any = None
        self._optimizer: Any = None
        self._engine = backward_engine()
        self._run_backward: Engine | None = None
        self.in_backward = False

    def start(self) -> None:
        """Listen to every module, every backward and every optimizer of this process."""
        any_module = torch_modules.register_module_forward_pre_hook(self._forward_begins)
        self._key, self._hooks = any_module.id, forward_pre_hooks_of_all_modules()
        self._handles = [
            any_module,
            torch_optimizers.register_optimizer_step_pre_hook(self._optimizer_begins),
            torch_optimizers.register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        # All of torch.autograd comes through here. Hooks on what modules return, and a callback at the end, cost
        # several times as much, and miss what has no module.
        self._engine = backward_engine()
        self._run_backward = self._stand_between(self._engine)
        replace_backward_engine(self._run_backward)
        self._listens = True

    def stop(self) -> None:
        """Listen no longer."""
        self._listens = False
        for handle in self._handles:
            handle.remove()
        if backward_engine() is self._run_backward:  # else somebody has come in between after us
            replace_backward_engine(self._engine)
        self._run_backward = None

    def mute(self) -> None:
        """Leave torch's modules and backwards alone: an operation of a program tells what is computed."""
        self._muted += 1
        self._hooks.pop(self._key, None)

    def unmute(self) -> None:
        """Go on listening, when every operation that muted has ended."""
        self._muted -= 1
        self._wait_for_a_forward()

    def _wait_for_a_forward(self) -> None:
        if self._listens and not self._muted:
            self._hooks[self._key] = self._forward_begins

    def _forward_begins(self, module: nn.Module, _: Any) -> None:
        """A module is called that no other one calls: until it ends, nobody listens to those that it calls."""
        if self.in_backward:
            return  # it computes again what backward needs, and that is part of backward
        key = self._key
        self._hooks.pop(key, None)
        # As `module.register_forward_hook(…, always_call=True)`, whose handle takes as long as all the rest.
        hooks, always_called = forward_hooks_of(module)
        hooks[key], always_called[key] = self._forward_ends, True
        self._forward = self._begin(Observed(f"forward of {type(module).__name__}", "forward"))

    def _forward_ends(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._end(self._forward)
        key = self._key
        for hooks in forward_hooks_of(module):
            hooks.pop(key, None)  # not there if the module calls itself
        self._wait_for_a_forward()

    def _stand_between(self, engine: Engine) -> Engine:
        """What torch's autograd calls instead of its engine."""

        def run_backward(*arguments: Any, **named: Any) -> Any:
            if self.in_backward or self._muted or self._run_backward is not run_backward:
                return engine(*arguments, **named)
            self.in_backward = True
            backward = self._begin(Observed("backward", "backward"))
            try:
                return engine(*arguments, **named)
            finally:
                self._end(backward)
                self.in_backward = False

        return run_backward

    def _optimizer_begins(self, _optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        self._optimizer = self._begin(OptimizerStep())

    def _optimizer_ends(self, _optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        if self._optimizer is not None:
            self._end(self._optimizer)
            self._optimizer = None
