"""`RankFailed` is raised from the rank's own exception."""

import os
import threading

import pytest
import torch

import microparallel as mp
from microparallel.world.carried_error import dumps_error, loads_error


class TwoArguments(Exception):
    """Cannot be unpickled in the usual way: its text is its only argument then."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.first = first


class WithLock(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class WithoutText(Exception):
    def __str__(self):
        raise RuntimeError


def raise_error(error):
    raise error


def test_the_exception_of_the_rank_is_the_cause(pool):
    with pytest.raises(mp.errors.RankFailed, match="rank 1 raised TwoArguments: one and two") as caught:
        pool.run(lambda comms: raise_error(TwoArguments("one", "two")) if comms.rank else comms.barrier(), 2)
    cause = caught.value.__cause__
    assert isinstance(cause, TwoArguments) and cause.first == "one" and str(cause) == "one and two"


def raise_from_another(comms):
    class Local(Exception):
        pass

    try:
        {}["missing"]
    except KeyError as error:
        error.add_note("a note")
        raise Local("of this script") from error


def test_what_it_was_raised_from_comes_along(pool):
    with pytest.raises(mp.errors.RankFailed) as caught:
        pool.run(raise_from_another, 1)
    cause = caught.value.__cause__
    assert type(cause).__name__ == "Local"
    assert isinstance(cause.__cause__, KeyError) and cause.__cause__.__notes__ == ["a note"]


def test_errors_of_this_library_come_with_their_attributes(pool):
    with pytest.raises(mp.errors.RankFailed) as caught:
        pool.run(lambda comms: raise_error(mp.errors.PeerLost([3], "barrier()", "rank 3 went away")), 1)
    assert isinstance(caught.value.__cause__, mp.errors.PeerLost)
    assert (caught.value.__cause__.ranks, caught.value.__cause__.call) == ((3,), "barrier()")


@pytest.mark.parametrize("error", [WithLock(), ValueError(torch.ones(10**6))], ids=lambda error: type(error).__name__)
def test_what_cannot_be_rebuilt_is_left_out(error):
    assert dumps_error(error) is None


def test_an_exception_that_cannot_say_what_it_is_comes_along_all_the_same():
    assert type(loads_error(dumps_error(WithoutText()))) is WithoutText


@pytest.mark.parametrize(
    "error",
    [
        OSError(2, "No such file", "where"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        KeyError("x"),
        StopIteration(3),
        ImportError("no", name="module"),
        mp.errors.CommsTimeout("late", [1]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_all_kinds_of_exceptions_are_rebuilt(error):
    again = loads_error(dumps_error(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert {name: getattr(again, name) for name in vars(error)} == vars(error)
    if type(error) is FileNotFoundError:
        assert (again.errno, again.filename) == (2, "where")


def test_bytes_that_cannot_be_read_here_are_no_error():
    assert loads_error(b"nonsense") is None


def test_a_rank_that_died_raised_nothing(pool):
    with pytest.raises(mp.errors.RankFailed) as caught:
        pool.run(lambda comms: os._exit(3), 1)
    assert caught.value.__cause__ is None
