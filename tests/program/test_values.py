"""Values: the table in the module's docstring is true, and names that share memory are known to."""

import re

import pytest

import microparallel as mp
from microparallel.program import Act, Grad, Named, Slices, parse_value, tied, touch, values

ROWS = re.findall(r"^\| `(\w+\(.*?\))` *\| `(\S+?)` *\|", values.__doc__, re.MULTILINE)


@pytest.mark.parametrize(("name", "text"), ROWS)
def test_the_table_is_true(name, text):
    value = eval(name, vars(values))
    assert str(value) == text and parse_value(text) == value


def test_every_value_stands_in_the_table():
    assert {name.partition("(")[0] for name, _ in ROWS} == {kind.__name__ for kind in values.Value.__args__}


def test_slices_touch_where_they_overlap():
    assert touch(Slices(0, 4), Slices(3, 5))
    assert not touch(Slices(0, 3), Slices(3, 5))
    assert not touch(Act(0, 1), Grad(0, 1))


def test_the_numbers_of_slices():
    assert list(Slices(2, 5).slices) == [2, 3, 4] and len(Slices(2, 5)) == 3
    for start, stop in ((3, 3), (4, 3), (-1, 2)):
        with pytest.raises(mp.errors.ProgramError, match="has no slices; start must be below stop"):
            Slices(start, stop)


def test_names_of_named_values():
    assert tied(2) == Named("tied2")
    for name in ("", "1", "a b", "ä", "a@b"):
        with pytest.raises(mp.errors.ProgramError, match="is no name of a value"):
            Named(name)
