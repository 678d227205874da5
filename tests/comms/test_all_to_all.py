"""The exchange: every rank has something of its own for every other, of any size."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import microparallel as mp
from microparallel.program import from_text

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.uint8, torch.complex64]


def content(case, source, to):
    """What one rank has for another: known to all, so that each can say what it should get."""
    dtype, shape = case[source][to]
    return (torch.arange(shape[0] * shape[1]).view(shape) + 10 * source + to).remainder(97).to(DTYPES[dtype])


def exchanges(comms, cases):
    """Each case in every way of calling; returns the cases that went wrong."""
    wrong = []
    for number, case in enumerate(cases):
        mine = [content(case, comms.rank, to) for to in range(comms.world_size)]
        wanted = [content(case, source, comms.rank) for source in range(comms.world_size)]
        transposed = [tensor.t().contiguous().t() for tensor in mine]
        into = [torch.zeros_like(tensor) for tensor in wanted]
        requests = [
            comms.all_to_all(transposed, async_op=True),
            comms.all_to_all(mine, [torch.zeros_like(tensor) for tensor in wanted], async_op=True),
        ]
        results = [comms.all_to_all(mine), comms.all_to_all(transposed, into), into]
        results += [request.wait() for request in requests]
        for way, got in enumerate(results):
            same = [
                one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(got, wanted, strict=True)
            ]
            if not all(same):
                wrong.append((number, way))
    return wrong


@st.composite
def worlds(draw):
    ranks = draw(st.integers(1, 4))
    sizes = st.tuples(st.integers(0, 4), st.integers(0, 3))
    tensor = st.tuples(st.integers(0, len(DTYPES) - 1), sizes)
    square = st.lists(st.lists(tensor, min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks)
    return ranks, draw(st.lists(square, min_size=1, max_size=6)), draw(st.booleans())


@settings(
    max_examples=12,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(world=worlds())
def test_any_shapes_and_dtypes(any_pool, world):
    ranks, cases, check = world
    assert any_pool.run(exchanges, ranks, cases, check=check, timeout=50) == [[]] * ranks


def beside_torch(comms, sizes):
    """The same exchange by torch's own, of rows of different length."""
    mine = [torch.randn(sizes[comms.rank][to], 3) for to in range(comms.world_size)]
    wanted = [torch.empty(sizes[source][comms.rank], 3) for source in range(comms.world_size)]
    rows = torch.empty(sum(len(tensor) for tensor in wanted), 3)
    dist.all_to_all_single(rows, torch.cat(mine), [len(one) for one in wanted], [len(one) for one in mine])
    return torch.equal(torch.cat(comms.all_to_all(mine)), rows)


def test_as_torch_does_it(any_pool):
    sizes = [[0, 3, 1], [2, 2, 7], [5, 0, 4]]
    assert any_pool.run(beside_torch, 3, sizes, timeout=50) == [True] * 3


def large(comms):
    """More than fits into one block or slot, both where peers read it and where it must be copied."""
    one = torch.arange(3_000_000.0)
    got = comms.all_to_all([one + 10 * comms.rank + to for to in range(comms.world_size)])
    wanted = [one + 10 * source + comms.rank for source in range(comms.world_size)]
    return all(map(torch.equal, got, wanted))


def test_large_tensors(any_pool):
    assert any_pool.run(large, 2, timeout=50) == [True] * 2


def several_at_once(comms):
    """Exchanges and sums that are under way together, waited for in another order."""
    ranks, rank = comms.world_size, comms.rank
    into = [[torch.zeros(1) for _ in range(ranks)] for _ in range(3)]
    first, second, third = (
        comms.all_to_all([torch.tensor([100.0 * step + 10 * rank + to]) for to in range(ranks)], room, async_op=True)
        for step, room in enumerate(into)
    )
    total = comms.all_reduce(torch.tensor([1.0]), async_op=True)
    third.wait(), total.wait(), first.wait(), second.wait()
    wanted = [[100.0 * step + 10 * source + rank for source in range(ranks)] for step in range(3)]
    return [[tensor.item() for tensor in room] for room in into] == wanted


def test_requests_end_in_any_order(any_pool):
    assert any_pool.run(several_at_once, 3, timeout=50) == [True] * 3


def in_a_group(comms):
    group = comms.group([1, 2])
    if group is None:
        return None
    return [one.item() for one in group.all_to_all([torch.tensor(10 * group.rank + to) for to in range(2)])]


def test_in_a_smaller_group(any_pool):
    assert any_pool.run(in_a_group, 3, timeout=50) == [None, [0, 10], [1, 11]]


def refusals(comms):
    texts = []
    for arguments in (([torch.zeros(1)],), ([torch.zeros(1)] * 2, [torch.zeros(1)] * 3)):
        with pytest.raises(mp.errors.UsageError) as caught:
            comms.all_to_all(*arguments)
        texts.append(str(caught.value))
    with pytest.raises(mp.errors.Mismatch) as caught:
        room = [torch.zeros(1), torch.zeros(1)]
        room[comms.rank] = torch.zeros(5)
        comms.all_to_all([torch.zeros(1)] * 2, room)
    return [*texts, str(caught.value)]


def test_refusals(any_pool):
    lists, rooms, own = any_pool.run(refusals, 2, timeout=50)[1]
    assert lists == "all_to_all: tensors needs one tensor for each of 2 ranks, not 1"
    assert rooms == "all_to_all: into needs one tensor for each of 2 ranks, not 3"
    assert own == "all_to_all: rank 1 has float32[1] for rank 1, which receives it into float32[5]"


def other_sizes(comms):
    room = [torch.zeros(2), torch.zeros(2)]
    try:
        comms.all_to_all([torch.zeros(2)] * 2 if comms.rank else [torch.zeros(2), torch.zeros(3)], room)
    except (mp.errors.Mismatch, mp.errors.PeerLost) as error:
        return str(error).partition("\n")[0]


def test_room_of_another_size_is_noticed_in_checked_mode(any_pool):
    found = any_pool.run(other_sizes, 2, check=True, timeout=50)
    assert found[1] == "all_to_all: rank 0 has float32[3] for rank 1, which receives it into float32[2]"


# ── the program ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_what_it_costs(ranks):
    """Of a rank's n bytes, a p-th goes to each of the others, one after another."""
    program = mp.collectives.build("all-to-all", ranks)
    trace = mp.simulate(program, mp.Costs(latency=5, seconds_per_byte=2, bytes_per_value=24))
    assert trace.makespan == (ranks - 1) * (5 + 2 * 24 / ranks)
    assert trace.bytes_sent == [(ranks - 1) * 24 / ranks] * ranks


def test_sizes_of_pairs_can_differ():
    """There is a name for each pair, so a rank that is handed more than others can be simulated."""
    program = mp.collectives.build("all-to-all", 3)
    crowded = mp.simulate(
        program, mp.Costs(seconds_per_byte=1, bytes_per_value=lambda one: 10 if one.start % 3 == 0 else 1)
    )
    assert crowded.bytes_sent == [2, 11, 11]
    assert crowded.makespan >= 20  # rank 0 receives twice 10


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        (("", "", ""), "among 3 ranks has a slice for each pair, 9 in all, not 4"),
        ((">C1@1", "<C1@0"), "rank 0 ends with nothing in slice 2, and should have rank 1's part"),
        ((">C0@1 <C0@1", ">C0@0 <C0@0"), "deadlock"),
        ((">C1@1 <C2@1 <C3@1", ">C2@0 <C1@0 >C3@0 C3+=C2"), "rank 1 ends with rank 1's part of slice 2"),
    ],
)
def test_what_is_wrong_is_named(ops, words):
    rows = [f"rank {rank}: {row}" for rank, row in enumerate(ops)]
    with pytest.raises(mp.errors.ProgramError, match=words):
        mp.verify(from_text("\n".join(["program x", "goal: all-to-all of 4 slices", *rows])))
