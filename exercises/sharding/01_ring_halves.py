"""Reduce-scatter and all-gather round the ring: the two halves of an all-reduce.

A tensor is cut into as many slices as there are ranks, and slice r belongs to rank r.

    reduce-scatter   every rank has a whole tensor           rank r ends with the sum of slice r
    all-gather       rank r has slice r                      every rank ends with all slices

One after the other they are an all-reduce. Each alone is half of it, p−1 hops. Between the two, every rank holds the
sum of its own slice: that is where ZeRO puts the optimizer.

In the ring all-reduce that you have written, rank r held the sum of slice r+1 after the first half. That did not matter
there. Here it must be slice r. So which slice does a rank send first?

    all-gather, three ranks, hop 0    rank 0 ──slice 0──▶ rank 1 ──slice 1──▶ rank 2 ──slice 2──▶ rank 0

Lesson: docs/sharding/02_two_halves.md                 Check it: microparallel learn check ring-halves
"""

import torch

import microparallel as mp


def slices_of(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The slices, as views: what is written to a slice is written to the tensor. Their sizes may differ by one."""
    return list(tensor.view(-1).tensor_split(ranks))


def pass_on(outgoing: torch.Tensor, expected: torch.Tensor, comms: mp.Comms) -> torch.Tensor:
    """Send a slice to the next rank, and return what comes from the rank before: a tensor like `expected`.

    You have comms.rank, comms.world_size, comms.isend(tensor, dest), comms.recv_tensor(shape, src, dtype), and the
    blocking comms.send_tensor, which waits until the receiver asks for the tensor.
    """
    after, before = (comms.rank + 1) % comms.world_size, (comms.rank - 1) % comms.world_size
    # All ranks do this at the same moment. What may a rank not wait for before it has begun to receive?
    raise NotImplementedError("send one slice and receive another")


def reduce_scatter(tensor: torch.Tensor, comms: mp.Comms) -> None:
    """In place: afterwards this rank's own slice holds the sum of all ranks'. The other slices may hold anything."""
    ranks, rank = comms.world_size, comms.rank
    slices = slices_of(tensor, ranks)
    # ranks - 1 hops. What a rank receives in the last one must be added to slice `rank`. So what does it receive in
    # the hop before that, and what in hop 0? And it always sends the slice that it has just added to.
    raise NotImplementedError("the first half: sums")


def all_gather(tensor: torch.Tensor, comms: mp.Comms) -> None:
    """In place: this rank's own slice is right, the others are old. Afterwards all are right, on every rank."""
    ranks, rank = comms.world_size, comms.rank
    slices = slices_of(tensor, ranks)
    # ranks - 1 hops again. In hop 0 there is only one slice that is worth sending.
    raise NotImplementedError("the second half: copies")


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[list[float]]:
        tensor = torch.full((3,), float(comms.rank))
        reduce_scatter(tensor, comms)
        between = tensor.tolist()
        all_gather(tensor, comms)
        return [between, tensor.tolist()]

    for between, after in mp.launch(try_it, ranks=3):
        print(between, after)  # rank r has a 3.0 at place r, and then everywhere
