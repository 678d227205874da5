"""A step of ZeRO-3 as a program: units are gathered ahead, and only as many are whole as the limit allows.

A *unit* is what is gathered together; here every layer is one. A rank keeps its part of each unit. It gathers a unit
before it computes with it, and frees it afterwards. With `prefetch` d, the gather of a unit begins d units before it is
used, so that their computation hides it; at most d + 1 units are whole at a time. You write what a rank does, in order:

    F2.5       forward of layer 2 on micro-batch 5     B2.5   its backward     S   update this rank's parts, at the end
    ~T0@dp     gather unit 0                           !T0    free it: this rank keeps its part
    %U0.1@dp   reduce-scatter what each rank's second micro-batch gave for unit 0: this rank gets its part of the sum
    !D2.5      free the whole gradient of layer 2 that micro-batch 5 gave

    two layers, one micro-batch, two ranks; the helpers below write the words
    prefetch 0   ~T1@dp F0.0 !T1 ~T0@dp F1.0 !T0   ~T0@dp B1.0 %U0.0@dp !D1.0 !T0 ~T1@dp B0.0 %U1.0@dp !D0.0 !T1   S
    prefetch 1   ~T1@dp ~T0@dp F0.0 !T1 F1.0 !T0   ~T0@dp ~T1@dp B1.0 %U0.0@dp !D1.0 !T0 B0.0 %U1.0@dp !D0.0 !T1   S

Units are counted from the end, as buckets are: unit 0 is the last layer. Communication has a *lane* of its own, so it
runs beside computation: it begins when everything has ended that stands before it, and what is computed next goes on.

Lesson: docs/sharding/04_gathered_on_demand.md         Check it: microparallel learn check zero-3
"""

import microparallel as mp
from microparallel.program import Program, TrainingStep, parse_op


def gather(layer: int, layers: int) -> str:
    """Gather the unit of a layer."""
    return f"~T{layers - 1 - layer}@dp"


def free(layer: int, layers: int) -> str:
    """Free the unit of a layer."""
    return f"!T{layers - 1 - layer}"


def reduce_scatter(layer: int, layers: int, turn: int) -> str:
    """Reduce-scatter the gradients of a layer: those of each rank's first micro-batch in turn 0, and so on."""
    return f"%U{layers - 1 - layer}.{turn}@dp"


def free_gradient(layer: int, microbatch: int) -> str:
    """Free the whole gradient of a layer that a micro-batch gave."""
    return f"!D{layer}.{microbatch}"


def in_turn(uses: list[tuple[int, list[str]]], layers: int, prefetch: int) -> list[str]:
    """Compute with one unit after another: each is gathered `prefetch` units ahead, and freed after its use.

    `uses` has, in order, which layer is used, and the words for what is done with it then.
    """
    # Go through the uses. Before the first one, which units must have been gathered? And before the next one?
    # Count how many you have gathered, and gather until it is as many as there should be. Then the words of this
    # use; then free its unit. At the end of the list there is nothing more to gather ahead.
    raise NotImplementedError("gather ahead, compute, free")


def order(rank: int, ranks: int, layers: int, microbatches: int, prefetch: int) -> list[str]:
    """What a rank does in one step. In each turn it has a micro-batch of its own: number `turn * ranks + rank`."""
    words = []
    for turn in range(microbatches):
        microbatch = turn * ranks + rank
        forwards = [(layer, [f"F{layer}.{microbatch}"]) for layer in range(layers)]
        # The backwards: in which order do they come? What is done with a layer's gradient as soon as it is there?
        # Then put the gathers and frees around both, with in_turn.
        raise NotImplementedError("the backwards, and gathers around all of it")
    return [*words, "S"]


if __name__ == "__main__":
    RANKS, LAYERS, MICROBATCHES, PREFETCH = 2, 3, 1, 1
    orders = [order(rank, RANKS, LAYERS, MICROBATCHES, PREFETCH) for rank in range(RANKS)]
    units = tuple((layer, layer + 1) for layer in reversed(range(LAYERS)))
    goal = TrainingStep(LAYERS, RANKS * MICROBATCHES, units, sharded=True)
    program = Program("mine", goal, tuple(tuple(map(parse_op, words)) for words in orders))
    mp.verify(program)
    print(mp.draw(program, memory=True))
