"""At arm's length: whatever a learner's code does, the runner lives, says so, and leaves nothing behind."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from microparallel.learn import checking
from microparallel.learn.catalogue import find_exercise
from microparallel.learn.checking import Checker
from microparallel.learn.exam import Exam
from microparallel.learn.holes import solved
from microparallel.learn.verdict import Wrong

RING = find_exercise("ring-all-reduce")
SHORT = find_exercise("ping-pong")  # is checked in a moment
WAIT = "        request.wait()\n"


def ring_with(instead_of_waiting):
    text = solved(RING.solution.read_text("utf-8"))
    assert text.count(WAIT) == 1
    return text.replace(WAIT, f"        {instead_of_waiting}\n")


@pytest.fixture(scope="module")
def checker(fork_server):
    """Its referees are forked; what a learner's own begins with is tested apart."""
    with fork_server.starting_ranks(), Checker() as checker:
        yield checker


@pytest.fixture
def real_checker(monkeypatch):
    monkeypatch.setattr(checking, "subprocess", subprocess)
    with Checker() as checker:
        yield checker


@pytest.fixture
def check(checker, tmp_path):
    def of(text, exercise=RING):
        file = tmp_path / exercise.file
        file.write_text(text, "utf-8")
        return checker.check(exercise, file)

    return of


def processes_of(checker):
    mark = f"{checking._TAG}={checker._referee._tag}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def solution():
    return solved(SHORT.solution.read_text("utf-8"))


def test_the_solution_passes_and_steps_are_told(checker, tmp_path):
    file = tmp_path / SHORT.file
    file.write_text(solution(), "utf-8")
    heard = []
    verdict = checker.check(SHORT, file, heard.append)
    assert verdict.passed, verdict.message
    assert heard == verdict.steps != []


def test_nothing_that_torch_needs_is_refused(real_checker, tmp_path):
    """The ranks of the command line have imported less than those that tests share."""
    for name in ("manual-averaging", "buckets", "interleaved", "performance"):
        exercise = find_exercise(name)
        file = tmp_path / exercise.file
        file.write_text(solved(exercise.solution.read_text("utf-8")), "utf-8")
        verdict = real_checker.check(exercise, file)
        assert verdict.passed, verdict.message
        assert not verdict.printed


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("raise SystemExit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "it may not start or end processes"),
        ("import ctypes; ctypes.CDLL(None).abort()", "was killed by SIGABRT"),
        ("import os; os._exit(0)", "it may not start or end processes"),
        ("import os; os.fork()", "it may not start or end processes"),
        ("import os; os.system('true')", "it may not start or end processes"),
        ("import os; os.execv('/bin/true', ['true'])", "it may not start or end processes"),
        ("import subprocess; subprocess.run(['true'])", "it may not start or end processes"),
        ("import torch.distributed as dist; dist.barrier()", "your code calls torch.distributed.barrier"),
        ("comms.all_reduce(tensor)", "comms.all_reduce is not for this exercise"),
        ("mp.all_reduce_in_process('ring', [tensor])", "the point is to write it yourself"),
        ("from microparallel.collectives.ring import ring_all_reduce as r; r(2)", "the point is to write it yourself"),
        ("import importlib; importlib.reload(mp.collectives)", "the point is to write it yourself"),
        (f"open({str(RING.solution)!r})", "your code opens a solution"),
        ("raise ValueError('x' * 10_000_000)", "ValueError: xxx"),
        ("x = [torch.empty(2**28) for _ in range(100)]", "can't allocate memory"),
        ("1 / 0", "ZeroDivisionError"),
        ("return )", "this is not Python yet: unmatched"),
    ],
)
def test_it_is_said_what_happened(check, does, words):
    verdict = check(ring_with(does))
    assert not verdict.passed
    assert words in verdict.message


def test_catching_a_refusal_does_not_help(check):
    verdict = check(ring_with("request.wait()\n        try: comms.all_reduce(tensor)\n        except Exception: pass"))
    assert not verdict.passed
    assert "comms.all_reduce" in verdict.message


def test_what_is_printed_is_kept_within_bounds(check):
    verdict = check(ring_with("request.wait(); print('x' * 100_000)"))
    assert verdict.passed
    assert "bytes were printed" in verdict.printed
    assert len(verdict.printed) < 10_000


def test_one_check_leaves_nothing_to_the_next(check):
    """Neither settings nor threads nor patches of a file that passed meet the next one."""
    changes = "import torch.nn.functional as F; F.mse_loss = None; torch.set_grad_enabled(False)"
    assert check(ring_with(f"request.wait(); {changes}")).passed
    looks = "import torch.nn.functional as F; print('is it on?', torch.is_grad_enabled(), F.mse_loss is not None)"
    verdict = check(ring_with(f"request.wait(); {looks}"))
    assert verdict.passed, verdict.message
    assert "is it on? True True" in verdict.printed


def test_forged_answers_are_not_believed(check):
    forge = (
        "import glob, json, os\n"
        "        for place in glob.glob(f'/proc/{os.getppid()}/fd/*'):\n"
        '            try: os.write(os.open(place, os.O_WRONLY), b\'{"number": "1", "verdict": {}}\\n\')\n'
        "            except OSError: pass"
    )
    verdict = check(ring_with(forge))
    assert not verdict.passed
    assert check(solution(), SHORT).passed


def test_a_referee_that_cannot_start_ranks_is_replaced(checker, check):
    from microparallel.observe.processes import descendants

    assert check(solution(), SHORT).passed
    for pid in descendants(checker._referee._process.pid):
        os.kill(pid, 9)
    assert check(solution(), SHORT).passed


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_other_encodings_are_read_as_python_reads_them(checker, tmp_path, encoding):
    text = solution().encode("ascii", "replace").decode()
    file = tmp_path / SHORT.file
    cookie = "# -*- coding: latin-1 -*-\n" if encoding == "latin-1" else ""
    file.write_text(f"{cookie}{text}# é\n", encoding=encoding)
    verdict = checker.check(SHORT, file)
    assert verdict.passed, verdict.message


def test_a_file_that_cannot_be_read_is_said_to_be(checker, tmp_path):
    file = tmp_path / RING.file
    file.write_bytes(b"# \xff\n")
    assert "cannot be read" in checker.check(RING, file).message
    assert "cannot be read" in checker.check(RING, tmp_path / "none.py").message


def test_a_loop_without_end_is_ended_with_its_line(warm_ranks, tmp_path):
    from microparallel.learn.graders.ring_all_reduce import _reduce

    file = tmp_path / RING.file
    text = ring_with("while True: print('still here')")
    file.write_text(text, "utf-8")
    line = text[: text.index("while True")].count("\n") + 1
    import torch

    with pytest.raises(Wrong, match=rf"still busy after 2 s, in line {line}"):
        Exam(file, warm_ranks).run(_reduce, 2, 4, torch.float64, timeout=2)


def test_a_rank_that_waits_for_another_is_not_to_blame(warm_ranks, tmp_path):
    """Rank 1 waits for something of its own, and rank 0 for rank 1: both threads stand in the same line of Python's."""
    from microparallel.learn.graders.ring_all_reduce import _reduce

    file = tmp_path / RING.file
    file.write_text(ring_with("import threading; comms.rank and threading.Event().wait(); request.wait()"), "utf-8")
    import torch

    with pytest.raises(Wrong, match="rank 1 was still busy after 2 s, in line"):
        Exam(file, warm_ranks).run(_reduce, 2, 4, torch.float64, timeout=2)


def test_a_check_that_never_ends_is_stopped(tmp_path):
    file = tmp_path / RING.file
    file.write_text("while True: pass\n")
    with Checker(timeout=0.5) as checker:
        verdict = checker.check(RING, file)
    assert not verdict.passed
    assert "did not come to an end" in verdict.message


def test_nothing_is_left_behind(real_checker, tmp_path):
    """Not even a process that left its group and its session, and whose parent has ended."""
    file = tmp_path / SHORT.file
    hidden = (
        "import ctypes, time, os\n"
        "libc = ctypes.CDLL(None)\n"
        "if libc.fork() == 0:\n"
        "    libc.setsid()\n"
        "    if libc.fork() == 0:\n"
        "        time.sleep(600)\n"
        "    libc._exit(0)\n"
    )
    file.write_text(hidden + solution(), "utf-8")
    assert real_checker.check(SHORT, file).passed
    left = processes_of(real_checker)
    assert len(left) == 2  # the referee, and the process that ranks are forked from
    real_checker.close()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(_alive(pid) for pid in left)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("def ring_all_reduce(tensor: torch.Tensor) -> None:", "cannot be called as the exercise says"),
        (
            "ring_all_reduce = 5\n\n\ndef another(tensor: torch.Tensor, comms: mp.Comms) -> None:",
            "should be a function",
        ),
        ("def ring(tensor: torch.Tensor, comms: mp.Comms) -> None:", "has no ring_all_reduce"),
    ],
)
def test_changed_names_and_parameters_are_the_learner_s(check, definition, words):
    text = solved(RING.solution.read_text("utf-8"))
    before = "def ring_all_reduce(tensor: torch.Tensor, comms: mp.Comms) -> None:"
    assert before in text
    assert words in check(text.replace(before, definition)).message
