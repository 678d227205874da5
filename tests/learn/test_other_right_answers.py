"""Answers that are right in another way than the solution: no grader may refuse them."""

import pytest
from answers import Answer

from microparallel.learn.catalogue import find_exercise

START = 'self.requests.append(self.comms.all_reduce(parameter.grad, op="mean", async_op=True))'
SEND = "        request = comms.isend(slices[send % ranks], after)\n"
FIRST = "        if rank % 2 == 0 and rank != ranks - 1:\n            comms.send_tensor(slices[send % ranks], after)\n"
LATER = FIRST.replace("if rank % 2 == 0 and rank != ranks - 1", "if rank % 2 == 1 or rank == ranks - 1")
BROADCAST = (
    "    if comms.rank == src:\n        for peer in others(src, comms):\n            comms.send_tensor(tensor, peer)\n"
    "    else:\n        tensor.copy_(comms.recv_tensor(tensor.shape, src, tensor.dtype))\n"
)
ALONG_A_LINE = (
    "    size, place = comms.world_size, (comms.rank - src) % comms.world_size\n"
    "    if place:\n        tensor.copy_(comms.recv_tensor(tensor.shape, (comms.rank - 1) % size, tensor.dtype))\n"
    "    if place < size - 1:\n        comms.send_tensor(tensor, (comms.rank + 1) % size)\n"
)
NOT_USED = (
    "            for parameter in bucket.parameters:\n                if parameter.grad is None:\n"
    "                    bucket.views[parameter].zero_()\n"
)
LEFT = "            if bucket.request is None:\n"
CLONE = "parameter.grad = bucket.views[parameter].clone()"

RIGHT = {
    "manual-averaging": {
        "in place": {"parameter.grad = total / sum(samples)": "parameter.grad.copy_(total / sum(samples))"},
    },
    "comms": {"from neighbour to neighbour": {BROADCAST: ALONG_A_LINE}},
    "naive-all-reduce": {
        "the last rank first": {
            "in range(1, comms.world_size):\n            tensor": (
                "in reversed(range(1, comms.world_size)):\n            tensor"
            )
        },
    },
    "ring-all-reduce": {
        "blocking sends in turns": {SEND: FIRST, "        request.wait()\n": LATER},
        "another slice to begin with": {
            "slices[(rank - step) % ranks].copy_(pass_on(rank + 1 - step, rank - step))": (
                "slices[(rank + 1 - step) % ranks].copy_(pass_on(rank + 2 - step, rank + 1 - step))"
            ),
            "slices[(rank - step - 1) % ranks].add_(pass_on(rank - step, rank - step - 1))": (
                "slices[(rank - step) % ranks].add_(pass_on(rank + 1 - step, rank - step))"
            ),
        },
    },
    "model-and-main": {
        "every third sample": {"slice(begin, end)": "slice(comms.rank, None, comms.world_size)"},
        "gradients weighted": {
            "(loss * share).backward()": "loss.backward()",
            "        comms.all_reduce(parameter.grad)": "        comms.all_reduce(parameter.grad.mul_(share))",
        },
        "parameters without data": {
            "        comms.broadcast(parameter.data, 0)": "        comms.broadcast(parameter.detach(), 0)"
        },
    },
    "hooks": {
        "a closure that is bound": {
            "hook(self.on_gradient)": "hook(lambda _, parameter=parameter: self.on_gradient(parameter))"
        },
        "divided before": {
            START: "parameter.grad /= self.comms.world_size\n        " + START.replace(', op="mean"', ""),
        },
        "another list": {"self.requests.clear()": "self.requests = []"},
    },
    "buckets": {
        "views as gradients": {
            CLONE: "parameter.grad = bucket.views[parameter]",
            "            bucket.buffer.zero_()\n": "",
            LEFT: NOT_USED + LEFT,
        },
        "no gradient where there was none": {
            CLONE: "parameter.grad = None if parameter.grad is None else bucket.views[parameter].clone()"
        },
        "sum, then divided": {
            ', op="mean"': "",
            "bucket.request.wait()\n": "bucket.request.wait()\n            bucket.buffer /= self.comms.world_size\n",
        },
        "waited for twice": {"bucket.request.wait()\n": "bucket.request.wait()\n            bucket.request.wait()\n"},
    },
    "performance": {
        "hidden first": {
            "seconds(spans) - exposed(spans, compute)": "seconds(spans) + seconds(compute) - seconds(compute + spans)"
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in RIGHT.items() for way in ways])
def test_passes(judge, name, way):
    exercise = find_exercise(name)
    verdict = judge(exercise, Answer(way, RIGHT[name][way], "").of(exercise))
    assert verdict.passed, verdict.message
