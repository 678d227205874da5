"""What the documentation says about Slurm, done by a real one."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from tests.slurm.cluster import Cluster, what_is_missing

from microparallel.train import checkpoint

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm.sh"
SMALL = ["--dim", "16", "--depth", "3", "--batch", "60"]
MISSING = what_is_missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}"),
]


@pytest.fixture(scope="module")
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    one = Cluster(folder, Path(sys.executable).parent)
    try:
        yield one
    finally:
        one.close()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """The checkpoint of a run without Slurm, of four ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = cluster.run(
        "microparallel", "train", *SMALL, "--ranks", "4", "--steps", "200", "--out", "run", folder=folder
    )
    assert done.returncode == 0, done.stderr
    return checkpoint.latest(folder / "run" / "checkpoints")[0]


def assert_same(run, expected):
    found = checkpoint.latest(run / "checkpoints")[0]
    assert found.step == expected.step
    assert all(torch.equal(found.model[name], tensor) for name, tensor in expected.model.items())


def losses(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]


def test_srun(cluster, tmp_path, undisturbed):
    command = ["srun", "--ntasks=4", "microparallel", "train", *SMALL, "--steps", "200", "--out", "run"]
    done = cluster.run(*command, folder=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ddp on 4 ranks" in done.stderr and "kept in run" in done.stdout
    assert_same(tmp_path / "run", undisturbed)


def test_one_task_is_a_world_of_one(cluster, tmp_path):
    command = ["srun", "--ntasks=1", "microparallel", "train", *SMALL, "--steps", "3", "--out", "run"]
    done = cluster.run(*command, folder=tmp_path, timeout=120)
    assert done.returncode == 0 and "1 rank" in done.stderr, done.stderr


def test_the_script_runs_as_it_stands(cluster, tmp_path, undisturbed):
    job = cluster.submit(SCRIPT, *SMALL, "--steps", "200", folder=tmp_path)
    state = cluster.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT", seconds=120)
    log = (tmp_path / f"slurm-{job}.log").read_text()
    assert state["JobState"] == "COMPLETED" and state["Restarts"] == "0", log
    assert_same(tmp_path / "runs" / f"slurm-{job}", undisturbed)


def test_a_step_with_fewer_tasks_than_the_job(cluster, tmp_path):
    script = tmp_path / "two.sh"
    script.write_text(f"#!/bin/bash\nsrun --ntasks=2 microparallel train {' '.join(SMALL)} --steps 3 --out run\n")
    job = cluster.submit(script, folder=tmp_path, flags=("--ntasks=4", "--output=log"))
    state = cluster.wait_for(job, "COMPLETED", "FAILED", seconds=120)
    log = (tmp_path / "log").read_text()
    assert state["JobState"] == "COMPLETED" and "ddp on 2 ranks" in log, log


@pytest.mark.timeout(600)
def test_stopped_before_the_time_is_up_saved_requeued_and_the_same_in_the_end(cluster, tmp_path, undisturbed):
    """Slurm looks at the clock twice a minute, so the limit is two: a slow link lets the job come to it."""
    slow = ["--slow-link", "0-1=250ms", *SMALL, "--steps", "200"]
    job = cluster.submit(SCRIPT, *slow, folder=tmp_path, flags=("--time=00:02:00", "--signal=TERM@20"))
    run, log = tmp_path / "runs" / f"slurm-{job}", tmp_path / f"slurm-{job}.log"
    state = cluster.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT", seconds=500)
    text = log.read_text()
    assert state["JobState"] == "COMPLETED" and int(state["Restarts"]) >= 1, text
    assert "stopped after step" in text and "Traceback" not in text
    assert [record["step"] for record in losses(run)] == [*range(1, 201)]
    assert_same(run, undisturbed)


def test_a_job_that_is_cancelled_saves_and_is_not_started_again(cluster, tmp_path):
    job = cluster.submit(SCRIPT, *SMALL, "--slow-link", "0-1=50ms", "--steps", "5000", folder=tmp_path)
    run = tmp_path / "runs" / f"slurm-{job}"
    cluster.wait_until(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 3, 120)
    cluster.run("scancel", str(job))
    cluster.wait_until(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), 60)
    assert cluster.state(job)["JobState"] == "CANCELLED"
    found = checkpoint.latest(run / "checkpoints")[0]
    assert found.step == losses(run)[-1]["step"] > 3, (tmp_path / f"slurm-{job}.log").read_text()


def test_doctor_looks_at_the_hosts_of_a_step(cluster, tmp_path):
    command = ["srun", "--ntasks=2", "microparallel", "doctor", "--between", "ranks"]
    done = cluster.run(*command, folder=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1 host, which met at ") and "no problems found" in done.stdout
