"""The machine: its cores; later its meshes of ranks and the links between them."""

from microparallel.topology.cores import available_cores, threads_per_rank

__all__ = ["available_cores", "threads_per_rank"]
