"""The sample that stands for a large matrix of cases."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tests.pairwise import pairwise, sampled

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
