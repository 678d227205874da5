"""Stages: a model cut into pieces, micro-batches that follow each other through them, and schedules that run."""

from microparallel.pipeline.doors import gpipe_pipeline_step, naive_pipeline_step, onef_oneb_pipeline_step
from microparallel.pipeline.pipeline import Pipeline

__all__ = ["Pipeline", "gpipe_pipeline_step", "naive_pipeline_step", "onef_oneb_pipeline_step"]
