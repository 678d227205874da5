"""Replicas: the same model on every rank, the batch split between them."""

from microparallel.data_parallel.loss import LossFunction, mean_loss
from microparallel.data_parallel.naive import naive_data_parallel_step, sum_gradients
from microparallel.data_parallel.replicate import replicas_are_identical, replicate

__all__ = [
    "LossFunction",
    "mean_loss",
    "naive_data_parallel_step",
    "replicas_are_identical",
    "replicate",
    "sum_gradients",
]
