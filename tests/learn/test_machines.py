"""The machines of beat-1f1b: what is stored of them is right, and the search finds something."""

import pytest

from microparallel.learn.graders import _machines
from microparallel.learn.graders._machines import MACHINES, search, words_of
from microparallel.schedules import one_f_one_b
from microparallel.simulator import simulate
from microparallel.verifier import verify


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_the_best_known_is_right_and_keeps_to_the_limit(machine):
    program = machine.program(machine.best_known_words)
    verify(program)
    trace = simulate(program, machine.costs)
    assert trace.makespan == pytest.approx(machine.best_known)
    assert all(held <= most for held, most in zip(trace.peak_activations, machine.most, strict=True))
    assert machine.best_known < machine.of_1f1b


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_1f1b_keeps_to_the_limit_as_the_contract_says(machine):
    trace = simulate(one_f_one_b(machine.ranks, machine.microbatches), machine.costs)
    assert all(held <= most for held, most in zip(trace.peak_activations, machine.most, strict=True))


def test_the_call_that_a_learner_is_shown_makes_the_machine():
    machine = next(one for one in MACHINES if one.slow_links)

    def schedule(ranks, microbatches, costs, most):
        made = simulate(one_f_one_b(ranks, microbatches), costs)
        return made.makespan, most

    import microparallel as mp

    assert eval(machine.call, {"mp": mp, "schedule": schedule}) == (machine.of_1f1b, [*machine.most])


def test_the_search_makes_1f1b_shorter(monkeypatch):
    monkeypatch.setattr(_machines, "_ROUNDS", 300)
    machine = next(one for one in MACHINES if one.name == "two ranks")
    makespan, words = search(machine, words_of(one_f_one_b(machine.ranks, machine.microbatches)), seed=0)
    assert makespan < machine.of_1f1b
    assert simulate(machine.program(words), machine.costs).makespan == makespan
