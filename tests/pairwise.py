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


def every(step, cases):
    """For `pytest.mark.parametrize`: every `step`-th case, from the first; the others are left to `make test-full`."""
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [[pytest.mark.slow] if number % step else [] for number in range(len(listed))]
    return [pytest.param(*case, marks=of_case) for case, of_case in zip(listed, marks, strict=True)]


# What is tested here stands on the transports, which have their own tests: one transport or the other does.
_ON_ANY_TRANSPORT = {"analyze", "bench", "data_parallel", "pipeline", "train"}


def take_turns(tests):
    """Of each test with the mark `in_turn`, leave every second combination of its values to `make test-full`.

            case 0   1   2   3       Every case is run, and every transport; with three parametrizations or more any
    gloo         ×       ×           two values of different ones meet.
    shm              ×       ×

    In folders of what stands on the transports all tests do so that run on any of them; the next one of a file begins
    with the other transport.
    """
    met = {}  # the values of each parametrization, in the order in which they come
    first = {}  # with which each test begins, by file
    for test in tests:
        transport = ["any_pool"] if "any_pool" in getattr(getattr(test, "callspec", None), "params", ()) else []
        stands_on_it = transport and not _ON_ANY_TRANSPORT.isdisjoint(test.nodeid.split("/"))
        if test.get_closest_marker("in_turn") is None and not stands_on_it:
            continue
        file, name = test.nodeid.split("[")[0].split("::")
        functions = first.setdefault(file, {})
        places = functions.setdefault(name, len(functions)) if stands_on_it else 0
        for names in (*transport, *(mark.args[0] for mark in test.iter_markers("parametrize"))):
            parts = [part.strip() for part in names.split(",")] if isinstance(names, str) else names
            values = [id(test.callspec.params[part]) for part in parts]
            others = met.setdefault((file, name, *parts), [])
            if values not in others:
                others.append(values)
            places += others.index(values)
        if places % 2:
            test.add_marker(pytest.mark.slow)


def _pairs(row):
    return set(itertools.combinations(enumerate(row), 2))
