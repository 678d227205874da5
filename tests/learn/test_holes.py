"""One text, and what is made of it."""

import pytest

from microparallel.errors import DataError
from microparallel.learn.holes import solved, unsolved

TEXT = """def add(tensors):
    # ┌ hole
    #: # Add them up.
    #:
    #: raise NotImplementedError("add them")
    total = sum(tensors)  #: not a given
    return total
    # └


print(add([1]))
"""


def test_the_learner_gets_what_is_given():
    assert unsolved(TEXT) == (
        'def add(tensors):\n    # Add them up.\n\n    raise NotImplementedError("add them")\n\n\nprint(add([1]))\n'
    )


def test_the_solution_has_no_marks():
    assert solved(TEXT) == (
        "def add(tensors):\n    total = sum(tensors)  #: not a given\n    return total\n\n\nprint(add([1]))\n"
    )


@pytest.mark.parametrize("text", ["x = 1\n", "# ┌ hole\nx = 1\n", "# └\n", "# ┌ hole\n# ┌ hole\n# └\n"])
def test_a_broken_hole_is_refused(text):
    with pytest.raises(DataError):
        unsolved(text)
