from answers import Answer

SCATTER = '        mine = self.comms.reduce_scatter(in_parts(parameter.grad, self.comms.world_size), op="mean")\n'
KEEP = "        part.grad = mine if part.grad is None else part.grad + mine\n"
LET_GO = "        parameter.grad = None\n"
HOOK = SCATTER + KEEP + LET_GO
BACKWARD = "            loss.backward()\n"
UPDATE = "        self.update()\n"
STEP = "        self.optimizer.step()\n"
FORGET = "        self.optimizer.zero_grad()\n"
GATHER = """        for parameter, part in self.parts.items():
            row = torch.cat(self.comms.all_gather(part))
            parameter.data.copy_(row[: parameter.numel()].view(parameter.shape))
"""
PARTS = "self.parts = {p: in_parts(p, comms.world_size)[comms.rank].clone() for p in model.parameters()}"

ANSWERS = [
    Answer(
        "sums a micro-batch twice: the gradient is not let go",
        {LET_GO: ""},
        "still in parameter.grad (0.weight, 0.bias, 2.weight, 2.bias, 4.weight, 4.bias): torch adds to them, so what "
        "has been reduce-scattered travels again and counts twice",
        True,
    ),
    Answer(
        "keeps whole gradients until the last micro-batch",
        {
            HOOK: "        self.seen[parameter] = self.seen.get(parameter, 0) + 1\n"
            "        if self.seen[parameter] % 3 == 0:\n" + HOOK.replace("        ", "            "),
            "        self.model, self.comms = model, comms\n": (
                "        self.model, self.comms, self.seen = model, comms, {}\n"
            ),
        },
        "which have not been reduce-scattered: ZeRO-1 adds up whole gradients",
        True,
    ),
    Answer(
        "lets go only after the whole backward",
        {LET_GO: "", BACKWARD: BACKWARD + "            self.model.zero_grad()\n"},
        "those of 4.bias, 4.weight are still there, whole",
    ),
    Answer(
        "keeps whole gradients in a list",
        {
            LET_GO: "        self.kept.append(parameter.grad)\n" + LET_GO,
            "        self.model, self.comms = model, comms\n": (
                "        self.model, self.comms, self.kept = model, comms, []\n"
            ),
        },
        "keep only your part of it",
    ),
    Answer(
        "only the last micro-batch counts",
        {KEEP: "        part.grad = mine\n"},
        "only the last micro-batch is in the sum: add to part.grad",
        True,
    ),
    Answer(
        "only the first micro-batch counts",
        {KEEP: "        part.grad = mine if part.grad is None else part.grad\n"},
        "only the first micro-batch is in the sum",
    ),
    Answer("loss not divided", {" / len(microbatches)": ""}, "the loss is not divided by the 3 micro-batches"),
    Answer(
        "divided by the micro-batches twice",
        {STEP: "        for part in self.parts.values():\n            part.grad /= 3\n" + STEP},
        "divided twice by the 3 micro-batches",
    ),
    Answer("sum instead of mean", {', op="mean")': ")"}, "added up over ranks and not averaged"),
    Answer(
        "divided by the ranks twice",
        {KEEP: "        mine /= self.comms.world_size\n" + KEEP},
        "divided twice by the number of ranks",
    ),
    Answer(
        "updates after every micro-batch",
        {BACKWARD + UPDATE: BACKWARD + "    " + UPDATE},
        "rank 0 updates after 1 of 3 micro-batches: the others would be computed with other parameters",
        True,
    ),
    Answer("never updates", {STEP: ""}, "rank 0 never updates its parts: no optimizer.step() was called"),
    Answer("updates twice", {STEP: STEP + STEP}, "rank 0 calls optimizer.step() 2 times in one step"),
    Answer("gradients of the step before", {FORGET: ""}, "still in part.grad: let them go after the update"),
    Answer(
        "gathers before the update",
        {STEP + FORGET + GATHER: GATHER + STEP + FORGET},
        "rank 0 gathers before the update: what it hands out are old parameters",
    ),
    Answer(
        "no gather",
        {GATHER: ""},
        "rank 0 has new numbers only in its own parts, and every rank has other parts: gather the parts",
    ),
    Answer(
        "reduce-scatters twice",
        {KEEP: KEEP + SCATTER.replace("mine =", "again =")},
        "reduce-scatters the gradient of 0.weight 2 times in micro-batch 0",
    ),
    Answer(
        "biases forgotten",
        {HOOK: "        if parameter.dim() == 2:\n" + HOOK.replace("        ", "            ")},
        "keeps the whole gradients of micro-batch 0 (0.bias, 2.bias, 4.bias), which have not been reduce-scattered",
    ),
    Answer(
        "biases thrown away",
        {HOOK: "        if parameter.dim() == 2:\n" + (SCATTER + KEEP).replace("        ", "            ") + LET_GO},
        "rank 0 never reduce-scatters the gradient of 0.bias that micro-batch 0 gave",
    ),
    Answer(
        "one backward for all micro-batches",
        {
            "            loss = loss_fn(self.model(inputs), targets) / len(microbatches)\n" + BACKWARD: (
                "            total = total + loss_fn(self.model(inputs), targets) / len(microbatches)\n"
                "        total.backward()\n"
            ),
            "        for inputs, targets in microbatches:\n": (
                "        total = 0\n        for inputs, targets in microbatches:\n"
            ),
        },
        "rank 0 does 1 backwards for 3 micro-batches",
    ),
    Answer(
        "state for all parameters",
        {"make_optimizer(list(self.parts.values()))": "make_optimizer(list(self.parts))"},
        "rank 0's optimizer is given 80 numbers, and the rank's part has 42",
    ),
    Answer(
        "the next rank's part",
        {PARTS: PARTS.replace("[comms.rank]", "[(comms.rank + 1) % comms.world_size]")},
        "rank 0's optimizer is given part 1, which is rank 1's",
    ),
    Answer(
        "forgets the padding",
        {"row[: parameter.numel()].view": "row.view"},
        "these are cut off again before it gets its old shape",
    ),
    Answer(
        "an all-reduce",
        {
            SCATTER: "        self.comms.all_reduce(parameter.grad, op='mean')\n"
            "        mine = in_parts(parameter.grad, self.comms.world_size)[self.comms.rank]\n"
        },
        "comms.all_reduce is not for this exercise",
    ),
    Answer(
        "nothing handed out",
        {"parameter.data.copy_(row[: parameter.numel()].view(parameter.shape))": "parameter = row"},
        "rank 0's parameters are as they were before the step",
    ),
    Answer(
        "gathers gradients",
        {
            FORGET: "",
            GATHER: GATHER.replace("all_gather(part)", "all_gather(part.grad)") + FORGET,
        },
        "gathers gradients: then every rank would have to update all parameters",
    ),
]
