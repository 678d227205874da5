"""Answers that are right in another way than the solution: no grader may refuse them."""

import pytest
from answers import Answer

from microparallel.learn.catalogue import find_exercise

START = 'self.requests.append(self.comms.all_reduce(gradient, op="mean", async_op=True))'
SEND = "        request = comms.isend(slices[send % ranks], after)\n"
FIRST = "        if rank % 2 == 0 and rank != ranks - 1:\n            comms.send_tensor(slices[send % ranks], after)\n"
LATER = FIRST.replace("if rank % 2 == 0 and rank != ranks - 1", "if rank % 2 == 1 or rank == ranks - 1")
ADD = "slices[(rank - step - 1) % ranks].add_(pass_on(rank - step, rank - step - 1))"
COPY = "slices[(rank - step) % ranks].copy_(pass_on(rank + 1 - step, rank - step))"
BROADCAST = (
    "    if comms.rank == src:\n        for peer in others(src, comms):\n            comms.send_tensor(tensor, peer)\n"
    "    else:\n        tensor.copy_(comms.recv_tensor(tensor.shape, src, tensor.dtype))\n"
)
ALONG_A_LINE = (
    "    size, place = comms.world_size, (comms.rank - src) % comms.world_size\n"
    "    if place:\n        tensor.copy_(comms.recv_tensor(tensor.shape, (comms.rank - 1) % size, tensor.dtype))\n"
    "    if place < size - 1:\n        comms.send_tensor(tensor, (comms.rank + 1) % size)\n"
)
BARRIER = "    gather(token, 0, comms)\n    broadcast(token, 0, comms)\n"
ROUND_TWICE = """    for _ in range(2 if comms.world_size > 1 else 0):
        if comms.rank == 0:
            comms.send_tensor(token, 1)
            comms.recv_tensor(1, comms.world_size - 1)
        else:
            comms.recv_tensor(1, comms.rank - 1)
            comms.send_tensor(token, (comms.rank + 1) % comms.world_size)
"""
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
    "comms": {
        "from neighbour to neighbour": {BROADCAST: ALONG_A_LINE},
        "barrier round the ring twice": {BARRIER: ROUND_TWICE},
    },
    "naive-all-reduce": {
        "the last rank first": {
            "in range(1, comms.world_size):\n            tensor": (
                "in reversed(range(1, comms.world_size)):\n            tensor"
            )
        },
    },
    "ring-all-reduce": {
        "blocking sends in turns": {SEND: FIRST, "        request.wait()\n": LATER},
        "waited for after adding to another slice": {
            "        request.wait()\n": "        pending.append(request)\n",
            "    def pass_on(": "    pending = []\n\n    def pass_on(",
            ADD: ADD + "\n        pending.pop().wait()",
            COPY: COPY + "\n        pending.pop().wait()",
        },
        "a receive that begins first": {
            SEND: "",
            "received = comms.recv_tensor(expected.shape, before, expected.dtype)\n        request.wait()": (
                "request = comms.irecv(expected.shape, before, expected.dtype)\n"
                "        comms.send_tensor(slices[send % ranks], after)\n"
                "        received = request.wait(timeout=5.0)"
            ),
        },
        "another slice to begin with": {
            COPY: ("slices[(rank + 1 - step) % ranks].copy_(pass_on(rank + 2 - step, rank + 1 - step))"),
            ADD: "slices[(rank - step) % ranks].add_(pass_on(rank + 1 - step, rank - step))",
        },
    },
    "model-and-main": {
        "every third sample": {"slice(begin, end)": "slice(comms.rank, None, comms.world_size)"},
        "gradients weighted": {
            "(loss * share).backward()": "loss.backward()",
            "        comms.all_reduce(parameter.grad)": "        comms.all_reduce(parameter.grad.mul_(share))",
        },
        "a ring by name": {"all_reduce(parameter.grad)": "all_reduce(parameter.grad, 'sum', 'ring')"},
        "a tree by name": {"all_reduce(mean_loss)": "all_reduce(mean_loss, algorithm='tree')"},
        "asked what comms can do": {
            "    mean_loss *= share\n": "    hasattr(comms, 'barrier')\n    mean_loss *= share\n"
        },
        "a tensor for a loss": {"return mean_loss.item()": "return mean_loss"},
        "parameters without data": {
            "        comms.broadcast(parameter.data, 0)": "        comms.broadcast(parameter.detach(), 0)"
        },
    },
    "hooks": {
        "a closure that is bound": {
            "hook(self.on_gradient)": "hook(lambda _, parameter=parameter: self.on_gradient(parameter))"
        },
        "divided before": {
            START: "gradient /= self.comms.world_size\n            " + START.replace(', op="mean"', ""),
        },
        "waits with a limit": {"request.wait()": "request.wait(timeout=10)"},
        "a ring by name": {'op="mean", async_op': 'op="mean", algorithm="ring", async_op'},
        "another list": {"self.requests.clear()": "self.requests = []"},
        "a buffer of its own for each": {
            START: (
                "buffer = gradient.clone()\n"
                "            self.requests.append(self.comms.all_reduce(buffer, op='mean', async_op=True))\n"
                "            self.pairs = [*getattr(self, 'pairs', []), (self.order[len(self.requests) - 1], buffer)]"
            ),
            "            request.wait()\n": (
                "            request.wait()\n        for parameter, buffer in self.pairs:\n"
                "            parameter.grad.copy_(buffer)\n        self.pairs = []\n"
            ),
        },
        "sorted by name": {
            "[parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]": (
                "[one for _, one in sorted(model.named_parameters(), reverse=True) if one.requires_grad]"
            )
        },
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
        "computations in another order": {
            "[(event.start, event.end) for event in trace.events if event.rank == rank and event.computes]": (
                "sorted((event.start, event.end) for event in trace.compute[rank])[::-1]"
            )
        },
        "issued, and a dict": {
            "    in_order = sorted(reduces, key=lambda event: event.rank)\n": (
                "    found = {(event.number, event.rank): (event.issued, event.end) for event in reduces}\n"
                "    return [[found[number, rank] for rank in range(trace.ranks)] for number in numbers]\n"
            ),
            "    return [[(event.asked, event.end) for event in in_order if event.number == number] "
            "for number in numbers]\n": "",
        },
        "waiting with the formula of exposed": {
            "exposed(waits, busy + travels)": "seconds(busy + travels + waits) - seconds(busy + travels)"
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in RIGHT.items() for way in ways])
def test_passes(judge, name, way):
    exercise = find_exercise(name)
    verdict = judge(exercise, Answer(way, RIGHT[name][way], "").of(exercise))
    assert verdict.passed, verdict.message
