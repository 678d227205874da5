"""A rank for which the others wait is named while the run goes on."""

import json
import time

import pytest
import torch

from microparallel.train import agreement, stragglers
from microparallel.train.agreement import Agreement
from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank
from microparallel.train.progress import Display
from microparallel.train.stragglers import Stragglers, columns_of
from microparallel.train.training import Training


class Watched:
    """What rank 0 hears, with a clock that a test moves on; each question is one of ten steps."""

    def __init__(self, columns):
        self.now, self.said = 0.0, []
        self.stragglers = Stragglers(columns, lambda *found: self.said.append(found), lambda: self.now)

    def questions(self, number, milliseconds, samples=None):
        """Ask some times, after steps in which each rank's own work takes so long; returns what was said."""
        samples = samples or [10] * len(milliseconds)
        self.said.clear()
        for _ in range(number):
            for _ in range(10):
                self.stragglers.after_step(max(milliseconds) / 1e3, 0.0, 1)
                self.now += max(milliseconds) / 1e3
            self.stragglers.answer()
            self.stragglers.hear([[one * 1000, many] for one, many in zip(milliseconds, samples, strict=True)])
        return [([str(one) for one in slow], before) for slow, before, _ in self.said]


def test_a_slow_rank_is_named_once_and_again_when_that_changes():
    watched = Watched([range(4)])
    words = (
        "rank 2 is slow: its own work takes 48.0 ms a step, the others' 21.0 ms (median); the others wait for it "
        "56% of the time"
    )
    assert watched.questions(50, [20, 21, 48, 22]) == [([words], [])]
    assert watched.said[0][2] == [0.020, 0.021, 0.048, 0.022]
    assert watched.questions(50, [20, 21, 60, 22]) == []  # known already
    [([other], before)] = watched.questions(50, [48, 21, 20, 22])
    assert other.startswith(words.replace("rank 2", "rank 0").partition("; ")[0]) and before == [2]
    assert watched.questions(50, [48, 21, 20, 48]) != []  # a second one
    assert watched.questions(50, [21, 21, 20, 22]) == [([], [0, 3])]
    assert watched.questions(50, [21, 21, 20, 22]) == []


def test_of_two_ranks_the_slower_is_named():
    [([words], _)] = Watched([range(2)]).questions(30, [50, 20])
    assert words == (
        "rank 0 is slow: its own work takes 50.0 ms a step, rank 1's 20.0 ms; rank 1 waits for it 60% of the time"
    )


@pytest.mark.parametrize(
    "milliseconds",
    [[20, 20, 20, 20], [200, 201, 199, 200], [20, 29, 20, 20], [20, 20, 29, 29], [0, 0, 0, 0], [20, 60, 60, 60], [20]],
)
def test_where_all_are_slow_or_nearly_equal_nobody_is_named(milliseconds):
    assert Watched([range(len(milliseconds))]).questions(300, milliseconds) == []


def test_it_must_last():
    """One question of the window, however bad, names nobody; nor do few questions, or a short time."""
    watched = Watched([range(2)])
    for _ in range(20):
        assert watched.questions(1, [20, 900]) + watched.questions(8, [20, 20]) == []
    watched = Watched([range(2)])
    assert watched.questions(2, [1000, 9000]) == [] and watched.questions(1, [1000, 9000]) != []
    assert Watched([range(2)]).questions(9, [10, 50]) == []  # 4.5 seconds


def test_a_rank_that_is_named_remains_so_until_it_is_clearly_better():
    watched = Watched([range(3)])
    assert watched.questions(50, [20, 20, 40]) != [] == watched.questions(50, [20, 20, 27])
    assert watched.questions(50, [20, 20, 24]) == [([], [2])]
    assert watched.questions(50, [20, 20, 27]) == []


def test_a_rank_with_more_samples_is_not_slow():
    """Three ranks compute four shares: the one that has two takes twice as long."""
    assert Watched([range(3)]).questions(50, [40, 20, 20], [20, 10, 10]) == []
    assert Watched([range(3)]).questions(50, [40, 20, 20], [10, 20, 20]) != []
    # Nor is one slow that has few samples, each of which takes long, because what takes time is something else.
    assert Watched([range(3)]).questions(50, [20, 20, 20], [1, 10, 10]) == []


def test_a_rank_that_costs_the_others_little_is_not_named():
    """Its work is three times theirs, but nearly all of a step is waiting for the network, say."""
    watched = Watched([range(2)])
    for _ in range(50):
        for _ in range(10):
            watched.stragglers.after_step(0.05, 0.049, 1)
            watched.now += 0.05
        watched.stragglers.answer()
        watched.stragglers.hear([[1000, 10], [3000, 10]])
    assert watched.said == []


def test_only_the_same_stage_of_pipelines_is_compared():
    assert [[*column] for column in columns_of(4, 2)] == [[0, 2], [1, 3]]
    assert [[*column] for column in columns_of(3, 1)] == [[0, 1, 2]]
    assert Watched(columns_of(4, 2)).questions(50, [20, 60, 21, 62]) == []
    [([words], _)] = Watched(columns_of(4, 2)).questions(50, [20, 60, 21, 130])
    assert words.startswith("rank 3 is slow: its own work takes 130 ms a step, rank 1's 60.0 ms")
    assert Watched(columns_of(3, 3)).questions(50, [20, 60, 21]) == []


def test_what_a_rank_answers_is_its_own_work_since_the_last_question():
    mine = Stragglers([range(2)], lambda *_: None)
    assert mine.answer() == [0, 0]
    mine.after_step(0.050, 0.020, 5)
    mine.after_step(0.070, 0.020, 4)
    assert mine.answer() == [40_000, 9] and mine.answer() == [0, 0]
    mine.after_step(0.1, 0.2, 1)  # clocks are not that exact
    assert mine.answer() == [0, 1]


# ── real ranks ──────────────────────────────────────────────────────────────────────────────────────────────────────


def answers_heard(comms):
    heard = []
    asking = Agreement(comms, lambda: True, lambda _: 7, lambda: [comms.rank * 10, comms.rank + 1], heard.append)
    decision = asking.after_step()
    return heard, decision.save, decision.stop, asking._copy_every


def test_every_rank_hears_all_answers(pool):
    assert pool.run(answers_heard, 3, timeout=50) == [([[[0, 1], [10, 2], [20, 3]]], True, False, 7)] * 3


def waited_for_the_last(comms):
    """Rank 1 computes something before each call."""
    before = comms.flight.waited
    for _ in range(10):
        comms.barrier()
        waited = comms.flight.waited
        end = time.monotonic() + 0.03 * comms.rank
        while time.monotonic() < end:
            torch.ones(64, 64) @ torch.ones(64, 64)
        requests = [comms.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        for request in requests:
            request.wait()
        assert comms.flight.waited > waited
    return comms.flight.waited - before


def test_the_rank_that_comes_last_has_waited_least(pool):
    first, last = pool.run(waited_for_the_last, 2, timeout=50)
    assert first > last > 0


def of_threads(comms):
    """Three calls are waited for at once: that time counts once."""
    begun, before = time.monotonic(), comms.flight.waited
    entries = [comms._group.log.collective(f"call {number}", "") for number in range(3)]
    for entry in entries:
        entry.waits()
    middle = time.monotonic() + 0.01
    while time.monotonic() < middle:
        pass
    for entry in entries:
        entry.ends()
    return comms.flight.waited - before, time.monotonic() - begun


def test_a_second_of_waiting_counts_once(pool):
    [(waited, passed)] = pool.run(of_threads, 1, timeout=50)
    assert 0.01 <= waited <= passed


def configuration(out, **others):
    settings = {"dim": 8, "depth": 3, "batch": 60, "steps": 40, "ranks": 3, "save_every": 1000, **others}
    return TrainConfig(out=str(out), **settings).resolved()


def train_watched(comms, config, *patches):
    """Train, asking after every step; returns what rank 0 was told."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("microparallel.train.loop.display_for", lambda *_: Display())
        patch.setattr(Display, "note", lambda _, text: told.append(text))
        patch.setattr(agreement, "_SECONDS_BETWEEN_QUESTIONS", 0.0)
        for change in patches:
            change(patch, comms.rank)
        train_on_rank(comms, config, None, True)
    return [text for text in told if "slow" in text]


def durations_of_a_slow_rank(patch, rank):
    """Rank 2 is slow at first; all durations are given, and a step takes as long as its slowest rank."""

    class Timed(Stragglers):
        def __init__(self, columns, found):
            self.steps = 0
            super().__init__(columns, found, lambda: self.steps * 0.6)

        def after_step(self, seconds, waited, samples):
            assert seconds > waited >= 0 and 0 < samples <= 20
            self.steps += 1
            super().after_step(0.6, 0.0 if rank == 2 and self.steps < 15 else 0.4, samples)

    patch.setattr("microparallel.train.loop.Stragglers", Timed)


def records(out):
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["slow_ranks"], line["own_work"]) for line in lines if "slow_ranks" in line]


def test_a_run_names_a_slow_rank_and_says_when_it_is_better(pool, tmp_path):
    config = configuration(tmp_path / "run")
    told, *_ = pool.run(train_watched, 3, config, durations_of_a_slow_rank, timeout=50)
    assert told == [
        "warning: rank 2 is slow: its own work takes 600 ms a step, the others' 200 ms (median); the others wait "
        "for it 67% of the time",
        "rank 2 is no longer slow",
    ]
    assert [slow for _, slow, _ in records(tmp_path / "run")] == [[2], []]
    assert records(tmp_path / "run")[0][2] == [0.2, 0.2, 0.6]


def rank_1_gets_its_data_late(patch, rank):
    patch.setattr(stragglers, "_SECONDS", 0.0)
    if rank == 1:
        draw = Training.draw
        patch.setattr(Training, "draw", lambda self: (time.sleep(0.05), draw(self))[1])


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_a_rank_that_is_really_slow_is_named(pool, tmp_path, shard):
    config = configuration(tmp_path / "run", ranks=2, steps=12, **({} if shard == "none" else {"shard": shard}))
    told, _ = pool.run(train_watched, 2, config, rank_1_gets_its_data_late, timeout=50)
    assert told[0].startswith("warning: rank 1 is slow: its own work takes ")
    _, slow, (quick_one, slow_one) = records(tmp_path / "run")[0]
    assert slow == [1] and quick_one < slow_one
