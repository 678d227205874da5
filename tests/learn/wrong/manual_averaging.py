from answers import Answer

TOTAL = "            total += parameter.grad * seen\n"
GIVE = "            parameter.grad = total / sum(samples)\n"
LOOP = "        for parameter in same_parameter:\n"

ANSWERS = [
    Answer(
        "missing division",
        {"parameter.grad * seen": "parameter.grad", "total / sum(samples)": "total.clone()"},
        "this is the sum of both gradients: divide it",
        True,
    ),
    Answer("sum over samples", {"total / sum(samples)": "total.clone()"}, "divide it by how many there are"),
    Answer(
        "plain mean of uneven parts",
        {"parameter.grad * seen": "parameter.grad", "total / sum(samples)": "total / len(copies)"},
        "weight each gradient by its samples",
        True,
    ),
    Answer("samples divided by copies", {"total / sum(samples)": "total / len(samples)"}, "by the number of copies"),
    Answer("only the first copy", {LOOP: LOOP.replace(":\n", "[:1]:\n")}, "copy 1 still holds its own"),
    Answer(
        "parameters instead of gradients",
        {
            "total += parameter.grad * seen": "total += parameter.data * seen",
            "parameter.grad = total / sum(samples)": "parameter.data = total / sum(samples)",
        },
        "parameters were changed: average parameter.grad",
    ),
    Answer("only the first parameter", {GIVE: GIVE + "        break\n"}, "every parameter needs its average"),
    Answer(
        "one tensor for both",
        {LOOP + GIVE: "        total /= sum(samples)\n" + LOOP + "            parameter.grad = total\n"},
        "one and the same tensor",
    ),
    Answer("weights swapped", {"same_parameter, samples,": "same_parameter, samples[::-1],"}, "weights are swapped"),
    Answer(
        "overwritten too early",
        {
            LOOP + GIVE: "",
            TOTAL: "            first, second = same_parameter\n        for parameter in same_parameter:\n"
            "            parameter.grad = (first.grad * samples[0] + second.grad * samples[1]) / sum(samples)\n",
        },
        "overwritten before copy 1's average was computed",
    ),
    Answer("nothing done", {LOOP + GIVE: ""}, "copy 0 still holds its own gradient"),
    Answer(
        "no gradient left", {GIVE: "            parameter.grad = None\n"}, "copy 0's 0.weight has no gradient any more"
    ),
]
