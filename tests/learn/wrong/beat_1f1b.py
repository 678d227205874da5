from answers import Answer

DEF = "def schedule(ranks: int, microbatches: int, costs: mp.Costs, most: Sequence[int]) -> Program:\n"


def other(body):
    """Another function under the name: what the solution's would do is never reached."""
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return {DEF: DEF + indented}


LAST = "            return as_it_comes(microbatches, costs, best)\n"
CHANGED = (
    "            program = as_it_comes(microbatches, costs, best)\n            return replace(program, ranks={})\n"
)
GOAL = "Program('mine', TrainingStep(ranks, microbatches), tuple(map(tuple, rows)))"
ONE_F_ONE_B = (
    """
from microparallel.program import Backward
rows = []
for rank in range(ranks):
    ahead = min(ranks - 1 - rank, microbatches)
    row = [Forward(rank, m) for m in range(ahead)]
    for m in range(microbatches):
        row += [Forward(rank, ahead + m)] if ahead + m < microbatches else []
        row += BACKWARD
    rows.append(row)
return """
    + GOAL
)

ANSWERS = [
    Answer(
        "one of our schedules",
        other("return mp.schedules.zb_h1(ranks, microbatches)"),
        "calls microparallel.schedules.zero_bubble.zb_h1: the point is to write it yourself",
    ),
    Answer(
        "1F1B",
        other(ONE_F_ONE_B.replace("BACKWARD", "[Backward(rank, m)]")),
        "takes as long as 1F1B",
        quick=True,
    ),
    Answer(
        "two halves, one after the other",
        other(ONE_F_ONE_B.replace("BACKWARD", "[BackwardWeight(rank, m), BackwardInput(rank, m)]")),
        "W0.0",
    ),
    Answer(
        "weight halves left out",
        other(ONE_F_ONE_B.replace("BACKWARD", "[BackwardInput(rank, m)]")),
        "W",
    ),
    Answer(
        "no limit",
        other(
            "rows = [[*(Forward(rank, m) for m in range(microbatches)), *(one for m in range(microbatches) for one in "
            "(BackwardInput(rank, m), BackwardWeight(rank, m)))] for rank in range(ranks)]\nreturn " + GOAL
        ),
        "rank 0 holds 6 activations at once, and has room for 4",
    ),
    Answer(
        "weight halves wait for the end, and keep their room",
        other(
            ONE_F_ONE_B.replace("BACKWARD", "[BackwardInput(rank, m)]").replace(
                "    rows.append(row)", "    rows.append(row + [BackwardWeight(rank, m) for m in range(microbatches)])"
            )
        ),
        "gives it back",
    ),
    Answer(
        "only for the machine of the lesson",
        other(
            "if ranks != 3:\n    ranks, microbatches, most = 3, 6, [4, 3, 2]\n"
            "    costs = mp.Costs(forward=[1, 2, 1], backward_input=[1, 2, 1], backward_weight=[1, 2, 1], latency=0.5)"
        ),
        "the program is for 3 ranks, and this machine has 4",
    ),
    Answer(
        "stages the other way round",
        {LAST: CHANGED.format("program.ranks[::-1]")},
        "rank 0 computes F2.0: stage 2 is on rank 2",
    ),
    Answer(
        "ranks wait for each other",
        other(
            "rows = [[op for m in range(microbatches)[:: 1 if rank % 2 else -1] for op in (Forward(rank, m), "
            "BackwardInput(rank, m), BackwardWeight(rank, m))] for rank in range(ranks)]\nreturn " + GOAL
        ),
        "deadlock",
    ),
    Answer("rows, and no program", other("return [[Forward(0, 0)]]"), "what schedule returns should be a program"),
    Answer("a text that is none", other("return 'F0.0 B0.0'"), "cannot be read as a program"),
    Answer("too few micro-batches", other("microbatches = 2"), "and should be a training step of 3 stages, 6 micro-"),
    Answer("it searches for ever", other("while True:\n    pass"), "still busy after 6 s"),
    Answer(
        "an update that nobody asked for",
        {
            LAST: "            from microparallel.program import OptimizerStep\n"
            + CHANGED.format("tuple((*ops, OptimizerStep()) for ops in program.ranks)")
        },
        "which is not for this step",
    ),
]
