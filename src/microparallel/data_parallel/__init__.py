"""Replicas: the same model on every rank, the batch split between them."""

from microparallel.data_parallel.deferred import deferred_init
from microparallel.data_parallel.fully_sharded import FullyShardedDataParallel
from microparallel.data_parallel.precision import LossScale, MixedPrecision
from microparallel.data_parallel.replicate import replicas_are_identical, replicate
from microparallel.data_parallel.sharded_optimizer import ShardedOptimizer
from microparallel.data_parallel.sync_batch_norm import SyncBatchNorm
from microparallel.data_parallel.wrapper import DataParallel

__all__ = [
    "DataParallel",
    "FullyShardedDataParallel",
    "LossScale",
    "MixedPrecision",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "deferred_init",
    "replicas_are_identical",
    "replicate",
]
