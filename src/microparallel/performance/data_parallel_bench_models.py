"""What a benchmark of data parallelism trains: small models by name, each with a batch that says enough.

mlp-1024   16 layers of that width: few samples, many gradients, so communication is what costs
mlp-128    so small that starting operations and messages is what costs
gpt        attention and many tokens: computing is what costs
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from microparallel.errors import ConfigError
from microparallel.models import GPT, FullMLP
from microparallel.performance.bench_settings import WIDEST
from microparallel.text import count

_DEPTH = 16
_CLASSES = 2
_VOCABULARY = 256
_CONTEXT = 64
HEAD = 32  # numbers of a vector that one attention head looks at
_BATCHES = {"mlp-512": 64, "gpt-128": 8}
_USUAL_BATCH = 32


@dataclass(frozen=True)
class Subject:
    """A model and how much it is given: `batch` is what one rank gets of samples."""

    name: str
    text: str  # for people: what it is made of
    batch: int
    build: Callable[[], nn.Module]  # from torch's random numbers
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # so many inputs and targets

    def on_rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples of one rank, which are nobody else's."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + rank)
            return self.data(self.batch)

    def model(self) -> nn.Module:
        """The same model on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()


def find_subject(name: str, batch: int | None = None) -> Subject:
    """The model that is called so: `mlp-WIDTH`, `gpt` or `gpt-WIDTH`."""
    found = re.fullmatch(r"(mlp|gpt)-([0-9]{1,5})", "gpt-128" if name == "gpt" else name)
    if found is None or not 1 <= int(found[2]) <= WIDEST:
        raise ConfigError(f"there is no model {name!r}; name it mlp-WIDTH, as in mlp-1024, or gpt, or gpt-WIDTH")
    width = int(found[2])
    samples = _BATCHES.get(found[0], _USUAL_BATCH if found[1] == "mlp" else _BATCHES["gpt-128"])
    return (_mlp if found[1] == "mlp" else gpt_subject)(name, width, samples if batch is None else batch)


def _mlp(name: str, width: int, batch: int) -> Subject:
    return Subject(
        name,
        f"{_DEPTH} layers of width {width}",
        batch,
        lambda: FullMLP(width, _DEPTH, out_features=_CLASSES),
        lambda samples: (torch.randn(samples, width), torch.randint(_CLASSES, (samples,))),
    )


def gpt_subject(name: str, width: int, batch: int, depth: int = 4) -> Subject:
    """A GPT with so many blocks."""
    if width % HEAD:
        raise ConfigError(
            f"{name}: a head takes {HEAD} numbers, so the width is a multiple of that; try gpt-{-(-width // 32) * 32}"
        )
    return Subject(
        name,
        f"{count(depth, 'block')} of width {width}, {_CONTEXT} tokens a sample",
        batch,
        lambda: GPT(_VOCABULARY, _CONTEXT, width, heads=width // HEAD, depth=depth),
        lambda samples: _next_tokens(torch.randint(_VOCABULARY, (samples, _CONTEXT + 1))),
    )


def _next_tokens(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def bytes_of(model: nn.Module) -> int:
    """What a model's parameters take of memory; its gradients take as much."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
