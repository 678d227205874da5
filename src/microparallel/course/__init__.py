"""The versions that a learner writes first, as short as they can be: from one all-reduce a gradient to a pipeline step.

The library's own versions (`mp.DataParallel`, `mp.Pipeline`) do the same with everything that practice needs.
"""

from microparallel.course.buckets import BucketedDDPHooks, GradientBucket
from microparallel.course.ddp import ddp_step, register_ddp_hooks
from microparallel.course.hook_tracker import HookTracker
from microparallel.course.hooks import GradientHooks
from microparallel.course.hooks_demo import compare_hook_timing, demonstrate_hook_order, demonstrate_overlap
from microparallel.course.naive import naive_data_parallel_step
from microparallel.course.pipeline_steps import gpipe_pipeline_step, naive_pipeline_step, onef_oneb_pipeline_step
from microparallel.course.replicas import Replicas
from microparallel.course.shortcuts import ParameterAveraging, accumulated_step
from microparallel.drawing.overlap import draw_overlap

__all__ = [
    "BucketedDDPHooks",
    "GradientBucket",
    "GradientHooks",
    "HookTracker",
    "ParameterAveraging",
    "Replicas",
    "accumulated_step",
    "compare_hook_timing",
    "ddp_step",
    "demonstrate_hook_order",
    "demonstrate_overlap",
    "draw_overlap",
    "gpipe_pipeline_step",
    "naive_data_parallel_step",
    "naive_pipeline_step",
    "onef_oneb_pipeline_step",
    "register_ddp_hooks",
]
