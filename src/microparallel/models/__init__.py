"""The subjects of the course: models small enough to read."""

from microparallel.models.gpt import GPT
from microparallel.models.loss import cross_entropy, mean_squared_error
from microparallel.models.mlp import FullMLP, ShardedMLP

__all__ = ["GPT", "FullMLP", "ShardedMLP", "cross_entropy", "mean_squared_error"]
