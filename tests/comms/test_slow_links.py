"""Links that are slow on purpose: everything arrives, in order, and late; nothing else changes."""

import itertools
import threading
import time

import pytest
import torch

import microparallel as mp
from microparallel.collectives import program_of, resolve
from microparallel.comms.slow_links import Port, SlowSend, slow_down, slow_network
from microparallel.program import Send
from microparallel.topology import Link

LATENCY = 0.05
ELEMENTS = 12


def three_messages(comms):
    slow = slow_down(comms, {frozenset((0, 1)): Link(LATENCY, 0.0)})
    begun = time.perf_counter()
    if comms.rank == 0:
        for number in range(3):
            slow.send_tensor(torch.tensor([float(number)]), 1)
    if comms.rank == 1:
        return [slow.recv_tensor((1,), 0).item() for _ in range(3)], time.perf_counter() - begun
    return None


def test_messages_arrive_in_order_and_late(any_pool):
    _, (received, seconds), _ = any_pool.run(three_messages, 3, timeout=30)
    assert received == [0, 1, 2]
    assert seconds >= 3 * LATENCY  # one after another, through one port


# ── every collective ────────────────────────────────────────────────────────────────────────────────────────────────


def every_collective(comms, exact):
    """The result of each collective, by name: sums that are exact in any order, or such as depend on the order."""
    generator = torch.Generator().manual_seed(comms.rank)
    if exact:
        pieces = list(
            torch.randint(-9, 9, (comms.world_size, ELEMENTS), generator=generator).float() * 6
        )  # so is their mean
    else:
        pieces = list(torch.randn(comms.world_size, ELEMENTS, generator=generator))
    whole = torch.cat(pieces)
    last = comms.world_size - 1
    found = {
        "all-reduce": comms.all_reduce(whole.clone()),
        "in the background": comms.all_reduce(whole.clone(), op="mean", async_op=True).wait(),
        "max": comms.all_reduce(whole.clone(), op="max"),
        "reduce": comms.reduce(whole.clone(), dst=last),
        "broadcast": comms.broadcast(whole.clone(), src=last),
        "all-gather": torch.cat(comms.all_gather(pieces[0])),
        "gather": torch.cat(comms.gather(pieces[0], dst=last) or pieces[:1]),
        "scatter": comms.scatter(pieces if comms.rank == last else None, src=last),
        "reduce-scatter": comms.reduce_scatter(pieces),
        "all-to-all": torch.cat(comms.all_to_all([piece[rank:] for rank, piece in enumerate(pieces)])),
        "its input": torch.cat(pieces),  # which stays as it was
        "message": exchanged(comms, pieces[0]),
    }
    for name in ("ring", "direct", "tree", "halving-doubling", "naive"):
        found[name] = comms.all_reduce(whole.clone(), algorithm=name)
    comms.barrier()
    smaller = comms.group(range(1, comms.world_size))
    if smaller is not None:
        found["smaller"] = smaller.all_reduce(whole.clone())
    return found


def exchanged(comms, tensor):
    """Every rank sends to the next and receives from the one before."""
    request = comms.isend(tensor, (comms.rank + 1) % comms.world_size)
    received = comms.recv_tensor(tensor.shape, (comms.rank - 1) % comms.world_size)
    request.wait()
    return received


def both(comms, exact, links):
    return every_collective(comms, exact), every_collective(slow_down(comms, links), exact)


SLOW = Link(0.002, 1e-6)


@pytest.mark.parametrize("check", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_bit_changes(any_pool, ranks, check):
    """On shared memory sums are rounded as without slow links; torch's own collectives add in an order of their own."""
    links = {frozenset(ends): SLOW for ends in itertools.combinations(range(ranks), 2)}
    exact = any_pool._transport != "shm"
    for plain, slow in any_pool.run(both, ranks, exact, links, check=check, timeout=50):
        assert plain.keys() == slow.keys()
        for name, tensor in plain.items():
            assert torch.equal(tensor, slow[name]), name


def test_one_slow_link_among_others(any_pool):
    for plain, slow in any_pool.run(both, 3, True, {frozenset((0, 2)): SLOW}, timeout=50):
        assert all(torch.equal(tensor, slow[name]) for name, tensor in plain.items())


def sent(comms):
    """How many messages each collective sends from this rank."""
    slow = slow_network(comms, 0.001)
    port = slow._group._port
    pieces = [torch.ones(ELEMENTS) for _ in range(comms.world_size)]
    calls = {
        "all-reduce": lambda: slow.all_reduce(torch.cat(pieces)),
        "broadcast": lambda: slow.broadcast(pieces[0], src=1),
        "reduce": lambda: slow.reduce(pieces[0], dst=1),
        "all-gather": lambda: slow.all_gather(pieces[0]),
        "reduce-scatter": lambda: slow.reduce_scatter(pieces),
        "gather": lambda: slow.gather(pieces[0], dst=1),
    }
    numbers = {}
    for name, call in calls.items():
        before = port.number()
        call()
        numbers[name] = port.number() - before - 1
    large = port.number()
    slow.all_reduce(torch.ones(100_000))
    numbers["large all-reduce"] = port.number() - large - 1
    return comms._group.transport_name, numbers


def test_slow_links_run_the_algorithm_that_runs_without_them(any_pool):
    for rank, (transport, numbers) in enumerate(any_pool.run(sent, 4, timeout=50)):
        assert transport.partition(":")[0] == any_pool._transport
        for name, messages in numbers.items():
            collective = name.removeprefix("large ")
            root = 1 if collective in ("broadcast", "reduce", "gather") else None
            size = 400_000 if name != collective else 4 * 4 * ELEMENTS
            algorithm = resolve(collective, "auto", 4, size, transport)
            wanted = [op for op in program_of(collective, algorithm, 4, root).ranks[rank] if isinstance(op, Send)]
            assert messages == len(wanted), (name, algorithm)


def times(comms):
    """How long collectives take over slow links at least: from the first rank's start, and from the last one's."""
    slow = slow_network(comms, LATENCY)
    calls = {
        ("all-reduce", "ring"): lambda: slow.all_reduce(torch.ones(ELEMENTS), algorithm="ring"),
        ("all-gather", "direct"): lambda: slow.all_gather(torch.ones(ELEMENTS)),
        ("broadcast", "direct"): lambda: slow.broadcast(torch.ones(ELEMENTS)),
        ("gather", "direct"): lambda: slow.gather(torch.ones(ELEMENTS)),
    }
    found = dict.fromkeys(calls, (float("inf"), float("inf")))
    for case, call in [*calls.items()] * 3:  # what else runs on the machine makes the others longer
        comms.barrier()
        begun = time.monotonic()
        call()
        mine = torch.tensor([-begun, begun, time.monotonic()], dtype=torch.float64)
        first, last, ended = comms.all_reduce(mine, op="max").tolist()
        found[case] = min(found[case][0], ended + first), min(found[case][1], ended - last)
    return found


def test_collectives_take_the_simulated_time(warm_ranks):
    """And never less: a receiver takes one message at a time, and a sender sends one."""
    found, *_ = warm_ranks.run(times, 3, transport="shm", device="cpu", timeout=50)
    costs = mp.Costs(latency=LATENCY)
    for (collective, algorithm), (most, least) in found.items():
        root = 0 if collective in ("broadcast", "gather") else None
        wanted = mp.simulate(program_of(collective, algorithm, 3, root), costs).makespan
        assert wanted <= most and least < wanted + LATENCY, (collective, algorithm)


def training(comms):
    slow = slow_down(comms, {frozenset((0, 1)): Link(0.001, 1e-9)})
    torch.manual_seed(0)
    model = mp.DataParallel(torch.nn.Linear(4, 2), slow)
    model(torch.ones(2, 4) * comms.rank).sum().backward()
    return model.module.weight.grad.tolist()


def test_data_parallelism_over_a_slow_link(pool):
    first, second = pool.run(training, 2, timeout=30)
    assert first == second == [[1.0] * 4] * 2


# ── the port ────────────────────────────────────────────────────────────────────────────────────────────────────────


def through(port, messages, delays):
    """The order in which messages leave whose receives are posted after so many seconds, and when each has left."""
    order, begun = [], time.monotonic()

    def wire(message, delay):
        time.sleep(max(0.0, begun + delay - time.monotonic()))
        port.let_through(message)
        order.append((message.number, time.monotonic() - begun))

    threads = [threading.Thread(target=wire, args=pair) for pair in zip(messages, delays, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [number for number, _ in order], [left for _, left in order]


def messages_of(port, *seconds):
    return [SlowSend(torch.ones(1), 1, port.number(), held) for held in seconds]


def test_a_port_lets_one_message_after_another_through():
    port = Port()
    order, left = through(port, messages_of(port, 0.3, 0.05, 0.0), [0.0, 0.1, 0.2])
    assert order == [0, 1, 2]
    assert left[0] >= 0.3 and left[1] >= 0.35 and left[2] >= 0.35


def test_what_could_begin_first_goes_first():
    port = Port()
    order, left = through(port, messages_of(port, 0.25, 0.25, 0.25), [0.2, 0.1, 0.0])
    assert order == [2, 1, 0]
    assert left[2] >= 0.75


def test_of_two_that_can_begin_at_once_the_one_that_was_sent_first_goes_first():
    port = Port()
    order, _ = through(port, messages_of(port, 0.5, 0.5), [0.01, 0.0])
    assert order == [0, 1]


# ── what goes wrong, and the end ────────────────────────────────────────────────────────────────────────────────────


def threads_of_ours():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("slow link", "microparallel c"))]


def closing(comms):
    before = threads_of_ours()
    slow = slow_network(comms, 0.001)
    smaller = slow.group([0, 1])
    for one in filter(None, (slow, smaller)):
        one.all_reduce(torch.ones(3), async_op=True).wait()
        exchanged(one, torch.ones(2))
    during = threads_of_ours()
    slow.close()
    slow.close()
    with pytest.raises(mp.errors.CommsError):
        slow._group.isend(torch.ones(1), (comms.rank + 1) % 3)
    after = threads_of_ours()
    return before, during, after, comms.all_reduce(torch.ones(1)).item()


def test_no_thread_is_left_and_the_ranks_go_on(any_pool):
    for rank, (before, during, after, total) in enumerate(any_pool.run(closing, 3, timeout=30)):
        assert (before, after, total) == ([], [], 3.0)
        assert sum("slow link" in name for name in during) >= (3 if rank < 2 else 2)


def nobody_receives(comms):
    slow = slow_network(comms, 0.001)
    if comms.rank == 0:
        slow.send_tensor(torch.ones(3), 1)
    comms.barrier()
    begun = time.monotonic()
    slow.close()
    return time.monotonic() - begun


def test_a_message_that_nobody_receives_holds_nobody_up(warm_ranks):
    first, second = warm_ranks.run(nobody_receives, 2, transport="shm", device="cpu", timeout=30)
    assert first < 10 and second < 1


def alone(comms):
    slow = slow_network(comms, 0.001)
    if comms.rank == 0:
        request = slow.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(mp.errors.CommsTimeout, match=r"all_reduce\(float32\[3\]"):
            slow.all_reduce(torch.ones(3), async_op=True).wait(0.2)
        del request
    comms.barrier()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_who_waits_in_vain_is_told_so(warm_ranks):
    warm_ranks.run(alone, 2, transport="shm", device="cpu", timeout=30)


class Listening:
    def __init__(self):
        self.heard = []

    def begins(self, activity):
        self.heard.append(activity.op.name.partition("(")[0])

    def waits(self, activity):
        pass

    ends = waits


def observed(comms):
    slow, observer = slow_network(comms, 0.001), Listening()
    comms.observers.append(observer)
    slow.all_reduce(torch.ones(3))
    slow.barrier()
    comms.observers.remove(observer)
    return observer.heard, slow.can_overlap


def test_observers_hear_of_calls_and_not_of_their_messages(any_pool):
    assert any_pool.run(observed, 2, timeout=30) == [(["all_reduce", "barrier"], True)] * 2
