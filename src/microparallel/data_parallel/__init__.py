"""Replicas: the same model on every rank, the batch split between them."""

from microparallel.data_parallel.buckets import BucketedDDPHooks, GradientBucket
from microparallel.data_parallel.ddp import ddp_step, register_ddp_hooks
from microparallel.data_parallel.hooks import GradientHooks
from microparallel.data_parallel.loss import LossFunction, mean_loss
from microparallel.data_parallel.naive import naive_data_parallel_step, sum_gradients
from microparallel.data_parallel.replicas import Replicas
from microparallel.data_parallel.replicate import replicas_are_identical, replicate
from microparallel.data_parallel.shortcuts import ParameterAveraging, accumulate, accumulated_step
from microparallel.data_parallel.wrapper import DataParallel

__all__ = [
    "BucketedDDPHooks",
    "DataParallel",
    "GradientBucket",
    "GradientHooks",
    "LossFunction",
    "ParameterAveraging",
    "Replicas",
    "accumulate",
    "accumulated_step",
    "ddp_step",
    "mean_loss",
    "naive_data_parallel_step",
    "register_ddp_hooks",
    "replicas_are_identical",
    "replicate",
    "sum_gradients",
]
