"""The known formulas for bubbles and activations hold exactly in the simulator, where they are said to hold."""

import functools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import microparallel as mp
from microparallel import schedules

times = st.fractions(Fraction(1, 10), 10, max_denominator=30)
shares = st.fractions(Fraction(1, 20), 1)
ranks_ = st.integers(1, 5)  # more of them in the sweep below, where the times are fixed
build = functools.cache(schedules.build)  # the same few shapes come again and again


def simulate(name, ranks, microbatches, forward, backward_input, backward_weight, **options):
    costs = mp.Costs(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
    return mp.simulate(build(name, ranks, microbatches, **options), costs)


@given(ranks=ranks_, microbatches=st.integers(1, 14), f=times, i=times, w=times)
def test_naive(ranks, microbatches, f, i, w):
    trace = simulate("naive", ranks, microbatches, f, i, w)
    assert trace.bubble == microbatches * (ranks - 1) * (f + i + w)
    assert trace.peak_activations == [1] * ranks


@given(ranks=ranks_, microbatches=st.integers(1, 14), f=times, i=times, w=times)
def test_gpipe(ranks, microbatches, f, i, w):
    trace = simulate("gpipe", ranks, microbatches, f, i, w)
    assert trace.bubble == (ranks - 1) * (f + i + w)
    assert trace.peak_activations == [microbatches] * ranks


@given(ranks=ranks_, more=st.integers(0, 10), f=times, i=times, w=times)
def test_one_f_one_b(ranks, more, f, i, w):
    microbatches = ranks + more
    trace = simulate("1f1b", ranks, microbatches, f, i, w)
    assert trace.bubble == (ranks - 1) * (f + i + w)
    assert trace.bubble_fraction == Fraction(ranks - 1, microbatches + ranks - 1)
    assert trace.peak_activations == [min(microbatches, ranks - rank) for rank in range(ranks)]


@given(ranks=st.integers(1, 5), rounds=st.integers(1, 4), stages_per_rank=st.integers(1, 4), f=times, i=times, w=times)
def test_interleaved(ranks, rounds, stages_per_rank, f, i, w):
    """f, i and w are one stage's times, F and B a whole rank's, v times as long: (p−1)(F+B)/v is (p−1)(f+b)."""
    trace = simulate("interleaved", ranks, rounds * ranks, f, i, w, stages_per_rank=stages_per_rank)
    assert trace.bubble == (ranks - 1) * (f + i + w)
    most = 2 * (ranks - 1) + (stages_per_rank - 1) * ranks + 1
    assert trace.peak_activations[0] == min(rounds * ranks * stages_per_rank, most)


@given(ranks=ranks_, more=st.integers(0, 10), f=times, i=times, share=shares)
def test_zb_h1(ranks, more, f, i, share):
    w = share * min(f, i)
    trace = simulate("zb-h1", ranks, ranks + more, f, i, w)
    assert trace.bubble == (ranks - 1) * (f + i - w)
    assert trace.peak_activations == [ranks] * ranks


@given(ranks=ranks_, more=st.integers(0, 10), f=times, i=times, share=shares)
def test_zb_h2(ranks, more, f, i, share):
    w = share * min(f, i)
    trace = simulate("zb-h2", ranks, 2 * ranks - 1 + more, f, i, w)
    assert trace.bubble_async == (ranks - 1) * (f + i - 2 * w)
    assert trace.bubble == (ranks - 1) * max(f, f + i - 2 * w)
    assert trace.peak_activations == [2 * ranks - 1] * ranks


@given(ranks=ranks_, more=st.integers(0, 8), i=times, f_share=shares, w_share=shares)
def test_zbv(ranks, more, i, f_share, w_share):
    """Each end is derived in lesson 8 of pipelines; the ranks between end between rank 0 and the last."""
    f, w = f_share * i, w_share * i
    trace = simulate("zbv", ranks, 2 * ranks + more, f, i, w)
    work, ends = trace.work[0], [events[-1].end for events in trace.compute]
    last, first = work + (ranks - 1) * i, work + 2 * (ranks - 1) * (i - w)
    assert ends == [last + (ranks - 1 - rank) * (i - 2 * w) for rank in range(ranks)]
    assert ends[0] == first
    assert trace.bubble == (ranks - 1) * max(i, 2 * (i - w))
    assert trace.bubble_async == (ranks - 1) * max(i - f, 2 * (i - w))
    assert w > f or trace.bubble_async == 2 * (ranks - 1) * (i - w)
    assert trace.peak_activations == [2 * ranks] * ranks


@given(ranks=st.integers(1, 7), more=st.integers(0, 8), f=times)
def test_dualpipev(ranks, more, f):
    trace = simulate("dualpipev", ranks, 2 * ranks + more, f, f, f)
    pair, backward = 3 * f, 2 * f
    assert trace.bubble == (ranks - 1) * (pair + backward - 3 * f)
    assert trace.peak_activations == [2 * ranks + 1] * ranks


@given(ranks=st.integers(1, 7), more=st.integers(0, 8), f=times, share=st.fractions(2, 3))
def test_dualpipev_whose_pairs_hide_something(ranks, more, f, share):
    """When pairs take less than their halves, ranks work differently long; the formula is the last rank's gap."""
    pair = share * f
    costs = mp.Costs(forward=f, backward_input=f, backward_weight=f, forward_backward=pair)
    trace = mp.simulate(build("dualpipev", ranks, 2 * ranks + more), costs)
    assert trace.makespan - trace.work[-1] == (ranks - 1) * (pair + 2 * f - 3 * f)


def test_the_numbers_everybody_knows():
    """4 ranks, 8 micro-batches, 1F1B: with B = F the end is at 22, with B = 2F at 33; 3/11 of it is bubble."""
    half = Fraction(1, 2)
    equal = simulate("1f1b", 4, 8, 1, half, half)
    assert (equal.makespan, equal.bubble_fraction) == (22, Fraction(3, 11))
    assert simulate("1f1b", 4, 8, 1, 1, 1).makespan == 33


# schedule → its bubble with F = 3, I = 3, W = 2 a stage (interleaved and zbv have two a rank), and the activations
# that its ranks hold at most; None where there are too few micro-batches for the formulas
SWEPT = {
    "naive": lambda p, m: (m * (p - 1) * 8, [1] * p),
    "gpipe": lambda p, m: ((p - 1) * 8, [m] * p),
    "1f1b": lambda p, m: ((p - 1) * 8, list(range(p, 0, -1))) if m >= p else None,
    "interleaved": lambda p, m: ((p - 1) * 8, [min(2 * m, 3 * p - 1)]) if m % p == 0 else None,
    "zb-h1": lambda p, m: ((p - 1) * 4, [p] * p) if m >= p else None,
    "zb-h2": lambda p, m: ((p - 1) * 3, [2 * p - 1] * p) if m >= 2 * p - 1 else None,
    "zbv": lambda p, m: ((p - 1) * 3, [2 * p] * p) if m >= 2 * p else None,
}
SMALL = [(p, m) for p in range(1, 6) for m in range(1, 13)]
LARGER = [(p, m) for p in range(6, 10) for m in (1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 24)]
ALL = [(p, m) for p in range(1, 10) for m in range(1, 25)]


@pytest.mark.parametrize("name", SWEPT)
@pytest.mark.parametrize("shapes", [SMALL + LARGER, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_all_small_shapes(name, shapes):
    for ranks, microbatches in shapes:
        trace = simulate(name, ranks, microbatches, 3, 3, 2)
        expected = SWEPT[name](ranks, microbatches)
        if expected is not None:
            bubble, peaks = expected
            assert trace.bubble == bubble, (ranks, microbatches)
            assert trace.peak_activations[: len(peaks)] == peaks, (ranks, microbatches)
        assert trace.makespan >= max(trace.work) == min(trace.work)
