"""What the engine promises: lanes keep their order, ports serve one message at a time, needs come first."""

import itertools
from collections import Counter, defaultdict, deque
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import microparallel as mp
from microparallel.program import AllGather, Free, Join, Lane, Observed, Parameters, Recv, Rules, Send, from_text, lane


def program(*ranks, goal):
    return from_text("\n".join(["program test", f"goal: {goal}", *(f"rank {n}: {ops}" for n, ops in enumerate(ranks))]))


def times(trace, rank):
    return {str(event.op): (event.start, event.end) for event in trace.by_rank[rank]}


@st.composite
def built(draw):
    kind = draw(st.sampled_from(["collective", "pipeline", "zero"]))
    if kind == "collective":
        name = draw(st.sampled_from(sorted(mp.collectives.ALL_REDUCES | mp.collectives.OTHERS)))
        return mp.collectives.build(name, draw(st.integers(1, 7)))
    if kind == "zero":
        level, layers, ranks, microbatches = (draw(st.integers(1, most)) for most in (3, 4, 3, 3))
        replicas = draw(st.integers(1, 2)) if level == 3 else 1
        return mp.schedules.zero(level, layers, ranks * replicas, microbatches, replicas=replicas)
    name = draw(st.sampled_from(sorted(mp.schedules.PIPELINES)))
    return mp.schedules.build(name, draw(st.integers(1, 5)), draw(st.integers(1, 8)))


cost = st.integers(0, 5)


def within(links, program):
    ranks = range(program.world_size)
    return {(a, b): link for (a, b), link in links.items() if a in ranks and b in ranks and a != b}


@given(
    program=built(),
    costs=st.builds(
        mp.Costs,
        forward=cost,
        backward_input=cost,
        backward_weight=cost,
        latency=cost,
        seconds_per_byte=cost,
        add_seconds_per_byte=cost,
        links=st.dictionaries(
            st.tuples(st.integers(0, 6), st.integers(0, 6)), st.builds(mp.Link, cost, cost), max_size=3
        ),
    ),
)
def test_lanes_ports_and_needs(program, costs):
    trace = mp.simulate(program, replace(costs, links=within(costs.links, program)))
    for rank, ops in enumerate(program.ranks):
        rules, events = Rules(program.goal, ops), trace.by_rank[rank]
        # Everything happened, once.
        counts = Counter(event.op for event in events)
        wanted = Counter(op for op in ops if not isinstance(op, Free | Join))
        assert counts.keys() == wanted.keys()
        for op, count in wanted.items():  # what waits to be added has one event for its arrival, one for the addition
            assert count <= counts[op] <= count * (2 if isinstance(op, Recv) and op.reduce else 1)
        # Each lane keeps its order (sends go their own way on a port), and does one thing at a time.
        computed = [event for event in events if event.lane is Lane.COMPUTE]
        assert [e.op for e in computed] == [op for op in ops if lane(op) is Lane.COMPUTE and not isinstance(op, Free)]
        for one_thing in (
            computed,
            [e for e in events if isinstance(e.op, Send)],
            [e for e in events if e.lane is Lane.COMM and not isinstance(e.op, Send)],
        ):
            for before, after in itertools.pairwise(one_thing):
                assert before.end <= after.start
        # What an operation needs was made before: by the operation that stands last before it, if there are several.
        made = dict.fromkeys(rules.at_first(), 0)
        left = defaultdict(deque)
        for event in events:
            left[event.op].append(event)
        for op in ops:
            if isinstance(op, Free | Join):
                continue
            event = left[op].popleft()
            if event.lane is Lane.COMPUTE:
                assert all(made[value] <= event.start for value in rules.needs(op))
            made |= dict.fromkeys(rules.makes(op), event.end)


@given(program=built(), latency=cost, per_byte=cost)
def test_a_message_arrives_as_it_leaves(program, latency, per_byte):
    trace = mp.simulate(program, mp.Costs(latency=latency, seconds_per_byte=per_byte, bytes_per_value=Fraction(1)))
    sent, received = defaultdict(list), defaultdict(list)
    for event in trace.events:
        if isinstance(event.op, Send):
            sent[event.rank, event.op.to].append(event)
            assert event.duration == latency + event.bytes * per_byte
        elif isinstance(event.op, Recv):
            received[event.op.source, event.rank].append(event)
    for channel, sends in sent.items():
        spans = [(event.start, event.end) for event in sends]
        assert sorted(spans) == sorted((event.start, event.end) for event in received[channel])


def test_a_slow_link_holds_up_those_behind_it():
    build = mp.schedules.build("gpipe", 3, 2)
    fast = mp.simulate(build, mp.Costs(latency=1))
    slow = mp.simulate(build, mp.Costs(latency=1, links={(1, 2): mp.Link(latency=10)}))
    assert times(slow, 1)["F1.0"] == times(fast, 1)["F1.0"]
    assert times(slow, 2)["F2.0"][0] == times(fast, 2)["F2.0"][0] + 9


def test_communication_hides_behind_computation():
    """Rank 0 computes F0.1 while A0.0 is under way."""
    trace = mp.simulate(mp.schedules.build("gpipe", 2, 2), mp.Costs(forward=3, latency=2))
    assert times(trace, 0)["F0.1"] == (3, 6)
    assert times(trace, 0)[">A0.0@1"] == (3, 5)
    assert times(trace, 1)["F1.0"] == (5, 8)
    assert trace.exposed_communication[0] == 4  # of 8: one send and one receive hide


def test_ddp_overlaps_and_naive_does_not():
    costs = mp.Costs(latency=0, seconds_per_byte=1)  # a ring of 2 sends n bytes in all, for n = 1 a layer
    overlapped = mp.simulate(mp.schedules.ddp(layers=4, buckets=2, ranks=2), costs)
    assert times(overlapped, 0)["*U0@dp"] == (8, 10)
    assert times(overlapped, 0)["*U1@dp"] == (12, 14)
    assert overlapped.exposed_communication == [2, 2]
    plain = mp.simulate(mp.schedules.ddp_naive(layers=4, ranks=2), costs)
    assert [times(plain, 1)[f"*U{index}@dp"] for index in range(4)] == [(12, 13), (13, 14), (14, 15), (15, 16)]
    assert plain.makespan == 16
    assert plain.exposed_communication == [4, 4]
    assert plain.messages_sent == [8, 8]
    assert plain.bytes_sent == [4, 4]


def test_costs_of_each_stage():
    trace = mp.simulate(
        mp.schedules.build("naive", 3, 1), mp.Costs(forward=[1, 2, 4], backward_input=0, backward_weight=0)
    )
    assert trace.work == [1, 2, 4]
    assert trace.makespan == 7


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        (("<C0@1", "<C0@0"), "rank 0 stands at <C0@1 for ever; mp.verify says why"),
        ((">C0@1", ""), "loses a message: rank 0 does >C0@1, and no rank receives it"),
    ],
)
def test_a_program_that_does_not_come_to_its_end_is_refused(ops, words):
    with pytest.raises(mp.errors.ProgramError, match=words):
        mp.simulate(program(*ops, goal="all-reduce of 1 slice"))


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"forward": -1}, "forward=-1 is no time"),
        ({"backward_weight": [1, -2]}, r"backward_weight\[1\]=-2"),
        ({"latency": float("nan")}, "latency=nan"),
        ({"forward": float("inf")}, "forward=inf"),
        ({"forward": "1"}, "forward='1' is no time"),
        ({"latency": None}, "latency=None is no time"),
        ({"links": {(1, 2): 5}}, "link 1 → 2 is 5; give mp.Link"),
        ({"links": {(0, 1): mp.Link(latency=-3)}}, "latency of link 0 → 1=-3"),
    ],
)
def test_costs_that_cannot_be(costs, words):
    with pytest.raises(mp.errors.UsageError, match=words):
        mp.Costs(**costs)


def test_costs_for_too_few_stages():
    with pytest.raises(mp.errors.UsageError, match="forward has 2 numbers, and the program has 3 stages"):
        mp.simulate(mp.schedules.build("gpipe", 3, 1), mp.Costs(forward=[1, 2]))


def test_waiting_to_add_is_not_communication():
    """Rank 0's message from rank 2 is there at 1, but what it is added to is still being sent until 20."""
    held_up = program(">C0@1 <+C0@2", "<+C0@3 <+C0@0", ">C0@0", ">C0@1", goal="reduce of 1 slice, root 1")
    trace = mp.simulate(held_up, mp.Costs(latency=1, links={(3, 1): mp.Link(latency=20)}))
    assert trace.makespan == 21
    assert trace.exposed_communication[0] == 2
    assert trace.waiting[0] == 19


def test_a_link_inherits_what_it_does_not_say():
    costs = {"latency": 1, "seconds_per_byte": 1, "bytes_per_value": 400}
    ring = mp.collectives.build("ring", 2)
    assert mp.simulate(ring, mp.Costs(**costs)).makespan == 402
    slow = {(0, 1): mp.Link(latency=5), (1, 0): mp.Link(latency=5)}
    assert mp.simulate(ring, mp.Costs(**costs, links=slow)).makespan == 410


def test_many_buckets_take_no_longer_than_their_number():
    """Each operation is looked at a bounded number of times, however many gradients an update needs."""
    program = mp.schedules.ddp(layers=400, buckets=400, ranks=4)
    assert mp.simulate(program, mp.Costs(seconds_per_byte=1)).makespan > 0


GROUP = {"latency": 3, "seconds_per_byte": 2, "add_seconds_per_byte": 1, "bytes_per_value": 60}


@pytest.mark.parametrize("algorithm", mp.collectives.ALL_REDUCES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_an_all_reduce_costs_what_its_program_costs(algorithm, ranks):
    links = {(0, 1): mp.Link(latency=50)} if ranks > 1 else {}
    alone = mp.simulate(mp.collectives.build(algorithm, ranks), mp.Costs(**GROUP, links=links))
    step = mp.schedules.ddp(layers=1, buckets=1, ranks=ranks, algorithm=algorithm)
    trace = mp.simulate(step, mp.Costs(**GROUP, links=links))
    for rank in range(ranks):
        start, end = times(trace, rank)[f"*U0@dp:{algorithm}"]
        assert start == 3
        assert end - 3 == max((event.end for event in alone.by_rank[rank]), default=0)
    assert trace.messages_sent == alone.messages_sent
    assert trace.bytes_sent == pytest.approx(alone.bytes_sent)


@pytest.mark.parametrize("ranks", range(2, 12))
def test_a_ring_of_equal_links_is_not_simulated_and_costs_the_same(ranks):
    costs = {name: Fraction(number, 7) for name, number in GROUP.items()}
    trace = mp.simulate(mp.schedules.ddp(1, 1, ranks, algorithm="ring"), mp.Costs(**costs))
    ring = mp.simulate(mp.collectives.build("ring", ranks), mp.Costs(**costs))
    assert {times(trace, rank)["*U0@dp:ring"] for rank in range(ranks)} == {(3, 3 + ring.makespan)}
    assert (trace.messages_sent, trace.bytes_sent) == (ring.messages_sent, ring.bytes_sent)


def test_a_ring_of_many_ranks_is_quick():
    trace = mp.simulate(mp.schedules.ddp(layers=2, buckets=2, ranks=1000), mp.Costs(seconds_per_byte=1))
    assert trace.messages_sent == [2 * 2 * 999] * 1000


def test_ranks_of_a_group_use_the_links_between_them():
    """Two columns of replicas: the slow link joins ranks 1 and 3, which are neighbours in the second column only."""
    program = mp.schedules.replicate(mp.schedules.build("gpipe", 2, 1), 2)
    trace = mp.simulate(program, mp.Costs(seconds_per_byte=1, links={(1, 3): mp.Link(seconds_per_byte=100)}))
    fast, slow = times(trace, 0)["*U0@dp"], times(trace, 1)["*U1@dp"]
    assert fast[1] - fast[0] == 1 and slow[1] - slow[0] == 100


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize(("algorithm", "expected"), [("tree", [4, 4, 4, 4]), ("direct", [2, 4, 6, 6])])
def test_a_broadcast_reaches_one_rank_after_another(root, algorithm, expected):
    ops = f"^:w@dp/{root}:{algorithm} ="
    step = program(
        *(f"{ops} F0.{r} B0.{r} *U0@dp" for r in range(4)),
        goal="training step of 1 stage, 4 micro-batches, buckets 0:1",
    )
    mp.verify(step)
    trace = mp.simulate(step, mp.Costs(latency=2, bytes_per_value=lambda value: 0))
    ends = [times(trace, rank)[ops.removesuffix(" =")][1] for rank in range(4)]
    assert sorted(ends) == expected
    assert all(times(trace, rank)[f"F0.{rank}"][0] == ends[rank] for rank in range(4))
    assert trace.messages_sent[root] >= 2


def test_auto_is_what_the_transport_runs():
    def took(transport, size):
        step = mp.schedules.ddp(layers=1, buckets=1, ranks=4)
        trace = mp.simulate(step, mp.Costs(latency=1, bytes_per_value=size, transport=transport))
        return trace.messages_sent[0]

    assert took("gloo", 1000) == took("gloo", 10**9) == 6
    assert took("shm", 1000) == 3 and took("shm", 10**9) == 6
    assert mp.collectives.resolve("all-reduce", "auto", 4, 512 * 2**10 / 3, "shm") == "gather-add"
    assert mp.collectives.resolve("all-reduce", "auto", 4, 512 * 2**10 / 3 + 1, "shm") == "direct"
    assert mp.collectives.resolve("all-reduce", "tree", 4, 10**9, "shm") == "tree"
    assert mp.collectives.resolve("broadcast", "auto", 4, 10, "shm") == "direct"
    assert mp.collectives.resolve("broadcast", "auto", 4, 10, "gloo") == "tree"
    with pytest.raises(mp.errors.UsageError):
        mp.collectives.resolve("all-reduce", "rin", 4, 10, "shm")


def test_what_is_shared_twice_takes_twice_as_long():
    step = program(
        *(f"F0.{r} B0.{r} *U0@dp *:loss@dp *:loss@dp" for r in (0, 1)),
        goal="training step of 1 stage, 2 micro-batches, buckets 0:1",
    )
    trace = mp.simulate(step, mp.Costs(latency=1))
    assert [(e.start, e.end) for e in trace.by_rank[0] if str(e.op) == "*:loss@dp"] == [(5, 7), (7, 9)]


def test_a_collective_is_asked_for_when_its_rank_comes_to_it():
    """A named sum needs no value, and yet it does not begin before what its rank computes before it has ended."""
    ranks = [f"F0.{rank} *:loss@world ?backward/0/a%20piece ?collective/2/call = S" for rank in range(2)]
    trace = mp.simulate(program(*ranks, goal="training step of 1 stage, 2 micro-batches"), Slow(latency=1))
    assert times(trace, 0) == {
        "F0.0": (0, 1),
        "*:loss@world": (1, 3),
        "a piece": (1, 5),
        "call": (5, 12),
        "S": (12, 12),
    }
    assert [(event.issued, event.number) for event in trace.by_rank[0] if event.name == "call"] == [(5, 2)]


class Slow(mp.Costs):
    def of(self, op, rank=0):
        return 4 if isinstance(op, Observed) else super().of(op, rank)

    def together(self, op, rank):
        return 7 if isinstance(op, Observed) else None


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("seconds_per_byte", [0.1, 1, 10])
def test_parameters_that_were_freed_are_waited_for_again(prefetch, seconds_per_byte):
    """Each forward and backward begins when the gather that stands last before it in the program has ended."""
    step = mp.schedules.zero(3, 4, 2, 2, prefetch=prefetch)
    trace = mp.simulate(step, mp.Costs(seconds_per_byte=seconds_per_byte))
    for rank, ops in enumerate(step.ranks):
        rules, gathered = Rules(step.goal, ops), {}
        events = {op: [event for event in trace.by_rank[rank] if event.op == op] for op in set(ops)}
        for op in ops:
            if isinstance(op, Free):
                continue
            event = events[op].pop(0)
            if isinstance(op, AllGather):
                gathered[op.value] = event.end
            needed = [gathered[value] for value in rules.needs(op) if isinstance(value, Parameters)]
            assert all(end <= event.start for end in needed), op


def test_without_prefetching_nothing_is_hidden():
    """Two gathers and a reduce-scatter of each unit stand one after another, between what is computed."""
    trace = mp.simulate(mp.schedules.zero(3, 4, 2, prefetch=0), mp.Costs(seconds_per_byte=10))
    half = 10 / 2  # of a layer's byte each rank sends half
    assert trace.exposed_communication == [4 * 3 * half] * 2
    assert trace.makespan == 4 * (1 + 2) + 4 * 3 * half
