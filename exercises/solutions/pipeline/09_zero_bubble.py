"""Split the backward and fill the gaps.

A backward does two things: it finds the gradient of a stage's input (I), which the rank before waits for, and the
gradients of its weights (W), which nobody waits for. So do I as soon as possible, and keep W for when there is nothing
else to do. That is ZB-H1: the order of 1F1B, with its backward split.

    rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3        no W waits
    rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3        one W waits, to the end
    rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3        two wait

1F1B leaves every rank (p − 1)(F + I + W) of waiting. Here it is (p − 1)(F + I − W). But what W needs must be kept until
it is done: a rank of p may hold at most p activations, as many as 1F1B's first rank.

Write the order of each rank as text; the messages are put in for you, and it is verified, simulated and run.

Lesson: docs/pipeline/08_zero_bubble.md            Check it: microparallel learn check zero-bubble
"""

import microparallel as mp
from microparallel.program import Program, TrainingStep, parse_op


def order(rank: int, ranks: int, microbatches: int) -> list[str]:
    """What a rank computes: "F1.2" is the forward of stage 1 on micro-batch 2, "I1.2" and "W1.2" its backward.

    Rank r has stage r. There may be fewer micro-batches than ranks.
    """
    warm_up = min(ranks - 1 - rank, microbatches)
    words = [f"F{rank}.{m}" for m in range(warm_up)]
    # ┌ hole
    #: # Then in turn, as in 1F1B: one forward, as long as there are any, and one I. After it one W; but this rank lets
    #: # some of them wait. How many does rank r let wait? See the drawing.
    #: # At last the W that are left. Nothing may be forgotten.
    #: raise NotImplementedError("forwards and the two halves of the backwards, in ZB-H1's order")
    waiting = rank
    for m in range(microbatches):
        if warm_up + m < microbatches:
            words.append(f"F{rank}.{warm_up + m}")
        words.append(f"I{rank}.{m}")
        if m >= waiting:
            words.append(f"W{rank}.{m - waiting}")
    words += [f"W{rank}.{m}" for m in range(max(0, microbatches - waiting), microbatches)]
    # └
    return words


if __name__ == "__main__":
    RANKS, MICROBATCHES = 3, 4
    orders = [order(rank, RANKS, MICROBATCHES) for rank in range(RANKS)]
    program = Program("mine", TrainingStep(RANKS, MICROBATCHES), tuple(tuple(map(parse_op, words)) for words in orders))
    program = mp.schedules.lower(program)
    mp.verify(program)
    print(mp.draw(program))
