"""What a value holds, in symbols: every contribution is counted."""

from microparallel.program import Collective, Slices
from microparallel.program.symbols import Contents


def test_symbols_count_what_is_added_twice():
    mine = Contents(Collective("all-reduce", 2), 0)
    for _ in range(2):
        mine.write(Slices(0, 1), ({(1, 0): 1},), add=True)
    mine.write(Slices(1, 2), ({(1, 0): 1},), add=False)
    assert mine.slices == [{(0, 0): 1, (1, 0): 2}, {(1, 0): 1}]
