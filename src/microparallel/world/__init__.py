"""Start ranks, join a world of ranks, and turn one rank's failure into an error of all."""

from microparallel.world.connect import connect
from microparallel.world.launch import Pool, launch

__all__ = ["Pool", "connect", "launch"]
