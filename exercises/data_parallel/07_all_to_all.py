"""Send every token to the rank of its expert, and back.

In a mixture of experts every rank has one expert, a layer of its own, and a batch of tokens. A router has chosen an
expert for each token. So each rank has something for every other, and in the next batch it is another amount. That is
an all-to-all:

    rank 0 has tokens   a b c d      their experts are on ranks   1 0 1 2
    sorted by rank      b │ a c │ d                      counts   1   2   1

    1. counts    rank 0 tells rank 1 that 2 tokens will come, and rank 2 that 1 will come; all ranks do so
    2. tokens    a and c go to rank 1, d goes to rank 2, b stays
    3. expert    each rank's expert computes all tokens that have come
    4. back      every output goes where its token came from; how many these are is known by now
    5. order     rank 0 puts the outputs in the order of its tokens: a' b' c' d'

Counts are uneven and may be zero: a rank may have no tokens, and an expert may get none. Nobody may wait for ever
because of that.

Lesson: docs/data_parallel/05_sync_primitives.md       Check it: microparallel learn check all-to-all
"""

from collections.abc import Callable

import torch

import microparallel as mp


def exchange(parts: list[torch.Tensor], rows: list[int], comms: mp.Comms) -> list[torch.Tensor]:
    """Give parts[r] to rank r, for every rank r; return what every rank has for this one, in the order of ranks.

    parts: a tensor for each rank, which differ in their first dimension only
    rows:  how many rows will come from each rank

    You have comms.rank, comms.world_size, comms.send_tensor(tensor, dest), comms.recv_tensor(shape, src, dtype), and
    the same two without waiting: comms.isend and comms.irecv, which return a request with a `wait()`.
    """
    # In the check a send is over only when its receiver asks for the message. What if all ranks send first? Your own
    # part stays with you; a rank cannot send to itself.
    raise NotImplementedError("give every rank its part, and receive one from every rank")


def sort_by_rank(ranks: torch.Tensor, world_size: int) -> tuple[torch.Tensor, list[int]]:
    """The order in which the tokens leave, those for rank 0 first; and how many there are for each rank.

    ranks: for each token, the rank of its expert; of [1, 0, 1, 2] the order is [1, 0, 2, 3], the counts are [1, 2, 1]
    """
    # torch can sort, and can count how often each number occurs. How many counts are there if the last expert gets
    # no token?
    raise NotImplementedError("the order of the tokens, and the counts")


def dispatch(
    tokens: torch.Tensor, ranks: torch.Tensor, comms: mp.Comms, expert: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Every token's output, in the order of the tokens; all ranks call this.

    tokens: a row for each token; there may be none
    ranks:  for each token, the rank whose expert computes it
    expert: this rank's; gives an output of the same width for each row of its argument
    """
    order, counts = sort_by_rank(ranks, comms.world_size)
    parts = list(tokens[order].split(counts))  # for each rank, its tokens
    # `exchange` must know how many rows will come. Who knows that? And how many numbers does it take to say it?
    raise NotImplementedError("exchange the counts: a list with how many tokens come from each rank")
    # The tokens go there, the expert computes them, and the outputs come back.
    raise NotImplementedError("exchange the tokens, compute, and exchange the outputs")
    # Row n of what has come back belongs to token order[n].
    raise NotImplementedError("put the outputs in the order of the tokens")


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[float]:
        tokens = torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 10 * comms.rank
        ranks = torch.tensor([1, 0, 1, 2])
        return dispatch(tokens, ranks, comms, lambda some: 100 * comms.rank + some).flatten().tolist()

    for outputs in mp.launch(try_it, ranks=3):
        print(outputs)  # first [101.0, 2.0, 103.0, 204.0]: each token, and a hundred times its expert's rank
