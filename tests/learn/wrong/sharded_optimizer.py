from answers import Answer

PART = "        self.part = self.in_parts(self.parameters)[comms.rank].clone()\n"
MAKE = "        self.optimizer = make_optimizer([self.part])\n"
SCATTER = '        self.part.grad = self.comms.reduce_scatter(gradients, op="mean")\n'
STEP = "        self.optimizer.step()\n"
GATHER = "        self.hand_out(self.comms.all_gather(self.part))\n"
PAD = "        row = torch.cat([row, row.new_zeros(missing)])\n"
CUT = "        return list(row.view(self.comms.world_size, -1).unbind())\n"
BACK = "            parameter.data.copy_(row[start : start + parameter.numel()].view(parameter.shape))\n"

ANSWERS = [
    Answer(
        "sum instead of mean",
        {', op="mean")': ")"},
        'the gradients were added up and not averaged: op="mean" divides',
        True,
    ),
    Answer(
        "divided twice",
        {SCATTER: SCATTER + "        self.part.grad /= self.comms.world_size\n"},
        "divided twice by the number of ranks",
    ),
    Answer(
        "state for all parameters",
        {MAKE: "        self.optimizer = make_optimizer(self.parameters)\n"},
        "rank 0's optimizer is given 80 numbers, and the rank's part has 40: it would keep state for all parameters",
        True,
    ),
    Answer(
        "the whole row",
        {PART: "        self.part = torch.cat(self.in_parts(self.parameters))\n"},
        "is given 80 numbers, and the rank's part has 40",
    ),
    Answer(
        "a view of the row",
        {PART: PART.replace(".clone()", "")},
        "a part of 320 bytes that keeps 640 bytes in memory: it is a view of the whole row",
    ),
    Answer(
        "the next rank's part",
        {PART: PART.replace("[comms.rank]", "[(comms.rank + 1) % comms.world_size]")},
        "rank 0's optimizer is given part 1, which is rank 1's; reduce_scatter gives rank 0 part 0",
    ),
    Answer(
        "everybody the first part",
        {PART: PART.replace("[comms.rank]", "[0]")},
        "rank 1's optimizer is given part 0, which is rank 0's",
    ),
    Answer(
        "gathers before the update",
        {STEP + GATHER: GATHER + STEP},
        "rank 0 gathers before the update: what it hands out are old parameters",
        True,
    ),
    Answer(
        "gathers gradients",
        {GATHER: GATHER.replace("all_gather(self.part)", "all_gather(self.part.grad)")},
        "gathers gradients: then every rank would have to update all parameters",
    ),
    Answer(
        "no gather",
        {
            GATHER: "        parts = self.in_parts(self.parameters)\n        parts[self.comms.rank] = self.part\n"
            "        self.hand_out(parts)\n"
        },
        "rank 0 has new numbers only in its own part, and every rank has another part: gather the parts",
    ),
    Answer(
        "no reduce-scatter",
        {SCATTER: "        self.part.grad = gradients[self.comms.rank]\n"},
        "rank 0 never reduce-scatters its gradients",
    ),
    Answer(
        "averaged after the update",
        {SCATTER + STEP: STEP + SCATTER},
        "updates its part before the gradients are averaged",
    ),
    Answer("never updated", {STEP: ""}, "rank 0 never updates its part: no optimizer.step() was called"),
    Answer("updated twice", {STEP: STEP + STEP}, "rank 0 calls optimizer.step() 2 times in one step"),
    Answer(
        "a new optimizer in every step",
        {
            STEP: "        self.optimizer = self.make([self.part])\n" + STEP,
            MAKE: MAKE + "        self.make = make_optimizer\n",
        },
        "a new optimizer begins without momentum; make it once, in __init__",
    ),
    Answer(
        "gradients add up",
        {
            SCATTER: SCATTER.replace("self.part.grad =", "mine =")
            + "        self.part.grad = mine if self.part.grad is None else self.part.grad + mine\n"
        },
        "the gradient of the step before is still in part.grad",
    ),
    Answer(
        "forgets the padding",
        {PAD: ""},
        "what does not divide by the number of ranks is filled up with zeros before it is cut into parts",
    ),
    Answer(
        "parts of different sizes",
        {PAD: "", CUT: "        return list(row.tensor_split(self.comms.world_size))\n"},
        "all_gather needs a tensor of the same shape on every rank; fill up with zeros",
    ),
    Answer(
        "nothing handed out",
        {BACK: "            parameter = row[start : start + parameter.numel()].view(parameter.shape)\n"},
        "rank 0's parameters are as they were before the step: copy the new ones into parameter.data",
    ),
    Answer(
        "an all-reduce",
        {
            SCATTER: "        for mean in gradients:\n            self.comms.all_reduce(mean, op='mean')\n"
            "        self.part.grad = gradients[self.comms.rank]\n"
        },
        "comms.all_reduce is not for this exercise; write it with comms.reduce_scatter, comms.all_gather",
    ),
    Answer(
        "reduce-scatters the parameters",
        {"(parameter.grad for parameter in self.parameters)": "(self.parameters)"},
        "reduce-scatters the parameters: it is their gradients that are averaged",
    ),
    Answer(
        "the library's own",
        {MAKE: "        self.optimizer = mp.ShardedOptimizer(self.parameters, torch.optim.Adam, comms)\n"},
        "ShardedOptimizer",
    ),
    Answer(
        "gradients as they are",
        {SCATTER: SCATTER.replace("(gradients,", "([p.grad for p in self.parameters],")},
        "the list needs one tensor for each of 2 ranks, not 6",
    ),
]
