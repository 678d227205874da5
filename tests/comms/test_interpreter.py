"""Messages and bytes that every rank really sends, against the formulas of the literature.

With p ranks and a tensor of n bytes. Where the ranks are no power of two, recursive doubling and halving-doubling fold:
p − 2^⌊lg p⌋ ranks hand everything to a partner, and get the result from it in the end.
"""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from microparallel.collectives import ALL_REDUCES, build
from microparallel.comms import run_in_process
from microparallel.comms.interpreter import COMBINE, Memory, perform, rounds
from microparallel.transport import CountingTransport, in_process_transports, nccl_rules_transports

ELEMENTS = 5040  # every number of slices that occurs below divides it
BYTES = ELEMENTS * 4


def naive(p, n):
    return [(p - 1, (p - 1) * n)] + [(1, n)] * (p - 1)


def gather_add(p, n):
    return [(p - 1, (p - 1) * n)] * p


def ring(p, n):
    return [(2 * (p - 1), 2 * (p - 1) * n // p)] * p


def recursive_doubling(p, n):
    steps = p.bit_length() - 1
    return folded(p, n, steps, steps * n)


def halving_doubling(p, n):
    power = 1 << (p.bit_length() - 1)
    return folded(p, n, 2 * (p.bit_length() - 1), 2 * (power - 1) * n // power)


def folded(p, n, messages, sent):
    """Pairs of neighbours fold: the first sends everything once, the second does its part and sends everything back."""
    pairs = p - (1 << (p.bit_length() - 1))
    return [(1, n), (messages + 1, sent + n)] * pairs + [(messages, sent)] * (p - 2 * pairs)


def tree(p, n):
    """All but the root send up, then each parent sends down to its children; a parent lacks its child's lowest bit."""
    parents = [rank & (rank - 1) for rank in range(1, p)]
    messages = [parents.count(rank) + (rank > 0) for rank in range(p)]
    return [(count, count * n) for count in messages]


def hierarchical(p, n, ranks_per_node=2):
    """Reduce-scatter inside a node, a ring of each share between the g nodes, all-gather inside the node.

    A rank of a full node of k owns one share of n / k; in a smaller last node, some own several.
    """
    g, k = -(-p // ranks_per_node), min(p, ranks_per_node)
    expected = []
    for rank in range(p):
        node, place = divmod(rank, ranks_per_node)
        inside = min(ranks_per_node, p - node * ranks_per_node)
        shares = len(range(place, k, inside))
        scattered, gathered, around = k - shares, shares * (inside - 1), shares * 2 * (g - 1)
        expected.append((scattered + gathered + around, (scattered + gathered) * n // k + around * n // (g * k)))
    return expected


def leaders(p, n, ranks_per_node=2):
    """Each rank but its node's first sends all it has to that one; these exchange, and hand the sum on."""
    nodes = -(-p // ranks_per_node)
    between = recursive_doubling(nodes, n)
    expected = [(1, n)] * p
    for node in range(nodes):
        others = min(ranks_per_node, p - node * ranks_per_node) - 1
        messages, sent = between[node]
        expected[node * ranks_per_node] = (messages + others, sent + others * n)
    return expected


EXPECTED = {
    "naive": naive,
    "gather-add": gather_add,
    "tree": tree,
    "ring": ring,
    "recursive-doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
    "direct": ring,
    "hierarchical": hierarchical,
    "leaders": leaders,
}


def test_every_algorithm_has_a_formula():
    assert EXPECTED.keys() == ALL_REDUCES.keys()


@pytest.mark.parametrize("p", range(1, 10))
def test_the_formulas_themselves(p):
    """What is known of the sums: a tree has 2(p − 1) messages; where nodes are full, two levels move a ring's bytes."""
    assert sum(messages for messages, _ in tree(p, BYTES)) == 2 * (p - 1)
    assert sum(messages for messages, _ in gather_add(p, BYTES)) == p * (p - 1)
    for k in (k for k in range(1, p + 1) if p % k == 0):
        assert hierarchical(p, BYTES, k) == [(2 * (k - 1) + 2 * (p // k - 1), 2 * (p - 1) * BYTES // p)] * p
    if p & (p - 1) == 0:
        assert halving_doubling(p, BYTES) == [(2 * (p.bit_length() - 1), 2 * (p - 1) * BYTES // p)] * p


def counted_in_process(program, make_transports):
    transports = [CountingTransport(transport) for transport in make_transports(program.world_size)]
    tensors = [torch.full((ELEMENTS,), 1.0 + rank) for rank in range(program.world_size)]
    run_in_process(program, tensors, transports)
    total = program.world_size * (program.world_size + 1) / 2
    assert all(torch.equal(tensor, torch.full_like(tensor, total)) for tensor in tensors)
    return [(transport.messages_sent, transport.bytes_sent) for transport in transports]


@pytest.mark.parametrize("make_transports", [in_process_transports, nccl_rules_transports])
@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("ranks", range(1, 10))
def test_in_one_process(ranks, name, make_transports):
    program = build(name, ranks)
    expected = EXPECTED[name](ranks, BYTES)
    assert counted_in_process(program, make_transports) == expected
    assert program.messages_sent() == [messages for messages, _ in expected]


@pytest.mark.parametrize("ranks", range(1, 10))
def test_nodes_of_any_size(ranks):
    for name, ranks_per_node in itertools.product(("hierarchical", "leaders"), range(1, ranks + 2)):
        program = build(name, ranks, ranks_per_node=ranks_per_node)
        expected = EXPECTED[name](ranks, BYTES, ranks_per_node)
        assert counted_in_process(program, in_process_transports) == expected, ranks_per_node
        assert program.messages_sent() == [messages for messages, _ in expected]


def counted_on_the_wire(comms):
    """For each algorithm what this rank sends: as its transport counts it, and as it passes torch's own door."""
    found = {}
    for name in ALL_REDUCES:
        tensor = torch.full((ELEMENTS,), 1.0 + comms.rank)
        again = tensor.clone()
        with mock.patch.object(dist, "isend", wraps=dist.isend) as isend:
            comms.all_reduce(tensor, algorithm=name)
        sent = [call.args[0].nbytes for call in isend.call_args_list]
        counting = CountingTransport(comms._group)
        program = build(name, comms.world_size)
        memory = Memory(again, program.goal.slices)
        for work in perform(rounds(program.ranks[comms.rank]), memory, counting, COMBINE["sum"]):
            work.wait()
        total = torch.full_like(tensor, comms.world_size * (comms.world_size + 1) / 2)
        right = torch.equal(tensor, total) and torch.equal(again, total)
        found[name] = right, (counting.messages_sent, counting.bytes_sent), (len(sent), sum(sent))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_between_real_ranks(pool, ranks):
    found = pool.run(counted_on_the_wire, ranks, timeout=50, transport="gloo")
    for name, formula in EXPECTED.items():
        expected = formula(ranks, BYTES)
        assert [of_rank[name] for of_rank in found] == [(True, counts, counts) for counts in expected], name
        assert build(name, ranks).messages_sent() == [messages for messages, _ in expected], name


def test_what_is_not_counted_still_works():
    sender, receiver = map(CountingTransport, in_process_transports(2))
    arrived = torch.zeros(3)
    sender.isend(torch.ones(3), 1)
    receiver.irecv(arrived, 0).wait()
    assert arrived.tolist() == [1.0] * 3
    assert (sender.messages_sent, sender.bytes_sent) == (1, 12)
    assert (receiver.messages_sent, receiver.bytes_sent) == (0, 0)
    assert sender._channels is receiver._channels  # a name of the transport beneath
    with pytest.raises(AttributeError):
        sender.broadcast(arrived)
