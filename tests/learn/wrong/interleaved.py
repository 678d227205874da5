from answers import Answer

WARM_UP = "warm_up = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)"
VISITS = """        for turn in range(microbatches // ranks)
        for chunk in range(chunks)
        for place in range(ranks)
"""

ANSWERS = [
    Answer(
        "neighbouring stages on one rank",
        {
            "F{chunk * ranks + rank}": "F{rank * chunks + chunk}",
            "B{(chunks - 1 - chunk) * ranks + rank}": "B{rank * chunks + chunks - 1 - chunk}",
        },
        "rank 0 has stages 0, 1, which are neighbours",
        quick=True,
    ),
    Answer(
        "all micro-batches through the first chunk",
        {VISITS: "        for chunk in range(chunks)\n" + VISITS.replace("        for chunk in range(chunks)\n", "")},
        "lets all micro-batches through its first chunk before the second sees any",
    ),
    Answer(
        "chunks not counted down in the backward",
        {"B{(chunks - 1 - chunk) * ranks + rank}": "B{chunk * ranks + rank}"},
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
        {WARM_UP: "warm_up = (chunks - 1) * ranks + ranks - 1 - rank"},
        "are enough. Rank 0 does 4 forwards before its first backward, and should do 5",
    ),
    Answer(
        "warm-up of all chunks",
        {WARM_UP: "warm_up = chunks * ranks + 2 * (ranks - 1 - rank)"},
        "does 7 forwards before its first backward, and should do 5",
    ),
    Answer(
        "every round begins with micro-batch 0",
        {"(chunk, turn * ranks + place)": "(chunk, place)"},
        "rank 0 does F0.0 2 times and F0.2 never",
    ),
    Answer(
        "only one round",
        {"range(microbatches // ranks)": "range(1)"},
        "rank 0 never does F0.2",
    ),
    Answer(
        "all forwards first",
        {WARM_UP: "warm_up = len(forwards)"},
        "rank 0 holds 8 activations at once, and 5 are enough",
    ),
    Answer(
        "the stage left out",
        {'f"F{chunk * ranks + rank}.{m}"': 'f"F{m}"'},
        "which is no operation of this schedule",
    ),
    Answer(
        "warm-up counted from the wrong end",
        {WARM_UP: "warm_up = (chunks - 1) * ranks + 2 * rank"},
        "the ranks wait for each other for ever",
    ),
    Answer(
        "the library's own schedule",
        {
            "    return in_turn(": (
                "    program = mp.schedules.PIPELINES['interleaved'](ranks, microbatches, chunks)\n"
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
