from answers import Answer

LAPS = "        for lap in range(stages_per_rank)\n"
WARM_UP = "warm_up = (stages_per_rank - 1) * ranks + 2 * (ranks - 1 - rank)"
VISITS = """        for first in range(0, microbatches, ranks)
        for lap in range(stages_per_rank)
        for m in range(first, first + ranks)
"""

ANSWERS = [
    Answer(
        "neighbouring stages on one rank",
        {
            "F{lap * ranks + rank}": "F{rank * stages_per_rank + lap}",
            "B{(stages_per_rank - 1 - lap) * ranks + rank}": "B{rank * stages_per_rank + stages_per_rank - 1 - lap}",
        },
        "rank 0 has stages 0, 1, which are neighbours",
        quick=True,
    ),
    Answer(
        "all micro-batches through the first stage",
        {VISITS: LAPS + VISITS.replace(LAPS, "")},
        "lets all micro-batches through its first stage before the second sees any",
    ),
    Answer(
        "stages not counted down in the backward",
        {"B{(stages_per_rank - 1 - lap) * ranks + rank}": "B{lap * ranks + rank}"},
        "rank 0's backwards begin with B0.0, but a gradient begins at the last stage",
        quick=True,
    ),
    Answer(
        "the warm-up of 1F1B",
        {WARM_UP: "warm_up = ranks - 1 - rank"},
        "Rank 0 does 2 forwards before its first backward, and should do 5",
    ),
    Answer(
        "warm-up one too long",
        {WARM_UP: WARM_UP + " + 1"},
        "rank 0 holds 6 activations at once, and 5 are enough. Rank 0 does 6 forwards before its first backward",
    ),
    Answer(
        "warm-up only one way",
        {WARM_UP: "warm_up = (stages_per_rank - 1) * ranks + ranks - 1 - rank"},
        "are enough. Rank 0 does 4 forwards before its first backward, and should do 5",
    ),
    Answer(
        "warm-up of all laps",
        {WARM_UP: "warm_up = stages_per_rank * ranks + 2 * (ranks - 1 - rank)"},
        "does 7 forwards before its first backward, and should do 5",
    ),
    Answer(
        "every round begins with micro-batch 0",
        {"(lap, m)": "(lap, m - first)"},
        "rank 0 does F0.0 2 times and F0.2 never",
    ),
    Answer(
        "only one round",
        {"range(0, microbatches, ranks)": "range(1)"},
        "rank 0 never does F0.2",
    ),
    Answer(
        "all forwards first",
        {WARM_UP: "warm_up = len(forwards)"},
        "rank 0 holds 8 activations at once, and 5 are enough",
    ),
    Answer(
        "the stage left out",
        {'f"F{lap * ranks + rank}.{m}"': 'f"F{m}"'},
        "which is no operation of this schedule",
    ),
    Answer(
        "warm-up counted from the wrong end",
        {WARM_UP: "warm_up = (stages_per_rank - 1) * ranks + 2 * rank"},
        "the ranks wait for each other for ever",
    ),
    Answer(
        "the library's own schedule",
        {
            "    return in_turn(": (
                "    program = mp.schedules.PIPELINES['interleaved'](ranks, microbatches, stages_per_rank)\n"
                "    return [str(op) for op in program.ranks[rank]]\n"
                "    return in_turn("
            )
        },
        "the point is to write it yourself",
    ),
    Answer(
        "nothing returned",
        {"    return in_turn(": "    in_turn("},
        "should be a list of words such as F0.1, and is None",
    ),
]
