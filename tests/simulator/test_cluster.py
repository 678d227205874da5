"""Nodes whose ranks share a network port: times are those of formulas, and waiting for the port is waiting."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import microparallel as mp
from microparallel.program import ops as o
from microparallel.simulator.groups import GroupCosts

times = st.fractions(Fraction(1, 10), 10, max_denominator=20)
sizes = st.fractions(1, 1000, max_denominator=3)


def cluster(nodes, per_node, inside, between, size=1, **more):
    links = {"inside": mp.Link(*inside), "between": mp.Link(*between)}
    return mp.Costs.cluster(nodes=nodes, per_node=per_node, **links, bytes_per_value=size, **more)


@given(nodes=st.integers(1, 4), k=st.integers(1, 4), n=sizes, a=times, b=times, near=times, far=times)
def test_hierarchical_all_reduce(nodes, k, n, a, b, near, far):
    """(k−1) steps inside with n/k each, 2(g−1) between with n/(gk), in which k ranks take turns, and (k−1) inside."""
    program = mp.collectives.build("hierarchical", nodes * k, ranks_per_node=k)
    inside, between = near + n / k * a, far + n / (nodes * k) * b
    alone = 2 * (k - 1) * inside + 2 * (nodes - 1) * between
    costs = cluster(nodes, k, (near, a), (far, b), n, shared_nic=False)
    assert mp.simulate(program, costs).makespan == alone
    costs = cluster(nodes, k, (near, a), (far, b), n)
    shared = mp.simulate(program, costs).makespan
    assert shared >= alone
    if inside <= between:  # then the way inside is never what the port waits for
        assert shared == 2 * (k - 1) * inside + 2 * (nodes - 1) * k * between


@given(nodes=st.integers(2, 4), k=st.integers(1, 4), n=sizes, near=times, far=times)
def test_a_ring_crosses_each_port_once_a_step(nodes, k, n, near, far):
    p = nodes * k
    ring = mp.collectives.build("ring", p)
    for shared_nic in (True, False):
        costs = cluster(nodes, k, (0, near), (0, far), n, shared_nic=shared_nic)
        slowest = far if k == 1 else max(near, far)
        assert mp.simulate(ring, costs).makespan == 2 * (p - 1) * n / p * slowest


def test_a_ring_on_two_nodes_of_four():
    costs = cluster(2, 4, (1, 0), (10, 0))
    assert mp.simulate(mp.collectives.build("ring", 8), costs).makespan == 14 * 10
    two_levels = mp.collectives.build("hierarchical", 8, ranks_per_node=4)
    assert mp.simulate(two_levels, costs).makespan == 2 * 3 * 1 + 2 * 4 * 10


@pytest.mark.parametrize(("nodes", "k"), [(2, 2), (2, 4), (3, 2), (4, 3)])
def test_an_all_to_all_keeps_every_port_busy_from_beginning_to_end(nodes, k):
    """Each of a node's k ranks has a message for each of the other nodes' ranks: k · k(g−1) in turn."""
    costs = cluster(nodes, k, (0, 0), (1, 0))
    trace = mp.simulate(mp.collectives.build("all-to-all", nodes * k), costs)
    across = k * k * (nodes - 1)
    assert across <= trace.makespan < across * 1.5  # ranks post one receive at a time, so a port may stand idle
    sent = [event for event in trace.events if event.kind == "send" and event.duration]
    assert len(sent) == nodes * across


def messages(ranks, *channels):
    """A program in which rank a sends its slice to rank b for each of these (a, b)."""
    lines = [[] for _ in range(ranks)]
    for sender, receiver in channels:
        lines[sender].append(f">C{sender}@{receiver}")
        lines[receiver].append(f"<C{sender}@{sender}")
    rows = "\n".join(f"rank {rank}: {' '.join(line)}" for rank, line in enumerate(lines))
    return mp.program.from_text(f"program messages\ngoal: all-gather of {ranks} slices\n{rows}")


def sends(program, costs):
    events = mp.simulate(program, costs).events
    return sorted((event.start, event.end, event.rank) for event in events if event.kind == "send")


def test_a_port_sends_one_message_at_a_time_and_receives_one():
    costs = cluster(2, 2, (1, 0), (10, 0))
    leaving = messages(4, (0, 2), (1, 3))
    assert sends(leaving, costs) == [(0, 10, 0), (10, 20, 1)]
    both_ways = messages(4, (0, 2), (3, 1))  # what leaves a node does not hold up what enters it
    assert sends(both_ways, costs) == [(0, 10, 0), (0, 10, 3)]
    inside = messages(4, (0, 1), (2, 3))
    assert sends(inside, costs) == [(0, 1, 0), (0, 1, 2)]
    without = cluster(2, 2, (1, 0), (10, 0), shared_nic=False)
    assert sends(leaving, without) == [(0, 10, 0), (0, 10, 1)]
    entering = messages(6, (0, 4), (2, 5))
    assert sends(entering, cluster(3, 2, (1, 0), (10, 0))) == [(0, 10, 0), (10, 20, 2)]


def test_a_message_that_waits_for_another_port_lets_others_go_first():
    """Node 2 receives from rank 0, so rank 2's message waits. Rank 3, of the same node, uses the port meanwhile."""
    program = messages(6, (0, 4), (2, 5), (3, 1))
    costs = cluster(3, 2, (1, 0), (10, 0))
    assert sends(program, costs) == [(0, 10, 0), (0, 10, 3), (10, 20, 2)]


def test_waiting_for_the_port_is_waiting():
    costs = cluster(2, 2, (1, 0), (10, 0))
    trace = mp.simulate(messages(4, (0, 2), (1, 3)), costs)
    assert trace.makespan == 20
    assert trace.exposed_communication == [10, 10, 10, 10]
    assert trace.waiting == [10, 10, 10, 10]
    drawn = mp.draw(trace, view="timeline", width=60)
    assert "rank 0 comm  │>C0@2│·····│" in drawn
    assert "rank 1 comm  ······│>C1@3│" in drawn


def test_an_all_reduce_of_a_step_takes_turns_at_the_port_too():
    step = mp.schedules.ddp(layers=1, buckets=1, ranks=8, algorithm="direct")
    shared, alone = (
        mp.simulate(step, cluster(2, 4, (0, 0), (1, 0), shared_nic=shared_nic)).makespan for shared_nic in (True, False)
    )
    direct = mp.collectives.build("direct", 8)
    compute = 3
    assert shared == compute + mp.simulate(direct, cluster(2, 4, (0, 0), (1, 0))).makespan
    assert shared > alone


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_the_short_way_for_rings_is_not_taken_where_a_port_is_shared(order):
    """Links that are all alike: ranks 0, 2, 1, 3 in a ring cross the network with every message."""
    costs = cluster(2, 2, (1, 0), (1, 0))
    link = GroupCosts(costs, mp.collectives.build("ring", 4), None)._only_link(order, (order,))
    assert (link is None) == (order == (0, 2, 1, 3))


def test_the_short_way_for_rings_is_not_taken_where_another_group_uses_the_port():
    costs = cluster(2, 2, (1, 0), (1, 0))
    find = GroupCosts(costs, mp.collectives.build("ring", 4), None)._only_link
    assert find((0, 2), ((0, 2),)) == mp.Link(1, 0)
    assert find((0, 2), ((0, 2), (1, 3))) is None
    assert find((0, 1), ((0, 1), (2, 3))) == mp.Link(1, 0)  # inside of a node there is no port to share


# ── hybrid sharding: parameters travel inside of a node, parts of gradients between nodes ───────────────────────────


def between_nodes(trace, per_node):
    """How many bytes cross from one node to another, added up from the messages of every ring."""
    rings = {(event.op, event.group, event.number): event.bytes for event in trace.events if event.group}
    kinds = {o.AllGather: "all-gather", o.ReduceScatter: "reduce-scatter", o.AllReduce: "ring"}
    total = 0
    for (op, group, _), size in rings.items():
        nodes = [rank // per_node for rank in group]
        for rank, ops in enumerate(mp.collectives.build(kinds[type(op)], len(group)).ranks):
            away = [one for one in ops if isinstance(one, o.Send) and nodes[one.to] != nodes[rank]]
            total += len(away) * size / len(group)
    return total


@pytest.mark.parametrize(("nodes", "k"), [(2, 2), (2, 4), (3, 2), (4, 1)])
@pytest.mark.parametrize("m", [1, 2])
def test_hybrid_sharding_sends_less_between_nodes(nodes, k, m):
    """Of a copy of n bytes, plain ZeRO-3 sends 3m(p−1)/p over each of g links that leave a node; hybrid sharding sends
    2m(g−1)/g · n/k for each rank, k of them in each of g nodes.
    """
    p, n = nodes * k, 6 * 10
    costs = cluster(nodes, k, (0, 0), (0, 1), 10)
    plain, hybrid = (mp.simulate(mp.schedules.zero(3, 6, p, m, replicas=copies), costs) for copies in (1, nodes))
    assert between_nodes(plain, k) == pytest.approx(nodes * 3 * m * (p - 1) / p * n)
    assert between_nodes(hybrid, k) == pytest.approx(p * m * 2 * (nodes - 1) / nodes * n / k)
    assert between_nodes(hybrid, k) < between_nodes(plain, k)
    assert hybrid.bytes_sent == pytest.approx([m * (3 * (k - 1) / k * n + 2 * (nodes - 1) / nodes * n / k)] * p)


def test_a_hybrid_step_on_two_nodes_of_two():
    """For one copy of 60 bytes: 2 links with 3 · 3/4 · 60 bytes each, or 4 ranks with 2 · 1/2 · 30 bytes each."""
    costs = cluster(2, 2, (0, 0), (0, 1), 10)
    plain, hybrid = (mp.simulate(mp.schedules.zero(3, 6, 4, replicas=copies), costs) for copies in (1, 2))
    assert (between_nodes(plain, 2), between_nodes(hybrid, 2)) == (270, 120)
    assert hybrid.makespan < plain.makespan


def test_groups_beside_each_other_take_turns_at_the_port():
    """A part of 10/2 bytes, in halves there and back: 5 seconds for a pair alone, 10 for two with one port a node."""
    step = mp.schedules.zero(3, 1, 4, replicas=2)
    ends = {}
    for shared_nic in (True, False):
        trace = mp.simulate(step, cluster(2, 2, (0, 0), (0, 1), 10, shared_nic=shared_nic))
        sums = [event for event in trace.events if str(event.op) == "*U0.0/@replica"]
        assert {event.bytes for event in sums} == {5} and {event.sent for event in sums} == {5}
        ends[shared_nic] = max(event.end for event in sums) - min(event.start for event in sums)
    assert ends == {True: 10, False: 5}


def test_a_link_of_its_own_wins_over_the_cluster_s():
    costs = cluster(2, 2, (1, 2), (10, 20), links={(0, 1): mp.Link(latency=5)})
    assert costs.link(0, 1) == mp.Link(5, 2)
    assert costs.link(1, 0) == mp.Link(1, 2)
    assert costs.link(1, 2) == mp.Link(10, 20)
    usual = mp.Costs.cluster(nodes=2, per_node=1, inside=mp.Link(), between=mp.Link(latency=3), seconds_per_byte=7)
    assert usual.link(0, 1) == mp.Link(3, 7)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": 0}, "nodes=0: a cluster has at least 1 node"),
        ({"per_node": 1.5}, "per_node=1.5: a node has at least 1 rank"),
        ({"inside": 3}, "inside=3: give mp.Link"),
        ({"between": mp.Link(latency=-1)}, "latency of the links between nodes=-1"),
    ],
)
def test_what_is_no_cluster_is_refused(given, words):
    usual = {"nodes": 2, "per_node": 4, "inside": mp.Link(), "between": mp.Link()}
    with pytest.raises(mp.errors.UsageError) as error:
        mp.Costs.cluster(**usual | given)
    assert words in str(error.value)


def test_a_program_of_other_ranks_is_refused():
    with pytest.raises(mp.errors.UsageError, match=r"2 nodes of 4 ranks are 8 ranks, and program 'ring' has 6"):
        mp.simulate(mp.collectives.build("ring", 6), cluster(2, 4, (1, 0), (1, 0)))
