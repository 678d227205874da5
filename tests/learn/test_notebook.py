"""What a check in a notebook prints, whatever the reader's answer is."""

import pytest

from microparallel.errors import ProgramError, RankFailed
from microparallel.learn.notebook import check, require


def even(number):
    require(number % 2 == 0, f"{number} is odd")
    return f"{number} is even"


def raising(error):
    def judge(_):
        raise error

    return judge


def failed_by(cause):
    error = RankFailed(1, f"raised {type(cause).__name__}: {cause}", traceback="Traceback (most recent call last)")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("answer", "words"), [(2, "✓ 2 is even\n"), (3, "✗ 3 is odd\n")])
def test_right_and_wrong(capsys, answer, words):
    check(even, answer)
    assert capsys.readouterr().out == words


@pytest.mark.parametrize("hole", [..., {"a": 1, "b": ...}, "rank 0: F0.0 ...\n"])
def test_a_hole_is_not_judged(capsys, hole):
    check(raising(AssertionError("judged")), 1, hole)
    assert capsys.readouterr().out.startswith("○ not solved yet")


@pytest.mark.parametrize("error", [NotImplementedError("add"), failed_by(NotImplementedError("add"))])
def test_a_function_with_a_hole_is_not_solved(capsys, error):
    check(raising(error), 1)
    assert capsys.readouterr().out.startswith("○ not solved yet")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ProgramError("no such rank"), "✗ no such rank\n"),
        (failed_by(ValueError("empty")), "✗ rank 1 raised ValueError: empty\n"),
        (KeyError("x"), "✗ this answer cannot be checked: KeyError: 'x'\n"),
    ],
)
def test_an_error_is_words_and_no_traceback(capsys, error, words):
    check(raising(error), 1)
    assert capsys.readouterr().out == words


def test_an_error_in_the_readers_function_is_shown_with_its_line(capsys):
    def answer():
        return 1 / 0

    check(lambda function: function(), answer)
    assert capsys.readouterr().out == "✗ your line `return 1 / 0` raised ZeroDivisionError: division by zero\n"
