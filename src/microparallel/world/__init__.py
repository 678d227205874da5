"""Start ranks, join them, and turn one rank's failure into everybody's error."""

from microparallel.world.connect import connect
from microparallel.world.launch import launch
from microparallel.world.pool import Pool

__all__ = ["Pool", "connect", "launch"]
