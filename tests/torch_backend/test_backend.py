"""The torch backend "microparallel": every call gives what gloo gives, and torch's own wrappers run on it unchanged."""

import gc
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import microparallel as mp
from microparallel._torch_entry import register

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)


def start(comms, path, timeout=20.0, backend="microparallel"):
    comms.close()  # the ranks that the pool has made are a world already
    register()  # torch does it by itself where the package is installed; a working tree may be older
    store = dist.FileStore(str(path), comms.world_size)
    dist.init_process_group(
        backend, store=store, rank=comms.rank, world_size=comms.world_size, timeout=timedelta(seconds=timeout)
    )


def in_both(comms, path, body, arguments):
    """Run a body on our group and on one of gloo's, from the same random state."""
    start(comms, path)
    try:
        results = []
        for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
            torch.manual_seed(comms.rank)
            results.append(body(group, comms.rank, *arguments))
        return results
    finally:
        dist.destroy_process_group()


@pytest.fixture
def both(pool, tmp_path):
    """Compares what a body returns on our group and on gloo's; gives our results, of all ranks."""

    def run(body, *arguments, ranks=3):
        results = pool.run(in_both, ranks, tmp_path / "store", body, arguments, transport="shm")
        for ours, gloos in results:
            torch.testing.assert_close(ours, gloos)
        return [ours for ours, _ in results]

    return run


def alone(pool, tmp_path, body, *arguments, ranks=2, **options):
    tmp_path.mkdir(exist_ok=True)
    return pool.run(started, ranks, tmp_path / "store", body, arguments, options, transport="shm")


def started(comms, path, body, arguments, options):
    start(comms, path, **options)
    try:
        return body(comms.rank, *arguments)
    finally:
        dist.destroy_process_group()


def numbers(dtype, shape=(7, 3)):
    return torch.randint(0, 5, shape).to(dtype) + (torch.rand(shape).to(dtype) if dtype.is_floating_point else 0)


# ── combining ───────────────────────────────────────────────────────────────────────────────────────────────────────


def all_reduce(group, rank, op, dtypes):
    tensors = [numbers(dtype) for dtype in dtypes]
    for tensor in tensors:
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), group=group)
    return tensors


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_all_reduce(both, op):
    ours = both(all_reduce, op, FLOATS + INTEGERS)
    for of_rank in ours[1:]:
        torch.testing.assert_close(of_rank, ours[0], rtol=0, atol=0)


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_all_reduce_of_bits(both, op):
    both(all_reduce, op, INTEGERS)


def test_reductions_that_gloo_lacks(pool, tmp_path):
    def body(rank):
        average, truncated = torch.tensor([1.0, 2.0]) * (rank + 1), torch.tensor([1, 2, 3]) + rank
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        dist.all_reduce(truncated, op=dist.ReduceOp.AVG)
        premultiplied = torch.ones(3)
        dist.all_reduce(premultiplied, op=dist._make_nccl_premul_sum(0.5))
        short, boolean = torch.tensor([300, -2], dtype=torch.int16), torch.tensor([rank == 0, False])
        dist.all_reduce(short)
        dist.all_reduce(boolean)
        return [tensor.tolist() for tensor in (average, truncated, premultiplied, short, boolean)]

    for result in alone(pool, tmp_path, body):
        assert result == [[1.5, 3.0], [1, 2, 3], [1.0, 1.0, 1.0], [600, -4], [True, False]]


def reduce_everything(group, rank):
    results = []
    for root in range(group.size()):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            tensor = numbers(torch.float32)
            dist.reduce(tensor, root, op=op, group=group)
            results.append(tensor if rank == root else torch.zeros(()))
    return results


def reduce_scatter(group, rank):
    output, listed = torch.empty(4), [numbers(torch.float32, (4,)) for _ in range(group.size())]
    dist.reduce_scatter(output, listed, group=group)
    single, entire = torch.empty(2, 5), numbers(torch.float32, (2 * group.size(), 5))
    dist.reduce_scatter_tensor(single, entire, group=group)
    return output, single


# ── moving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def broadcast(group, rank):
    tensors = [numbers(dtype) for dtype in (*FLOATS, *INTEGERS)]
    for index, tensor in enumerate(tensors):
        dist.broadcast(tensor, index % group.size(), group=group)
    return tensors


def all_gather(group, rank):
    tensor = numbers(torch.float32)
    listed = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(listed, tensor, group=group)
    rows = torch.empty(7 * group.size(), 3)
    dist.all_gather_into_tensor(rows, tensor, group=group)
    if is_ours(group):  # gloo refuses this shape, NCCL takes it
        stacked = torch.empty(group.size(), 7, 3)
        dist.all_gather_into_tensor(stacked, tensor, group=group)
        assert torch.equal(stacked.view_as(rows), rows)
    return listed, rows


def gather_and_scatter(group, rank):
    results = []
    for root in range(group.size()):
        tensor, here = numbers(torch.float32), rank == root
        listed = [torch.empty_like(tensor) for _ in range(group.size())] if here else None
        dist.gather(tensor, listed, dst=root, group=group)
        output = torch.empty_like(tensor)
        dist.scatter(output, [2 * row for row in listed] if here else None, src=root, group=group)
        results.append((listed or [], output))
    return results


def all_to_all(group, rank):
    if is_ours(group):  # gloo wants one size, or has no such call before torch 2.13; NCCL takes this
        larger = [torch.empty(rank + source + 1) for source in range(group.size())]
        dist.all_to_all(larger, [torch.full((rank + to + 1,), 10.0 * rank + to) for to in range(group.size())])
        assert [tensor.unique().tolist() for tensor in larger] == [
            [10.0 * source + rank] for source in range(group.size())
        ]
    equal = torch.empty(2 * group.size(), 2)
    dist.all_to_all_single(equal, numbers(torch.float32, (2 * group.size(), 2)), group=group)
    sizes = [rank + other for other in range(group.size())]
    uneven = torch.empty(sum(sizes), 2)
    dist.all_to_all_single(uneven, numbers(torch.float32, (sum(sizes), 2)), sizes, sizes, group=group)
    return equal, uneven


def messages(group, rank):
    ranks = group.size()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    first, second = torch.empty(3), torch.empty(2, dtype=torch.int64)
    # Received in another order than sent: tags tell them apart.
    sent = [
        dist.isend(torch.full((3,), float(rank)), after, group=group, tag=7),
        dist.isend(torch.tensor([rank, rank]), after, group=group, tag=8),
    ]
    received = [dist.irecv(second, before, group=group, tag=8), dist.irecv(first, before, group=group, tag=7)]
    for work in received + sent:
        work.wait()
    third = torch.empty(4)
    if rank == 0:
        dist.send(torch.arange(4.0), 1, group=group)
    elif rank == 1:
        dist.recv(third, 0, group=group)
    fourth = torch.empty(5)
    operations = [
        dist.P2POp(dist.isend, torch.full((5,), rank + 0.5), after, group=group),
        dist.P2POp(dist.irecv, fourth, before, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return first, second, third if rank == 1 else torch.zeros(()), fourth


def objects(group, rank):
    gathered = [None] * group.size()
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank}, group=group)
    received = [{"from": rank}, rank]
    dist.broadcast_object_list(received, src=1, group=group)
    on_root = [None] * group.size() if rank == 0 else None
    dist.gather_object(rank, on_root, dst=0, group=group)
    mine = [None]
    dist.scatter_object_list(
        mine, [f"for {to}" for to in range(group.size())] if rank == 2 else None, src=2, group=group
    )
    return torch.tensor(list(str((gathered, received, on_root, mine)).encode()))


def odd_shapes(group, rank):
    scalar, nothing, strided = torch.tensor(rank + 1.0), torch.empty(0, 3), torch.arange(12.0).view(3, 4).t()
    column = torch.zeros(4, 3)
    for tensor in (scalar, nothing, strided, column[:, 1]):
        tensor.add_(rank)
        dist.all_reduce(tensor if tensor.is_contiguous() or is_ours(group) else tensor.contiguous(), group=group)
    gathered = [torch.empty(()) for _ in range(group.size())]
    dist.all_gather(gathered, scalar, group=group)
    empties = [torch.empty(0, 2) for _ in range(group.size())]
    dist.all_gather(empties, torch.empty(0, 2), group=group)
    dist.broadcast(nothing, 0, group=group)
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(parameter, 1, group=group)
    return scalar, nothing, gathered, empties, parameter.detach()


def is_ours(group):
    return dist.get_backend(group) == "microparallel"


def coalesced(group, rank):
    tensors = [numbers(torch.float32, (size,)) for size in (3, 5)]
    with dist._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    inputs = [numbers(torch.float32, (size,)) for size in (2, 4)]
    outputs = [torch.empty(size * group.size()) for size in (2, 4)]
    with dist._coalescing_manager(group, async_ops=True) as together:
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, tensor, group=group)
    together.wait()
    scattered = [torch.empty_like(tensor) for tensor in inputs]
    with dist._coalescing_manager(group, async_ops=True) as together:
        for tensor, output in zip(scattered, outputs, strict=True):
            dist.reduce_scatter_tensor(tensor, output, group=group)
    together.wait()
    return tensors, outputs, scattered


def asynchronous(group, rank):
    tensors = [numbers(torch.float32, (size,)) for size in (1, 1000, 100_000)]
    gathered = [torch.empty(4) for _ in range(group.size())]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    works.append(dist.all_gather(gathered, torch.full((4,), float(rank)), group=group, async_op=True))
    works.append(dist.barrier(group=group, async_op=True))
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    future = dist.all_reduce(tensors[0], group=group, async_op=True).get_future()
    doubled = future.then(lambda done: 2 * done.value()[0])
    return tensors, gathered, doubled.wait()


def sparse(group, rank):
    """Ranks with different rows, the same ones twice, and none; values of a number or of a vector; hybrid and plain."""
    found = []
    for size, dense in (((5, 3), 0), ((7, 2, 2), 2), ((4,), 0)):
        rows = torch.randint(size[0], (len(size) - dense, 2 * rank)) % torch.tensor(size[: len(size) - dense])[:, None]
        for dtype in (torch.float32, torch.float64, torch.int64):
            values = numbers(dtype, (2 * rank, *size[len(size) - dense :]))
            tensor = torch.sparse_coo_tensor(rows, values, size, check_invariants=True)
            dist.all_reduce(tensor, group=group)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            work.wait()
            assert work.result()[0] is tensor or group.name() == "gloo"
            assert tensor.is_coalesced()
            found += [tensor.indices(), tensor.values()]
    return found


def sparse_gradients(group, rank):
    model = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 1))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    found = []
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.randint(20, (3 + rank, 2))).sum().backward()
        found += [model[0].weight.grad.coalesce().indices(), model[0].weight.grad.to_dense(), model[1].weight.grad]
    return found


def monitored_barrier(group, rank):
    for timeout in (timedelta(seconds=10), None):
        group.monitored_barrier(timeout, wait_all_ranks=True)
    group.monitored_barrier()


BODIES = [
    reduce_everything,
    reduce_scatter,
    broadcast,
    all_gather,
    gather_and_scatter,
    all_to_all,
    messages,
    objects,
    odd_shapes,
    coalesced,
    asynchronous,
    sparse,
    sparse_gradients,
    monitored_barrier,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_equals_gloo(both, body):
    both(body)


def test_lists_of_different_shapes(pool, tmp_path):
    def body(rank):
        shapes = [(2,), (3, 1), (0,)]
        gathered = [torch.empty(shape) for shape in shapes]
        dist.all_gather(gathered, torch.full(shapes[rank], float(rank)))
        mine = torch.empty(shapes[rank])
        dist.reduce_scatter(mine, [torch.ones(shape) for shape in shapes])
        return [tensor.tolist() for tensor in gathered], mine.tolist()

    for rank, result in enumerate(alone(pool, tmp_path, body, ranks=3)):
        assert result == ([[0, 0], [[1], [1], [1]], []], [[3, 3], [[3], [3], [3]], []][rank])


def test_strided_results_arrive(pool, tmp_path):
    def body(rank):
        grid = torch.zeros(4, 3)
        grid[:, 1] = rank + 1
        dist.all_reduce(grid[:, 1])
        received = torch.zeros(3, 2)
        if rank == 0:
            dist.send(torch.arange(6.0).view(2, 3), 1)
        else:
            dist.recv(received.t(), 0)
        with torch.inference_mode():
            made = torch.full((3,), rank + 1.0)
        dist.all_reduce(made, async_op=True).wait()
        return grid.tolist(), received.tolist(), made.tolist()

    _, (grid, received, made) = alone(pool, tmp_path, body)
    assert grid == [[0, 3, 0]] * 4
    assert made == [3, 3, 3]
    assert received == [[0, 3], [1, 4], [2, 5]]


# ── groups, devices, errors ─────────────────────────────────────────────────────────────────────────────────────────


def test_smaller_groups(pool, tmp_path):
    def body(rank):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
        totals = []
        for group, members in zip(groups, ([0, 2], [1, 2]), strict=True):
            if rank in members:
                tensor = torch.tensor([rank])
                dist.all_reduce(tensor, group=group)
                totals.append(tensor.item())
        dist.destroy_process_group(groups[0])
        return totals

    assert alone(pool, tmp_path, body, ranks=3) == [[2], [3], [2, 3]]


def test_mixed_groups_send_cpu_tensors_to_us(pool, tmp_path):
    def body(rank):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        world = dist.group.WORLD
        side = world._get_backend(torch.device("cuda"))
        dist.all_reduce(torch.ones(1))  # no rank leaves while another one's gloo still connects
        return tensor.tolist(), sorted(device.type for device in world._device_types), side.name()

    for number, backend in enumerate(("cpu:microparallel,cuda:gloo", "cuda:gloo,cpu:microparallel")):
        for result in alone(pool, tmp_path / str(number), body, backend=backend):
            assert result == ([2, 2], ["cpu", "cuda"], "gloo")


def test_other_devices_are_refused_with_the_reason(pool, tmp_path):
    def body(rank):
        with pytest.raises(mp.errors.UsageError, match=r"shares the memory of the CPU.*on meta.*init_process_group"):
            dist.all_reduce(torch.ones(2, device="meta"))
        with pytest.raises(mp.errors.UsageError, match="bits of integers"):
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)
        with pytest.raises(mp.errors.UsageError, match="to_dense"):
            dist.broadcast(torch.ones(2).to_sparse(), 0)
        with pytest.raises(mp.errors.UsageError, match="only the SUM, not MAX"):
            dist.all_reduce(torch.ones(2).to_sparse(), op=dist.ReduceOp.MAX)
        with pytest.raises(mp.errors.UsageError, match="some are not"):
            dist.group.WORLD.allreduce([torch.ones(2).to_sparse(), torch.ones(2)])
        with pytest.raises(RuntimeError, match="No device associated"):
            dist.split_group(split_ranks=[[0], [1]])

    alone(pool, tmp_path, body)


def test_calls_that_do_not_belong_together(pool, tmp_path):
    def body(rank, asynchronous):
        with pytest.raises(
            mp.errors.Mismatch, match=r"rank 0: all_reduce\(float32\[2\], op=SUM\)\n  rank 1: all_reduce\(float"
        ):
            work = dist.all_reduce(torch.ones(2 + rank), async_op=asynchronous)
            work.wait()

    alone(pool, tmp_path, body, False)
    alone(pool, tmp_path / "again", body, True)


def test_a_rank_that_leaves(pool, tmp_path):
    def body(rank):
        if rank == 0:
            return
        tensor = torch.ones(2)
        with pytest.raises(
            mp.errors.PeerLost, match=r"rank 0 went away during all_reduce\(float32\[2\], op=SUM\) on rank 1"
        ):
            dist.all_reduce(tensor)
        with pytest.raises(RuntimeError, match=r"went away during all_reduce"):
            dist.all_reduce(tensor, async_op=True).get_future().wait()

    alone(pool, tmp_path, body)


def test_timeouts(pool, tmp_path):
    def body(rank):
        if rank == 1:
            with pytest.raises(mp.errors.CommsTimeout, match=r"recv\(float32\[2\], src=0, tag=0\)"):
                dist.irecv(torch.ones(2), 0).wait(timedelta(seconds=0.05))
            with pytest.raises(mp.errors.CommsTimeout, match="rank 1 waited in vain in barrier"):
                dist.barrier(async_op=True).wait(timedelta(seconds=0.05))
            with pytest.raises(mp.errors.CommsTimeout, match="all_reduce"):
                dist.all_reduce(torch.ones(2))
        dist.distributed_c10d._get_default_store().set(f"done/{rank}", "")
        dist.distributed_c10d._get_default_store().wait(["done/0", "done/1"])

    alone(pool, tmp_path, body, timeout=0.3)


def misses_a_barrier(group, rank, meet):
    """Ranks 1 and 2 never come; returns what the others are told."""
    store = dist.distributed_c10d._get_default_store()
    told = None
    if rank in (0, 3):
        try:
            meet(group)
        except RuntimeError as error:
            told = str(error).partition("\n")[0], getattr(error, "ranks", None)
    keys = [f"{group.name()}/{rank}" for rank in range(4)]
    store.set(keys[rank], "")
    store.wait(keys)
    return told


def wait_at_monitored_barrier(group):
    group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)


def wait_at_barrier(group):
    dist.barrier(group=group, async_op=True).wait(timedelta(seconds=0.3))


def wait_at_barrier_with_options(group):
    options = dist.BarrierOptions()
    options.timeout, options.device = timedelta(seconds=0.3), torch.device("cpu")
    group.barrier(options).wait()


def misses_barriers_of_both(comms, path, meet):
    start(comms, path)
    try:
        groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
        return [misses_a_barrier(group, comms.rank, meet) for group in groups]
    finally:
        dist.destroy_process_group()


def test_a_monitored_barrier_names_the_ranks_that_are_missing(pool, tmp_path):
    """With gloo only rank 0 raises; here every rank that came does, and names those that are missing."""
    results = pool.run(misses_barriers_of_both, 4, tmp_path / "store", wait_at_monitored_barrier, transport="shm")
    for rank in (0, 3):
        text, ranks = results[rank][0]
        assert ranks == (1, 2)
        assert text.startswith(
            f"rank {rank} waited in vain in monitored_barrier(): ranks 1, 2 did not make the matching call in time"
        )
    gloos, _ = results[0][1]
    assert gloos == "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 300 ms"


def test_every_barrier_that_times_out_names_the_ranks_that_are_missing(pool, tmp_path):
    def body(rank, meet):
        return misses_a_barrier(dist.group.WORLD, rank, meet)

    for number, meet in enumerate((wait_at_barrier, wait_at_barrier_with_options)):
        results = alone(pool, tmp_path / str(number), body, meet, ranks=4)
        assert [result and result[1] for result in results] == [(1, 2), None, None, (1, 2)]


def test_starting_and_ending_again_and_again(pool, tmp_path):
    def body(comms, folder):
        def rest():
            gc.collect()
            return (
                threading.active_count(),
                len(list(Path("/proc/self/fd").iterdir())),
                Path("/proc/self/maps").read_text().count("memfd"),
            )

        before = None
        for cycle in range(8):
            start(comms, f"{folder}/{cycle}")
            dist.new_group([0, 1])
            tensor = torch.ones(100)
            dist.all_reduce(tensor, async_op=True).get_future().wait()
            dist.all_reduce(tensor)
            assert tensor[0] == 4
            dist.destroy_process_group()
            if cycle == 2:
                before = rest()
        return before, rest()

    for before, after in pool.run(body, 2, str(tmp_path), transport="shm"):
        assert after == before


def from_anybody(rank):
    """Rank 0 takes what comes, by tag; returns what each sender sent."""
    if rank:
        for number in range(3):
            dist.send(torch.tensor([10 * rank + number]), 0, tag=number % 2)
        return []
    heard = {1: [], 2: []}
    for tag in (0, 0, 0, 0, 1, 1):
        tensor = torch.empty(1, dtype=torch.int64)
        heard[dist.recv(tensor, tag=tag)].append(tensor.item())
    return [sorted(heard[1]), sorted(heard[2])]


def test_receiving_from_any_source(pool, tmp_path):
    assert alone(pool, tmp_path, from_anybody, ranks=3)[0] == [[10, 11, 12], [20, 21, 22]]


def nobody_is_left(rank):
    if rank:
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.recv(torch.empty(1))
    return str(caught.value)


def test_no_rank_is_left_to_receive_from(pool, tmp_path):
    assert "rank 1" in alone(pool, tmp_path, nobody_is_left)[0]


def test_callbacks_may_call_and_wait(pool, tmp_path):
    """PowerSGD's hook does this: a future's callback starts another collective, and waits for it."""

    def body(rank):
        def again(done):
            inner = dist.all_reduce(done.value()[0], async_op=True).get_future()
            return inner.then(lambda value: value.value()[0] + 1).wait()

        return dist.all_reduce(torch.ones(1), async_op=True).get_future().then(again).wait().item()

    assert alone(pool, tmp_path, body) == [5, 5]


PROGRAM = """
import sys, torch, torch.distributed as dist
if sys.argv[1] == "register":
    from microparallel._torch_entry import register
    register()
assert [name for name in sys.modules if name.startswith("microparallel.")] in ([], ["microparallel._torch_entry"])
dist.init_process_group("microparallel", store=dist.FileStore(sys.argv[2], 1), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor, async_op=True).wait()
dist.all_reduce(tensor, async_op=True)
print(tensor.tolist(), flush=True)
if sys.argv[3] == "destroy":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["destroy", "leave"])
def test_a_program_ends(tmp_path, end):
    arguments = [sys.executable, "-W", "error", "-c", PROGRAM, "register", str(tmp_path / "store"), end]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1.0, 1.0, 1.0]\n", "")


def test_where_it_cannot_work(tmp_path, monkeypatch):
    register()
    monkeypatch.setattr(sys, "platform", "beos")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with pytest.raises(mp.errors.UsageError, match="needs Linux, and this is beos; choose 'gloo'"):
        dist.init_process_group("microparallel", store=store, rank=0, world_size=1)
    assert not dist.is_initialized()


def test_gloos_groups_stay_as_they_are(pool, tmp_path):
    def body(rank):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return tensor.tolist()

    assert alone(pool, tmp_path, body, backend="cpu:gloo,cuda:gloo") == [[2, 2], [2, 2]]
