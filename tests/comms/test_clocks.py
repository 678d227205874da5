"""One clock for all ranks."""

import time
from types import SimpleNamespace

from microparallel.comms import record

SHIFT = 1000.0


def offsets(comms, one_machine):
    """Let each rank's clock be another one, as on machines that were started at different times."""
    machine = record._machine
    if not one_machine:
        record._machine = lambda: f"machine {comms.rank}"
    record.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + comms.rank * SHIFT)
    try:
        return record.offset_from_rank_0(comms)
    finally:
        record.time, record._machine = time, machine  # warm ranks serve other tests, too


def test_the_distance_between_clocks_is_measured_and_its_error_known(any_pool):
    measured = any_pool.run(offsets, 3, one_machine=False, timeout=30)
    assert measured[0] == (0, 0)
    for rank, (offset, error) in enumerate(measured[1:], start=1):
        assert error > 0
        assert abs(offset + rank * SHIFT) <= error + 1e-6


def test_one_machine_has_one_clock(pool):
    assert pool.run(offsets, 2, one_machine=True, timeout=30) == [(0, 0)] * 2
