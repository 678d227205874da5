"""Shared memory inside of each host, gloo between hosts: in one world."""

import pytest

TALK = """
import torch, microparallel as mp
with mp.connect(timeout=30) as comms:
    total = comms.all_reduce(torch.arange(300_000.0) + comms.rank)
    right = torch.equal(total, 4 * torch.arange(300_000.0) + 6)
    inside, across = comms.group([0, 1]), comms.group([0, 2])
    kinds = [group.transport_name for group in (comms, inside, across) if group is not None]
    print(right, *kinds, flush=True)
"""
BACKEND = """
import torch, torch.distributed as dist
dist.init_process_group("microparallel")
tensor = torch.ones(1000) * dist.get_rank()
dist.all_reduce(tensor)
print(tensor.sum().item(), flush=True)
dist.destroy_process_group()
"""


def on_two_hosts(hosts, tmp_path, text, **variables):
    (tmp_path / "script.py").write_text(text)
    ranks = hosts(2).ranks("python", "script.py", on_each=2, **variables)
    for rank in ranks:
        assert rank.wait(40) == 0, rank.errors
    return [rank.output.split() for rank in ranks]


def test_ranks_share_memory_inside_of_a_host(hosts, tmp_path):
    said = on_two_hosts(hosts, tmp_path, TALK)
    assert said[0] == ["True", "shm+gloo:0-1+2-3", "shm", "shm+gloo:0+1"]
    assert said[3] == ["True", "shm+gloo:0-1+2-3"]


@pytest.mark.slow
def test_the_torch_backend(hosts, tmp_path):
    assert on_two_hosts(hosts, tmp_path, BACKEND) == [["6000.0"]] * 4
