from answers import Answer

WHILE = "        while gathered < min(place + 1 + prefetch, len(uses)):\n"
FREE = "        words += [*computed, free(layer, layers)]\n"
LIMIT = "min(place + 1 + prefetch, len(uses))"
GRADIENT = "reduce_scatter(layer, layers, turn), free_gradient(layer, microbatch)]"
BOTH = "        words += in_turn(forwards, layers, prefetch) + in_turn(backwards, layers, prefetch)\n"

ANSWERS = [
    Answer(
        "no prefetching",
        {LIMIT: "place + 1"},
        "F1.0 waits for its unit: no unit is computed with between the gather and F1.0, where prefetch 1 allows 1",
        quick=True,
    ),
    Answer(
        "one unit less ahead",
        {LIMIT: "min(place + max(1, prefetch), len(uses))"},
        "no unit is computed with between the gather and F1.0, where prefetch 1 allows 1; begin the gather earlier",
    ),
    Answer(
        "never more than one ahead",
        {LIMIT: "min(place + 1 + min(prefetch, 1), len(uses))"},
        "1 unit is computed with between the gather and F2.0, where prefetch 2 allows 2; begin the gather earlier",
    ),
    Answer(
        "one unit too far ahead",
        {LIMIT: "min(place + 2 + prefetch, len(uses))"},
        "3 layers, 1 micro-batch a rank, prefetch 0: after ~T1@dp rank 0 has 2 units whole (T2, T1), and 1 are allowed",
        quick=True,
    ),
    Answer(
        "everything is gathered at the beginning",
        {LIMIT: "len(uses)"},
        "after ~T1@dp rank 0 has 2 units whole",
    ),
    Answer(
        "gathered in time, but not what was gathered ahead",
        {LIMIT: "min(prefetch + 1, len(uses))"},
        "does F1.1 with unit 1, which it has not gathered: ~T1@dp stands before it",
    ),
    Answer(
        "the last units are gathered that there are not",
        {LIMIT: "place + 1 + prefetch"},
        "list index out of range",
    ),
    Answer(
        "never freed",
        {FREE: "        words += computed\n"},
        "has gathered T0 already; it frees T0 first, or keeps it",
        quick=True,
    ),
    Answer(
        "kept from forward to backward",
        {
            BOTH: "        kept = [word for word in in_turn(forwards, layers, prefetch) if word[:2] != '!T']\n"
            "        words += kept + [word for word in in_turn(backwards, layers, prefetch) if word[:2] != '~T']\n"
        },
        "units whole (T2, T1), and 1 are allowed. No unit is freed in forward: what is kept until backward is whole",
        quick=True,
    ),
    Answer(
        "not gathered again for backward",
        {BOTH: BOTH.replace("in_turn(backwards", "[w for w in in_turn(backwards").rstrip() + " if w[:2] != '~T']\n"},
        "does B2.1 with unit 0, which it has freed after its forward: gather it again for the backward (~T0@dp)",
        quick=True,
    ),
    Answer(
        "freed before it is used",
        {FREE: "        words += [free(layer, layers), *computed]\n"},
        "does F0.1 with unit 2, which it has freed",
    ),
    Answer(
        "units counted from the front",
        {'return f"~T{layers - 1 - layer}@dp"': 'return f"~T{layer}@dp"'},
        "does F0.1 with unit 2, which it has not gathered: ~T2@dp stands before it",
    ),
    Answer(
        "backward from the first layer on",
        {"for layer in reversed(range(layers))\n": "for layer in range(layers)\n"},
        "does B0.0 before B1.0: backward goes from the last layer to the first",
    ),
    Answer(
        "gradients are not reduced",
        {", " + GRADIENT: "]"},
        "rank 0 never reduce-scatters a gradient of layer 2: every rank has other samples",
    ),
    Answer(
        "gradients are thrown away",
        {GRADIENT: "free_gradient(layer, microbatch)]"},
        "never reduce-scatters a gradient of layer 2",
    ),
    Answer(
        "whole gradients are kept",
        {GRADIENT: "reduce_scatter(layer, layers, turn)]"},
        "after B0.0 rank 0 holds 3 whole gradients (D2.0, D1.0, D0.0): free each when it is reduce-scattered",
        quick=True,
    ),
    Answer(
        "freed before they are reduced",
        {GRADIENT: "free_gradient(layer, microbatch), reduce_scatter(layer, layers, turn)]"},
        "when D2.1 is gone: the whole gradient of a layer is freed after its reduce-scatter",
    ),
    Answer(
        "reduced before backward",
        {
            '[f"B{layer}.{microbatch}", reduce_scatter(layer, layers, turn), ': (
                '[reduce_scatter(layer, layers, turn), f"B{layer}.{microbatch}", '
            )
        },
        "does %U0.0@dp before B2.1, which makes that gradient",
    ),
    Answer(
        "only the first micro-batch's gradients",
        {"reduce_scatter(layer, layers, turn)": "reduce_scatter(layer, layers, 0)"},
        "does %U0.0@dp twice: the number after the dot is the turn",
    ),
    Answer(
        "an update in every turn",
        {BOTH: BOTH + "        words.append('S')\n", 'return [*words, "S"]': "return words"},
        "2 ranks, 4 layers, 2 micro-batches a rank, prefetch 1: rank 0 updates 2 times (S)",
    ),
    Answer(
        "no update",
        {'return [*words, "S"]': "return words"},
        "rank 0 updates 0 times (S): once, when all gradients are summed up",
    ),
    Answer(
        "an update at the beginning",
        {'return [*words, "S"]': 'return ["S", *words]'},
        "updates before B0.0: the update comes after the last micro-batch's backward",
    ),
    Answer(
        "every rank has the same micro-batches",
        {"microbatch = turn * ranks + rank": "microbatch = turn"},
        "rank 1 does F0.0, and has micro-batches 1",
    ),
    Answer(
        "ranks gather in another order",
        {
            '    return [*words, "S"]\n': (
                '    if rank and prefetch and layers > 1:\n        words[:2] = words[1::-1]\n    return [*words, "S"]\n'
            )
        },
        "all ranks gather and reduce-scatter in the same order, or they wait for each other for ever",
    ),
    Answer(
        "gathered twice for nothing",
        {
            FREE: "        words += [*computed, free(layer, layers)]\n"
            "        if place == len(uses) - 1:\n"
            "            words += [gather(layer, layers), free(layer, layers)]\n"
        },
        "rank 0 gathers 8 times, and 6 are enough: each of 3 units for forward and for backward",
    ),
    Answer(
        "an all-reduce",
        {'f"%U{layers - 1 - layer}.{turn}@dp"': 'f"*U{layers - 1 - layer}@dp"'},
        "has '*U0@dp' in it, which is no word of this exercise",
    ),
    Answer(
        "the library's own program",
        {
            "    words = []\n    for turn": (
                "    program = mp.schedules.zero(3, layers, ranks, microbatches, prefetch=prefetch)\n"
                "    return [str(op) for op in program.ranks[rank]]\n    words = []\n    for turn"
            )
        },
        "the point is to write it yourself",
    ),
    Answer(
        "nothing returned",
        {'    return [*words, "S"]': "    [*words]"},
        "should be a list of words such as F0.1, and is None",
    ),
]
