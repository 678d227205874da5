"""Pass a tensor back and forth.

Two ranks play. Rank 0 has the ball, a tensor. In every round rank 0 sends it to rank 1; rank 1 adds one to what it has
received and sends that back; rank 0 receives it, and adds one too.

    rank 0   ball ─▶           ─▶ +1 ─▶           ─▶ +1
    rank 1           ─▶ +1 ─▶          ─▶ +1 ─▶
             └────── round 0 ──────┘└───── round 1 ──────┘

Both ranks run the same function, and only their number tells them apart. A send waits until the other rank receives,
and a receive waits until the other rank sends. So if both ranks send first, both wait for ever. If both receive first,
both wait for ever, too.

A receiver must say which shape and which dtype (torch.float32, say) it expects. Here that is simple: both ranks know
the ball's.

Lesson: docs/pipeline/03_ping_pong.md            Check it: microparallel learn check ping-pong
"""

import time

import torch

import microparallel as mp


def ping_pong(ball: torch.Tensor, rounds: int, comms: mp.Comms) -> torch.Tensor:
    """Play, and return the ball as this rank has had it last.

    Both ranks are given a ball of the same shape and dtype, but only the numbers of rank 0's ball count. Leave the
    caller's tensor as it is.
    You have comms.rank, comms.send_tensor(tensor, dest) and comms.recv_tensor(shape, src, dtype).
    """
    # What does rank 0 do in a round, and what does rank 1? Which of them must receive while the other one sends?
    raise NotImplementedError("play the rounds: there and back")
    return ball


if __name__ == "__main__":

    def try_it(comms: mp.Comms, rounds: int = 200) -> str:
        begun = time.perf_counter()
        ball = ping_pong(torch.zeros(3), rounds, comms)
        one_way = (time.perf_counter() - begun) / (2 * rounds)
        return f"rank {comms.rank} has {ball.tolist()}; a message took about {one_way * 1e6:.0f} microseconds"

    print(*mp.launch(try_it, ranks=2), sep="\n")  # rank 0 has [400.0, …], rank 1 has had 399 last
