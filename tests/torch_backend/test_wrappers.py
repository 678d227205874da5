"""torch's own distributed wrappers on the backend "microparallel": unchanged, and with gloo's results."""

import gc
import os
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import microparallel as mp
from microparallel._torch_entry import register
from microparallel.comms import shared_memory

WIDTH = 16


def with_backend(comms, backend, path, body, arguments):
    comms.close()  # the ranks that the pool has made are a world already
    register()
    store = dist.FileStore(str(path), comms.world_size)
    dist.init_process_group(
        backend, store=store, rank=comms.rank, world_size=comms.world_size, timeout=timedelta(seconds=30)
    )
    torch.manual_seed(0)
    try:
        return body(comms.rank, path.parent / backend, *arguments)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def both(pool, tmp_path):
    """Runs a body as a program would, under each backend, and compares what it returns."""

    def run(body, *arguments, ranks=2):
        ours, gloos = (
            pool.run(with_backend, ranks, backend, tmp_path / f"store-{backend}", body, arguments, transport="shm")
            for backend in ("microparallel", "gloo")
        )
        for our_result, gloos_result in zip(ours, gloos, strict=True):
            torch.testing.assert_close(our_result, gloos_result)

    return run


class Net(nn.Module):
    """Has a layer that is not always used, buffers, and enough parameters for several buckets."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, inputs, extra=True):
        hidden = torch.relu(self.norm(self.first(inputs)))
        return self.last(self.sometimes(hidden) if extra else hidden)


def batch(rank, step):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def ddp(rank, _, options, hook):
    # PowerSGD's callbacks call collectives, in an order of their own if there are several buckets.
    model = DistributedDataParallel(Net(), bucket_cap_mb=25 if hook == "power" else 0.0005, **options)
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "own":
        model.register_comm_hook(None, lambda _, bucket: own_hook(bucket))
    elif hook == "power":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    unused = options.get("find_unused_parameters", False)
    for step in range(4):
        with model.no_sync() if step == 1 else nullcontext():
            model(batch(rank, step), extra=not (unused and step % 2)).square().mean().backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model.module)


def own_hook(bucket):
    future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@pytest.mark.parametrize(
    ("options", "hook"),
    [
        ({}, ""),
        ({"find_unused_parameters": True}, ""),
        ({"gradient_as_bucket_view": True, "broadcast_buffers": False}, ""),
        ({"static_graph": True}, ""),
        ({}, "own"),
        ({}, "fp16"),
    ],
    ids=["plain", "unused", "views", "static", "own-hook", "fp16-hook"],
)
def test_distributed_data_parallel(both, options, hook):
    both(ddp, options, hook)


@contextmanager
def moving(wanted):
    """Whether groups that are made meanwhile may move large tensors into shared memory."""
    before = os.environ.pop("MICROPARALLEL_MOVE", None)
    if wanted:
        os.environ["MICROPARALLEL_MOVE"] = "1"
    try:
        yield
    finally:
        os.environ.pop("MICROPARALLEL_MOVE", None)
        if before is not None:
            os.environ["MICROPARALLEL_MOVE"] = before


def large_buckets(rank, _, kept_in_place, move=True):
    """Buckets of more than two blocks, which come again and again, except where NumPy looks at them."""
    layers = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).double()
    with moving(move):
        group = dist.new_group()
    model = DistributedDataParallel(layers, gradient_as_bucket_view=True, process_group=group)
    gradient = lambda: model.module[0].weight.grad  # noqa: E731
    arrays = []
    for step in range(5):
        model(torch.full((2, 1024), float(rank + step), dtype=torch.float64)).square().mean().backward()
        if step == 1 and rank in kept_in_place:  # the buckets are the last ones now, and have come once
            arrays.append(gradient().numpy())
    if dist.get_backend() == "microparallel":
        assert gradient().untyped_storage().is_shared() == (move and rank not in kept_in_place)
    for array in arrays:
        assert torch.equal(torch.from_numpy(array), gradient())
    return gradient().clone()


@pytest.mark.in_turn
@pytest.mark.parametrize("kept_in_place", [(), (1,), (0, 1)], ids=["all moved", "one moved", "none moved"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_large_buckets_are_moved_to_where_peers_read_them(both, ranks, kept_in_place):
    both(large_buckets, kept_in_place, ranks=ranks)


def test_buckets_stay_where_they_are_by_default(both):
    """The user's code may hold a pointer into a gradient."""
    both(large_buckets, (), False)


def uneven(rank, _, divide):
    """Rank 1 has more batches. Forward starts to count who is still there, and C++ waits for that in backward."""
    model = DistributedDataParallel(nn.Linear(WIDTH, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=divide):
        for step in range(2 + 2 * rank):
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
    return weights(model.module)


@pytest.mark.parametrize("divide", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_with_different_numbers_of_batches(both, divide):
    both(uneven, divide)


@pytest.mark.parametrize("kind", ["FP16_COMPRESS", "ALLREDUCE"])
def test_the_hooks_that_are_built_into_torch(both, kind):
    both(built_in_hook, kind)


def built_in_hook(rank, _, kind):
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    for step in range(2):
        model(batch(rank, step)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def compiled(rank, _, backend):
    """Also says which functions of ours were compiled: C++ calls them while a compiled model runs."""
    of_ours, source = [], str(Path(mp.__file__).parent)

    def note(graph, inputs):
        of_ours.extend(node.stack_trace for node in graph.graph.nodes if source in (node.stack_trace or ""))
        return lookup_backend(backend)(graph, inputs)

    model = torch.compile(DistributedDataParallel(Net()), backend=note, dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(batch(rank, step)[: 8 - step]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert of_ours == []
    return weights(model)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_models(both, backend):
    both(compiled, backend)


def held():
    """What this process holds of the system: descriptors, and maps of memory that torch has moved."""
    gc.collect()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/torch_" in line]
    return len(list(Path("/proc/self/fd").iterdir())), len(maps)


def many_worlds(comms, folder, count):
    comms.close()
    register()
    holds = []
    for number in range(count):
        store = dist.FileStore(str(folder / f"store-{number}"), comms.world_size)
        dist.init_process_group("microparallel", store=store, rank=comms.rank, world_size=comms.world_size)
        large_buckets(comms.rank, None, ())
        dist.destroy_process_group()
        holds.append(held())
    return holds


def test_worlds_with_moved_buckets_leave_nothing_behind(pool, tmp_path):
    for holds in pool.run(many_worlds, 2, tmp_path, 4, transport="shm"):
        assert holds[1:] == holds[:1] * 3  # the first may have loaded something
        assert holds[0][1] == 0


def begun_in_backward(rank, _):
    """Rank 1 joins only when rank 0 has finished its backward: that must not wait for what it has begun."""
    message = torch.zeros(1)
    gradient = torch.full((4,), float(rank))
    if rank == 0:
        works = []
        weight = torch.ones(4, requires_grad=True)
        weight.register_hook(lambda _: works.append(dist.all_reduce(gradient, async_op=True)))
        weight.sum().backward()
        dist.send(message, 1)
        works[0].wait()
    else:
        dist.recv(message, 0)
        dist.all_reduce(gradient)
    return gradient


def test_backward_does_not_wait_for_ranks_that_have_not_called(both):
    both(begun_in_backward)


def polled_in_backward(rank, _):
    """A hook that asks again and again whether its sum is there does not wait for the end of backward."""
    gradient = torch.full((4,), float(rank))

    def hook(_):
        work = dist.all_reduce(gradient, async_op=True)
        while not work.is_completed():
            pass

    weight = torch.ones(4, requires_grad=True)
    weight.register_hook(hook)
    with pytest.MonkeyPatch.context() as patch:  # ranks fill the cores, and the delay would last for ever
        patch.setattr(shared_memory, "available_cores", lambda: 1)
        patch.setattr(shared_memory, "_LONGEST_DELAY", 1000.0)
        weight.sum().backward()
    return gradient


def test_backward_may_poll_for_what_it_has_begun(both):
    both(polled_in_backward)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hook synchronizes with the GPU, for tensors on the CPU too")
def test_power_sgd(pool, tmp_path):
    """Not compared with gloo: there the hook's nested calls race, and end the process now and then."""
    path = tmp_path / "store"
    first, second = pool.run(with_backend, 2, "microparallel", path, ddp, ({}, "power"), transport="shm")
    torch.manual_seed(0)
    for name, weight in Net().state_dict().items():
        if name.endswith("weight") and "norm" not in name:
            assert torch.equal(first[name], second[name])
            assert not torch.equal(first[name], weight)


def zero_redundancy(rank, _):
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(3):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model.module)


def sharded_tensors(rank, _):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    entire = torch.arange(48.0).view(8, 6)
    sharded = distribute_tensor(entire, mesh, [Shard(0), Shard(1)])
    product = sharded @ distribute_tensor(entire.t().contiguous(), mesh, [Replicate(), Shard(0)])
    moved = product.redistribute(mesh, [Shard(1), Replicate()])
    back = DTensor.from_local(moved.to_local(), mesh, [Shard(1), Replicate()]).full_tensor()
    return product.full_tensor(), moved.to_local(), back, mesh["rows"].get_group().size()


def fully_sharded(rank, _):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def checkpointed(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {"sharded": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)]), "step": torch.tensor(3)}
    dist.checkpoint.save(state, checkpoint_id=folder)
    loaded = {"sharded": distribute_tensor(torch.zeros(10), mesh, [Shard(0)]), "step": torch.tensor(0)}
    dist.checkpoint.load(loaded, checkpoint_id=folder)
    return loaded["sharded"].full_tensor(), loaded["step"]


def pipelined(rank, _, schedule_class):
    stage_module = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, 2)][rank]
    stage = PipelineStage(stage_module, rank, 2, torch.device("cpu"))
    schedule = schedule_class(stage, 4, loss_fn=nn.functional.mse_loss)
    losses = []
    for step in range(2):
        if rank == 0:
            schedule.step(batch(0, step))
        else:
            schedule.step(target=torch.ones(8, 2), losses=losses)
    return [parameter.grad for parameter in stage_module.parameters()], [loss.detach() for loss in losses]


def test_zero_redundancy_optimizer(both):
    both(zero_redundancy)


def test_device_mesh_and_dtensor(both):
    both(sharded_tensors, ranks=4)


def test_fully_shard(both):
    both(fully_sharded)


def test_distributed_checkpoint(both):
    both(checkpointed)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_pipelining(both, schedule):
    both(pipelined, schedule)
