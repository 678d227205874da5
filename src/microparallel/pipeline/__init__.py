"""Stages: a model cut into pieces, micro-batches that follow each other through them, and schedules that run."""

from microparallel.pipeline.microbatches import Share
from microparallel.pipeline.parts import pipeline_layers
from microparallel.pipeline.pipeline import Pipeline

__all__ = ["Pipeline", "Share", "pipeline_layers"]
