"""Several thin stages of the model on every rank.

Cut the model into more stages than there are ranks: with v stages a rank, rank r of p has stages r, r + p, r + 2p, …
A micro-batch goes round all ranks v times. Call each time a *lap*. Every stage is v times thinner, so the first
micro-batch reaches the last rank v times sooner, and the bubble, the time in which a rank only waits, is v times
smaller.

    2 ranks, 4 micro-batches, 2 stages a rank; F2.1 is stage 2 on micro-batch 1; rank 0 has 0 and 2, rank 1 has 1 and 3
    rank 0  F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 …
    rank 1       F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 …

You write only the order in which each rank computes, as text. The check puts in the sends and receives, verifies and
simulates the program, and runs it on ranks.

Lesson: docs/pipeline/07_interleaved.md            Check it: microparallel learn check interleaved
"""

import microparallel as mp
from microparallel.program import Program, TrainingStep, parse_op


def visits(ranks: int, microbatches: int, stages_per_rank: int) -> list[tuple[int, int]]:
    """The (lap, micro-batch) of a rank's forwards, in order: micro-batches come in rounds of p.

    With 2 ranks, 4 micro-batches and 2 stages a rank: micro-batches 0 and 1 on lap 0, the same on lap 1; then 2 and 3
    on lap 0, and on lap 1. The number of micro-batches is a multiple of the number of ranks.
    """
    raise NotImplementedError("in which order do a rank's stages see the micro-batches?")


def order(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[str]:
    """What a rank computes, in order: "F2.1" is the forward of stage 2 on micro-batch 1, "B2.1" its backward."""
    # The forwards, in the order of visits(…). Which stage does this rank do on lap l?
    # The backwards, in the same order of micro-batches; but which of a rank's stages does a gradient reach first?
    # And how many forwards come before the first "forward, then backward"? The first micro-batch has to go through
    # all laps but the last, which is p forwards each; then down to the last rank and back up again.
    # Then return in_turn(forwards, backwards, warm_up).
    raise NotImplementedError("forwards, backwards, and the length of the warm-up")


def in_turn(forwards: list[str], backwards: list[str], warm_up: int) -> list[str]:
    """The warm-up, then one forward and one backward in turn, then the backwards that are left."""
    words = forwards[:warm_up]
    for number, backward in enumerate(backwards):
        words += forwards[warm_up + number : warm_up + number + 1]
        words.append(backward)
    return words


if __name__ == "__main__":
    RANKS, MICROBATCHES, STAGES_PER_RANK = 2, 4, 2
    orders = [order(rank, RANKS, MICROBATCHES, STAGES_PER_RANK) for rank in range(RANKS)]
    goal = TrainingStep(RANKS * STAGES_PER_RANK, MICROBATCHES)
    program = Program("mine", goal, tuple(tuple(map(parse_op, words)) for words in orders))
    program = mp.schedules.lower(program)
    mp.verify(program)
    print(mp.draw(program))
