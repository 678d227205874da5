"""What the benchmarks of training steps train: small models by name, each with a batch that suits it.

    mlp-1024   16 layers of that width: few samples, many gradients, so communication is what costs
    mlp-128    so small that starting operations and messages is what costs
    gpt        attention and many tokens: computing is what costs
    gpt-85m    12 blocks of width 768, 512 tokens a sample: enough for a GPU to compute

A pipeline cuts its model into stages. Its layers are all alike, so that stages can be: an `mlp` whose last layer is as
wide as the others, or a `gpt` with an embedding, blocks of attention and a head.

Times do not depend on what the samples say, so they are noise; where the loss is looked at, there is something to learn
(`learnable=True`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from microparallel.bench.settings import LARGE, WIDEST, Size
from microparallel.errors import ConfigError
from microparallel.models import GPT, FullMLP
from microparallel.pipeline.programs import Schedule
from microparallel.text import count

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets

_DEPTH = 16
_CLASSES = 2
_VOCABULARY = 256
_CONTEXT = 64
_HEAD = 32  # numbers of a vector that one attention head looks at
_BATCHES = {"mlp-512": 64, "gpt-128": 8, LARGE: 8}
_LARGE_WIDTH, _LARGE_DEPTH, _LARGE_HEAD, _LARGE_CONTEXT = 768, 12, 64, 512
_USUAL_BATCH = 32
_APART = 3.0  # of the two classes' means, as a multiple of a sample's spread
_FOLLOWS = 0.8  # how often a token is followed by its successor, and not by any other


@dataclass(frozen=True)
class Subject:
    """A model and its samples.

    Attributes:
        name: as the command line has it.
        text: what it is made of, for people.
        batch: how many samples one rank gets.
        build: makes the model from torch's random numbers.
        data: makes so many inputs and targets from torch's random numbers.
    """

    name: str
    text: str
    batch: int
    build: Callable[[], nn.Module]
    data: Callable[[int], Batch]

    def on_rank(self, rank: int) -> Batch:
        """The samples of one rank; every rank has others."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + rank)
            return self.data(self.batch)

    def model(self) -> nn.Module:
        """The same model on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()


def bytes_of(model: nn.Module) -> int:
    """The memory that a model's parameters take; its gradients take as much."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
    """Inputs and targets on a device; those that are no whole numbers in this dtype."""
    inputs, targets = (part.to(device, dtype if part.is_floating_point() else None) for part in batch)
    return inputs, targets


# ── for data parallelism ────────────────────────────────────────────────────────────────────────────────────────────


def find_subject(name: str, batch: int | None = None, *, learnable: bool = False) -> Subject:
    """The model with that name: `mlp-WIDTH`, `gpt`, `gpt-WIDTH` or `gpt-85m`.

    Args:
        name: of the model.
        batch: samples of a rank; as usual for the model, if None.
        learnable: whether its samples have something to learn, or are noise.
    """
    if name == LARGE:
        if learnable:
            raise ConfigError(f"{name}: there is nothing to learn from its samples; try gpt")
        return _large_gpt(_LARGE_DEPTH, _LARGE_WIDTH, _BATCHES[name] if batch is None else batch)
    found = re.fullmatch(r"(mlp|gpt)-([0-9]{1,5})", "gpt-128" if name == "gpt" else name)
    if found is None or not 1 <= int(found[2]) <= WIDEST:
        raise ConfigError(f"there is no model {name!r}; name it mlp-WIDTH, as in mlp-1024, or gpt, or gpt-WIDTH")
    width = int(found[2])
    if found[1] == "gpt" and (wider := _next_width(width)) != width:
        raise ConfigError(f"{name}: a head takes {_HEAD} numbers, so the width is a multiple of that; try gpt-{wider}")
    usual = _BATCHES.get(found[0], _USUAL_BATCH if found[1] == "mlp" else _BATCHES["gpt-128"])
    samples = usual if batch is None else batch
    if found[1] == "gpt":
        subject = _gpt(name, 4, width, samples)
        return replace(subject, data=_successions) if learnable else subject
    subject = _mlp(name, _DEPTH, width, _CLASSES, samples)
    return replace(subject, data=partial(_clusters, width)) if learnable else subject


# ── for pipelines ───────────────────────────────────────────────────────────────────────────────────────────────────


def pipeline_subject(size: Size) -> Subject:
    """The model of that name and size, with its batch."""
    depth, width, batch = size.filled
    if size.model == "mlp":
        return _mlp("mlp", depth, width, width, batch)
    if size.model == LARGE:
        if width % _LARGE_HEAD:
            wider = -(-width // _LARGE_HEAD) * _LARGE_HEAD
            raise ConfigError(f"--width {width}: a head of {LARGE} takes {_LARGE_HEAD} numbers; try {wider}")
        return _large_gpt(depth, width, batch)
    if (wider := _next_width(width)) != width:
        raise ConfigError(f"--width {width}: a head of gpt takes {_HEAD} numbers, so it is a multiple; try {wider}")
    return _gpt("gpt", depth, width, batch)


def require_cuttable(size: Size, schedules: Sequence[str], ranks: int, microbatches: int) -> None:
    """Refuse more micro-batches than samples, and more stages than layers."""
    batch = size.filled[2]
    if microbatches > batch:
        raise ConfigError(
            f"--microbatches {microbatches}: a batch of {batch} has too few samples for that; "
            f"try --batch {microbatches}, or --microbatches {batch}"
        )
    for name in schedules:
        stages = Schedule(name, ranks, microbatches).stages
        if stages > size.layers:
            raise ConfigError(
                f"--depth {size.filled[0]}: {name} on {ranks} ranks has {stages} stages, and this {size.model} "
                f"{size.layers} layers; try --depth {size.filled[0] + stages - size.layers}, fewer --ranks, or leave "
                f"{name} out with --schedules"
            )


def describe(subject: Subject, microbatches: int) -> str:
    """The model and its micro-batches, for people."""
    return f"{subject.text}, {count(subject.batch, 'sample')} in {count(microbatches, 'micro-batch', 'es')}"


# ── both models ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _mlp(name: str, depth: int, width: int, outputs: int, batch: int) -> Subject:
    return Subject(
        name,
        f"{count(depth, 'layer')} of width {width}",
        batch,
        lambda: FullMLP(width, depth, out_features=outputs),
        lambda samples: (torch.randn(samples, width), torch.randint(outputs, (samples,))),
    )


def _gpt(name: str, depth: int, width: int, batch: int, head: int = _HEAD, context: int = _CONTEXT) -> Subject:
    return Subject(
        name,
        f"{count(depth, 'block')} of width {width}, {context} tokens a sample",
        batch,
        lambda: GPT(_VOCABULARY, context, width, heads=width // head, depth=depth),
        lambda samples: _next_tokens(torch.randint(_VOCABULARY, (samples, context + 1))),
    )


def _large_gpt(depth: int, width: int, batch: int) -> Subject:
    return _gpt(LARGE, depth, width, batch, _LARGE_HEAD, _LARGE_CONTEXT)


def _clusters(width: int, samples: int) -> Batch:
    """Points around the means of two classes, which are always the same ones."""
    fixed = torch.Generator().manual_seed(0)
    means = _APART * torch.nn.functional.normalize(torch.randn(_CLASSES, width, generator=fixed))
    classes = torch.randint(_CLASSES, (samples,))
    return means[classes] + torch.randn(samples, width), classes


def _successions(samples: int) -> Batch:
    """Tokens of which each has a successor, always the same one, that follows it more often than not."""
    fixed = torch.Generator().manual_seed(0)
    successors = torch.randperm(_VOCABULARY, generator=fixed)
    tokens = torch.randint(_VOCABULARY, (samples, _CONTEXT + 1))
    follows = torch.rand(samples, _CONTEXT + 1) < _FOLLOWS
    for place in range(1, _CONTEXT + 1):
        tokens[:, place] = torch.where(follows[:, place], successors[tokens[:, place - 1]], tokens[:, place])
    return _next_tokens(tokens)


def _next_width(width: int) -> int:
    """The width itself if heads can share it evenly, otherwise the next larger one."""
    return -(-width // _HEAD) * _HEAD


def _next_tokens(tokens: torch.Tensor) -> Batch:
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
