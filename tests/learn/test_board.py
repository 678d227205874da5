"""Can anybody still go on? Counted, not guessed."""

import pytest

from microparallel.learn.board import Board, State


@pytest.fixture
def board(tmp_path):
    board = Board.make(tmp_path / "board", 2)
    for rank in range(2):
        board.says(rank, State.RUNNING)
    yield board
    board.close()


def test_nobody_is_stuck_while_one_computes(board):
    board.says(0, State.SENDING, peer=1, line=7, needs=board.sends(0, 1))
    assert board.stuck() == []


def test_two_who_send_to_each_other_are_stuck(board):
    for rank in range(2):
        board.says(rank, State.SENDING, peer=1 - rank, line=7, needs=board.sends(rank, 1 - rank))
    assert [(one.rank, one.peer, one.line) for one in board.stuck()] == [(0, 1, 7), (1, 0, 7)]


def test_a_send_goes_on_once_its_receive_has_begun(board):
    for rank in range(2):
        board.receives(rank, 1 - rank)
        board.says(rank, State.SENDING, peer=1 - rank, needs=board.sends(rank, 1 - rank))
    assert board.stuck() == []


def test_a_receive_goes_on_once_that_many_were_sent(board):
    board.sends(1, 0)
    board.says(1, State.FINISHED)
    board.says(0, State.RECEIVING, peer=1, needs=1)
    assert board.stuck() == []
    board.says(0, State.RECEIVING, peer=1, needs=2)
    assert [one.rank for one in board.stuck()] == [0]
    assert board.finished() == [1]


def test_a_call_of_all_needs_all(board):
    board.says(0, State.TOGETHER, needs=board.joins(0))
    board.says(1, State.RECEIVING, peer=0, needs=1)
    assert [one.rank for one in board.stuck()] == [0, 1]
    board.joins(1)
    assert board.stuck() == []


def test_another_process_sees_it(board, tmp_path):
    board.sends(0, 1)
    again = Board(tmp_path / "board", 2)
    again.says(1, State.FINISHED)
    assert again.sends(0, 1) == 2
    again.close()
    assert board.finished() == [1]
