"""Tensors of a device that gloo does not reach, through the host: here the device is the CPU under another name."""

import threading
import time

import pytest
import torch

import microparallel as mp
from microparallel.comms.comms import Comms
from microparallel.comms.staged_group import StagedGroup

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPERATIONS = ["sum", "mean", "max"]


class LateCopies:
    """Copies nothing before it is waited for, and notes who waited; until `gate` opens, the device is not ready."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.hosts = []
        self.waited = []

    def thread_begins(self):
        pass

    def room(self, tensor):
        self.hosts.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        return self.hosts[-1]

    def out(self, tensors, hosts):
        def there():
            self.waited.append(threading.current_thread())
            assert self.gate.wait(20)
            for tensor, host in zip(tensors, hosts, strict=True):
                host.copy_(tensor)

        return there

    def back(self, hosts, tensors):
        def there():
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host)

        return there


class OtherDevice(StagedGroup):
    """All tensors lie on another device, but those that were made for copies."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self._copies = LateCopies()

    def _is_elsewhere(self, tensor):
        hosts = {host.untyped_storage().data_ptr() for host in self._copies.hosts}
        return tensor.untyped_storage().data_ptr() not in hosts


def next_rank(comms):
    return (comms.rank + 1) % comms.world_size


def prev_rank(comms):
    return (comms.rank - 1) % comms.world_size


def staged(comms, check=False):
    group = OtherDevice(comms._group.group, None)
    return Comms(group, device=comms.device, local_rank=comms.local_rank, check=check, on_close=group._sends.close)


def close(comms):
    comms._group._sends.close()
    comms._group._calls.close()


def everything(comms, check):
    other = staged(comms, check)
    rank, ranks = comms.rank, comms.world_size
    failures = []

    def same(what, mine, theirs):
        equal = mine.shape == theirs.shape and torch.equal(mine, theirs)
        failures.extend([] if equal else [f"{what}: {mine.tolist()} and not {theirs.tolist()}"])

    for size in (1, 100):
        tensor = torch.arange(size, dtype=torch.float32) * (rank + 1)
        for op in OPERATIONS:
            for algorithm in ("auto", "ring", "tree", "gather-add"):
                found = other.all_reduce(tensor.clone(), op, algorithm)
                same(f"all_reduce {op} {algorithm}", found, comms.all_reduce(tensor.clone(), op))
        parts = [tensor + other_rank for other_rank in range(ranks)]
        same("reduce_scatter", other.reduce_scatter(parts), comms.reduce_scatter([one.clone() for one in parts]))
        flat = torch.arange(ranks * size, dtype=torch.float32) * (rank + 1)
        place = torch.empty(size)
        other.reduce_scatter(flat, into=place)
        same("reduce_scatter into", place, comms.reduce_scatter(flat.clone()))
        for mine, theirs in zip(other.all_to_all(parts), comms.all_to_all(parts), strict=True):
            same("all_to_all", mine, theirs)
        for mine, theirs in zip(other.all_gather(tensor), comms.all_gather(tensor), strict=True):
            same("all_gather", mine, theirs)
        halves = tensor.to(torch.bfloat16)
        rings = [one.all_reduce(halves.clone(), algorithm="ring") for one in (other, comms)]
        same("bf16", *rings)
        request = other.isend(tensor, next_rank(comms))
        same("isend", other.recv(size, prev_rank(comms)), torch.arange(size) * (prev_rank(comms) + 1.0))
        request.wait()
    close(other)
    return failures


@pytest.mark.parametrize(("ranks", "check"), [(2, False), (3, True)])
def test_every_call_does_what_it_does_over_the_host(pool, ranks, check):
    assert pool.run(everything, ranks, check, transport="gloo", timeout=50) == [[]] * ranks


def call_before_the_device_is_ready(comms):
    other = staged(comms)
    copies = other._group.copies
    copies.gate.clear()
    tensor = torch.full((5,), comms.rank + 1.0)
    scattered = torch.empty(5)
    requests = [
        other.all_reduce(tensor, algorithm="ring", async_op=True),
        other.reduce_scatter([torch.ones(5)] * comms.world_size, into=scattered, async_op=True),
        other.isend(torch.full((3,), 7.0), next_rank(comms)),
        other.irecv(3, prev_rank(comms)),
    ]
    done_before = [request._works[0].poll() for request in requests[2:3]]
    of_this_thread = threading.current_thread() in copies.waited
    copies.gate.set()  # this thread comes here: no call waited for the device
    results = [request.wait() for request in requests]
    close(other)
    return tensor.tolist(), scattered.tolist(), results[3].tolist(), done_before, of_this_thread


def test_no_call_waits_for_the_device(pool):
    for found in pool.run(call_before_the_device_is_ready, 2, transport="gloo", timeout=30):
        assert found == ([3.0] * 5, [2.0] * 5, [7.0] * 3, [False], False)


def send_many(comms):
    """Messages of one tag arrive in the order in which they were sent, whether they lie on the device or not."""
    other = staged(comms)
    other._group.copies.gate.clear()
    numbers = list(range(12))
    if comms.rank == 0:
        tensors = [torch.tensor([float(number)]) for number in numbers]
        other._group.copies.hosts += tensors[1::2]  # every second one lies on the host
        requests = [other.isend(tensor, 1) for tensor in tensors]
        other._group.copies.gate.set()
        for request in requests:
            request.wait()
        received = numbers
    else:
        received = [int(other.recv(1, 0)) for _ in numbers]
    close(other)
    return received


def test_messages_stay_in_order(pool):
    assert pool.run(send_many, 2, transport="gloo", timeout=30) == [list(range(12))] * 2


def fail_in_the_thread(comms):
    other = staged(comms)
    if comms.rank == 1:
        close(other)
        return "left"
    request = other.all_reduce(torch.ones(3), algorithm="ring", async_op=True)
    with pytest.raises(mp.errors.CommsError) as caught:
        request.wait(0.5)
    return type(caught.value).__name__


def test_a_call_that_nobody_answers_is_named(pool):
    assert pool.run(fail_in_the_thread, 2, transport="gloo", timeout=30) == ["CommsTimeout", "left"]


def on_the_gpu(comms):
    """All calls on tensors of the GPU, with a long kernel in front of each: what arrives is what that kernel made."""
    device = comms.device
    assert isinstance(comms._group, StagedGroup)
    failures = []
    rank, ranks = comms.rank, comms.world_size
    for number in range(20):
        heavy = torch.randn(2000, 2000, device=device)
        tensor = torch.full((100_000,), float("nan"), device=device)
        for _ in range(5):
            heavy = heavy @ heavy * 1e-3
        tensor.copy_(heavy.flatten()[:100_000] * 0 + rank + number)
        requests = [
            comms.all_reduce(tensor.clone(), async_op=True),
            comms.all_reduce(tensor.clone(), algorithm="ring", async_op=True),
            comms.reduce_scatter([tensor.clone()] * ranks, async_op=True),
            comms.isend(tensor.clone(), next_rank(comms)),
            comms.irecv(len(tensor), prev_rank(comms)),
        ]
        torch.empty(100_000, device=device).fill_(-1)  # would overwrite what torch gave away too early
        total = float(sum(other + number for other in range(ranks)))
        expected = [total, total, total, None, float(prev_rank(comms) + number)]
        for request, value in zip(requests, expected, strict=True):
            found = request.wait()
            if value is not None and not bool((found == value).all()):
                failures.append((number, value, found.unique().tolist()[:5]))
    return failures


@ON_A_GPU
def test_what_a_gpu_makes_arrives(pool):
    assert pool.run(on_the_gpu, 2, transport="gloo", device="cuda", timeout=50) == [[]] * 2


def busy_gpu(comms):
    """How long async calls take while the GPU has seconds of work in front of them."""
    tensor = torch.ones(1_000_000, device=comms.device)
    comms.all_reduce(tensor.clone())
    comms.all_reduce(tensor.clone(), algorithm="ring")
    comms.barrier()
    torch.cuda._sleep(int(2e9))  # about a second
    begun = time.perf_counter()
    requests = [
        comms.all_reduce(tensor, async_op=True),
        comms.all_reduce(tensor.clone(), algorithm="ring", async_op=True),
        comms.isend(tensor.clone(), next_rank(comms)),
    ]
    taken = time.perf_counter() - begun
    received = comms.recv(1_000_000, prev_rank(comms))
    for request in requests:
        request.wait()
    return taken, float(received.sum())


@ON_A_GPU
def test_no_call_waits_for_a_gpu(pool):
    for taken, received in pool.run(busy_gpu, 2, transport="gloo", device="cuda", timeout=50):
        assert taken < 0.2
        assert received == 1_000_000
