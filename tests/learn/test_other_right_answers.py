"""Answers that are right in another way than the solution: no grader may refuse them."""

import pytest
from answers import Answer

from microparallel.learn.catalogue import find_exercise

START = 'self.requests.append(self.comms.all_reduce(gradient, op="mean", async_op=True))'
SEND = "        request = comms.isend(slices[send % ranks], after)\n"
FIRST = "        if rank % 2 == 0 and rank != ranks - 1:\n            comms.send_tensor(slices[send % ranks], after)\n"
LATER = FIRST.replace("if rank % 2 == 0 and rank != ranks - 1", "if rank % 2 == 1 or rank == ranks - 1")
ADD = "slices[(rank - hop - 1) % ranks].add_(pass_on(rank - hop, rank - hop - 1))"
COPY = "slices[(rank - hop) % ranks].copy_(pass_on(rank + 1 - hop, rank - hop))"
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
EXCHANGE = (
    "    peers = [rank for rank in range(comms.world_size) if rank != comms.rank]\n"
    "    requests = [comms.isend(parts[peer], peer) for peer in peers if len(parts[peer])]\n"
    "    received = [part.new_empty(0, *part.shape[1:]) for part in parts]\n"
    "    received[comms.rank] = parts[comms.rank]\n    for peer in peers:\n        if rows[peer]:\n            "
    "received[peer] = comms.recv_tensor((rows[peer], *parts[peer].shape[1:]), peer, parts[peer].dtype)\n"
    "    for request in requests:\n        request.wait()\n    return received\n"
)
LEVELS = (
    "    mine = next(ranks for ranks in hosts if comms.rank in ranks)\n    reduce_inside(tensor, mine, comms)\n"
    "    if comms.rank == mine[0]:\n        all_reduce_between(tensor, [ranks[0] for ranks in hosts], comms)\n"
    "    spread_inside(tensor, mine, comms)\n"
)
TWO_HALVES = """    mine = next(ranks for ranks in hosts if comms.rank in ranks)
    for part, end in zip(tensor.tensor_split(2), (0, -1), strict=True):
        ordered = mine[::-1] if end else mine
        reduce_inside(part, ordered, comms)
        if comms.rank == ordered[0]:
            all_reduce_between(part, [ranks[end] for ranks in hosts], comms)
        spread_inside(part, ordered, comms)
"""
LEADERS_IN_A_RING = """    count, place = len(leaders), leaders.index(comms.rank)
    slices = tensor.tensor_split(count)
    for hop in range(2 * (count - 1)):
        send, receive = slices[(place - hop) % count], slices[(place - hop - 1) % count]
        request = comms.isend(send, leaders[(place + 1) % count])
        came = comms.recv_tensor(receive.shape, leaders[place - 1], tensor.dtype)
        request.wait()
        if hop < count - 1:
            receive.add_(came)
        else:
            receive.copy_(came)
"""

RIGHT = {
    "manual-averaging": {
        "in place": {"parameter.grad = total / sum(samples)": "parameter.grad.copy_(total / sum(samples))"},
    },
    "replicas": {
        "every third sample": {
            "torch.arange(len(targets)).tensor_split(len(devices))": (
                "[slice(first, None, len(devices)) for first in range(len(devices))]"
            )
        },
        "the replica without samples computes, too": {
            "        if len(targets) == 0:\n            losses.append(torch.zeros(()))\n            continue\n": ""
        },
        "all forwards first, and one list of means": {
            "        loss.backward()\n        losses.append(loss.detach())\n": "        losses.append(loss)\n",
            "    return losses\n": (
                "    for loss in losses:\n        loss.requires_grad and loss.backward()\n    return losses\n"
            ),
            "                total += parameter.grad.cpu() * seen\n": (
                "                total.add_(parameter.grad.to('cpu'), alpha=seen / sum(samples))\n"
            ),
            "(total / sum(samples)).to(parameter.device)": "total.to(parameter.device, copy=True)",
        },
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
            COPY: ("slices[(rank + 1 - hop) % ranks].copy_(pass_on(rank + 2 - hop, rank + 1 - hop))"),
            ADD: "slices[(rank - hop) % ranks].add_(pass_on(rank + 1 - hop, rank - hop))",
        },
    },
    "hierarchical": {
        "the last rank speaks for its host": {
            "leader, *others = ranks": "*others, leader = ranks",
            "mine[0]": "mine[-1]",
            "ranks[0] for": "ranks[-1] for",
        },
        "along a line inside": {
            "    leader, *others = ranks\n    if comms.rank != leader:\n        comms.send_tensor(tensor, leader)\n"
            "        return\n    for other in others:\n"
            "        tensor.add_(comms.recv_tensor(tensor.shape, other, tensor.dtype))\n": (
                "    place = ranks.index(comms.rank)\n    if place + 1 < len(ranks):\n"
                "        tensor.add_(comms.recv_tensor(tensor.shape, ranks[place + 1], tensor.dtype))\n"
                "    if place:\n        comms.send_tensor(tensor, ranks[place - 1])\n"
            )
        },
        "a ring of the leaders": {
            "    reduce_inside(tensor, leaders, comms)\n    spread_inside(tensor, leaders, comms)\n": LEADERS_IN_A_RING
        },
        "two ranks of a host share the work": {LEVELS: TWO_HALVES},
    },
    "all-to-all": {
        "receives begin first, and empty messages are sent": {
            EXCHANGE: "    others = [rank for rank in range(comms.world_size) if rank != comms.rank]\n"
            "    receives = [comms.irecv((rows[one], *parts[0].shape[1:]), one, parts[0].dtype) for one in others]\n"
            "    for one in others:\n        comms.send_tensor(parts[one], one)\n"
            "    received = dict(zip(others, (one.wait() for one in receives)))\n"
            "    return [received.get(rank, parts[rank]) for rank in range(comms.world_size)]\n"
        },
        "one expert call for each rank": {
            "outputs = expert(torch.cat(arrived))": "outputs = torch.cat([expert(part) for part in arrived])"
        },
        "sorted back by the inverse": {
            "    result = torch.empty_like(tokens)\n    result[order] = torch.cat(returned)\n    return result\n": (
                "    return torch.cat(returned)[order.argsort()]\n"
            )
        },
        "every rank gets the whole table of counts": {
            "    one_each = [torch.tensor([count]) for count in counts]\n": "",
            "torch.cat(exchange(one_each, [1] * comms.world_size, comms)).tolist()": (
                "[int(row[comms.rank]) for row in exchange([torch.tensor(counts)] * comms.world_size, "
                "[comms.world_size] * comms.world_size, comms)]"
            ),
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
    "accumulation": {
        "a counter instead of a switch": {
            "before, self.quiet = self.quiet, True": "self.quiet += 1",
            "self.quiet = before": "self.quiet -= 1",
        },
        "weighted at the end": {
            " * (len(targets) / samples)": " * len(targets)",
            "    hooks.finish()\n    return total\n": (
                "    hooks.finish()\n    for parameter in hooks.parameters:\n"
                "        parameter.grad /= samples\n    return total / samples\n"
            ),
        },
        "one block for all but the last": {
            "    for number, (inputs, targets) in enumerate(micro_batches, 1):\n": (
                "    def one(inputs, targets):\n"
                "        loss = loss_fn(model(inputs), targets) * (len(targets) / samples)\n"
                "        loss.backward()\n        return loss.detach()\n\n    with hooks.no_sync():\n"
                "        total = sum(one(*pair) for pair in micro_batches[:-1])\n"
                "    total += one(*micro_batches[-1])\n    for number, (inputs, targets) in enumerate([]):\n"
            )
        },
    },
    "parameter-averaging": {
        "one flat message": {
            "        for tensor in [*self.parameters(), *self.buffers(), *self.optimizer_state()]:\n"
            '            self.comms.all_reduce(tensor, op="mean")\n': (
                "        tensors = [*self.parameters(), *self.buffers(), *self.optimizer_state()]\n"
                "        flat = torch.cat([one.flatten().double() for one in tensors])\n"
                "        self.comms.all_reduce(flat)\n        flat /= self.comms.world_size\n"
                "        for one, mean in zip(tensors, flat.split([one.numel() for one in tensors])):\n"
                "            one.copy_(mean.view_as(one))\n"
            )
        },
        "no count of Adam's steps, and without autograd": {
            "            if isinstance(value, torch.Tensor)\n": (
                "            if isinstance(value, torch.Tensor) and value.dim()\n"
            ),
            "    def average(self)": "    @torch.no_grad()\n    def average(self)",
            "[parameter.detach() for parameter in self.model.parameters()]": "[*self.model.parameters()]",
        },
        "a countdown": {
            "        self.steps = 0  # how": "        self.steps = every  # how",
            "        self.steps += 1\n        if self.steps % self.every == 0:\n": (
                "        self.steps -= 1\n        if not self.steps:\n            self.steps = self.every\n"
            ),
        },
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
    "read-a-hang": {
        "along the arrows from any rank that waits": {
            "    waited_for = {rank for one in flights for rank in waits_for(one, flights)}\n"
            "    culprit = next(one for one in flights if one.rank in waited_for and not waits_for(one, flights))\n": (
                "    by_rank = {one.rank: one for one in flights}\n"
                "    culprit = next(one for one in flights if waits_for(one, flights))\n"
                "    while waits_for(culprit, flights):\n"
                "        culprit = by_rank[waits_for(culprit, flights)[-1]]\n"
            )
        },
        "only the last collectives are compared": {
            "    for _, calls in sorted(made.items()):\n": "    for _, calls in sorted(made.items())[-1:]:\n"
        },
        "by what must agree": {"call.text": "call.agreement"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in RIGHT.items() for way in ways])
def test_passes(judge, name, way):
    exercise = find_exercise(name)
    verdict = judge(exercise, Answer(way, RIGHT[name][way], "").of(exercise))
    assert verdict.passed, verdict.message
