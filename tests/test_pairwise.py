"""The sample that stands for a large matrix of cases."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pairwise import every, pairwise, sampled, take_turns

factors = st.lists(st.integers(1, 4).map(range), min_size=2, max_size=4)


def pairs(rows):
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@given(factors, st.integers(0, 3))
def test_any_two_values_meet_that_can(factors, sum_):
    def possible(*row):
        return sum(row) != sum_

    rows = [row for row in itertools.product(*factors) if possible(*row)]
    sample = pairwise(*factors, possible=possible)
    assert set(sample) <= set(rows)
    assert pairs(sample) == pairs(rows)


def test_the_sample_is_small_and_always_the_same():
    matrix = (range(8), range(7), range(4), range(2))
    sample = pairwise(*matrix)
    assert 8 * 7 <= len(sample) <= 1.2 * 8 * 7 < 8 * 7 * 4 * 2
    assert sample == pairwise(*matrix)


def test_the_rest_is_slow():
    rows = sampled("ab", "cd", "ef")
    slow = [row.values for row in rows if hasattr(row, "marks") and row.marks[0].name == "slow"]
    quick = [row for row in rows if not hasattr(row, "marks")]
    assert len(quick) + len(slow) == 8
    assert quick == [row for row in itertools.product("ab", "cd", "ef") if row in pairwise("ab", "cd", "ef")]


def test_every_second_case_is_quick():
    cases = every(2, [("a", 1), ("b", 2), ("c", 3)])
    assert [case.values for case in cases if not case.marks] == [("a", 1), ("c", 3)]
    assert [case.values for case in every(3, "xyz")] == [("x",), ("y",), ("z",)]


def collected(marks, file="tests/test_one.py"):
    """What pytest collects of a test with nine cases on two transports."""
    function = pytest.mark.parametrize("one, two", [("a", 0), ("b", 0), ("c", 0)])
    cases = itertools.product(["gloo", "shm"], "abc", [False, True, None])
    for transport, one, other in cases:
        slow = []
        parametrized = [function.mark, pytest.mark.parametrize("other", [False, True, None]).mark]
        yield SimpleNamespace(
            nodeid=f"{file}::test[{transport}-{one}-{other}]",
            callspec=SimpleNamespace(params={"any_pool": transport, "one": one, "two": 0, "other": other}),
            get_closest_marker=marks.get,
            iter_markers=lambda name, parametrized=parametrized: parametrized,
            add_marker=slow.append,
            slow=slow,
            row=(transport, one, other),
        )


def test_cases_take_turns_on_the_transports():
    tests = list(collected({"in_turn": True}))
    take_turns(tests)
    assert all(test.slow in ([], [pytest.mark.slow]) for test in tests)
    quick = [test.row for test in tests if not test.slow]
    assert len(quick) == 9
    assert pairs(quick) == pairs(test.row for test in tests)
    assert len({row[1:] for row in quick}) == 9  # every case
    others = list(collected({}))
    take_turns(others)
    assert not any(test.slow for test in others)


def test_what_stands_on_the_transports_takes_turns_by_itself():
    tests = list(collected({}, "tests/pipeline/test_one.py"))
    take_turns(tests)
    quick = [test.row for test in tests if not test.slow]
    assert len(quick) == 9 == len({row[1:] for row in quick})
