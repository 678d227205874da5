"""All-reduce through rank 0.

Every rank has a tensor of the same shape: its gradients, for example. Afterwards every rank should have the sum of all
of them. The plain way: all ranks send their tensors to rank 0, which adds them up and sends the sum to all others.

    rank 1 ──▶ ┐              ┌ ──▶ rank 1
    rank 2 ──▶ ┤ rank 0 adds  ├ ──▶ rank 2
    rank 3 ──▶ ┘              └ ──▶ rank 3

It is right, but rank 0 has to do all the work: with p ranks, p−1 whole tensors come in and p−1 go out, one after
another. The next exercise does better, and is compared with this one.

Lesson: docs/data_parallel/06_all_reduce.md            Check it: microparallel learn check naive-all-reduce
"""

import torch

import microparallel as mp


def naive_all_reduce(tensor: torch.Tensor, comms: mp.Comms) -> None:
    """Replace every rank's tensor by the sum of all of them, in place.

    You have comms.rank, comms.world_size, comms.send_tensor(tensor, dest), which waits until the receiver asks for it,
    and comms.recv_tensor(shape, src, dtype), which returns a new tensor.
    """
    if comms.rank == 0:
        # ┌ hole
        #: # Receive each other rank's tensor and add it to your own, in place. When it is complete, send it back.
        #: raise NotImplementedError("rank 0: add up, then send the sum")
        for peer in range(1, comms.world_size):
            tensor.add_(comms.recv_tensor(tensor.shape, peer, tensor.dtype))
        for peer in range(1, comms.world_size):
            comms.send_tensor(tensor, peer)
        # └
    else:
        # ┌ hole
        #: # Send your tensor to rank 0, and replace it by what comes back.
        #: raise NotImplementedError("the others: send, then receive the sum")
        comms.send_tensor(tensor, 0)
        tensor.copy_(comms.recv_tensor(tensor.shape, 0, tensor.dtype))
        # └


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[float]:
        tensor = torch.tensor([1.0, 10.0]) * (comms.rank + 1)
        naive_all_reduce(tensor, comms)
        return tensor.tolist()

    print(mp.launch(try_it, ranks=3))  # three times [6.0, 60.0]
