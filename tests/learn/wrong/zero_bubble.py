from answers import Answer

AFTER = """        if m >= waiting:
            words.append(f"W{rank}.{m - waiting}")
"""
LEFT_OVER = """    words += [f"W{rank}.{m}" for m in range(max(0, microbatches - waiting), microbatches)]
"""

INPUT = "torch.autograd.grad(outputs, received, gradient, retain_graph=True)[0]"
WEIGHT = "torch.autograd.grad(outputs, parameters, gradient)"
ADD = "new if parameter.grad is None else parameter.grad + new"

ANSWERS = [
    Answer(
        "I does the whole backward",
        {"return " + INPUT: "outputs.backward(gradient, retain_graph=True)\n    return received.grad"},
        "input_half also computes the gradients of 0.bias, 0.weight",
        quick=True,
    ),
    Answer("I frees the graph", {", retain_graph=True)": ")"}, "unless it is told retain_graph=True. I goes first"),
    Answer("I returns a tuple", {INPUT: INPUT.removesuffix("[0]")}, "input_half returns a tuple"),
    Answer("I returns nothing", {"return " + INPUT: INPUT}, "input_half returns None"),
    Answer("I without a gradient", {INPUT: INPUT.replace(", gradient", "")}, "a half begins without a gradient"),
    Answer(
        "I begins with ones",
        {INPUT: INPUT.replace("gradient", "torch.ones_like(gradient)")},
        "the gradient that came from the next rank is not used: I begins with it",
    ),
    Answer(
        "W does the whole backward",
        {"    parameters = list(stage.parameters())\n": "    return outputs.backward(gradient)\n    parameters = []\n"},
        "weight_half computes the gradient of the input again",
    ),
    Answer("W keeps nothing", {"parameter.grad = " + ADD: "new + 0"}, "leaves no gradient in parameter.grad"),
    Answer("W overwrites", {ADD: "new"}, "each W adds its own to what is there"),
    Answer(
        "W begins with ones",
        {WEIGHT: WEIGHT.replace("gradient)", "torch.ones_like(gradient))")},
        "the gradient that came from the next rank is not used: W begins with it, too",
    ),
    Answer(
        "W finds only the weight",
        {"list(stage.parameters())": "list(stage.parameters())[:1]"},
        "1 of the 2 parameters of the stage, after W of micro-batch 0, have no gradient",
    ),
    Answer(
        "no W waits",
        {"waiting = rank": "waiting = 0"},
        "Rank 1 does its first W after 1 I, and should let 1 of them wait",
        quick=True,
    ),
    Answer(
        "all W wait",
        {"waiting = rank": "waiting = microbatches"},
        "rank 0 holds 6 activations at once, and 3 are allowed: an activation is kept until its W is done",
        quick=True,
    ),
    Answer("W left over forgotten", {LEFT_OVER: ""}, "rank 1 never does W1.5: a W that waits must be done in the end"),
    Answer(
        "one W too many waits",
        {"waiting = rank": "waiting = rank + 1"},
        "rank 0 holds 4 activations at once, and 3 are allowed",
    ),
    Answer(
        "waiting counted from the wrong end",
        {"waiting = rank": "waiting = ranks - 1 - rank"},
        "Rank 0 lets 2 W wait, and should let 0 wait",
    ),
    Answer(
        "W before I",
        {
            '        words.append(f"I{rank}.{m}")\n' + AFTER: AFTER + '        words.append(f"I{rank}.{m}")\n',
        },
        "rank 0 does W0.0 before I0.0, which makes what it needs",
    ),
    Answer(
        "the wrong micro-batch's W",
        {'f"W{rank}.{m - waiting}"': 'f"W{rank}.{m}"'},
        "rank 1 does W1.5 2 times and W1.0 never",
    ),
    Answer(
        "the backward not split",
        {'f"I{rank}.{m}"': 'f"B{rank}.{m}"'},
        "the letters are F, I, W",
    ),
    Answer(
        "the warm-up of ZB-H2",
        {"min(ranks - 1 - rank, microbatches)": "min(2 * (ranks - 1 - rank), microbatches)"},
        "Rank 0 does 5 forwards before its first I, and should do 3",
    ),
    Answer(
        "warm-up one too short",
        {"min(ranks - 1 - rank, microbatches)": "min(max(0, ranks - 2 - rank), microbatches)"},
        "Rank 0 does 2 forwards before its first I, and should do 3",
    ),
    Answer(
        "no forwards after the warm-up",
        {'        if warm_up + m < microbatches:\n            words.append(f"F{rank}.{warm_up + m}")\n': ""},
        "rank 0 never does F0.2",
    ),
    Answer(
        "left-over W not clamped",
        {"range(max(0, microbatches - waiting), microbatches)": "range(microbatches - waiting, microbatches)"},
        "W3.-1 in it, and micro-batches are counted from 0",
    ),
    Answer(
        "the library's own schedule",
        {
            "    return words\n": (
                "    return [str(op) for op in mp.schedules.zb_h1(ranks, microbatches).ranks[rank]]\n"
            )
        },
        "the point is to write it yourself",
    ),
    Answer("nothing returned", {"    return words\n": ""}, "should be a list of words such as F0.1, and is None"),
    Answer(
        "a text",
        {"    return words\n": "    return ' '.join(words)\n"},
        "should be a list of words such as F0.1, and is 'F0",
    ),
    Answer("numbers", {"    return words\n": "    return [1, 2]\n"}, "has 1 in it, which is no operation"),
]
