"""The Comms of an exam takes what the real one takes, and finds what was changed too early, and nothing else."""

import inspect

import pytest
import torch

from microparallel.comms import Comms
from microparallel.comms.request import Request
from microparallel.learn.board import Board
from microparallel.learn.exam_comms import ExamComms
from microparallel.learn.verdict import NotAllowed, Wrong
from microparallel.learn.words import flat, require_like, require_number, require_tensor, require_type, shown

NAN = float("nan")


class Done:
    """A request that is over at once."""

    def __init__(self, result=None):
        self.result = result

    def wait(self, timeout=None):
        return self.result


class Alone:
    """A rank whose peer always listens."""

    rank, world_size, device, next_rank, prev_rank = 0, 2, torch.device("cpu"), 1, 1

    def __init__(self):
        self.asked = []

    def isend(self, tensor, dest):
        return Done()

    def irecv(self, shape, src, dtype):
        return Done(torch.zeros(shape, dtype=dtype))

    def all_reduce(self, tensor, op="sum", algorithm="auto", async_op=False):
        self.asked.append((op, algorithm, async_op))
        return Done(tensor) if async_op else tensor


@pytest.fixture
def comms(tmp_path):
    board = Board.make(tmp_path / "board", 2)
    for _ in range(9):
        board.receives(1, 0)  # rank 1 has asked for all that may come
    yield ExamComms(Alone(), board, __file__, ("isend", "irecv", "send_tensor", "all_reduce"), lambda _: None)
    board.close()


@pytest.mark.parametrize("name", ["send_tensor", "isend", "recv_tensor", "irecv", "all_reduce"])
def test_calls_take_what_the_real_ones_take(name):
    mine, real = (inspect.signature(getattr(kind, name)).parameters for kind in (ExamComms, Comms))
    assert list(mine) == list(real)
    assert [one.default for one in mine.values()] == [one.default for one in real.values()]


def test_requests_take_a_timeout_as_the_real_ones_do(comms):
    requests = [
        comms.isend(torch.ones(1), 1),
        comms.irecv(1, 1),
        comms.all_reduce(torch.ones(1), "sum", "ring", async_op=True),
    ]
    for request in requests:
        assert list(inspect.signature(request.wait).parameters) == list(inspect.signature(Request.wait).parameters)[1:]
        request.wait(3.0)


def test_the_algorithm_is_handed_on(comms):
    comms.all_reduce(torch.ones(1), "mean", "ring")
    comms.all_reduce(torch.ones(1), algorithm="tree", async_op=True)
    assert comms._real.asked == [("mean", "ring", False), ("sum", "tree", True)]


@pytest.mark.parametrize("what", [None, 5, "text", [torch.ones(1)]])
@pytest.mark.parametrize("together", [True, False])
def test_only_tensors_are_reduced(comms, what, together):
    with pytest.raises(Wrong, match="all_reduce was given"):
        comms.all_reduce(what, async_op=together)


def test_another_slice_may_be_written_to_while_one_is_sent(comms):
    first, second = torch.ones(4).tensor_split(2)
    request = comms.isend(first, 1)
    second.add_(1)
    request.wait()


@pytest.mark.parametrize("number", [0.0, NAN])
def test_what_is_sent_may_not_be_written_to(comms, number):
    tensor = torch.full((3,), number)
    request = comms.isend(tensor, 1)
    tensor.fill_(7.0)
    with pytest.raises(Wrong, match="was changed before the send was waited for"):
        request.wait()


def test_what_is_not_a_number_is_not_a_change(comms):
    comms.isend(torch.tensor([1.0, NAN]), 1).wait()
    comms.all_reduce(torch.tensor([1.0, NAN]), async_op=True).wait()


def test_after_a_wait_one_may_write_and_wait_again(comms):
    tensor = torch.ones(3)
    request = comms.isend(tensor, 1)
    request.wait()
    tensor.zero_()
    request.wait()


def test_an_eager_send_comes_back_before_anybody_asks(tmp_path):
    board = Board.make(tmp_path / "board", 2)
    comms = ExamComms(Alone(), board, __file__, ("send_tensor",), lambda _: None)
    comms.eager = True
    comms.send_tensor(torch.ones(1), 1)
    assert comms.log[0].waited
    board.receives(1, 0)
    comms.deliver()
    board.close()


def test_to_ask_whether_there_is_a_call_is_no_crime(comms):
    assert hasattr(comms, "barrier")
    assert not hasattr(comms, "nonsense")
    assert not hasattr(comms, "process_group")  # no call, so it cannot be refused when it is made
    assert comms.refused == []
    with pytest.raises(NotAllowed, match=r"comms\.barrier is not for this exercise"):
        comms.barrier()
    assert len(comms.refused) == 1


@pytest.mark.parametrize("value", [None, "text", [1.0], (1, 2), torch.ones(2), torch.ones(0), 1j, torch.tensor(1j), {}])
def test_a_number_is_required(value):
    with pytest.raises(Wrong, match=r"the loss should be (a|one) number, and is"):
        require_number(value, "the loss")


@pytest.mark.parametrize("value", [2, 2.0, torch.tensor(2), torch.tensor([2.0])])
def test_a_number_is_a_number(value):
    assert require_number(value, "the loss") == 2.0


def test_other_requirements():
    with pytest.raises(Wrong, match="the ball should be a tensor, and is None"):
        require_tensor(None, "the ball")
    with pytest.raises(Wrong, match="it should be a range, and is 5"):
        require_type(5, range, "it", "a range")
    with pytest.raises(Wrong, match=r"it has shape \[2\], and should have \[3\]"):
        require_like(torch.ones(2), torch.ones(3), "it")
    with pytest.raises(Wrong, match="it has dtype int64, and should have float32"):
        require_like(torch.ones(3).long(), torch.ones(3), "it")
    assert flat([None]).numel() == 0


def test_what_cannot_be_shown_has_a_name():
    class Shy:
        def __repr__(self):
            raise ValueError

    assert shown(Shy()) == "a Shy"
