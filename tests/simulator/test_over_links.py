"""A step that was recorded over links without delay, as it would be over slower ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microparallel.program import Bucket
from microparallel.schedules import data_parallel_step
from microparallel.simulator import Costs, simulate
from microparallel.simulator.fitted import fit_step
from microparallel.simulator.over_links import link_seconds, over_link
from microparallel.topology import Link


def trace_of(link, ranks, buckets, transport, size, algorithms="auto", overlap=False):
    program = data_parallel_step(buckets, ranks, loss=True, overlap=overlap, algorithms=algorithms)
    return simulate(
        program,
        Costs(
            forward=0.01,
            backward_input=0.01,
            backward_weight=0.01,
            optimizer=0.002,
            latency=link.latency,
            seconds_per_byte=link.seconds_per_byte,
            transport=transport,
            bytes_per_value=lambda value: size if isinstance(value, Bucket) else 8,
        ),
    )


@given(
    st.sampled_from(["auto", "tree", "int8", "topk-0.01", "bf16", "mine-sum-1000-sum-80"]),
    st.integers(2, 4),
    st.integers(1, 3),
    st.sampled_from(["shm", "gloo"]),
    st.integers(4, 10**6),
    st.booleans(),
    st.builds(Link, st.floats(0, 0.01), st.floats(0, 1e-6)),
)
def test_messages_come_on_top_of_what_was_recorded(algorithm, ranks, buckets, transport, size, overlap, link):
    """There and back: without delay, and then over the link, is what the simulator makes of the link itself."""
    shape = (ranks, buckets, transport, size, algorithm, overlap)
    without = fit_step(trace_of(Link(0.0, 0.0), *shape))
    assert over_link(without, Link(0.0, 0.0), transport).makespan == pytest.approx(without.makespan)
    assert over_link(without, link, transport).makespan == pytest.approx(trace_of(link, *shape).makespan)


def test_each_sum_takes_what_its_program_takes():
    step = fit_step(trace_of(Link(0.0, 0.0), 2, 1, "shm", 4 * 10**6, "topk-0.01"))
    found = {
        str(op): seconds for (rank, op), seconds in link_seconds(step, Link(1e-3, 8e-8), "shm").items() if not rank
    }
    assert found["*U0@dp:topk-0.01"] == pytest.approx(1e-3 + 8 * 10**4 * 8e-8)  # values and places of 10,000 numbers
    assert found["*:presence0@dp"] == pytest.approx(1e-3 + 8 * 8e-8) == found["*:loss@dp"]
    step = fit_step(trace_of(Link(0.0, 0.0), 2, 1, "shm", 4 * 10**6))
    found = {
        str(op): seconds for (rank, op), seconds in link_seconds(step, Link(1e-3, 8e-8), "shm").items() if not rank
    }
    assert found["*U0@dp"] == pytest.approx(2e-3 + 4 * 10**6 * 8e-8)  # two halves, one after the other
