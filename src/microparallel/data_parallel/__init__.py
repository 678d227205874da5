"""Replicas: the same model on every rank, the batch split between them."""

from microparallel.data_parallel.replicate import replicas_are_identical, replicate
from microparallel.data_parallel.wrapper import DataParallel

__all__ = ["DataParallel", "replicas_are_identical", "replicate"]
