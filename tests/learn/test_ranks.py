"""Ranks that are threads: a real Comms, sends that wait until they are asked for, and waits that nobody can end."""

import inspect
import threading

import pytest
import torch

from microparallel.comms import Comms
from microparallel.errors import Mismatch
from microparallel.learn.log import SENDS, calls
from microparallel.learn.ranks import ExamComms, Over, ThreadGroup, World
from microparallel.learn.verdict import NotAllowed, Wrong

NAN = float("nan")
ALLOWED = ("send_tensor", "recv_tensor", "isend", "irecv", "broadcast", "all_reduce", "all_reduce_mean")


class Exam:
    """Functions, each run as a rank of one world, in a thread of its own."""

    def __init__(self, *functions, allowed=ALLOWED):
        self.world = World(len(functions))
        ends = [ThreadGroup(rank, len(functions), self.world) for rank in range(len(functions))]
        self.comms = [ExamComms(end, __file__, allowed) for end in ends]
        threads = [threading.Thread(target=self._take_part, args=one) for one in enumerate(functions)]
        for thread in threads:
            thread.start()
        assert self.world.join(20.0)
        for thread in threads:
            thread.join()

    def _take_part(self, rank, function):
        try:
            self.world.ends(rank, function(self.comms[rank]))
        except Over:
            pass
        except BaseException as error:
            self.world.fails(rank, error)

    @property
    def waits(self):
        return [(wait.rank, wait.doing, wait.on) for wait in self.world.stuck]

    def raised(self):
        return self.world.failures[min(self.world.failures)]


def receives(comms):
    return comms.recv_tensor(3, 0)


def does_nothing(comms):
    pass


# ── who can go on ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_who_send_to_each_other_are_stuck():
    exam = Exam(*[lambda comms: comms.send_tensor(torch.ones(1), 1 - comms.rank)] * 2)
    assert exam.waits == [(0, "send_tensor", 1), (1, "send_tensor", 0)]


def test_so_are_two_who_start_to_send_and_wait():
    exam = Exam(*[lambda comms: comms.isend(torch.ones(1), 1 - comms.rank).wait()] * 2)
    assert exam.waits == [(0, "isend", 1), (1, "isend", 0)]


def test_a_send_goes_on_once_its_receive_has_begun():
    def sends_and_receives(comms):
        request = comms.irecv(1, 1 - comms.rank)
        comms.send_tensor(torch.full((1,), float(comms.rank)), 1 - comms.rank)
        return request.wait().item()

    assert Exam(sends_and_receives, sends_and_receives).world.results == {0: 1.0, 1: 0.0}


def test_who_waits_for_one_that_has_finished_is_stuck():
    exam = Exam(does_nothing, receives)
    assert exam.waits == [(1, "recv_tensor", 0)]
    assert exam.world.results == {0: None}


@pytest.mark.filterwarnings("ignore:isend.* was dropped before it was waited for:ResourceWarning")
def test_who_was_sent_enough_goes_on_after_the_sender_has_finished():
    exam = Exam(lambda comms: comms.isend(torch.ones(3), 1) and None, receives)
    assert exam.world.results[1].tolist() == [1.0] * 3


def test_a_call_of_all_needs_all():
    reduces = lambda comms: comms.all_reduce(torch.ones(1)).item()  # noqa: E731
    assert Exam(reduces, does_nothing, reduces).waits == [(0, "all_reduce", 1), (2, "all_reduce", 1)]
    assert Exam(reduces, reduces).world.results == {0: 2.0, 1: 2.0}


def test_when_one_fails_the_others_are_let_go():
    def divides(comms):
        return 1 / 0

    assert isinstance(Exam(divides, receives).raised(), ZeroDivisionError)


def test_send_and_recv_are_allowed_where_send_tensor_and_recv_tensor_are():
    exam = Exam(lambda comms: comms.send(torch.ones(3), 1), lambda comms: comms.recv(3, 0).sum().item())
    assert exam.world.results == {0: None, 1: 3.0}
    refused = Exam(lambda comms: comms.send(torch.ones(3), 1), receives, allowed=["recv_tensor"]).raised()
    assert "comms.send_tensor is not for this exercise" in str(refused)


# ── what arrives ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("sent", "words"), [(torch.ones(3).double(), "told the dtype"), (torch.ones(2), "the shape")])
def test_the_two_ends_of_a_message_must_agree(sent, words):
    error = Exam(lambda comms: comms.send_tensor(sent, 1), receives).raised()
    assert isinstance(error, Mismatch)
    assert words in str(error)


def test_all_must_make_the_same_call():
    exam = Exam(lambda comms: comms.all_reduce(torch.ones(2)), lambda comms: comms.all_reduce(torch.ones(3)))
    assert isinstance(exam.raised(), Mismatch)


def test_calls_of_all():
    def does(comms):
        own = torch.tensor([1.0 + comms.rank])
        mean = comms.all_reduce_mean(own.clone())
        ring = comms.all_reduce(own.clone(), "max", "ring")
        request = comms.all_reduce(own, "product", async_op=True)
        before = own.item()
        return [mean.item(), ring.item(), before, request.wait(3.0).item(), comms.broadcast(own + comms.rank, 1).item()]

    assert Exam(does, does).world.results == {0: [1.5, 2.0, 1.0, 2.0, 3.0], 1: [1.5, 2.0, 2.0, 2.0, 3.0]}


# ── what is written down ────────────────────────────────────────────────────────────────────────────────────────────


def test_it_is_a_real_comms_and_takes_what_that_takes():
    assert issubclass(ExamComms, Comms)
    for name in ALLOWED:
        assert inspect.signature(getattr(ExamComms, name)) == inspect.signature(getattr(Comms, name))


def test_a_row_has_what_a_rank_did():
    exam = Exam(lambda comms: comms.send_tensor(torch.ones(3), 1), receives)
    [sent] = calls(exam.comms[0].row, *SENDS)
    assert (sent.call, sent.peer, sent.bytes, sent.ended) == ("send_tensor", 1, 12, True)
    assert sent.line == inspect.currentframe().f_lineno - 3
    assert [moment.phase for moment in exam.comms[1].row] == ["begins", "waits", "ends"]


def test_a_request_that_is_waited_for_again_is_written_down():
    def twice(comms):
        request = comms.all_reduce(torch.ones(1), async_op=True)
        request.wait()
        request.wait()

    assert [moment.phase for moment in Exam(twice).comms[0].row] == ["begins", "waits", "ends", "waits"]


@pytest.mark.filterwarnings("ignore:all_reduce.* was dropped before it was waited for:ResourceWarning")
def test_one_that_nobody_waits_for_has_not_ended():
    [call] = calls(Exam(lambda comms: comms.all_reduce(torch.ones(1), async_op=True) and None).comms[0].row)
    assert not call.ended


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", [None, 5, "text", [torch.ones(1)]])
@pytest.mark.parametrize("together", [True, False])
def test_only_tensors_are_reduced(what, together):
    error = Exam(lambda comms: comms.all_reduce(what, async_op=together)).raised()
    assert isinstance(error, Wrong)
    assert "all_reduce was given" in str(error)


def test_another_slice_may_be_written_to_while_one_is_sent():
    def sends(comms):
        first, second = torch.ones(6).tensor_split(2)
        request = comms.isend(first, 1)
        second.add_(1)
        request.wait()
        first.zero_()
        request.wait()

    assert Exam(sends, receives).world.results[1].tolist() == [1.0] * 3


@pytest.mark.parametrize("number", [0.0, NAN])
def test_what_is_sent_may_not_be_written_to(number):
    def sends(comms):
        tensor = torch.full((3,), number)
        request = comms.isend(tensor, 1)
        tensor.fill_(7.0)
        request.wait()

    assert "was changed before the send was waited for" in str(Exam(sends, receives).raised())


def test_what_is_reduced_may_not_be_written_to():
    def reduces(comms):
        tensor = torch.ones(3)
        request = comms.all_reduce(tensor, async_op=True)
        tensor.fill_(7.0)
        request.wait()

    assert "was changed before the request was waited for" in str(Exam(reduces).raised())


def test_what_is_not_a_number_is_not_a_change():
    def does(comms):
        comms.all_reduce(torch.tensor([1.0, NAN]), async_op=True).wait()
        comms.isend(torch.tensor([1.0, NAN, 1.0]), 1).wait()

    def answers(comms):
        comms.all_reduce(torch.tensor([1.0, NAN]))
        receives(comms)

    assert Exam(does, answers).world.failures == {}


def test_to_ask_whether_there_is_a_call_is_no_crime():
    def asks(comms):
        assert hasattr(comms, "barrier")
        assert not hasattr(comms, "nonsense")
        assert not hasattr(comms, "process_group")  # no call, so it cannot be refused when it is made
        assert comms.refused == []
        comms.barrier()

    exam = Exam(asks)
    assert isinstance(exam.raised(), NotAllowed)
    assert "comms.barrier is not for this exercise" in str(exam.raised())
    assert len(exam.comms[0].refused) == 1


def test_every_call_of_comms_that_is_not_for_the_exercise_is_refused():
    for name, _ in inspect.getmembers(Comms, inspect.isfunction):
        if not name.startswith("_"):
            assert getattr(ExamComms, name) is not getattr(Comms, name)


def test_a_message_to_oneself():
    assert "dest=0, which is itself" in str(Exam(lambda comms: comms.send_tensor(torch.ones(1), 0)).raised())


def test_only_neighbours_talk_in_a_line():
    def sends(comms):
        comms.line_of_ranks = True
        comms.send_tensor(torch.ones(1), 2)

    assert "rank 0 sends to rank 2, which is not its neighbour" in str(Exam(sends, does_nothing, does_nothing).raised())


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────

IN_PARTS = ("reduce_scatter", "all_gather")


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 1, 0)], ids=["equal", "different"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_scatter(sizes, op):
    def scatters(comms):
        numbers = torch.arange(float(sum(sizes))) + 10 * comms.rank
        request = comms.reduce_scatter(numbers.split(sizes), op=op, async_op=True)
        return request.wait().tolist()

    whole = 3 * torch.arange(float(sum(sizes))) + 30
    expected = (whole if op == "sum" else whole / 3).split(sizes)
    exam = Exam(scatters, scatters, scatters, allowed=IN_PARTS)
    assert exam.world.results == {rank: expected[rank].tolist() for rank in range(3)}
    assert [call.content.numel() for call in calls(exam.comms[0].row)] == [sum(sizes)]


def test_parts_of_one_tensor():
    def both(comms):
        row = torch.arange(4.0) + 10 * comms.rank
        mine = comms.reduce_scatter(row, into=row.view(2, 2)[comms.rank])
        comms.all_gather(mine, row)
        return row.tolist()

    exam = Exam(both, both, allowed=IN_PARTS)
    assert exam.world.results == {0: [10.0, 12.0, 14.0, 16.0], 1: [10.0, 12.0, 14.0, 16.0]}


def test_all_gather():
    def gathers(comms):
        return [one.tolist() for one in comms.all_gather(torch.full((2,), comms.rank))]

    assert Exam(*[gathers] * 3, allowed=IN_PARTS).world.results == {rank: [[0, 0], [1, 1], [2, 2]] for rank in range(3)}


def test_a_part_that_is_changed_on_its_way():
    def writes(comms):
        parts = [torch.zeros(1), torch.zeros(1)]
        request = comms.reduce_scatter(parts, async_op=True)
        parts[1].fill_(NAN)
        request.wait()

    error = Exam(writes, writes, allowed=IN_PARTS).raised()
    assert isinstance(error, Wrong) and "began to reduce-scatter in line" in str(error)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((one for one in ()), "and takes a list with a tensor for each rank"),
        ([None, torch.zeros(1)], "a gradient is None until backward has made it"),
    ],
)
def test_what_is_no_list_of_tensors(given, words):
    error = Exam(lambda comms: comms.reduce_scatter(given), does_nothing, allowed=IN_PARTS).raised()
    assert isinstance(error, Wrong) and words in str(error)
