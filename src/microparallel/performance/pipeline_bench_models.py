"""What a benchmark of pipelines cuts into stages: layers that are all alike, so that stages can be.

mlp   a wide perceptron, whose last layer is as wide as all others
gpt   an embedding, blocks of attention, and a head
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microparallel.errors import ConfigError
from microparallel.models import FullMLP
from microparallel.performance.bench_settings import Size
from microparallel.performance.data_parallel_bench_models import HEAD, Subject, gpt_subject
from microparallel.pipeline.programs import Schedule
from microparallel.text import count


def pipeline_subject(size: Size) -> Subject:
    """The model of that name and size, with its batch."""
    depth, width, batch = size.filled
    if size.model == "gpt":
        if width % HEAD:
            nearest = -(-width // HEAD) * HEAD
            raise ConfigError(
                f"--width {width}: a head of gpt takes {HEAD} numbers, so it is a multiple; try {nearest}"
            )
        return gpt_subject("gpt", width, batch, depth)
    return Subject(
        "mlp",
        f"{count(depth, 'layer')} of width {width}",
        batch,
        lambda: FullMLP(width, depth, out_features=width),
        lambda samples: (torch.randn(samples, width), torch.randint(width, (samples,))),
    )


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
    """The model and how it is fed, for people."""
    return f"{subject.text}, {count(subject.batch, 'sample')} in {count(microbatches, 'micro-batch', 'es')}"
