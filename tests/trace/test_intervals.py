"""Sets of intervals: what overlaps is put together, and what is outside is left."""

from microparallel.trace.intervals import length, outside, union


def test_intervals():
    assert union([(4, 5), (0, 1), (1, 2), (0, 1.5), (3, 3)]) == [(0, 2), (4, 5)]
    assert outside([(0, 10)], [(1, 2), (4, 6)]) == [(0, 1), (2, 4), (6, 10)]
    assert outside([(0, 2), (3, 5)], [(1, 4)]) == [(0, 1), (4, 5)]
    assert outside([(1, 2)], [(0, 3)]) == []
    assert length([(0, 1), (2, 5)]) == 4
