"""Large matrices of cases, sampled: most mistakes show where two settings meet, so every two of them meet in some case.

ranks 1 2 3 × transport gloo shm × dtype float32 float64        12 cases, of which 6 hold every pair
"""

import itertools

import pytest


def pairwise(*factors, possible=lambda *row: True):
    """Rows with one value of each factor, in which any two values meet that a possible row can have together."""
    rows = [row for row in itertools.product(*factors) if possible(*row)]
    unmet = set().union(*map(_pairs, rows))
    sample = []
    while unmet:
        best = max(rows, key=lambda row: len(_pairs(row) & unmet))  # the first of several, so the sample never changes
        sample.append(best)
        unmet -= _pairs(best)
    return sample


def sample_and_whole(*factors, possible=lambda *row: True):
    """For `pytest.mark.parametrize`: the sample as one case, and all rows as another, left to `make test-full`."""
    whole = [row for row in itertools.product(*factors) if possible(*row)]
    pairs = pairwise(*factors, possible=possible)
    return [pytest.param(pairs, id="pairs"), pytest.param(whole, id="whole", marks=pytest.mark.slow)]


def sampled(*factors, possible=lambda *row: True):
    """For `pytest.mark.parametrize`: every possible row; what is not in the sample is left to `make test-full`."""
    sample = pairwise(*factors, possible=possible)
    rows = [row for row in itertools.product(*factors) if possible(*row)]
    return [row if row in sample else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def take_turns(tests):
    """Of each test with the mark `in_turn`, leave every second combination of its values to `make test-full`.

            case 0   1   2   3       Every case is run, and every transport; with three parametrizations or more any
    gloo         ×       ×           two values of different ones meet.
    shm              ×       ×
    """
    met = {}  # the values of each parametrization, in the order in which they come
    for test in tests:
        if test.get_closest_marker("in_turn") is None:
            continue
        places = 0
        transport = ["any_pool"] if "any_pool" in test.callspec.params else []
        for names in (*transport, *(mark.args[0] for mark in test.iter_markers("parametrize"))):
            parts = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
            values = [id(test.callspec.params[name]) for name in parts]
            others = met.setdefault((test.nodeid.split("[")[0], *parts), [])
            if values not in others:
                others.append(values)
            places += others.index(values)
        if places % 2:
            test.add_marker(pytest.mark.slow)


def _pairs(row):
    return set(itertools.combinations(enumerate(row), 2))
