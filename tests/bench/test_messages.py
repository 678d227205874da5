"""Fitting recovers the costs that made the data, and predictions follow from them."""

import pytest

import microparallel as mp
from microparallel.bench.messages import MessageCosts, fit_line, fit_messages, longest_path, typical_factor

SIZES = (4_000, 256_000, 16_000_000)
TRUTH = MessageCosts(latency=3e-4, seconds_per_byte=8e-10, add_seconds_per_byte=1.5e-10)


def measured_in_an_ideal_world(ranks):
    programs = [mp.collectives.build(name, ranks) for name in mp.collectives.ALL_REDUCES]
    times = [(program, size, TRUTH.predict(program, size)) for program in programs for size in SIZES]
    adds = [(size, 2e-6 + size * TRUTH.add_seconds_per_byte) for size in SIZES]  # a call has its overhead
    return times, adds


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_exact_times_give_back_the_exact_costs(ranks):
    costs = fit_messages(*measured_in_an_ideal_world(ranks))
    assert costs.latency == pytest.approx(TRUTH.latency, rel=1e-9)
    assert costs.seconds_per_byte == pytest.approx(TRUTH.seconds_per_byte, rel=1e-9)
    assert costs.add_seconds_per_byte == pytest.approx(TRUTH.add_seconds_per_byte, rel=1e-9)


def test_the_prediction_is_the_formula():
    size = 1_000_000
    ring = mp.collectives.build("ring", 4)
    expected = 6 * TRUTH.latency + 1.5 * size * TRUTH.seconds_per_byte + 0.75 * size * TRUTH.add_seconds_per_byte
    assert TRUTH.predict(ring, size) == pytest.approx(expected)
    path = longest_path(ring)
    assert (path.messages, path.sent, path.added) == (6, 1.5, 0.75)


def test_errors_count_by_their_share_and_not_by_their_seconds():
    """By seconds, what is off at the smallest size would be next to nothing."""
    times, adds = measured_in_an_ideal_world(4)
    disturbed = [(program, size, seconds * (1.5 if size == SIZES[0] else 1)) for program, size, seconds in times]
    costs = fit_messages(disturbed, adds)
    assert costs.latency > 1.1 * TRUTH.latency
    assert costs.seconds_per_byte == pytest.approx(TRUTH.seconds_per_byte, rel=0.1)


def test_nothing_costs_less_than_nothing():
    constant, slope = fit_line([(1_000, 1e-6), (1_000_000, 5e-3)])  # a line through both would begin below 0
    assert constant == 0 and slope > 0
    constant, slope = fit_line([(1_000, 2e-3), (1_000_000, 1e-3)])
    assert constant > 0 and slope == 0


def test_what_cannot_be_told_apart_is_not_guessed():
    times, adds = measured_in_an_ideal_world(4)
    one_size = [row for row in times if row[1] == SIZES[0]][:1]
    assert fit_messages(one_size, adds) is None
    assert fit_messages([], adds) is None
    assert fit_messages(times, adds[:1]) is None
    assert fit_messages(*measured_in_an_ideal_world_of_one()) is None


def measured_in_an_ideal_world_of_one():
    return [(mp.collectives.build("ring", 1), size, 1e-5) for size in SIZES], [(size, size * 1e-10) for size in SIZES]


def test_too_high_and_too_low_are_off_alike():
    assert typical_factor([(2.0, 1.0), (1.0, 2.0), (1.0, 1.0)]) == 2.0
