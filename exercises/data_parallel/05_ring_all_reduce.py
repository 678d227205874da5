"""All-reduce round the ring.

Every rank has a tensor of the same shape. Afterwards every rank should have the sum of all of them, and no rank may
send more than 2(p−1)/p of the tensor. Less is not possible, and the ring needs no more.

Cut the tensor into as many slices as there are ranks. In p−1 hops every rank passes a slice to the next rank, and adds
the slice that comes from the rank before to its own. Afterwards rank r holds the whole sum of slice r+1. In p−1 more
hops the sums go round once, and are copied instead of added.

    hop 0, three ranks        rank 0 ──slice 0──▶ rank 1 ──slice 1──▶ rank 2 ──slice 2──▶ rank 0

Lesson: docs/data_parallel/06_all_reduce.md            Check it: microparallel learn check ring-all-reduce
"""

import torch

import microparallel as mp


def ring_all_reduce(tensor: torch.Tensor, comms: mp.Comms) -> None:
    """Replace every rank's tensor by the sum of all of them, in place.

    You have comms.rank, comms.world_size, comms.isend(tensor, dest), comms.recv_tensor(shape, src, dtype), and the
    blocking comms.send_tensor, which waits until the receiver asks for the tensor.
    """
    ranks, rank = comms.world_size, comms.rank
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    slices = list(tensor.view(-1).tensor_split(ranks))  # views: what is written to a slice is written to the tensor

    def pass_on(send: int, receive: int) -> torch.Tensor:
        """Send one slice to the next rank and return what comes from the rank before in place of another."""
        # Start sending slices[send % ranks] to `after`, receive a tensor like slices[receive % ranks] from `before`,
        # and return it. What happens if every rank first waits until its own slice has been received?
        raise NotImplementedError("pass one slice on and receive another")

    # Twice ranks - 1 hops. First add what is received to your own slice, then replace your own slice by it.
    # Which slice does rank r send in hop s? It is the one that it received (and added to) in hop s - 1.
    raise NotImplementedError("go round the ring twice")


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[float]:
        tensor = torch.full((5,), float(comms.rank))
        ring_all_reduce(tensor, comms)
        return tensor.tolist()

    print(mp.launch(try_it, ranks=3))  # three times [3.0, 3.0, 3.0, 3.0, 3.0]
