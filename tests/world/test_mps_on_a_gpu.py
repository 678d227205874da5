"""Worlds under NVIDIA's own MPS; where there is no GPU, `test_mps.py` has what can be tested without."""

import os
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from tests.world.test_launch import gone, pids

import microparallel as mp
from microparallel.errors import RankFailed
from microparallel.world.mps.choice import CONTROL, NOWHERE, PIPES

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"needs {CONTROL}, of NVIDIA's driver, on the PATH"),
]


def ask(command, **environment):
    """What the daemon answers that this process's environment leads to; None if there is none."""
    asked = subprocess.run(
        [CONTROL], input=command, capture_output=True, text=True, env=os.environ | environment, timeout=20, check=False
    )
    return asked.stdout.split() if asked.returncode == 0 else None


def processes():
    """The numbers of the daemon and of its servers, as a rank that computes sees them."""
    daemon = (Path(os.environ[PIPES]) / f"{CONTROL}.pid").read_text().strip()
    return [int(number) for number in (daemon, *ask("get_server_list\n"))]


def add_up(comms, length=100_003):
    with comms.device:
        mine = torch.arange(length, dtype=torch.float64) * (comms.rank + 1)
        total = comms.all_reduce(mine)
        expected = torch.arange(length, dtype=torch.float64) * sum(range(1, comms.world_size + 1))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return torch.equal(total, expected), os.environ.get(PIPES), visible, processes() if comms.rank == 0 else None


def all_gone(found, folder):
    return all(gone(process) for process in found) and not Path(folder).parent.exists()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("mps", ["auto", "on"])
def test_a_world_under_mps_computes_what_it_should_and_leaves_nothing(ranks, transport, mps):
    ranks = max(ranks, torch.cuda.device_count() + 1)  # they share a GPU
    results = mp.launch(add_up, ranks, transport=transport, device="cuda", mps=mps, timeout=55)
    assert all(right for right, *_ in results)
    _, folder, _, found = results[0]
    assert len(found) == 2, "a daemon and its server"
    assert all_gone(found, folder)


def test_training_under_mps_is_that_of_one_process():
    def train(comms):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()
        model = model.to(comms.device)
        replica = mp.DataParallel(model, comms)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            batch = torch.randn(12, 8, dtype=torch.float64, generator=generator).to(comms.device)
            optimizer.zero_grad()
            replica(batch[comms.rank :: comms.world_size]).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])

    ranks = max(2, torch.cuda.device_count() + 1)
    alone = mp.launch(train, 1, device="cuda", mps="off", timeout=55)[0]
    together = mp.launch(train, ranks, device="cuda", mps="on", timeout=55)
    for weights in together:
        assert torch.equal(weights, together[0])
        torch.testing.assert_close(weights, alone, rtol=1e-10, atol=1e-12)


def test_gpus_that_are_chosen_by_number(monkeypatch):
    """To the daemon, which numbers the GPUs that it sees anew, the last one's number would mean nothing."""
    last = torch.cuda.device_count() - 1
    name = f"GPU-{torch.cuda.get_device_properties(last).uuid}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(last + 1)))).split(",")[last]
    if not visible.isdecimal():
        pytest.skip("CUDA_VISIBLE_DEVICES has names already")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    results = mp.launch(add_up, last + 2, device="cuda", mps="on", timeout=55)
    assert [(right, seen) for right, _, seen, _ in results] == [(True, name)] * (last + 2)


def die(comms, folder):
    if comms.rank == 0:
        mark = torch.ones(1, device=comms.device)
        (folder / "found").write_text(" ".join(map(str, [os.getpid(), *processes()])))
        (folder / "pipes").write_text(os.environ[PIPES])
        del mark
    comms.all_reduce(torch.ones(1 << 20, device=comms.device))
    torch.cuda.synchronize()
    comms.barrier()
    if comms.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(10_000):
        comms.all_reduce(torch.ones(1 << 20, device=comms.device))
    torch.cuda.synchronize()


def test_a_rank_that_is_killed_ends_world_and_daemon_and_the_next_world_is_well(tmp_path):
    ranks = max(2, torch.cuda.device_count() + 1)
    with mp.Pool() as pool:
        with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
            pool.run(die, ranks, tmp_path, device="cuda", mps="on", timeout=55)
        rank, *found = map(int, (tmp_path / "found").read_text().split())
        assert gone(rank) and all_gone(found, (tmp_path / "pipes").read_text())
        assert not list(Path("/dev/shm").glob(f"cuda.shm.*.{rank:x}.*"))
        results = pool.run(add_up, ranks, device="cuda", mps="on", timeout=55)
        assert all(right for right, *_ in results) and results[0][3] != found
    assert all_gone(results[0][3], results[0][1])


SCRIPT = """
import os, pathlib, sys, time
import torch
import microparallel as mp
from tests.world.test_mps_on_a_gpu import processes

def work(comms, folder):
    comms.all_reduce(torch.ones(1 << 20, device=comms.device))
    torch.cuda.synchronize()
    if comms.rank == 0:
        (folder / "found").write_text(" ".join(map(str, processes())))
        (folder / "pipes").write_text(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    comms.barrier()
    (folder / f"{comms.rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{comms.rank}.tmp").rename(folder / f"{comms.rank}.pid")
    while True:  # the GPU has work when the launcher ends
        comms.all_reduce(torch.ones(1 << 20, device=comms.device))

mp.launch(work, int(sys.argv[2]), pathlib.Path(sys.argv[1]), device="cuda", mps="on")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_the_daemon_ends_with_the_launcher_however_that_ends(tmp_path, start, number):
    ranks = max(2, torch.cuda.device_count() + 1)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launcher = start("python", script, tmp_path, ranks, PYTHONPATH=Path(__file__).parents[2])
    numbers = pids(tmp_path, ranks)
    os.kill(launcher.pid, number)
    assert launcher.wait(30) != 0
    assert all(gone(rank, 15) for rank in numbers)
    found = [int(process) for process in (tmp_path / "found").read_text().split()]
    assert len(found) == 2 and all(gone(process, 15) for process in found)


def test_a_daemon_of_the_users_own_is_used_unless_mps_is_off(tmp_path, monkeypatch):
    def look(comms):
        right = torch.equal(
            comms.all_reduce(torch.ones(3, device=comms.device)).cpu(), torch.full((3,), comms.world_size)
        )
        return right, os.environ[PIPES]

    ranks = max(2, torch.cuda.device_count() + 1)
    folder = Path(os.path.realpath(subprocess.check_output(["mktemp", "-d"], text=True).strip()))
    try:
        monkeypatch.setenv(PIPES, str(folder))
        monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", str(folder))
        subprocess.run([CONTROL, "-d"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=30)
        try:
            off = mp.launch(look, ranks, device="cuda", mps="off", timeout=55)
            assert off == [(True, NOWHERE)] * ranks
            assert ask("get_server_list\n") == [], "no rank has used the daemon"
            assert mp.launch(look, ranks, device="cuda", timeout=55) == [(True, str(folder))] * ranks
            assert len(ask("get_server_list\n")) == 1, "the ranks have used it, and it still runs"
        finally:
            ask("quit -t 1\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
