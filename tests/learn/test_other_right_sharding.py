"""Answers on sharding that are right in another way than the solution: no grader may refuse them."""

import pytest
from answers import Answer

from microparallel.learn.catalogue import find_exercise

FIRST = """        send, receive = (rank - step - 1) % ranks, (rank - step - 2) % ranks
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
            "    for step in range(ranks - 1):\n" + FIRST: (
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
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in RIGHT.items() for way in ways])
def test_passes(judge, name, way):
    exercise = find_exercise(name)
    verdict = judge(exercise, Answer(way, RIGHT[name][way], "").of(exercise))
    assert verdict.passed, verdict.message
