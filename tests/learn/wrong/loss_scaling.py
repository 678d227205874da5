from answers import Answer

MINE = "        mine = any(not parameter.grad.isfinite().all() for parameter in self.parameters)\n"
FLAG = "        flag = torch.tensor([float(mine)])\n"
SHARE = '        self.comms.all_reduce(flag, op="max")\n'
ANSWER = "        return flag.item() > 0\n"
HALVE = "            self.scale, self.good_steps = self.scale / 2, 0\n            return\n"
COUNT = "        self.good_steps += 1\n"
ENOUGH = "        if self.good_steps == self.interval:\n"
DOUBLE = "            self.scale, self.good_steps = self.scale * 2, 0\n"
BACKWARD = "        (loss * self.scale).backward()\n"
AGREE = "        overflow = self.overflow()\n"
AVERAGE = '                self.comms.all_reduce(parameter.grad, op="mean")\n'
DIVIDE = "                parameter.grad /= self.scale\n"
CLIP = "            nn.utils.clip_grad_norm_(self.parameters, max_norm)\n"
UPDATE = "            self.optimizer.step()\n"
CHANGE = "        self.change_scale(overflow)\n"
IF_NOT = "        if not overflow:\n"
FOR_ALL = "            for parameter in self.parameters:\n"

ANSWERS = [
    Answer(
        "each rank decides alone",
        {SHARE: ""},
        "the ranks do not make the same calls: does each decide alone whether there is an overflow?",
        quick=True,
    ),
    Answer(
        "looks at its own gradients, then averages in any case",
        {
            AGREE: "        overflow = any(not parameter.grad.isfinite().all() for parameter in self.parameters)\n"
            "        for parameter in self.parameters:\n" + AVERAGE[4:],
            FOR_ALL + AVERAGE: FOR_ALL,
        },
        "a rank decides alone: it looks at its own gradients before they are averaged",
        quick=True,
    ),
    Answer(
        "the smallest answer instead of the largest",
        {SHARE: SHARE.replace("max", "min")},
        "the step is left out only if all ranks have an overflow: one is enough",
    ),
    Answer(
        "the largest of the answers to the opposite question",
        {FLAG: FLAG.replace("float(mine)", "float(not mine)"), ANSWER: "        return flag.item() == 0\n"},
        "the step is left out only if all ranks have an overflow: one is enough",
    ),
    Answer("forgets to divide", {DIVIDE: ""}, "the gradients are never divided by the scale", quick=True),
    Answer(
        "divides after clipping",
        {DIVIDE: "", CLIP: CLIP + FOR_ALL + DIVIDE},
        "the gradients are clipped while they are still scaled",
        quick=True,
    ),
    Answer("divides twice", {DIVIDE: DIVIDE + DIVIDE}, "the gradients are divided by the scale twice"),
    Answer(
        "changes the scale before it divides",
        {
            IF_NOT + FOR_ALL: CHANGE + IF_NOT + FOR_ALL,
            UPDATE + CHANGE: UPDATE,
        },
        "the gradients are divided by the new scale: they were made with the old one",
    ),
    Answer("does not scale", {BACKWARD: "        loss.backward()\n", DIVIDE: ""}, "the loss is not scaled"),
    Answer(
        "halves once for each rank",
        {
            SHARE: SHARE.replace('"max"', '"sum"'),
            ANSWER: "        return int(flag.item())\n",
            HALVE: HALVE.replace("self.scale / 2", "self.scale / 2**overflow"),
        },
        "the scale is halved once for each rank that has an overflow: halve it once",
        quick=True,
    ),
    Answer(
        "does not halve",
        {HALVE: "            self.good_steps = 0\n            return\n"},
        "the scale is not halved after an overflow",
    ),
    Answer("a quarter", {"self.scale / 2, 0": "self.scale / 4, 0"}, "the scale is halved twice"),
    Answer("never grows", {ENOUGH + DOUBLE: ""}, "the scale never grows"),
    Answer(
        "counts on over an overflow",
        {HALVE: "            self.scale /= 2\n            return\n"},
        "good steps are counted on over an overflow: they must come in a row",
    ),
    Answer(
        "counts steps that were left out",
        {HALVE: "            self.scale, self.good_steps = self.scale / 2, 0\n"},
        "steps that were left out are counted as good ones",
    ),
    Answer(
        "doubles in every step from then on",
        {ENOUGH + DOUBLE: "        if self.good_steps >= self.interval:\n            self.scale *= 2\n"},
        "once the scale has doubled, it doubles in every step: begin to count again",
    ),
    Answer(
        "takes the step with inf",
        {IF_NOT + FOR_ALL: "        if True:\n" + FOR_ALL},
        "there is an overflow, and the optimizer takes a step all the same",
        quick=True,
    ),
    Answer(
        "looks at the loss, and not at the gradients",
        {MINE: "        mine = not self.loss.isfinite()\n", BACKWARD: "        self.loss = loss\n" + BACKWARD},
        "the loss is looked at, and not the gradients",
    ),
    Answer(
        "nobody looks",
        {MINE: "        mine = False\n"},
        "an overflow is never found, and the optimizer takes a step with gradients that are not finite",
    ),
    Answer(
        "a step with zeros",
        {
            CHANGE: "        else:\n            for parameter in self.parameters:\n"
            "                parameter.grad.zero_()\n            self.optimizer.step()\n" + CHANGE
        },
        "the optimizer takes a step with zeros instead of leaving it out: momentum goes on",
    ),
    Answer(
        "nan into zeros, and on",
        {MINE: "        mine = any(parameter.grad.isinf().any() for parameter in self.parameters)\n"},
        "nan is not noticed: an overflow may be inf or nan",
        quick=True,
    ),
    Answer(
        "looks at the first gradient only",
        {MINE: "        mine = not self.parameters[0].grad.isfinite().all()\n"},
        "only the first gradient is looked at",
    ),
    Answer(
        "looks at the last gradient only",
        {MINE: "        for p in self.parameters:\n            mine = not p.grad.isfinite().all()\n"},
        "only the last gradient is looked at",
    ),
    Answer("a sum instead of a mean", {'op="mean"': 'op="sum"'}, "added up over ranks and not averaged"),
    Answer("no average", {AVERAGE: ""}, "the gradients are not averaged: each rank takes another step"),
    Answer(
        "divided by the ranks twice",
        {DIVIDE: DIVIDE + "                parameter.grad /= self.comms.world_size\n"},
        "divided twice by the number of ranks",
    ),
    Answer("no clipping", {CLIP: ""}, "the gradients are not clipped"),
    Answer("returns nothing", {"        return not overflow\n": ""}, "step should return True or False"),
    Answer(
        "gathers all gradients",
        {
            AVERAGE: "                parts = self.comms.all_gather(parameter.grad)\n"
            "                parameter.grad = torch.stack(parts).mean(0)\n"
        },
        "average gradients by an all-reduce, which sends fewer bytes",
    ),
    Answer(
        "averages after the update",
        {
            FOR_ALL + AVERAGE: FOR_ALL,
            UPDATE: UPDATE + FOR_ALL + AVERAGE,
        },
        "the gradients are not averaged",
    ),
]
