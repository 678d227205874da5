"""What torch programs do around collectives: drop works, call before they wait, profile, fork.

Each body runs as it would on gloo. Where gloo gives a result, ours is compared with it.
"""

import gc
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.torch_backend.test_backend import alone, both, is_ours  # noqa: F401
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx, wait_tensor
from torch.profiler import ProfilerActivity, profile

import microparallel as mp

CPU = torch.device("cpu")
LARGE = 300_000  # elements: enough for another thread to be seen at it


# ── works that nobody holds, or nobody waits for ────────────────────────────────────────────────────────────────────


def drop_many(rank):
    """A work that was dropped is kept, since C++ may wait for it: `DDP.join` does. But not for ever."""
    world = dist.group.WORLD
    for size, most in ((1, 64), (100_000, 1)):
        for _ in range(100):
            dist.all_reduce(torch.ones(size), async_op=True)
        dist.barrier()
        dist.all_reduce(torch.ones(1), async_op=True)  # lets the older ones go
        gc.collect()
        assert len(world._dropped._works) <= most
    dist.barrier()


def test_dropped_works_do_not_pile_up(pool, tmp_path):
    alone(pool, tmp_path, drop_many)


def in_flight(group, rank):
    results = []
    with allow_inflight_collective_as_graph_input_ctx():
        for size in (3, LARGE):
            tensor = torch.full((size,), rank + 1.0)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            results.append(wait_tensor(tensor).clone())
            work.wait()
            dist.all_reduce(tensor, group=group, async_op=True)  # dropped
            gc.collect()
            results.append(wait_tensor(tensor).clone())
            gathered = torch.empty(2 * size)
            dist.all_gather_into_tensor(gathered, tensor, group=group, async_op=True).wait()
            results.append(gathered)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0 or not is_ours(group)
    return results


def test_wait_tensor_waits(both):  # noqa: F811
    both(in_flight, ranks=2)


# ── calls that were made before, and not waited for ─────────────────────────────────────────────────────────────────


def one_after_another(rank, size, strided):
    """Each call takes what the one before leaves, on every rank."""
    ranks, works = dist.get_world_size(), []

    def summed(count=1):
        tensors = [torch.full((size, 2), rank + 1.0) for _ in range(count)]
        works.extend(dist.all_reduce(tensor, async_op=True) for tensor in tensors)
        return [tensor.t() for tensor in tensors] if strided else tensors

    def room(count=1):
        return [torch.zeros(2, size) if strided else torch.zeros(size, 2) for _ in range(count)]

    listed, reduced, scattered, handed = room(ranks), room(), room(), room(ranks)
    on_root = room(ranks) if rank == 0 else None
    works.append(dist.all_gather(listed, *summed(), async_op=True))
    works.append(dist.reduce_scatter(*reduced, summed(ranks), async_op=True))
    works.append(dist.gather(*summed(), on_root, async_op=True))
    tensors = summed(ranks)
    works.append(dist.scatter(*scattered, tensors if rank == 0 else None, async_op=True))
    works.append(dist.all_to_all(handed, summed(ranks), async_op=True))
    (halved,) = summed()
    works.append(dist.all_reduce(halved, op=dist._make_nccl_premul_sum(1 / ranks), async_op=True))
    for work in works:
        work.wait()
    results = [*listed, *(on_root or []), *scattered, *handed, halved, reduced[0] / ranks]
    return [tensor.unique().tolist() for tensor in results]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("size", [3, LARGE // 2])
def test_calls_see_what_calls_before_them_have_left(pool, tmp_path, size, strided):
    for results in alone(pool, tmp_path, one_after_another, size, strided):
        assert results == [[3.0]] * len(results)


def sparse_twice(group, rank):
    tensor = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,))
    works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(2 if is_ours(group) else 1)]
    for work in works:
        work.wait()
    if not is_ours(group):
        dist.all_reduce(tensor, group=group)  # gloo's second call would take what the first has not yet summed
    return tensor.to_dense()


def test_sparse_sums_see_what_calls_before_them_have_left(both):  # noqa: F811
    both(sparse_twice, ranks=2)


# ── shapes and sizes that differ ────────────────────────────────────────────────────────────────────────────────────


def other_shapes(group, rank):
    """Ranks agree on the number of elements; the shape is each rank's own."""
    shape = [(6,), (3, 2), (1, 6, 1)][rank]
    tensors = [torch.arange(6.0).view(shape) + rank for _ in range(3)]
    dist.all_reduce(tensors[0], group=group)
    dist.broadcast(tensors[1], 1, group=group)
    gathered = [torch.empty(shape) for _ in range(3)]
    dist.all_gather(gathered, tensors[2], group=group)
    return tensors, gathered


def test_equal_numbers_of_elements_in_other_shapes(both):  # noqa: F811
    both(other_shapes)


def larger_room(group, rank):
    """A message may be smaller than the tensor that it is received into."""
    tensors = [torch.full((2, 3), -1.0) for _ in range(2)]
    if rank == 0:
        dist.send(torch.arange(4.0), 1, group=group)
        dist.send(torch.arange(2.0), 1, group=group, tag=1)
    elif rank == 1:
        dist.recv(tensors[0], 0, group=group)
        dist.recv(tensors[1], None if is_ours(group) else 0, group=group, tag=1)
    return tensors


def test_receiving_into_more_than_is_sent(both):  # noqa: F811
    both(larger_room, ranks=2)


def smaller_room(rank):
    if rank == 0:
        dist.send(torch.arange(4.0), 1)
    else:
        with pytest.raises(mp.errors.CommsError, match="rank 0 sent 16 bytes, and 12 were expected"):
            dist.recv(torch.empty(3), 0)


def test_receiving_into_less_than_is_sent(pool, tmp_path):
    alone(pool, tmp_path, smaller_room)


def uneven_all_to_all(rank):
    sizes = [[1, 2], [2, 1]][rank]
    expected = [1, 2] if rank == 0 else [1, 1]  # rank 0 has two for rank 1
    with pytest.raises(mp.errors.Mismatch) as caught:
        dist.all_to_all_single(torch.empty(sum(expected)), torch.ones(3), expected, sizes)
        dist.barrier()
    return str(caught.value)


def test_sizes_that_differ_are_named_on_all_ranks(pool, tmp_path):
    text = "all_to_all_single(float32): rank 0 has 8 bytes for rank 1, which expects 4"
    assert [text in told for told in alone(pool, tmp_path, uneven_all_to_all)] == [True, True]


# ── one call too many ───────────────────────────────────────────────────────────────────────────────────────────────


def one_too_many(rank, odd):
    told = []
    try:
        if rank == odd:
            dist.broadcast(torch.ones(3), rank)  # its source need not wait for the others
        for size in (5, 6):
            dist.all_reduce(torch.ones(size))
    except mp.errors.Mismatch as error:
        told.append(str(error))
    dist.distributed_c10d._get_default_store().set(f"told/{rank}", "")
    dist.distributed_c10d._get_default_store().wait([f"told/{other}" for other in range(dist.get_world_size())])
    return told


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_call_that_is_one_too_many_is_named(pool, tmp_path, ranks):
    others = "rank 0" if ranks == 2 else "ranks 0, 2"
    first = (
        "the calls of these ranks do not belong together\n"
        f"  {others}: all_reduce(float32[5], op=SUM)\n  rank 1: broadcast(float32[3], src=1)"
    )
    unless = ", unless rank 0 left it out" if ranks == 2 else ""
    then = f"\n  broadcast(float32[3], src=1) of rank 1 is one call too many{unless}: the call after it is all_re"
    results = alone(pool, tmp_path, one_too_many, 1, ranks=ranks)
    for told in results:
        assert len(told) == 1
        assert told[0].startswith(first)
    # It is known as such when that rank has made its next call: on that rank at the latest.
    assert then in results[1][0]


# ── processes that are forked ───────────────────────────────────────────────────────────────────────────────────────


def forked(rank):
    dist.all_reduce(torch.ones(2))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        for call in (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.send(torch.ones(2), 1 - rank), dist.barrier):
            try:
                call()
            except mp.errors.UsageError as error:
                told.append(str(error))
        dist.destroy_process_group()  # of the child's: the parent goes on
        os.write(writer, "\n".join(told).encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reader, 10_000).decode().splitlines()
    os.close(reader)
    os.close(writer)
    total = torch.ones(2)
    dist.all_reduce(total)
    return told, total.tolist()


def test_a_forked_child_cannot_speak_for_its_parent(pool, tmp_path):
    for rank, (told, total) in enumerate(alone(pool, tmp_path, forked)):
        assert total == [2.0, 2.0]
        assert len(told) == 3
        assert all(line.startswith(f"this process was forked from rank {rank} and is no rank itself") for line in told)


# ── what torch asks of a group besides collectives ──────────────────────────────────────────────────────────────────


def profiled(group, rank):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        tensor, other = torch.ones(8), 1 - rank
        for _ in range(2):
            dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        dist.broadcast(tensor, 0, group=group)
        dist.all_gather([torch.empty(8) for _ in range(2)], tensor, group=group)
        dist.all_gather_into_tensor(torch.empty(16), tensor, group=group)
        dist.all_to_all_single(torch.empty(8), tensor, group=group)
        dist.barrier(group=group)
        if rank == 0:
            dist.send(tensor, other, group=group)
        else:
            dist.recv(tensor, other, group=group)
    events = [(event.name, event.input_shapes) for event in recorded.events()]
    if is_ours(group):
        assert ("c10d::allreduce_", [[8]]) in events
        assert any(name == "microparallel:all_gather_into_tensor" for name, _ in events)
        assert any(name == "microparallel:all_to_all_single" for name, _ in events)
    # gloo has other names for some of its own, such as "gloo:all_to_all".
    names = [name.replace("microparallel:", "gloo:") for name, _ in events if "c10d::" in name or "_reduce" in name]
    return torch.tensor(list(" ".join(sorted(names)).encode()))


def test_the_profiler_shows_the_calls_that_it_shows_of_gloo(both):  # noqa: F811
    both(profiled, ranks=2)


def sequence_numbers(group, rank):
    numbers = [group._get_sequence_number_for_group()]
    tensor = torch.ones(2)
    for call in (dist.all_reduce, dist.barrier, lambda *_, **given: dist.broadcast(tensor, 0, **given)):
        call(*[tensor] if call is dist.all_reduce else [], group=group)
        numbers.append(group._get_sequence_number_for_group())
    return torch.tensor(numbers)


def test_sequence_numbers(both):  # noqa: F811
    both(sequence_numbers)


def asked(rank):
    world = dist.group.WORLD
    options = world._get_backend(CPU).options
    assert world._get_backend(torch.device("cuda")) is world._get_backend(CPU)  # it carries both
    with pytest.raises(RuntimeError, match=r"of one GPU.*on xpu.*cpu:microparallel,xpu:gloo"):
        world._get_backend(torch.device("xpu"))
    return options._timeout, options.backend, options.global_ranks_in_group, options.group_name == world.group_name


def test_options_and_devices_without_a_backend(pool, tmp_path):
    for result in alone(pool, tmp_path, asked):
        assert result == (timedelta(seconds=20), "microparallel", [0, 1], True)
