"""Every all-reduce program, run on tensors: in one process, and between real ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import microparallel as mp
from microparallel.collectives import ALGORITHMS, ALL_REDUCES, OTHERS, build, program_of, resolve
from microparallel.collectives.hierarchical import best_all_reduce
from microparallel.comms import run_in_process
from microparallel.program import Collective
from microparallel.topology.hosts import Hosts

each_algorithm = pytest.mark.parametrize("name", ALL_REDUCES)


def contributions(ranks, size, dtype=torch.float32):
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for generator in generators]


@each_algorithm
@settings(max_examples=60, derandomize=True)
@given(ranks=st.integers(1, 12), size=st.integers(0, 40), per_node=st.integers(1, 5))
def test_in_one_process(name, ranks, size, per_node):
    options = {"ranks_per_node": per_node} if name in ("hierarchical", "leaders") else {}
    whole = torch.arange(size)
    integers = [whole + 100 * rank for rank in range(ranks)]
    mp.all_reduce_in_process(name, integers, **options)
    assert all(torch.equal(tensor, ranks * whole + 50 * ranks * (ranks - 1)) for tensor in integers)
    floats = contributions(ranks, size)
    mp.all_reduce_in_process(name, floats, **options)
    assert all(torch.equal(floats[0], tensor) for tensor in floats)  # the same bits on every rank


def test_tensors_of_any_shape_and_layout():
    tensors = [torch.arange(6.0).view(2, 3).t() + rank for rank in range(3)]
    mp.all_reduce_in_process("ring", tensors)
    assert all(torch.equal(tensor, 3 * torch.arange(6.0).view(2, 3).t() + 3) for tensor in tensors)


def through_comms(comms, sizes):
    wrong = []
    for name in ALL_REDUCES:
        for size in sizes:
            tensor = torch.arange(size) + 100 * comms.rank
            comms.all_reduce(tensor, algorithm=name)
            wanted = comms.world_size * torch.arange(size) + 50 * comms.world_size * (comms.world_size - 1)
            if not torch.equal(tensor, wanted):
                wrong.append((name, size))
        for op in ("mean", "min", "max", "product"):
            ours = torch.arange(1.0, 6.0) + comms.rank
            theirs = ours.clone()
            if not torch.equal(comms.all_reduce(ours, op=op, algorithm=name), comms.all_reduce(theirs, op=op)):
                wrong.append((name, op))
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_between_ranks(any_pool, ranks):
    assert any_pool.run(through_comms, ranks, [0, 1, 3, 1000], check=ranks == 3, timeout=50) == [[]] * ranks


def same_bits(comms, name):
    return comms.all_reduce(contributions(comms.world_size, 1001)[comms.rank], algorithm=name)


@each_algorithm
def test_ranks_end_with_the_bits_of_the_one_process_run(any_pool, name):
    tensors = contributions(3, 1001)
    mp.all_reduce_in_process(name, tensors)
    for result in any_pool.run(same_bits, 3, name, timeout=50):
        assert torch.equal(result, tensors[0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mp.all_reduce_in_process("rings", [torch.zeros(1)]), "did you mean 'ring'"),
        (lambda: mp.all_reduce_in_process("ring", []), "list of tensors is empty"),
        (
            lambda: mp.all_reduce_in_process("ring", [torch.zeros(2), torch.zeros(3)]),
            r"tensor 1 is float32\[3\], and tensor 0 is float32\[2\]",
        ),
        (lambda: build("ring", 0), "at least 1 rank"),
        (lambda: build("ring", 4, ranks_per_node=2), "does not take ranks_per_node"),
        (lambda: build("hierarchical-0-1+2-3", 5), "is for 4 ranks, and there are 5"),
        (lambda: build("hierarchical-0-1+3", 4), "name the ranks of each host once, from rank 0 on"),
        (lambda: resolve("all-gather", "leaders-0-1+2-3", 4, 1, "gloo"), "there is no all-gather algorithm 'leaders-0"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(mp.errors.UsageError, match=words):
        call()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 9])
def test_messages_sent(ranks):
    """The counts of the literature; a fold adds messages of its own when the ranks are no power of two."""
    messages = {name: build(name, ranks).messages_sent() for name in ALL_REDUCES}
    assert messages["naive"] == [ranks - 1] + [1] * (ranks - 1)
    assert messages["gather-add"] == [ranks - 1] * ranks
    assert messages["ring"] == messages["direct"] == [2 * (ranks - 1)] * ranks
    assert sum(messages["tree"]) == 2 * (ranks - 1)
    if ranks & (ranks - 1) == 0:
        steps = ranks.bit_length() - 1
        assert messages["recursive-doubling"] == [steps] * ranks
        assert messages["halving-doubling"] == [2 * steps] * ranks


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_the_other_collectives(name, ranks):
    """Slice s of rank r starts as 1000 r + s + 1; what ends where follows from the kind."""
    program = build(name, ranks)
    assert isinstance(program.goal, Collective)
    kind = program.goal.kind
    assert name.partition("-")[2] == kind if name.startswith(("direct", "hierarchical", "leaders")) else name == kind
    slices = program.goal.slices
    tensors = [torch.arange(slices) + 1000 * rank + 1 for rank in range(ranks)]
    before = [tensor.clone() for tensor in tensors]
    run_in_process(program, tensors)
    total = sum(before)
    own = torch.stack([before[index][index] for index in range(slices)]) if slices == ranks else None
    for rank, tensor in enumerate(tensors):
        if kind == "reduce-scatter":
            assert tensor[rank] == total[rank]
        elif kind == "all-gather" or (kind == "gather" and rank == 0):
            assert torch.equal(tensor, own)
        elif kind == "all-to-all":  # a row of a square before, and a column afterwards
            assert tensor.view(ranks, ranks)[:, rank].tolist() == [
                1000 * source + source * ranks + rank + 1 for source in range(ranks)
            ]
        elif kind == "broadcast":
            assert torch.equal(tensor, before[0])
        elif kind == "reduce" and rank == 0:
            assert torch.equal(tensor, total)
        elif kind == "scatter":
            assert tensor[rank] == before[0][rank]


ROOTED = ("broadcast", "direct-broadcast", "leaders-broadcast", "reduce", "direct-reduce", "leaders-reduce")


@pytest.mark.parametrize("name", [*ROOTED, "scatter", "gather"])
def test_any_rank_may_be_the_root(name):
    for ranks in (1, 2, 3, 4, 6):
        for root in range(ranks):
            program = build(name, ranks, root=root)
            assert program.goal.root == root
            mp.verify(program)


@settings(max_examples=60, derandomize=True)
@given(
    hosts=st.integers(2, 5),
    per_host=st.integers(1, 4),
    size=st.sampled_from([8, 4e3, 1e5, 1e6, 3e6, 1e8]),
    latency=st.sampled_from([2e-5, 2e-4, 5e-3]),
    megabits=st.sampled_from([10, 100, 1000, 10_000]),
)
def test_what_auto_takes_between_hosts_is_about_as_quick_as_the_other(hosts, per_host, size, latency, megabits):
    """The formulas beside the simulator, which knows that messages wait for each other at a host's port."""
    layout, between = Hosts.alike(hosts * per_host, per_host), mp.Link(latency, 8e-6 / megabits)
    inside = mp.Link(2e-5, 0.25e-9)
    costs = mp.Costs.cluster(nodes=hosts, per_node=per_host, inside=inside, between=between, bytes_per_value=size)
    took = {
        name: mp.simulate(build(name, hosts * per_host, ranks_per_node=per_host), costs).makespan
        for name in ("leaders", "hierarchical")
    }
    assert took[best_all_reduce(layout, between, size)] <= 1.5 * min(took.values())


@pytest.mark.parametrize("transport", ["shm", "gloo", "nccl", "shm+gloo:0-1+2-3", "shm+gloo:0.2+1.3:1ms,10Mbit"])
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_auto_stands_for_an_algorithm_on_every_transport(collective, transport):
    for size in (1, 2**30):
        algorithm = resolve(collective, "auto", 4, size, transport)
        assert resolve(collective, algorithm, 4, size, transport) == algorithm
        program = program_of(collective, algorithm, 4)
        assert program.goal.kind == collective
        mp.verify(program)
    with pytest.raises(mp.errors.UsageError, match=f"there is no {collective} algorithm 'rink'; "):
        resolve(collective, "rink", 4, 1, transport)
