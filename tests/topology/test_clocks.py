"""What is said of another machine's clock is true, within the error that is claimed."""

from hypothesis import assume, given
from hypothesis import strategies as st

from microparallel.topology.clocks import FASTEST_DRIFT, OtherClock, RoundTrip, quickest

STARTED = st.floats(0, 1e6)  # seconds since a machine was started
DRIFT = st.floats(-FASTEST_DRIFT / 2, FASTEST_DRIFT / 2)
DELAY = st.floats(0, 0.2)  # of a message, one way
DELAYS = st.lists(st.tuples(DELAY, DELAY), min_size=1, max_size=5)
LASTED = st.floats(0.001, 1000)  # the recording


def ask(moment, delays, theirs):
    """Round trips one after another, the first at `moment`; `theirs` is what the other clock says at any moment."""
    for there, back in delays:
        yield RoundTrip(moment, theirs(moment + there), moment + there + back)
        moment += there + back


@given(STARTED, st.floats(-1e6, 1e6), DRIFT, DELAYS, DELAYS, LASTED, st.floats(0, 1))
def test_a_clock_that_is_off_and_drifts_is_known_within_the_error(start, offset, drift, first, last, lasted, part):
    """However unlike the ways there and back are: at any moment between the measurements."""

    def theirs(moment):
        return moment + offset + drift * (moment - start)

    before = quickest(ask(start, first, theirs))
    ended = start + sum(map(sum, first)) + lasted
    after = quickest(ask(ended, last, theirs))
    clock = OtherClock.between(before, after)
    moment = before.at + part * (after.at - before.at)
    assert abs(clock.at(moment) - theirs(moment)) <= clock.error
    assert clock.error <= max(before.error, after.error)  # nothing seemed to jump
    assert abs(clock.drift - drift) <= clock.drift_error + 1e-9


@given(STARTED, st.floats(-1e6, 1e6), st.floats(1, 100), DELAYS, DELAYS, LASTED, st.floats(0, 1), st.floats(0, 1))
def test_a_clock_that_was_set_meanwhile_is_in_doubt_by_all_of_that(
    start, offset, jump, first, last, lasted, jumped, part
):
    ended = start + sum(map(sum, first)) + lasted
    at = ended - lasted * jumped

    def theirs(moment):
        return moment + offset + (jump if moment > at else 0)

    before, after = quickest(ask(start, first, theirs)), quickest(ask(ended + 1e-3, last, theirs))
    # What is measured may be less than the jump by the doubt; and what is more than doubt and drift is noticed.
    assume(jump > 2 * (before.error + after.error) + FASTEST_DRIFT * (after.at - before.at))
    clock = OtherClock.between(before, after)
    moment = before.at + part * (after.at - before.at)
    assert abs(clock.at(moment) - theirs(moment)) <= clock.error
    assert clock.error >= jump - before.error - after.error


def test_the_quickest_round_trip_leaves_the_least_doubt():
    slow, quick = RoundTrip(0, 10.4, 1), RoundTrip(2, 12.25, 2.5)
    found = quickest([slow, quick])
    assert (found.seconds, found.at, found.offset) == (0.5, 2.25, 10)
    assert 0.25 <= found.error < 0.2503


def test_one_machine_has_one_clock():
    assert (OtherClock().at(12.5), OtherClock().error) == (12.5, 0)
