"""Which transports work on a machine, and why others do not."""

import os
import re
import sys

import pytest
from tests.world.fake_mps import install

from microparallel.analyze.checkup import check_mps, check_transports, facts, problems
from microparallel.world.mps import choice, daemon


def test_shared_memory_is_tried_first_and_its_speed_is_told(warm_ranks):
    told = []
    shm, gloo, _ = check_transports(warm_ranks, told.append)
    assert told == ["trying shm", "trying gloo", "trying nccl"]
    for check, name in ((shm, "shm"), (gloo, "gloo")):
        assert check.name == name and check.works and re.search(r"\d [MG]B/s at 4 MiB$", check.detail)
        assert [time.size for time in check.times] == [4 << 10, 4 << 20]


def test_where_shared_memory_cannot_work_the_reason_is_given(warm_ranks, monkeypatch):
    reason = "it needs Linux, and this is darwin"
    monkeypatch.setattr("microparallel.transport.shared_memory.futex.why_not", lambda: reason)
    shm, gloo, _ = check_transports(warm_ranks)
    assert not shm.works and reason in shm.detail and shm.times == []
    assert gloo.works
    assert not any("transport" in problem.what for problem in problems([shm, gloo]))  # gloo will do


@pytest.mark.skipif(sys.platform != "linux", reason="MPS is for Linux alone")
def test_mps_is_tried_where_there_is_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "gpus_here", lambda: 0)
    assert check_mps() is None and "MPS" not in facts("1.0")
    monkeypatch.setattr(choice, "gpus_here", lambda: 1)
    monkeypatch.setattr(choice, "_USUAL_PIPES", tmp_path / "usual")
    monkeypatch.setattr(daemon, "use_gpus", lambda changes, with_context: [])
    monkeypatch.delenv(choice.PIPES, raising=False)
    monkeypatch.setenv("FAKE_MPS_LOG", str(tmp_path / "daemons"))

    monkeypatch.setenv("PATH", str(tmp_path))
    missing = check_mps()
    assert not missing.works and facts("1.0", missing)["MPS"] == "nvidia-cuda-mps-control is not on the PATH"
    turns = [problem for problem in problems([], missing) if "take turns by time slices" in problem.what]
    assert len(turns) == 1 and "not on the PATH; the program comes with NVIDIA's driver" in turns[0].fix

    program = install(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(program.parent))
    works = check_mps()
    assert works.works and not any("MPS" in problem.what for problem in problems([], works))

    monkeypatch.setenv("FAKE_MPS", "broken")
    broken = check_mps()
    assert not broken.works and broken.detail.startswith("does not work: the MPS daemon did not start: ")

    monkeypatch.setenv(choice.PIPES, str(tmp_path))
    (tmp_path / f"{choice.CONTROL}.pid").write_text(str(os.getpid()))
    assert check_mps().detail == f"a daemon runs in {tmp_path}, and ranks use it"
