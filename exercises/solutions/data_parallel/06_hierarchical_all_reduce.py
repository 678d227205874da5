"""All-reduce with few bytes between hosts.

Two ranks on one host share its memory. Between two hosts there is a network, which is many times slower, and all ranks
of a host share it. A ring through all ranks does not know that: with 2 hosts of 2 ranks it sends 3 times the tensor
over the network. So add up on two levels:

            host 0              host 1
         rank 0  rank 1      rank 2  rank 3
    1.    A+B  ◀── B          C+D  ◀── D          inside: each host adds up what its ranks have
    2.    A+B  ◀═══ network ═══▶  C+D             between: the hosts' sums are exchanged and added; nothing else crosses
    3.     Σ   ──▶ Σ           Σ   ──▶ Σ          inside: each host spreads the result

The limit: with h hosts, at most 2(h−1) times the tensor may cross between hosts, all messages together. For two hosts:
the tensor once in each direction. Inside of a host you may send what you like.

The check measures this limit, and accepts any form that keeps it. It wants the same bits on every rank.

Lesson: docs/data_parallel/06_all_reduce.md            Check it: microparallel learn check hierarchical
"""

import torch

import microparallel as mp


def hierarchical_all_reduce(tensor: torch.Tensor, comms: mp.Comms, hosts: list[list[int]]) -> None:
    """Sum everybody's tensor, in place.

    hosts: the ranks of each host, as in [[0, 1], [2, 3]]; hosts may differ in size, and [[0, 3, 4], [1, 2]] is possible

    You have comms.rank, comms.send_tensor(tensor, dest) and comms.recv_tensor(shape, src, dtype), and the same two
    without waiting: comms.isend and comms.irecv, which return a request with a `wait()`.
    """
    # ┌ hole
    #: # The three levels of the picture, with the functions below. Which ranks are on your host (comms.rank is in the
    #: # list)? Which of them speaks for it? The same list must give the same answer on every rank.
    #: raise NotImplementedError("reduce inside your host, all-reduce between the hosts, spread inside your host")
    mine = next(ranks for ranks in hosts if comms.rank in ranks)
    reduce_inside(tensor, mine, comms)
    if comms.rank == mine[0]:
        all_reduce_between(tensor, [ranks[0] for ranks in hosts], comms)
    spread_inside(tensor, mine, comms)
    # └


def reduce_inside(tensor: torch.Tensor, ranks: list[int], comms: mp.Comms) -> None:
    """Leave the sum of these ranks' tensors in the tensor of the first of them."""
    # ┌ hole
    #: raise NotImplementedError("add up the tensors of these ranks on the first of them")
    leader, *others = ranks
    if comms.rank != leader:
        comms.send_tensor(tensor, leader)
        return
    for other in others:
        tensor.add_(comms.recv_tensor(tensor.shape, other, tensor.dtype))
    # └


def all_reduce_between(tensor: torch.Tensor, leaders: list[int], comms: mp.Comms) -> None:
    """Leave the sum of the leaders' tensors in the tensor of each of them; the other ranks do not call this."""
    # ┌ hole
    #: # Two leaders can exchange their tensors. Does your form also hold for three? And may both send first?
    #: raise NotImplementedError("all-reduce between the leaders, one of each host")
    reduce_inside(tensor, leaders, comms)
    spread_inside(tensor, leaders, comms)
    # └


def spread_inside(tensor: torch.Tensor, ranks: list[int], comms: mp.Comms) -> None:
    """Replace the tensors of these ranks by that of the first of them."""
    # ┌ hole
    #: raise NotImplementedError("give the first one's tensor to the others")
    leader, *others = ranks
    if comms.rank != leader:
        tensor.copy_(comms.recv_tensor(tensor.shape, leader, tensor.dtype))
        return
    for other in others:
        comms.send_tensor(tensor, other)
    # └


if __name__ == "__main__":

    def try_it(comms: mp.Comms, hosts: list[list[int]]) -> list[float]:
        tensor = torch.full((4,), 10.0**comms.rank)
        hierarchical_all_reduce(tensor, comms, hosts)
        return tensor.tolist()

    for found in mp.launch(try_it, 4, [[0, 1, 2], [3]]):
        print(found)  # four times [1111.0, 1111.0, 1111.0, 1111.0]
