"""Every collective against a reference in plain Python, over shapes, dtypes, layouts and world sizes."""

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from microparallel.comms import Request

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
LAYOUTS = ["contiguous", "transposed", "strided"]
MOST_RANKS = 5

# No shrinking: a failure costs a restart of all ranks, and the cases are small as they are.
a_property = settings(
    max_examples=10,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
cases = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.sampled_from(LAYOUTS),
        st.integers(0, MOST_RANKS - 1),
    ),
    min_size=1,
    max_size=8,
)
world_sizes = st.integers(1, MOST_RANKS)


def values(rank, dtype, shape, salt=0):
    """Small whole numbers that differ between ranks and are exact in every dtype, sums and products included."""
    numbers = [(7 * rank + 3 * index + salt) % 5 - 2 for index in range(math.prod(shape))]
    if dtype == torch.bool:
        return [number > 0 for number in numbers]
    return [abs(number) for number in numbers] if dtype == torch.uint8 else numbers


def make(rank, dtype, shape, layout="contiguous", salt=0):
    plain = torch.tensor(values(rank, dtype, shape, salt), dtype=dtype).reshape(shape)
    if layout == "transposed" and plain.dim() > 1:
        return plain.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        roomy = torch.zeros(*plain.shape, 2, dtype=dtype)
        roomy[..., 0] = plain
        return roomy[..., 0]
    return plain


def same(tensor, numbers, dtype, shape):
    return (
        tensor.dtype == dtype
        and tuple(tensor.shape) == tuple(shape)
        and tensor.tolist() == torch.tensor(numbers, dtype=dtype).reshape(shape).tolist()
    )


def combined(op, world_size, dtype, shape, salt=0):
    columns = zip(*(values(rank, dtype, shape, salt) for rank in range(world_size)), strict=True)
    combine = {"sum": sum, "min": min, "max": max, "product": math.prod, "mean": lambda c: sum(c) / world_size}[op]
    return [combine(column) for column in columns]


def root_of(case, comms):
    return case[3] % comms.world_size


def check_each(comms, cases, check):
    """Run one check for every case, with tensors on the rank's device, and say which failed."""
    with comms.device:
        return [case for case in cases if not check(comms, *case[:3], root_of(case, comms))]


def check_broadcast(comms, dtype, shape, layout, root):
    tensor = make(comms.rank, dtype, shape, layout)
    result = comms.broadcast(tensor, src=root)
    return result is tensor and same(tensor, values(root, dtype, shape), dtype, shape)


def check_all_gather(comms, dtype, shape, layout, root):
    mine = make(comms.rank, dtype, shape, layout)
    parts = comms.all_gather(mine)
    return len(parts) == comms.world_size and all(
        same(part, values(rank, dtype, shape), dtype, shape) for rank, part in enumerate(parts)
    )


def check_gather(comms, dtype, shape, layout, root):
    parts = comms.gather(make(comms.rank, dtype, shape, layout), dst=root)
    if comms.rank != root:
        return parts is None
    return all(same(part, values(rank, dtype, shape), dtype, shape) for rank, part in enumerate(parts))


def check_scatter(comms, dtype, shape, layout, root):
    # a different shape for every rank, which the receivers cannot know
    shapes = [(*shape, rank) if rank % 2 else shape for rank in range(comms.world_size)]
    parts = [make(root, dtype, each, layout, salt=rank) for rank, each in enumerate(shapes)]
    mine = comms.scatter(parts if comms.rank == root else None, src=root)
    return same(mine, values(root, dtype, shapes[comms.rank], salt=comms.rank), dtype, shapes[comms.rank])


def check_all_reduce(comms, dtype, shape, layout, root):
    for op in ["sum", "min", "max", "product"] + (["mean"] if dtype.is_floating_point else []):
        tensor = make(comms.rank, dtype, shape, layout)
        result = comms.all_reduce(tensor, op=op)
        if result is not tensor or not same(tensor, combined(op, comms.world_size, dtype, shape), dtype, shape):
            return False
    return True


def check_reduce(comms, dtype, shape, layout, root):
    for op in ["sum", "min", "max", "product"] + (["mean"] if dtype.is_floating_point else []):
        tensor = make(comms.rank, dtype, shape, layout)
        comms.reduce(tensor, dst=root, op=op)
        mine = values(comms.rank, dtype, shape)
        wanted = combined(op, comms.world_size, dtype, shape) if comms.rank == root else mine
        if not same(tensor, wanted, dtype, shape):
            return False
    return True


def check_reduce_scatter(comms, dtype, shape, layout, root):
    for uneven in (False, True):
        shapes = [(*shape, rank) if uneven else shape for rank in range(comms.world_size)]
        parts = [make(comms.rank, dtype, each, layout, salt=rank) for rank, each in enumerate(shapes)]
        mine = comms.reduce_scatter(parts)
        wanted = combined("sum", comms.world_size, dtype, shapes[comms.rank], salt=comms.rank)
        if not same(mine, wanted, dtype, shapes[comms.rank]):
            return False
    return True


def check_messages(comms, dtype, shape, layout, root):
    """Round the ring without blocking, then down the line with blocking sends."""
    after, before = (comms.rank + 1) % comms.world_size, (comms.rank - 1) % comms.world_size
    if comms.world_size == 1:
        return True
    receive = comms.irecv(shape, before, dtype)
    send = comms.isend(make(comms.rank, dtype, shape, layout), after)
    around = receive.wait()
    send.wait()
    down = comms.recv_tensor(shape, comms.prev_rank, dtype) if comms.prev_rank is not None else None
    if comms.next_rank is not None:
        comms.send_tensor(make(comms.rank, dtype, shape, layout), comms.next_rank)
    return same(around, values(before, dtype, shape), dtype, shape) and (
        down is None or same(down, values(before, dtype, shape), dtype, shape)
    )


CHECKS = [
    check_broadcast,
    check_all_gather,
    check_gather,
    check_scatter,
    check_all_reduce,
    check_reduce,
    check_reduce_scatter,
    check_messages,
]


each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))


@each_check
@a_property
@given(world_size=world_sizes, cases=cases, checked=st.booleans())
def test_against_plain_python(any_pool, check, world_size, cases, checked):
    wrong = any_pool.run(check_each, world_size, cases, check, check=checked, timeout=30)
    assert wrong == [[]] * world_size


@pytest.mark.slow
@pytest.mark.timeout(300)
@each_check
@settings(a_property, max_examples=100)
@given(world_size=world_sizes, cases=cases, checked=st.booleans())
def test_many_cases_against_plain_python(any_pool, check, world_size, cases, checked):
    wrong = any_pool.run(check_each, world_size, cases, check, check=checked, timeout=30)
    assert wrong == [[]] * world_size


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_check
@a_property
@given(world_size=world_sizes, cases=cases, checked=st.booleans())
def test_on_a_gpu(pool, check, world_size, cases, checked):
    """NCCL where every rank can have a GPU of its own, else gloo, staged through the host."""
    world = {"transport": "nccl" if world_size <= torch.cuda.device_count() else "gloo", "device": "cuda"}
    wrong = pool.run(check_each, world_size, cases, check, check=checked, timeout=30, **world)
    assert wrong == [[]] * world_size


def random_floats(comms, dtype):
    generator = torch.Generator().manual_seed(comms.rank)
    tensor = torch.randn(1001, generator=generator, dtype=torch.float64).to(dtype)
    return comms.all_reduce_mean(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_rank_holds_the_same_bits(any_pool, dtype):
    results = any_pool.run(random_floats, 4, dtype, timeout=30)
    assert all(torch.equal(results[0], result) for result in results)


def every_collective(comms):
    """A call of each, which takes `async_op`; every one of them is on tensors of its own."""

    def mine(size=5):
        return torch.arange(float(size)) + 10 * comms.rank

    def parts():
        return [mine(size) + 100 * size for size in range(comms.world_size)]

    last = comms.world_size - 1
    return {
        "barrier": lambda **how: comms.barrier(**how),
        "broadcast": lambda **how: comms.broadcast(mine(), src=last, **how),
        "scatter": lambda **how: comms.scatter(parts() if comms.rank == last else None, src=last, **how),
        "gather": lambda **how: comms.gather(mine(), dst=last, **how),
        "all_gather": lambda **how: comms.all_gather(mine(), **how),
        "reduce": lambda **how: comms.reduce(mine(), dst=last, **how),
        "reduce_scatter": lambda **how: comms.reduce_scatter([mine()] * comms.world_size, op="max", **how),
        "reduce_scatter of other shapes": lambda **how: comms.reduce_scatter(parts(), **how),
        "all_reduce": lambda **how: comms.all_reduce(mine(), op="product", **how),
        "all_reduce by a ring": lambda **how: comms.all_reduce(mine(), algorithm="ring", **how),
        "all_reduce_mean": lambda **how: comms.all_reduce_mean(mine(), **how),
        "all_to_all": lambda **how: comms.all_to_all(parts(), **how),
    }


def listed(result):
    """A result in plain numbers."""
    return [listed(one) for one in result] if isinstance(result, list) else None if result is None else result.tolist()


def with_and_without_async_op(comms):
    calls = every_collective(comms)
    wanted = {name: listed(call()) for name, call in calls.items()}
    requests = {name: call(async_op=True) for name, call in calls.items()}  # all of them are under way together
    are_requests = all(isinstance(request, Request) for request in requests.values())
    found = {name: listed(request.wait()) for name, request in reversed(requests.items())}
    again = {name: listed(request.wait()) for name, request in requests.items()}
    return are_requests, wanted, found, again


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("check", [False, True])
def test_async_op_returns_a_request_for_the_same_result(any_pool, ranks, check):
    for are_requests, wanted, found, again in any_pool.run(with_and_without_async_op, ranks, check=check, timeout=30):
        assert are_requests
        assert found == wanted
        assert again == wanted


def late_barrier(comms):
    """A barrier in the background lets its rank go on, and is complete only when the other rank has come."""
    if comms.rank == 1:
        comms.recv((1,), 0)  # sent when rank 0 has gone on
        comms.barrier()
        return None
    request = comms.barrier(async_op=True)
    comms.send(torch.zeros(1), 1)
    return request.wait()


def test_a_barrier_with_async_op_does_not_stop_its_rank(any_pool):
    assert any_pool.run(late_barrier, 2, timeout=30) == [None, None]


def several_under_way(comms):
    tensors = [torch.full((size,), float(comms.rank + size)) for size in (1, 1000, 7)]
    requests = [comms.all_reduce(tensor, async_op=True) for tensor in tensors]
    return [request.wait() is tensor for request, tensor in zip(reversed(requests), reversed(tensors), strict=True)] + [
        tensor[0].item() for tensor in tensors
    ]


def test_several_collectives_under_way(any_pool):
    for result in any_pool.run(several_under_way, 3, timeout=30):
        assert result == [True, True, True, 0 + 1 + 2 + 3 * 1, 3 + 3 * 1000, 3 + 3 * 7]
