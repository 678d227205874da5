from answers import Answer

PART = "    return in_parts(weight, comms.world_size)[comms.rank].clone()\n"
GATHERED = "    return torch.cat(comms.all_gather(part))[:rows]\n"
SAVE = "        ctx.save_for_backward(inputs, part)\n"
COMPUTE = "        return inputs @ gathered(part, rows, comms).T\n"
FORWARD = SAVE + COMPUTE
TAKE = "        inputs, part = ctx.saved_tensors\n"
OF_INPUTS = "        of_inputs = gradient @ gathered(part, ctx.rows, ctx.comms)\n"
OF_WEIGHT = "        of_weight = gradient.T @ inputs\n"
SCATTER = '        of_part = ctx.comms.reduce_scatter(in_parts(of_weight, ctx.comms.world_size), op="mean")\n'
RETURN = "        return of_inputs, of_part, None, None\n"
GATHER_FIRST = "        weight = gathered(part, rows, comms)\n"
COMPUTE_WITH_IT = "        return inputs @ weight.T\n"

ANSWERS = [
    Answer(
        "saves the whole weight for backward",
        {
            FORWARD: GATHER_FIRST + SAVE.replace("part", "weight") + COMPUTE_WITH_IT,
            TAKE: TAKE.replace("part", "weight"),
            OF_INPUTS: "        of_inputs = gradient @ weight\n",
        },
        "rank 0 holds the whole weight between forward and backward: autograd has saved it (save_for_backward)",
        quick=True,
    ),
    Answer(
        "lets autograd save it: a gather with a backward, and a linear layer of torch's",
        {
            "        return GatheredLinear.apply(inputs, self.part, self.rows, self.comms)\n": (
                "        return inputs @ Gather.apply(self.part, self.rows, self.comms).T\n"
            ),
            "class ShardedLinear(nn.Module):\n": (
                "class Gather(torch.autograd.Function):\n"
                "    @staticmethod\n    def forward(ctx, part, rows, comms):\n"
                "        ctx.comms = comms\n        return gathered(part, rows, comms)\n\n"
                "    @staticmethod\n    def backward(ctx, of_weight):\n"
                "        parts = in_parts(of_weight, ctx.comms.world_size)\n"
                '        return ctx.comms.reduce_scatter(parts, op="mean"), None, None\n\n\n'
                "class ShardedLinear(nn.Module):\n"
            ),
        },
        "autograd has saved it (save_for_backward): save your part, and gather again in backward",
    ),
    Answer(
        "keeps the whole weight in ctx",
        {
            FORWARD: GATHER_FIRST + "        ctx.weight = weight\n" + SAVE + COMPUTE_WITH_IT,
            OF_INPUTS: "        of_inputs = gradient @ ctx.weight\n",
        },
        "rank 0 holds the whole weight between forward and backward: something keeps it: an attribute of ctx",
        quick=True,
    ),
    Answer(
        "keeps the gathered parts in a list",
        {
            GATHERED: "    parts = comms.all_gather(part)\n"
            "    KEPT.append(parts)\n    return torch.cat(parts)[:rows]\n",
            "def part_of(": "KEPT = []\n\n\ndef part_of(",
        },
        "something keeps it: an attribute of ctx or of the layer, a list",
    ),
    Answer(
        "the weight is kept until the next one is there",
        {
            GATHERED: "    whole = torch.cat(comms.all_gather(part))[:rows]\n"
            "    LAST[comms.rank] = whole\n    return whole\n",
            "def part_of(": "LAST = {}\n\n\ndef part_of(",
        },
        "rank 0 holds the whole weight between forward and backward",
    ),
    Answer(
        "backward keeps the weight that it has gathered",
        {
            OF_INPUTS: "        whole = gathered(part, ctx.rows, ctx.comms)\n"
            "        ctx.comms.last = whole\n        of_inputs = gradient @ whole\n"
        },
        "rank 0 still holds the whole weight after backward: it is not needed until the next forward",
    ),
    Answer(
        "a part that is a view",
        {PART: PART.replace(".clone()", "")},
        "rank 0's part is a view: it has 18 numbers, and keeps the memory of 36",
        quick=True,
    ),
    Answer(
        "the layer keeps the whole weight beside its part",
        {"        self.part = nn.Parameter(": "        self.weight = weight\n        self.part = nn.Parameter("},
        "rank 0 still holds the whole weight when its layer is made",
    ),
    Answer(
        "the next rank's part",
        {PART: PART.replace("[comms.rank]", "[(comms.rank + 1) % comms.world_size]")},
        "rank 0 keeps part 1, which is rank 1's: part r belongs to rank r",
    ),
    Answer(
        "rows that are not filled up",
        {PART: "    return weight.tensor_split(comms.world_size)[comms.rank].clone()\n"},
        "rank 1 keeps 2 rows, and should keep 3: the rows divided by the ranks, rounded up",
    ),
    Answer(
        "the zeros are not cut off",
        {GATHERED: GATHERED.replace("[:rows]", "")},
        "the outputs have 9 columns. The rows of zeros that fill the parts up are still in the weight",
        quick=True,
    ),
    Answer(
        "only its own rows",
        {COMPUTE: "        return inputs @ part.T\n"},
        "what the layer returns has shape [2, 3], and should have [2, 6]",
    ),
    Answer(
        "the weight is not transposed in forward",
        {COMPUTE: COMPUTE.replace(".T", "")},
        "inputs · weight instead of inputs · weightᵀ",
    ),
    Answer(
        "the weight is transposed in backward",
        {OF_INPUTS: OF_INPUTS.replace("ctx.comms)\n", "ctx.comms).T\n")},
        "gradient · weightᵀ instead of gradient · weight",
    ),
    Answer(
        "the weight's gradient transposed",
        {OF_WEIGHT: "        of_weight = inputs.T @ gradient\n"},
        "inputsᵀ · gradient instead of gradientᵀ · inputs",
    ),
    Answer(
        "a sum instead of a mean",
        {', op="mean")\n        return': ")\n        return"},
        "the gradients are added up over ranks and not averaged",
        quick=True,
    ),
    Answer(
        "divided twice",
        {RETURN: RETURN.replace("of_part", "of_part / ctx.comms.world_size")},
        "divided twice by the number of ranks",
    ),
    Answer(
        "nothing is reduced: its own samples alone",
        {SCATTER: "        of_part = in_parts(of_weight, ctx.comms.world_size)[ctx.comms.rank].clone()\n"},
        "this is what the rank's own samples say: every rank has other samples",
        quick=True,
    ),
    Answer(
        "gathers whole gradients and averages them itself",
        {
            SCATTER: "        whole = torch.stack(ctx.comms.all_gather(of_weight)).mean(0)\n"
            "        of_part = in_parts(whole, ctx.comms.world_size)[ctx.comms.rank].clone()\n"
        },
        "numbers in line 70, which are not its part of the weight (18 numbers)",
    ),
    Answer(
        "an all-reduce",
        {
            SCATTER: '        ctx.comms.all_reduce(of_weight, op="mean")\n'
            "        of_part = in_parts(of_weight, ctx.comms.world_size)[ctx.comms.rank].clone()\n"
        },
        "comms.all_reduce is not for this exercise",
    ),
    Answer(
        "the part of the gradient is a view of the whole",
        {
            SCATTER: "        parts = in_parts(of_weight, ctx.comms.world_size)\n"
            '        of_part = ctx.comms.reduce_scatter(parts, op="mean", into=parts[ctx.comms.rank])\n'
        },
        "after backward: the gradient of its part is a view of it, which keeps all of its memory",
    ),
    Answer(
        "the whole gradient is kept",
        {OF_WEIGHT: OF_WEIGHT + "        ctx.comms.last = of_weight\n"},
        "rank 0 still holds the whole gradient of the weight after backward: once it is reduce-scattered",
    ),
    Answer(
        "no gradient of the inputs",
        {RETURN: RETURN.replace("of_inputs,", "None,")},
        "rank 0's inputs have no gradient: the first thing that backward returns",
    ),
    Answer(
        "no gradient of the part",
        {RETURN: RETURN.replace("of_part,", "None,")},
        "the gradient of rank 0's part is missing",
    ),
    Answer(
        "gathers twice in forward",
        {COMPUTE: "        gathered(part, rows, comms)\n" + COMPUTE},
        "in forward rank 0 gathers 2 times: once is enough",
    ),
    Answer(
        "reduce-scatters in forward, to try it out",
        {
            COMPUTE: "        comms.reduce_scatter(in_parts(torch.cat([part] * comms.world_size), comms.world_size))\n"
            + COMPUTE
        },
        "in forward rank 0 reduce-scatters 1 times: there is no gradient yet",
    ),
    Answer(
        "no backward at all",
        {
            "        return GatheredLinear.apply(inputs, self.part, self.rows, self.comms)\n": (
                "        return inputs.detach() @ gathered(self.part.detach(), self.rows, self.comms).T\n"
            )
        },
        "what the layer returns has no backward",
    ),
    Answer(
        "the library's own",
        {
            "        self.part = nn.Parameter(part_of(weight, comms))\n": (
                "        layer = nn.Linear(weight.shape[1], len(weight), bias=False)\n"
                "        self.part = next(mp.FullyShardedDataParallel(layer, comms).parameters())\n"
            )
        },
        "FullyShardedDataParallel",
    ),
    Answer(
        "one rank gathers less often",
        {
            OF_INPUTS: "        if ctx.comms.rank == 0:\n    "
            + OF_INPUTS
            + "        else:\n            of_inputs = inputs\n"
        },
        "rank 1 calls reduce_scatter",
    ),
    Answer(
        "backward returns gradients for the tensors alone",
        {RETURN: "        return of_inputs, of_part\n"},
        "gradients, backward returns one for each argument of forward, in the same order: for rows and comms None",
    ),
]
