"""Ranks that fail are started again, and not for ever."""

import importlib
import os
import signal
from pathlib import Path

import pytest

import microparallel as mp
from microparallel.errors import LaunchError, RankFailed
from microparallel.world.restarts import Restarts


def killed(step=None):
    return RankFailed(1, "was killed by SIGKILL"), step


def raised(step=None, text="raised ValueError: 7"):
    return RankFailed(0, text, "Traceback …"), step


def decide(failures, most=10):
    """Feed the failures in turn; returns how many were restarted, and what was raised at last."""
    told = []
    restarts = Restarts(most, lambda *news: told.append(news))
    for error, step in failures:
        try:
            restarts.after(error, step, 2)
        except LaunchError as ended:
            return len(told), ended
    return len(told), None


def test_the_number_of_restarts_is_the_bound():
    failures = [killed(step) for step in range(5)]
    restarted, ended = decide(failures, most=3)
    assert restarted == 3 and ended is failures[3][0]
    assert ended.__notes__ == ["3 restarts came before this, and no more are allowed"]
    assert decide(failures, most=0) == (0, failures[0][0])


def test_an_exception_that_comes_again_at_the_same_step_ends_it_with_the_first():
    failures = [killed(1), raised(5), raised(5, "raised ValueError: 8")]
    assert decide(failures) == (2, failures[1][0])  # the same but for a number
    assert failures[1][0].__notes__ == ["after step 5 this came 2 times: there is no other restart"]
    assert decide([raised(5), raised(6), raised(7)]) == (3, None)  # it gets further
    assert decide([raised(5), raised(5, "raised KeyError")]) == (2, None)
    assert decide([raised(5), killed(5), raised(5)]) == (3, None)  # chance came between


def test_a_rank_that_dies_again_at_the_same_step_has_two_more_tries():
    failures = [killed(5), killed(5), killed(5)]
    assert decide(failures) == (2, failures[0][0])


def test_where_steps_are_not_counted_only_the_number_bounds():
    assert decide([raised()] * 10) == (10, None)


def test_what_the_caller_got_wrong_is_not_tried_again():
    refusal = RankFailed(0, "raised UsageError: no", "…", refusal="no")
    assert decide([(refusal, 3)]) == (0, refusal)


# ── with real ranks ─────────────────────────────────────────────────────────────────────────────────────────────────


def counts_its_attempts(comms, folder, failures, fail):
    """Fail so many times, each time at a later step; then return the number of this attempt."""
    attempt = len([*folder.iterdir()])
    comms.barrier()
    if comms.rank == 1:
        (folder / str(attempt)).touch()
    comms.flight.at_step(attempt)
    comms.barrier()
    if attempt < failures and comms.rank == 1:
        fail()
    comms.barrier()
    return attempt


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    raise SystemExit(3)


def fail():
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("how", [kill, leave, fail])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_ranks_are_started_again_until_they_return(warm_ranks, tmp_path, how, transport):
    told = []
    results = warm_ranks.run(
        *(counts_its_attempts, 2, tmp_path, 2, how),
        transport=transport,
        device="cpu",
        restarts=5,
        on_restart=lambda error, number, ranks: told.append((error.rank, number, ranks)),
        timeout=50,
    )
    assert results == [2, 2]
    assert told == [(1, 1, 2), (1, 2, 2)]


def stops_itself(comms, folder):
    """In the first attempt, rank 1 stops as a process does that a debugger or the system has stopped."""
    first = not any(folder.iterdir())
    comms.barrier()
    if comms.rank == 1 and first:
        (folder / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    comms.barrier()
    return "done"


def test_a_rank_that_was_stopped_is_replaced(warm_ranks, tmp_path):
    named = {"restarts": 1, "call_timeout": 1.0, "on_restart": lambda *_: None, "device": "cpu", "timeout": 50}
    assert warm_ranks.run(stops_itself, 2, tmp_path, **named) == ["done", "done"]


def stops_alone(comms, folder):
    """In the first attempt rank 1 stops, and nobody waits for it."""
    first = not any(folder.iterdir())
    comms.barrier()
    if comms.rank == 1 and first:
        (folder / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return "done"


def test_a_rank_that_was_stopped_and_that_nobody_waits_for_is_replaced(warm_ranks, tmp_path):
    told = []
    named = {"restarts": 1, "call_timeout": 1.0, "on_restart": lambda *news: told.append(news), "device": "cpu"}
    assert warm_ranks.run(stops_alone, 2, tmp_path, **named, timeout=50) == ["done", "done"]
    assert str(told[0][0]).startswith("rank 1 was stopped (SIGSTOP, or a debugger) for ")


def always_raises(comms):
    comms.flight.at_step(4)
    raise ValueError("at step 4")


def test_the_first_traceback_is_raised(warm_ranks):
    with pytest.raises(RankFailed, match=r"raised ValueError: at step 4[\s\S]*always_raises") as failed:
        warm_ranks.run(always_raises, 2, restarts=9, on_restart=lambda *_: None, device="cpu", timeout=50)
    assert isinstance(failed.value.__cause__, ValueError)


@pytest.mark.parametrize("named", [{"restarts": -1}, {"restarts": "2"}, {"restarts": 1, "min_ranks": 3}])
def test_bad_numbers_are_refused(named):
    with pytest.raises(mp.errors.UsageError, match=r"(restarts|min_ranks)=\S+: give a whole number"):
        mp.launch(always_raises, 2, **named)


@pytest.mark.parametrize("groups", [0, 2, "2"])
def test_groups_that_ranks_cannot_be_cut_into_are_refused(groups):
    with pytest.raises(mp.errors.UsageError, match=r"in_groups_of=\S+: ranks=3 cannot be cut into such groups"):
        mp.launch(always_raises, 3, restarts=1, in_groups_of=groups)


@pytest.mark.parametrize(("ranks", "groups"), [(3, 1), (4, 2), (6, 2)])
def test_fewer_ranks_where_no_more_can_be_started(warm_ranks, tmp_path, monkeypatch, ranks, groups):
    launch = importlib.import_module("microparallel.world.launch")
    started = []

    class Scarce(launch.RankProcess):
        def __init__(self, *arguments, **named):
            if len(started) == 2:
                raise LaunchError("no more processes")
            super().__init__(*arguments, **named)
            started.append(self.pid)

    monkeypatch.setattr(launch, "RankProcess", Scarce)
    warm_ranks.replace_ranks()
    told = []
    results = warm_ranks.run(
        *(where, ranks),
        restarts=2,
        min_ranks=2,
        in_groups_of=groups,
        on_restart=lambda error, number, ranks: told.append((str(error), number, ranks)),
        device="cpu",
        timeout=50,
    )
    assert results == [(0, 2), (1, 2)]
    fewer = range(ranks - groups, 1, -groups)
    assert told == [("a process cannot be started (no more processes)", *one) for one in enumerate(fewer, start=1)]


def where(comms):
    return comms.rank, comms.world_size


def test_launch_forks_new_ranks(tmp_path: Path):
    """Without a pool of one's own: killed once, then again, and nothing is left running."""
    results = mp.launch(
        *(counts_its_attempts, 2, tmp_path, 2, kill), restarts=2, on_restart=lambda *_: None, device="cpu", timeout=50
    )
    assert results == [2, 2]
