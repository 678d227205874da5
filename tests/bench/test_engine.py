"""How often contenders are measured, and what is left out when time is short."""

from microparallel.bench.engine import FEWEST_REPEATS, MOST_REPEATS, TimeBudget


def test_larger_sizes_get_more_and_what_a_small_one_leaves_over():
    budget = TimeBudget(28, sizes=3)
    assert budget.share == 2  # of 1 + 4 + 9 parts
    budget.end_size(2)
    assert budget.share == 8
    budget.end_size(5)
    assert budget.share == 21


def test_every_size_is_measured_a_few_times_even_when_time_is_up():
    budget = TimeBudget(1, sizes=2)
    budget.end_size(5)
    assert budget.share == 0
    assert budget.goes_on(FEWEST_REPEATS - 1, spent_here=100, next_round=50)
    assert not budget.goes_on(FEWEST_REPEATS, spent_here=100, next_round=50)


def test_repeats_end_with_the_time_or_when_there_are_plenty():
    budget = TimeBudget(10, sizes=1)
    assert budget.goes_on(5, spent_here=8, next_round=1)
    assert not budget.goes_on(5, spent_here=8, next_round=3)
    assert not budget.goes_on(MOST_REPEATS, spent_here=0.1, next_round=0.001)
    assert budget.fraction(5, 5) == 0.5


def test_methods_that_are_too_slow_to_repeat_are_the_slowest():
    budget = TimeBudget(10, sizes=1)
    calls = {"ring": 0.5, "naive": 4.0, "tree": 1.0, "gather-add": 9.0}
    assert budget.too_slow(calls, FEWEST_REPEATS - 2, spent_here=4) == {"gather-add", "naive"}  # 2 × 1.5 s are left
    assert budget.too_slow(calls, FEWEST_REPEATS - 1, spent_here=4) == {"gather-add"}
    assert budget.too_slow(calls, FEWEST_REPEATS, spent_here=20) == set()
    assert TimeBudget(100, sizes=1).too_slow(calls, 1, spent_here=14.5) == set()
    assert TimeBudget(1, sizes=1).too_slow(calls, 1, spent_here=14.5) == set(calls)


def test_fixed_repeats_ask_for_no_time():
    budget = TimeBudget(1e-9, sizes=2, repeats=4)
    assert budget.too_slow({"naive": 100.0}, 1, spent_here=100) == set()
    assert [budget.goes_on(repeats, 1e9, 1e9) for repeats in (0, 3, 4)] == [True, True, False]
    assert budget.fraction(2, 1e9) == 0.25
