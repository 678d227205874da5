"""Groups of torch's own that a GPU needs: gloo by way of main memory, and NCCL on hosts that are none."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.conftest import ON_ONE_GPU
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from microparallel.bench.other_groups import nccl_group, staged_gloo


def messages(comms, device):
    with staged_gloo(comms) as group:
        before, after = (comms.rank - 1) % comms.world_size, (comms.rank + 1) % comms.world_size
        sent = torch.arange(6.0, device=device).view(2, 3) + comms.rank
        arrived = torch.zeros(2, 3, device=device)
        ops = [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, arrived, before, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
            work.wait()  # once more does no harm
        sent += 100  # it was a copy that went
        return arrived.cpu(), dist.get_backend(group)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_ONE_GPU)])
def test_messages_go_by_way_of_main_memory(warm_ranks, device):
    for rank, (arrived, backend) in enumerate(warm_ranks.run(messages, 3, device, transport="gloo", device=device)):
        assert torch.equal(arrived, torch.arange(6.0).view(2, 3) + (rank - 1) % 3)
        assert backend == "staged"


def pipeline_of_torch_s(comms, device):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, device=device) for _ in range(comms.world_size)]
    inputs, targets = torch.randn(6, 4, device=device), torch.randn(6, 4, device=device)
    whole = nn.Sequential(*layers)
    nn.functional.mse_loss(whole(inputs), targets).backward()
    expected = layers[comms.rank].weight.grad.clone()
    whole.zero_grad()
    with staged_gloo(comms) as group:
        stage = PipelineStage(layers[comms.rank], comms.rank, comms.world_size, torch.device(device), group=group)
        schedule = Schedule1F1B(stage, 3, loss_fn=nn.functional.mse_loss)
        first, last = comms.rank == 0, comms.rank == comms.world_size - 1
        schedule.step(*([inputs] if first else []), **({"target": targets} if last else {}))
    return expected.cpu(), layers[comms.rank].weight.grad.cpu()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_ONE_GPU)])
def test_torch_s_pipelines_run_on_it(warm_ranks, device):
    for expected, found in warm_ranks.run(pipeline_of_torch_s, 2, device, transport="gloo", device=device):
        torch.testing.assert_close(found, expected)


def variable_and_reason(comms):
    with nccl_group(comms) as group:
        inside = os.environ.get("NCCL_HOSTID")
    return group, inside, os.environ.get("NCCL_HOSTID")


@pytest.mark.skipif(dist.is_nccl_available(), reason="this build of torch has NCCL")
def test_where_there_is_no_nccl_the_reason_is_told(warm_ranks):
    found = warm_ranks.run(variable_and_reason, 2)
    assert found == [("this build of torch comes without NCCL", None, None)] * 2


def sum_by_nccl(comms):
    with nccl_group(comms) as group:
        if isinstance(group, str):
            return group
        tensor = torch.full((1000,), float(comms.rank + 1), device=comms.device)
        dist.all_reduce(tensor, group=group)
        return tensor.unique().tolist(), os.environ["NCCL_HOSTID"]


@ON_ONE_GPU
@pytest.mark.timeout(200)
def test_nccl_sums_on_one_gpu_if_ranks_have_different_hosts(warm_ranks):
    found = warm_ranks.run(sum_by_nccl, 2, device="cuda", timeout=180)
    if isinstance(found[0], str):
        pytest.skip(f"NCCL cannot be used here: {found[0]}")
    assert found == [([3.0], "microparallel-0"), ([3.0], "microparallel-1")]
