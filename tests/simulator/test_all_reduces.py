"""Time, messages and bytes of every all-reduce are those of the known formulas."""

import functools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import microparallel as mp

build = functools.cache(mp.collectives.build)  # the same few numbers of ranks come again and again
numbers = st.fractions(0, 10, max_denominator=20)
sizes = st.fractions(1, 1000, max_denominator=3)


def power_below(ranks):
    return 1 << (ranks.bit_length() - 1)


def folding(ranks, n, a, b, g):
    return 0 if ranks == power_below(ranks) else 2 * a + 2 * n * b + n * g


def halving_doubling(p, n, a, b, g):
    q = power_below(p)
    share = Fraction(q - 1, q)
    return 2 * int(math.log2(q)) * a + 2 * share * n * b + share * n * g + folding(p, n, a, b, g)


def ring(p, n, a, b, g):
    share = Fraction(p - 1, p)
    return 2 * (p - 1) * a + 2 * share * n * b + share * n * g


# p ranks, n bytes, latency a, b seconds a byte, g seconds a byte to add
TIMES = {
    "naive": lambda p, n, a, b, g: 2 * (p - 1) * (a + n * b) + (p - 1) * n * g,
    "gather-add": lambda p, n, a, b, g: (p - 1) * (a + n * b + n * g),
    "tree": lambda p, n, a, b, g: math.ceil(math.log2(p)) * (2 * (a + n * b) + n * g),
    "ring": ring,
    "recursive-doubling": lambda p, n, a, b, g: (
        int(math.log2(power_below(p))) * (a + n * b + n * g) + folding(p, n, a, b, g)
    ),
    "halving-doubling": halving_doubling,
    "direct": ring,
}


def simulate(program, n, a, b, g):
    return mp.simulate(program, mp.Costs(latency=a, seconds_per_byte=b, add_seconds_per_byte=g, bytes_per_value=n))


@pytest.mark.parametrize("name", TIMES)
@given(ranks=st.integers(1, 17), n=sizes, a=numbers, b=numbers, g=numbers)
def test_time(name, ranks, n, a, b, g):
    assert simulate(build(name, ranks), n, a, b, g).makespan == TIMES[name](ranks, n, a, b, g)


@given(nodes=st.integers(1, 4), inside=st.integers(1, 4), n=sizes, a=numbers, b=numbers, g=numbers)
def test_time_of_hierarchical(nodes, inside, n, a, b, g):
    program = build("hierarchical", nodes * inside, ranks_per_node=inside)
    share = n / inside
    expected = (inside - 1) * (2 * (a + share * b) + share * g) + ring(nodes, share, a, b, g)
    assert simulate(program, n, a, b, g).makespan == expected


@pytest.mark.parametrize("ranks", range(1, 10))
def test_messages_and_bytes(ranks):
    n, others = Fraction(5040), ranks - 1
    traces = {name: simulate(build(name, ranks), n, 1, 0, 0) for name in TIMES}
    assert traces["naive"].messages_sent == [others] + [1] * others
    assert traces["naive"].bytes_sent == [others * n] + [n] * others
    assert traces["gather-add"].messages_sent == [others] * ranks
    assert traces["gather-add"].bytes_sent == [others * n] * ranks
    assert sum(traces["tree"].messages_sent) == 2 * others
    assert sum(traces["tree"].bytes_sent) == 2 * others * n
    for name in ("ring", "direct"):
        assert traces[name].messages_sent == [2 * others] * ranks
        assert traces[name].bytes_sent == [2 * others * n / ranks] * ranks


@pytest.mark.parametrize("ranks", range(1, 18))
def test_messages_and_bytes_of_folded_ranks(ranks):
    """p − 2^k even ranks hand everything over and wait; their partners do their share and hand the result back."""
    n, power = Fraction(5040), power_below(ranks)
    folded, rounds = ranks - power, int(math.log2(power))
    doubling = simulate(build("recursive-doubling", ranks), n, 1, 0, 0)
    halving = simulate(build("halving-doubling", ranks), n, 1, 0, 0)
    share = 2 * n * Fraction(power - 1, power)
    for rank in range(ranks):
        resting, partner = rank < 2 * folded and rank % 2 == 0, rank < 2 * folded and rank % 2 == 1
        extra = int(partner)
        assert doubling.messages_sent[rank] == (1 if resting else rounds + extra)
        assert doubling.bytes_sent[rank] == (n if resting else rounds * n + extra * n)
        assert halving.messages_sent[rank] == (1 if resting else 2 * rounds + extra)
        assert halving.bytes_sent[rank] == (n if resting else share + extra * n)


@pytest.mark.parametrize("name", mp.collectives.ALL_REDUCES | mp.collectives.OTHERS)
def test_the_program_and_the_trace_count_the_same(name):
    for ranks in range(1, 10):
        program = build(name, ranks)
        assert mp.simulate(program).messages_sent == program.messages_sent()
