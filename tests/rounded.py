"""Trainings that round, in 16 bits or compressed, beside one process that is given the same weights in every step.

Weights that are rounded drift away from one process's; an update at the same weights does not. So the judge is

    what the weights have moved = Σ updates of one process at these weights − learning rate · Σ what ranks have not sent

within what the methods round. It also wants to see that they did: 16-bit numbers differ from float32's, and something
waits to be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

import microparallel as mp
from microparallel.compression import parse

RATE = 0.1
IN_16_BITS, COMPRESSED = 0.05, 1e-6  # the largest difference, relative to what a weight has moved
SEEN = 1e-5  # the smallest, in 16 bits: float32 rounds by less
SCALE = 64.0  # at which no gradient of these trainings overflows

ROUNDED: dict[str, dict[str, str]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "topk": {"compress": "topk:0.1"},
    "powersgd": {"compress": "powersgd:1"},
    "activations": {"compress_activations": "bf16"},
    "bf16 topk": {"precision": "bf16", "compress": "topk:0.1"},
    "fp16 powersgd": {"precision": "fp16", "compress": "powersgd:1"},
    "fp16 activations": {"precision": "fp16", "compress_activations": "int8"},
}


def title_of(name: str) -> str:
    """What a table calls it."""
    return ", ".join(f'`{option}="{value}"`' for option, value in ROUNDED[name].items())


def options_of(features: Iterable[str], *, can_compress: bool = True) -> dict[str, Any]:
    """The options of a wrapper; compressors leave no parameter alone, also of small models."""
    options: dict[str, Any] = {}
    for name in ROUNDED.keys() & set(features):
        options |= ROUNDED[name]
    if can_compress and "compress" in options:
        options["compress"] = parse(options["compress"], smallest=1)
    return options


def is_rounded(features: Iterable[str]) -> bool:
    return not ROUNDED.keys().isdisjoint(features)


class OneProcess:
    """One process's updates, each of which begins with the weights of the ranks.

    Args:
        plain: its model.
        comms: the ranks.
        model: theirs: a wrapped one, or a pipeline.
    """

    def __init__(self, plain: nn.Module, comms: mp.Comms, model: Any) -> None:
        self._plain, self._comms, self._model = plain, comms, model
        if model.loss_scale is not None:
            model.loss_scale.value = SCALE
        self._before = self._first = self._weights()
        self._total = {name: torch.zeros_like(one) for name, one in self._first.items()}

    def begin(self) -> None:
        """Take the ranks' weights, before a step."""
        self._before = self._weights()
        self._plain.load_state_dict(self._before)

    def end(self) -> None:
        """Note what the step has changed."""
        for name, one in self._plain.state_dict().items():
            self._total[name] += one - self._before[name]

    def wrong(self, options: Mapping[str, Any]) -> str | None:
        """What is wrong after the last step, if anything is; every rank calls this."""
        if not self._is_identical():
            return "ranks have different weights"
        weights, waiting = self._weights(), self._waiting()
        differences = {}
        for name, one in self._plain.named_parameters():
            moved = weights[name] - self._first[name] - RATE * waiting[one]
            wanted = self._total[name]
            differences[name] = float((moved - wanted).norm() / wanted.norm().clamp(min=1e-12))
        largest = max(differences, key=differences.__getitem__)
        rounds = not options.keys().isdisjoint({"precision", "compress_activations"})
        if not differences[largest] < (IN_16_BITS if rounds else COMPRESSED):
            return f"{largest} has moved otherwise than in one process, by {differences[largest]:.1e} of that"
        if rounds and differences[largest] < SEEN:
            return f"nothing was rounded to 16 bits: the largest difference is {differences[largest]:.1e}"
        if "compress" in options and not any(bool(one.any()) for one in waiting.values()):
            return "nothing was compressed: no rank has something to send"
        return None

    def _is_identical(self) -> bool:
        if isinstance(self._model, mp.Pipeline):
            return self._model.replicas_are_identical()
        mine = torch.cat([one.detach().reshape(-1).cpu() for one in self._model.state_dict().values()])
        return torch.equal(*(self._comms.all_reduce(mine.clone(), op=which) for which in ("max", "min")))

    def _weights(self) -> dict[str, torch.Tensor]:
        """The weights of the whole model, in float64, on every rank."""
        mine = {name: one.detach().double().clone() for name, one in self._model.state_dict().items()}
        if not isinstance(self._model, mp.Pipeline):
            return mine
        names = self._plain.state_dict()
        sums = self._summed({name: torch.stack([mine[name], torch.ones_like(mine[name])]) for name in mine}, names, 2)
        return {name: one[0] / one[1] for name, one in sums.items()}

    def _waiting(self) -> dict[nn.Parameter, torch.Tensor]:
        """For each parameter of the whole model, what all ranks together have not sent, in float64."""
        state = self._model.compression_state() if hasattr(self._model, "compression_state") else {"residuals": {}}
        mine: dict[str, torch.Tensor] = {}
        for name, one in state["residuals"].items():
            mine[name.partition("@")[0]] = one.double()
        names = dict(self._plain.named_parameters(remove_duplicate=False))
        found: dict[nn.Parameter, torch.Tensor] = {}
        for name, one in self._summed(mine, names, 1).items():
            found[names[name]] = found[names[name]] + one if names[name] in found else one
        return found

    def _summed(
        self, mine: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor], copies: int
    ) -> dict[str, torch.Tensor]:
        """Tensors by name, each summed over the ranks that have one."""
        found = {}
        for name, one in like.items():
            shape = one.shape if copies == 1 else (copies, *one.shape)
            own = mine.get(name, torch.zeros(shape, dtype=torch.float64, device=self._comms.device))
            found[name] = self._comms.all_reduce(own.reshape(shape).clone())
        return found
