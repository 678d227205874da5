"""Which transports work on a machine, and why others do not."""

import re

from microparallel.analyze.checkup import check_transports, problems


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
