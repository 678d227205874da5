"""The machine: its cores; later its meshes of ranks and the links between them."""

from microparallel.topology.cores import DO_NOT_SPIN, available_cores, threads_per_rank

__all__ = ["DO_NOT_SPIN", "available_cores", "threads_per_rank"]
