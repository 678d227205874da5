"""Every exercise: the hole is noticed, the solution passes, and typical mistakes are called by their names."""

import importlib.util
from pathlib import Path

import pytest

from microparallel.learn.catalogue import EXERCISES
from microparallel.learn.holes import solved, unsolved

NAMES = [exercise.name for exercise in EXERCISES]
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


def wrong_answers(exercise):
    path = Path(__file__).parent / "wrong" / exercise.file[3:]
    spec = importlib.util.spec_from_file_location(f"wrong_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ANSWERS


def cases(exercise):
    """All its wrong answers; `make test` has time for one of those that are quick."""
    answers = wrong_answers(exercise)
    quick = [answer.mistake for answer in answers if answer.quick][:1]
    for answer in answers:
        marks = [] if answer.mistake in quick else [pytest.mark.slow]
        yield pytest.param(exercise, answer, id=f"{exercise.name}: {answer.mistake}", marks=marks)


WRONG = [case for exercise in EXERCISES for case in cases(exercise)]


@pytest.mark.parametrize("name", NAMES)
def test_the_hole_is_noticed(judge, name):
    verdict = judge(BY_NAME[name], BY_NAME[name].task.read_text("utf-8"))
    assert not verdict.passed
    assert "still to be written" in verdict.message


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes(judge, name):
    verdict = judge(BY_NAME[name], solved(BY_NAME[name].solution.read_text("utf-8")))
    assert verdict.passed, verdict.message
    assert all(step.passed for step in verdict.steps)


@pytest.mark.parametrize(("exercise", "answer"), WRONG)
def test_mistakes_are_named(judge, exercise, answer):
    verdict = judge(exercise, answer.of(exercise))
    assert not verdict.passed, "this passed"
    assert answer.words in " ".join(verdict.message.split())


@pytest.mark.parametrize("name", NAMES)
def test_there_are_enough_wrong_answers(name):
    answers = wrong_answers(BY_NAME[name])
    assert len({answer.mistake for answer in answers}) >= 8
    assert sum(answer.quick for answer in answers) >= 1


@pytest.mark.parametrize("name", NAMES)
def test_what_learners_get_is_made_of_the_solution(name):
    exercise = BY_NAME[name]
    assert exercise.task.read_text("utf-8") == unsolved(exercise.solution.read_text("utf-8")), "run: make exercises"
    assert len(exercise.hints) == 3
