"""Broadcast, gather and barrier from sends and receives.

Ranks share no memory. A rank can send a tensor to another rank, and it can receive a tensor of a known shape from
another rank. Three operations that every distributed program needs are a loop or two around these two:

    broadcast   one rank has a tensor, then all have it           src ──▶ all others
    gather      every rank has one, then one rank has all of them  all others ──▶ dst
    barrier     no rank goes on before all have arrived           all others ──▶ 0, then 0 ──▶ all others

A receive returns when the tensor is there. A send returns when its receiver has asked for the tensor (or sooner, if the
tensor is small: do not rely on it). So every send needs its receive, in an order in which neither waits for ever.

Lesson: docs/data_parallel/05_sync_primitives.md       Check it: microparallel learn check comms
"""

import torch

import microparallel as mp


def others(rank: int, comms: mp.Comms) -> list[int]:
    """Every rank but one."""
    return [peer for peer in range(comms.world_size) if peer != rank]


def broadcast(tensor: torch.Tensor, src: int, comms: mp.Comms) -> None:
    """Write the tensor of rank `src` into the tensor of every rank.

    You have comms.rank, comms.send_tensor(tensor, dest) and comms.recv_tensor(shape, src, dtype), which returns a new
    tensor. Every rank passes a tensor of the same shape and dtype.
    """
    # ┌ hole
    #: # Rank src sends its tensor to all others; each of them receives it, and writes it into its own (tensor.copy_).
    #: # Say which dtype you expect: without it, recv_tensor expects float32.
    #: raise NotImplementedError("broadcast: from src to all others")
    if comms.rank == src:
        for peer in others(src, comms):
            comms.send_tensor(tensor, peer)
    else:
        tensor.copy_(comms.recv_tensor(tensor.shape, src, tensor.dtype))
    # └


def gather(tensor: torch.Tensor, dst: int, comms: mp.Comms) -> list[torch.Tensor] | None:
    """Return every rank's tensor, in the order of ranks, on rank `dst`; None on the others."""
    # ┌ hole
    #: # The way back. Rank dst returns a list with a tensor for every rank, its own (a clone of it) among them.
    #: raise NotImplementedError("gather: from all others to dst")
    if comms.rank != dst:
        comms.send_tensor(tensor, dst)
        return None
    return [
        tensor.clone() if rank == dst else comms.recv_tensor(tensor.shape, rank, tensor.dtype)
        for rank in range(comms.world_size)
    ]
    # └


def barrier(comms: mp.Comms) -> None:
    """Return when every rank has called this, and not before."""
    token = torch.zeros(1)  # its content does not matter: its arrival is the message
    # ┌ hole
    #: # First rank 0 must know that all have arrived; then all must know that it knows. Use what you wrote above.
    #: raise NotImplementedError("barrier: wait for all ranks")
    gather(token, 0, comms)
    broadcast(token, 0, comms)
    # └


def all_gather(tensor: torch.Tensor, comms: mp.Comms) -> list[torch.Tensor]:
    """Return every rank's tensor on every rank: the functions above do all the work."""
    gathered = gather(tensor, 0, comms) or [torch.empty_like(tensor) for _ in range(comms.world_size)]
    for one in gathered:
        broadcast(one, 0, comms)
    return gathered


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[list[float]]:
        tensor = torch.full((2,), float(comms.rank))
        broadcast(tensor, 1, comms)  # now it is rank 1's
        barrier(comms)
        return [one.tolist() for one in all_gather(tensor + comms.rank, comms)]

    for found in mp.launch(try_it, ranks=3):
        print(found)  # three times [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
