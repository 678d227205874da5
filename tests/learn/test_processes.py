"""Ranks of an exam that are processes: how they fail, are killed and come to no end, and what the grader is told."""

import os
import signal

import pytest

from microparallel.learn.exam import Exam
from microparallel.learn.graders import _killing as killing
from microparallel.learn.sandbox import trusted
from microparallel.learn.verdict import Wrong
from microparallel.world.fork_server import hidden_gpus


@pytest.fixture
def exam(warm_ranks, tmp_path):
    def of(text):
        file = tmp_path / "answer.py"
        file.write_text(text)
        return Exam(file, warm_ranks)

    return of


def call(load, comms):
    return load().answer(comms)


def die(load, comms):
    if comms.rank == 1:
        with trusted():
            os.kill(os.getpid(), signal.SIGKILL)
    return load().answer(comms)


def test_each_rank_has_random_numbers_of_its_own_and_a_real_comms(exam):
    text = """
import torch

def answer(comms):
    torch.manual_seed(comms.rank)
    return comms.all_gather(torch.rand(1))[1 - comms.rank].item(), torch.rand(1).item()
"""
    (theirs, own), (theirs_again, own_again) = exam(text).run_in_processes(call, 2)
    assert theirs != theirs_again
    assert own != own_again


def test_a_rank_that_is_killed_is_no_error(exam):
    assert exam("def answer(comms): comms.barrier()").run_in_processes(die, 2) is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('no')", "stopped in line 2 with ValueError: no"),
        ("raise SystemExit(3)", "exited with code 3, in line 2"),
        ("raise NotImplementedError('add')", "line 2 is still to be written: add"),
        ("import os; os._exit(0)", "your code calls os._exit"),
        ("comms.barrier() if comms.rank else comms.all_gather(1)", "line 2"),
    ],
)
def test_what_goes_wrong_is_said_with_its_line(exam, body, words):
    with pytest.raises(Wrong) as refused:
        exam(f"def answer(comms):\n    {body}").run_in_processes(call, 2)
    assert words in str(refused.value)


def test_a_refusal_that_is_caught_is_not_forgotten(exam):
    text = """
import microparallel as mp

def answer(comms):
    try:
        mp.launch(print, 2)
    except Exception:
        return 1
"""
    with pytest.raises(Wrong, match=r"your code calls microparallel\.world\.launch\.launch"):
        exam(text).run_in_processes(call, 2)


def test_ranks_that_come_to_no_end_are_placed(exam):
    text = "def answer(comms):\n    while comms.rank:\n        pass\n    comms.barrier()"
    with pytest.raises(Wrong) as late:
        exam(text).run_in_processes(call, 2, timeout=4.0)
    assert "your ranks had not come to their end after 4 s" in str(late.value)
    assert "answer.py:" in str(late.value)


def test_a_power_cut_empties_what_was_not_synced(tmp_path):
    for name, size in (("safe", 10), ("early", 20), ("never", 30), ("empty", 0)):
        (tmp_path / name).write_bytes(bytes(size))
    safe, early = ((tmp_path / name).stat() for name in ("safe", "early"))
    synced = {(safe.st_dev, safe.st_ino, 10), (early.st_dev, early.st_ino, 5)}
    assert killing.cut_power(tmp_path, synced) == {"early": True, "never": False}
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == {
        "safe": 10,
        "early": 0,
        "never": 0,
        "empty": 0,
    }


@pytest.mark.parametrize("before", [None, "0,1"])
def test_gpus_are_hidden_for_a_while(monkeypatch, before):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with hidden_gpus():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
