"""Answers on sharding that are right in another way than the solution: no grader may refuse them."""

import pytest
from answers import Answer

from microparallel.learn.catalogue import find_exercise

FIRST = """        send, receive = (rank - hop - 1) % ranks, (rank - hop - 2) % ranks
        slices[receive].add_(pass_on(slices[send], slices[receive], comms))
"""
SCATTER = '        self.part.grad = self.comms.reduce_scatter(gradients, op="mean")\n'
GATHER = "        self.hand_out(self.comms.all_gather(self.part))\n"
PART = "        self.part = self.in_parts(self.parameters)[comms.rank].clone()\n"
HOOK = """        mine = self.comms.reduce_scatter(in_parts(parameter.grad, self.comms.world_size), op="mean")
        part.grad = mine if part.grad is None else part.grad + mine
        parameter.grad = None
"""
LATER = """        self.finish()
        parts = in_parts(parameter.grad, self.comms.world_size)
        self.pending = part, self.comms.reduce_scatter(parts, op="mean", async_op=True), parameter.grad
        parameter.grad = None

    def finish(self):
        if self.pending is not None:
            part, request, _ = self.pending
            mine = request.wait()
            part.grad = mine if part.grad is None else part.grad + mine
            self.pending = None
"""
DIVIDED = """        parameter.grad /= self.comms.world_size
        mine = self.comms.reduce_scatter(in_parts(parameter.grad, self.comms.world_size))
        part.grad = mine if part.grad is None else part.grad.add_(mine)
        parameter.grad = None
"""
GATHERED = "    return torch.cat(comms.all_gather(part))[:rows]\n"
COMPUTE = "        return inputs @ gathered(part, rows, comms).T\n"
OF_INPUTS = "        of_inputs = gradient @ gathered(part, ctx.rows, ctx.comms)\n"
OF_WEIGHT = "        of_weight = gradient.T @ inputs\n"
OF_PART = '        of_part = ctx.comms.reduce_scatter(in_parts(of_weight, ctx.comms.world_size), op="mean")\n'
APPLY = "        return GatheredLinear.apply(inputs, self.part, self.rows, self.comms)\n"
GATHERING = """class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, rows, comms):
        ctx.comms = comms
        return gathered(part, rows, comms)

    @staticmethod
    def backward(ctx, of_weight):
        parts = in_parts(of_weight, ctx.comms.world_size)
        return ctx.comms.reduce_scatter(parts, op="mean"), None, None


class ShardedLinear(nn.Module):
"""
UNITS = """        while gathered < min(place + 1 + prefetch, len(uses)):
            words.append(gather(uses[gathered][0], layers))
            gathered += 1
        words += [*computed, free(layer, layers)]
"""
BOTH = "        words += in_turn(forwards, layers, prefetch) + in_turn(backwards, layers, prefetch)\n"
WINDOW = """    words, whole = [], []
    for place, (layer, computed) in enumerate(uses):
        soon = [later for later, _ in uses[place : place + prefetch + 1]]
        words += [free(one, layers) for one in whole if one not in soon]
        words += [gather(one, layers) for one in dict.fromkeys(soon) if one not in whole]
        whole = list(dict.fromkeys(soon))
        words += computed
    return words + [free(one, layers) for one in whole]
"""

RIGHT = {
    "ring-halves": {
        "a receive that begins first": {
            "    request = comms.isend(outgoing, after)\n"
            "    received = comms.recv_tensor(expected.shape, before, expected.dtype)\n"
            "    request.wait()\n": (
                "    request = comms.irecv(expected.shape, before, expected.dtype)\n"
                "    comms.send_tensor(outgoing, after)\n"
                "    received = request.wait()\n"
            )
        },
        "even ranks send first": {
            "    request = comms.isend(outgoing, after)\n": (
                "    first = comms.rank % 2 == 0 and comms.rank != comms.world_size - 1\n"
                "    if first:\n        comms.send_tensor(outgoing, after)\n"
            ),
            "    request.wait()\n": "    if not first:\n        comms.send_tensor(outgoing, after)\n",
        },
        "copies that are sent": {"comms.isend(outgoing,": "comms.isend(outgoing.clone(),"},
        "counted down": {
            "    for hop in range(ranks - 1):\n" + FIRST: (
                "    for ahead in range(ranks - 1, 0, -1):\n"
                "        send, receive = (rank + ahead) % ranks, (rank + ahead - 1) % ranks\n"
                "        slices[receive] += pass_on(slices[send], slices[receive], comms)\n"
            )
        },
    },
    "sharded-optimizer": {
        "started, and waited for": {
            SCATTER: SCATTER.replace('op="mean")', 'op="mean", async_op=True).wait()'),
            GATHER: GATHER.replace("self.part)", "self.part, async_op=True).wait()"),
        },
        "one flat tensor": {SCATTER: SCATTER.replace("(gradients,", "(torch.cat(gradients),")},
        "divided before": {
            "(parameter.grad for parameter": "(parameter.grad / self.comms.world_size for parameter",
            ', op="mean"': "",
        },
        "a parameter for a part": {PART: PART.replace("self.in_parts", "nn.Parameter(self.in_parts").rstrip() + ")\n"},
        "new memory for parameters": {"parameter.data.copy_(": "parameter.data = ("},
        "copied without gradients": {
            "            parameter.data.copy_(row": (
                "            with torch.no_grad():\n                parameter.copy_(row"
            )
        },
        "no zeros in the optimizer": {
            PART: PART + "        numbers = sum(p.numel() for p in self.parameters)\n"
            "        self.size = len(self.part)\n"
            "        self.part = self.part[: max(0, numbers - comms.rank * self.size)].clone()\n",
            SCATTER: SCATTER.replace("self.part.grad =", "mine =")
            + "        self.part.grad = mine[: len(self.part)].clone()\n",
            GATHER: "        zeros = self.part.new_zeros(self.size - len(self.part))\n"
            + GATHER.replace("self.part)", "torch.cat([self.part, zeros]))"),
        },
    },
    "zero-2": {
        "one is on its way": {
            HOOK: LATER,
            "        self.model, self.comms = model, comms\n": (
                "        self.model, self.comms, self.pending = model, comms, None\n"
            ),
            "        self.update()\n": "        self.finish()\n        self.update()\n",
        },
        "divided before": {HOOK: DIVIDED},
        "gradients divided, not the loss": {
            "        loss = loss_fn(self.model(inputs), targets) / len(microbatches)\n": (
                "        loss = loss_fn(self.model(inputs), targets)\n"
            ),
            "        self.update()\n": (
                "        for part in self.parts.values():\n"
                "            part.grad /= len(microbatches)\n"
                "        self.update()\n"
            ),
        },
        "forgotten before the first micro-batch": {
            "        self.optimizer.zero_grad()\n": "",
            "        for inputs, targets in microbatches:\n": (
                "        self.optimizer.zero_grad()\n        for inputs, targets in microbatches:\n"
            ),
        },
        "gathered in the other order": {
            "in self.parts.items():\n            row": "in reversed(self.parts.items()):\n            row"
        },
        "all gathers at once": {
            "        for parameter, part in self.parts.items():\n": (
                "        requests = [self.comms.all_gather(part, async_op=True) for part in self.parts.values()]\n"
                "        for parameter, request in zip(self.parts, requests):\n"
            ),
            "self.comms.all_gather(part))": "request.wait())",
        },
    },
    "sharded-linear": {
        "reduce-scattered before the weight is gathered again": {
            OF_INPUTS + OF_WEIGHT + OF_PART: OF_WEIGHT + OF_PART + OF_INPUTS,
        },
        "gathered while the weight's gradient is computed": {
            OF_INPUTS: "        request = ctx.comms.all_gather(part, async_op=True)\n",
            OF_PART: "        of_inputs = gradient @ torch.cat(request.wait())[: ctx.rows]\n" + OF_PART,
        },
        "reduced while the inputs' gradient is computed": {
            OF_INPUTS + OF_WEIGHT + OF_PART: (
                OF_WEIGHT
                + OF_PART.replace("of_part", "request").replace('op="mean"', 'op="mean", async_op=True')
                + OF_INPUTS
                + "        of_part = request.wait()\n"
            ),
        },
        "no gather where no gradient of the inputs is wanted": {
            OF_INPUTS: "        of_inputs = None\n        if ctx.needs_input_grad[0]:\n    " + OF_INPUTS,
        },
        "kept in ctx": {
            "        ctx.save_for_backward(inputs, part)\n": "        ctx.inputs, ctx.part = inputs, part\n",
            "        inputs, part = ctx.saved_tensors\n": "        inputs, part = ctx.inputs, ctx.part\n",
        },
        "gathered into memory that is there": {
            GATHERED: "    whole = part.new_empty(comms.world_size, *part.shape)\n"
            "    comms.all_gather(part, into=list(whole.unbind()))\n"
            "    return whole.flatten(0, 1)[:rows]\n"
        },
        "divided before": {
            OF_PART: OF_PART.replace("of_weight,", "of_weight / ctx.comms.world_size,").replace(', op="mean"', "")
        },
        "one flat tensor": {
            OF_PART: OF_PART.replace("in_parts(", "torch.cat(in_parts(")
            .replace("world_size),", "world_size)).flatten(),")
            .rstrip()
            + ".view_as(part)\n"
        },
        "torch's linear layer, without a graph": {
            COMPUTE: "        return nn.functional.linear(inputs, gathered(part, rows, comms))\n",
            OF_WEIGHT: "        of_weight = torch.einsum('sr,sf->rf', gradient, inputs)\n",
        },
        "a gather with a backward, done again by torch's checkpoint": {
            "class ShardedLinear(nn.Module):\n": GATHERING,
            APPLY: "        def compute(inputs, part):\n"
            "            return nn.functional.linear(inputs, Gather.apply(part, self.rows, self.comms))\n\n"
            "        return torch.utils.checkpoint.checkpoint(compute, inputs, self.part, use_reentrant=False)\n",
            "import torch\n": "import torch\nimport torch.utils.checkpoint\n",
        },
        "rows by hand": {
            "    return in_parts(weight, comms.world_size)[comms.rank].clone()\n": (
                "    size = -(-len(weight) // comms.world_size)\n"
                "    mine = weight[comms.rank * size : (comms.rank + 1) * size]\n"
                "    return torch.cat([mine, mine.new_zeros(size - len(mine), weight.shape[1])])\n"
            )
        },
    },
    "zero-3": {
        "gathered before the gradient travels": {
            UNITS: UNITS.replace(
                "words += [*computed, free(layer, layers)]", "words += [computed[0], free(layer, layers)]"
            )
            + "        if place + 1 + prefetch < len(uses):\n"
            "            words.append(gather(uses[place + 1 + prefetch][0], layers))\n"
            "            gathered += 1\n"
            "        words += computed[1:]\n"
        },
        "freed before the gradient travels": {
            "[*computed, free(layer, layers)]": "[computed[0], free(layer, layers), *computed[1:]]"
        },
        "a gradient is freed when the next one is there": {
            "        words += in_turn(forwards": (
                "        late = [backwards[0][1].pop()]\n"
                "        for _, computed in backwards[1:]:\n"
                "            computed.insert(1, late.pop())\n"
                "            late.append(computed.pop())\n"
                "        backwards[-1][1].append(late.pop())\n"
                "        words += in_turn(forwards"
            )
        },
        "the last unit is kept for its backward": {
            BOTH: "        forth, back = in_turn(forwards, layers, prefetch), in_turn(backwards, layers, prefetch)\n"
            "        words += forth[:-1] + back[1:]\n"
        },
        "what is in the window is whole, and nothing else": {
            "    words: list[str] = []\n    gathered = 0\n"
            "    for place, (layer, computed) in enumerate(uses):\n" + UNITS + "    return words\n": WINDOW,
        },
        "one window for the whole step": {
            "    words: list[str] = []\n    gathered = 0\n"
            "    for place, (layer, computed) in enumerate(uses):\n" + UNITS + "    return words\n": WINDOW,
            "    words = []\n    for turn": "    uses = []\n    for turn",
            BOTH: "        uses += forwards + backwards\n",
            '    return [*words, "S"]\n': '    return [*in_turn(uses, layers, prefetch), "S"]\n',
        },
        "a tuple": {'return [*words, "S"]': 'return (*words, "S")'},
        "nothing is freed where all may be whole": {
            BOTH: BOTH.replace("        words +=", "        both =") + "        if prefetch >= layers:\n"
            "            both = [w for place, w in enumerate(both) if not (w[0] == '!' and w in both[place + 1 :])]\n"
            "            both = [w for place, w in enumerate(both) if not (w[0] == '~' and w in both[:place])]\n"
            "        words += both\n"
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in RIGHT.items() for way in ways])
def test_passes(judge, name, way):
    exercise = find_exercise(name)
    verdict = judge(exercise, Answer(way, RIGHT[name][way], "").of(exercise))
    assert verdict.passed, verdict.message
