"""Shared memory inside of hosts, gloo between them: four ranks of this machine that behave like two hosts.

Every test of `any_pool` runs on this transport, too, in `make test-full`; `tests/hosts/test_mixed.py` has real hosts.
"""

import pytest
import torch

import microparallel as mp
from microparallel.collectives import program_of, resolve
from microparallel.comms import run_in_process
from microparallel.topology.hosts import Hosts, among, hosts_of, transport_between

TURNS = "shm+gloo:0.2+1.3"  # hosts whose ranks take turns


def contribution(rank, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def sums(comms, sizes):
    pairs = comms.group([0, 2]), comms.group([0, 1])
    names = [comms.transport_name, *(pair.transport_name for pair in pairs if pair is not None)]
    for pair in pairs:
        if pair is not None:
            assert pair.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    return names, [comms.all_reduce(contribution(comms.rank, size)) for size in sizes]


def test_auto_runs_the_program_it_stands_for_to_the_bit(pool):
    sizes = (3, 1_000_000)
    chosen = [resolve("all-reduce", "auto", 4, 4 * size, TURNS) for size in sizes]
    assert chosen == ["leaders-0.2+1.3", "hierarchical-0.2+1.3"]
    found = pool.run(sums, 4, sizes, transport=TURNS, timeout=50)
    assert [names for names, _ in found] == [
        [TURNS, "shm", "shm+gloo:0+1"],
        [TURNS, "shm+gloo:0+1"],
        [TURNS, "shm"],
        [TURNS],
    ]
    for number, size in enumerate(sizes):
        tensors = [contribution(rank, size) for rank in range(4)]
        run_in_process(program_of("all-reduce", chosen[number], 4), tensors)
        assert all(torch.equal(results[number], tensors[0]) for _, results in found)


def other_shapes(comms):
    comms.all_reduce(torch.ones(3 if comms.rank == 0 else 4))


def test_ranks_of_a_host_compare_their_calls(pool):
    with pytest.raises(mp.errors.RankFailed, match=r"do not belong together"):
        pool.run(other_shapes, 3, transport="shm+gloo:0-1+2", timeout=3)


@pytest.mark.parametrize(
    ("transport", "ranks", "words"),
    [
        ("shm+gloo:0-1+2-3", 3, "is for 4 ranks, and there are 3"),
        ("shm+gloo:0-1+3", 3, "name the ranks of each host once"),
        ("shm+gloo:0+1:fast", 2, "'fast' is neither a time such as 5ms nor a bandwidth"),
        ("gloo:0+1", 2, "there is no transport 'gloo:0\\+1'"),
    ],
)
def test_refusals(transport, ranks, words):
    with pytest.raises(mp.errors.MicroparallelError, match=words):
        mp.launch(sums, ranks, transport=transport)


def test_names_of_transports():
    hosts = Hosts.of(["a", "b", "a", "b", "c"])
    assert str(hosts) == "0.2+1.3+4"
    assert transport_between(hosts, "1ms,1Gbit") == "shm+gloo:0.2+1.3+4:1ms,1Gbit"
    assert among("shm+gloo:0.2+1.3+4:1ms,1Gbit", [0, 4]) == "shm+gloo:0+1:1ms,1Gbit"
    assert among("shm+gloo:0.2+1.3+4", [1, 3]) == "shm"
    assert hosts_of("shm") is hosts_of("gloo") is None
