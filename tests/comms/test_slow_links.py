"""Links that are slow on purpose: everything arrives, in order, and late."""

import time

import torch

import microparallel as mp
from microparallel.comms.slow_links import slow_down
from microparallel.topology import Link

LATENCY = 0.05


def conversation(comms):
    slow = slow_down(comms, {frozenset((0, 1)): Link(LATENCY, 0.0)})
    begun = time.perf_counter()
    if comms.rank == 0:
        for number in range(3):
            slow.send_tensor(torch.tensor([float(number)]), 1)
    if comms.rank == 1:
        return [slow.recv_tensor((1,), 0).item() for _ in range(3)], time.perf_counter() - begun
    return None


def test_messages_arrive_in_order_and_late(any_pool):
    _, (received, seconds), _ = any_pool.run(conversation, 3, timeout=30)
    assert received == [0, 1, 2]
    assert seconds >= 2 * LATENCY  # one after another, as over one wire


def sums(comms):
    slow = slow_down(comms, {frozenset((0, 1)): Link(LATENCY, 0.0)})
    group = slow.group([0, 1])
    tensor = torch.arange(10.0) * (comms.rank + 1)
    begun = time.perf_counter()
    total = slow.all_reduce(tensor, async_op=True).wait()
    seconds = time.perf_counter() - begun
    smaller = None if group is None else group.all_reduce(torch.ones(2)).tolist()
    return total.tolist(), seconds, smaller


def test_all_reduces_go_over_the_slow_link(any_pool):
    for total, seconds, smaller in any_pool.run(sums, 3, timeout=30):
        assert total == [6.0 * number for number in range(10)]
        assert seconds > LATENCY
        assert smaller in (None, [2.0, 2.0])


def training(comms):
    slow = slow_down(comms, {frozenset((0, 1)): Link(0.001, 1e-9)})
    torch.manual_seed(0)
    model = mp.DataParallel(torch.nn.Linear(4, 2), slow)
    model(torch.ones(2, 4) * comms.rank).sum().backward()
    return model.module.weight.grad.tolist()


def test_data_parallelism_over_a_slow_link(pool):
    first, second = pool.run(training, 2, timeout=30)
    assert first == second == [[1.0] * 4] * 2
