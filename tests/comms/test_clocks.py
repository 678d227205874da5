"""One clock for all ranks of a recording: each machine's is measured before and after it."""

import time

from microparallel.comms.clocks import Clocks

AHEAD = 1000.0
FASTER = 1e-4


def measured(comms, machines):
    """Let each machine's clock be another one, which also runs faster than that of the machine before."""
    number = machines[comms.rank]

    def shown(now):
        return now + number * AHEAD + number * FASTER * now

    clocks = Clocks(comms, lambda: shown(time.perf_counter()), f"machine {number}")
    now = time.perf_counter()  # in truth all ranks have this one
    found = clocks.align()
    return found, abs(found[comms.rank].at(shown(now)) - now), clocks.worst(found), clocks.about(found)


def test_every_rank_has_rank_0_s_clock_within_the_error(any_pool):
    ranks = any_pool.run(measured, 3, [0, 1, 2], timeout=30)
    for rank, (found, wrong, worst, about) in enumerate(ranks):
        assert found[0].error == 0 and (rank == 0 or found[rank].error > 0)
        assert wrong <= found[rank].error
        assert worst == found[1].error + found[2].error  # between ranks 1 and 2
        assert [*about] == ["clock of rank 1", "clock of rank 2"]
        assert " s ahead of rank 0's, put right to within " in about["clock of rank 2"]
        assert abs(-found[2].drift - 2 * FASTER) <= found[2].drift_error + 1e-6


def test_ranks_of_one_machine_have_one_clock(any_pool):
    """So what is known of it is the same for them, and nothing is measured where there is no other machine."""
    (found, _, worst, about), *_ = any_pool.run(measured, 4, [0, 1, 0, 1], timeout=30)
    assert found[0] == found[2] and found[1] == found[3] and found[1].error == worst > 0
    assert [*about] == ["clock of ranks 1, 3"]
    (found, wrong, worst, about), _ = any_pool.run(measured, 2, [0, 0], timeout=30)
    assert (found[1].error, wrong, worst, about) == (0, 0, 0, {})
