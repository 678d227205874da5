"""What is said when a rank of one host keeps the ranks of another waiting."""

import os
import signal

import pytest

HANG = """
import os, signal, torch, microparallel as mp
with mp.connect(timeout=30) as comms:
    comms.barrier()
    if comms.rank == 1:
        print(os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    comms.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize("own_files", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_host_says_that_it_cannot_see_what_another_s_ranks_do(hosts, tmp_path, own_files):
    """Where hosts share no folder, only the host of a stopped rank can say that it was stopped."""
    (tmp_path / "hang.py").write_text(HANG)
    bed = hosts(2, own_files=False)
    folder = {} if own_files else {"MICROPARALLEL_FLIGHT_DIR": tmp_path / "flight"}
    if own_files:
        for host in bed:
            host.do("mount", "-t", "tmpfs", "own", os.environ["XDG_RUNTIME_DIR"])
    first, stopped = bed.ranks("python", "hang.py", MICROPARALLEL_WHY_AFTER=1, **folder)
    first.until("waits for it in all_reduce(float32[3], op='sum')", 40)
    if own_files:
        words = "out of sight: rank 1 is on beta, and what happens there cannot be seen from here: it is busy, or "
        words += "stopped, or the link to beta is down; ask there: microparallel why; rank 0 waits for it in all_reduce"
        assert words in first.errors
        asked = bed[0].run("microparallel", "why")
        assert asked.wait(20) == 0
        assert " on beta" in asked.output
        there = bed[1].run("microparallel", "why")
        there.until("stopped: rank 1 is stopped (SIGSTOP", 20)
    else:
        assert "straggler: rank 1 is in no call" in first.errors
    os.killpg(stopped.pid, signal.SIGCONT)
    assert [first.wait(20), stopped.wait(20)] == [0, 0]
