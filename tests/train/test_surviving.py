"""What goes wrong in a run, and what is left of it."""

import ctypes
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import microparallel as mp
from microparallel.train import checkpoint
from microparallel.train.checkpoint_folder import best_of
from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank as train
from microparallel.train.run_folder import RunFolder
from microparallel.train.saving import Saving, young_interval


def configuration(out, **changes):
    settings = {"out": str(out), "dim": 16, "depth": 3, "batch": 300, "steps": 6, "ranks": 2}
    return TrainConfig(**settings | changes)


def run(pool, config, resume=None):
    return pool.run(train, config.ranks, config, resume, True, timeout=50)[0]


def saved(out):
    return sorted(path.name for path in (Path(out) / "checkpoints").glob("step-*"))


def losses(out):
    records = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


# ── how often a run saves ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_interval_is_youngs_and_saving_takes_a_fiftieth_at_the_most():
    assert young_interval(0.5, 3600) == pytest.approx(60)  # √(2 · 0.5 · 3600)
    assert young_interval(100, 3600) == pytest.approx(5000)  # √(2 · 100 · 3600) would be 849: 12 % of the time


def test_the_interval_is_said_again_only_when_it_has_changed_much():
    said = []
    display = SimpleNamespace(note=said.append)
    saving = Saving(SimpleNamespace(steps_done=0), configuration("run", mtbf=24), Path("checkpoints"), display)
    for cost in (0.02, 0.001, 0.03, 0.002):  # the first save takes fresh memory
        saving._choose_interval(cost, again=True)
    assert len(said) == 1
    for _ in range(9):
        saving._choose_interval(1.0, again=True)
    assert len(said) == 2 and "a save costs C = 506 ms" in said[1]
    saving._choose_interval(1000.0)  # the last save, or one for a validation
    assert len(said) == 2


class BusyWriter:
    """Copies whose writer does what the test says."""

    def __init__(self):
        self.writer = self
        self.reading, self.failure = 0, None

    def finished(self):
        return self.reading is None

    def take_failure(self):
        failure, self.failure = self.failure, None
        return failure

    def settle(self):
        assert self.finished()


@pytest.fixture
def saving_in_the_background():
    copies = BusyWriter()
    display = SimpleNamespace(note=lambda _: None, warn=lambda _: None)
    training = SimpleNamespace(steps_done=0, comms=None)
    saving = Saving(training, configuration("run"), Path("checkpoints"), display, copies)
    saving._on_its_way = True  # to the writer
    return saving, copies


def test_steps_do_not_wait_for_a_writer_that_is_busy(saving_in_the_background):
    saving, copies = saving_in_the_background
    saving._next = 0.0  # long ago
    assert not saving.due()
    copies.reading = None
    assert saving.due()


def test_a_failure_that_was_heard_of_before_the_end_is_one_at_the_end(saving_in_the_background):
    """The writer could not write the last step, and rank 0 learnt that when it looked whether to save."""
    saving, copies = saving_in_the_background
    copies.reading, copies.failure = None, "the disk is full"
    saving.due()
    with pytest.raises(mp.errors.CheckpointError, match="the disk is full"):
        saving._settle()


def saves_by_the_clock(comms, config):
    """Train with a clock on which every look takes a second."""
    from microparallel.train import saving

    class Clock:
        now = 0.0

        @classmethod
        def monotonic(cls):
            cls.now += 1.0
            return cls.now

    saving.time, before = Clock, saving.time
    try:
        return train(comms, config, None, True)
    finally:
        saving.time = before


def test_a_run_saves_by_default(pool, tmp_path):
    """Before the first step, whenever it is time, and at the end; without --save-every."""
    config = configuration(tmp_path / "run", steps=300, keep=100, mtbf=1e-6, wait_for_saves=True)
    pool.run(saves_by_the_clock, 2, config, timeout=50)
    names = saved(tmp_path / "run")
    assert names[0] == "step-00000000" and names[-1] == "step-00000300"
    assert len(names) > 2


class CannotBeStored(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 10))

    def get_extra_state(self):
        return {1, 2}

    def set_extra_state(self, state):
        pass


def cannot_be_stored():
    return CannotBeStored()


def test_a_model_that_cannot_be_stored_is_known_before_the_first_step(pool, tmp_path):
    config = TrainConfig(model=f"{__name__}:cannot_be_stored", data="digits", out=str(tmp_path / "run"), steps=3)
    with pytest.raises(
        mp.errors.RankFailed, match="model tensor _extra_state is a set, and only tensors can be stored"
    ):
        run(pool, config)
    assert not (tmp_path / "run").exists()


# ── numbers that are not finite ─────────────────────────────────────────────────────────────────────────────────────


MARKED = list(mp.ShardedSampler(64, 8))[4][5]  # a sample of the fifth step


class Poisoned(nn.Module):
    """Its loss, or a gradient, is not finite for the samples that are marked."""

    def __init__(self, gradient_only):
        super().__init__()
        self.gradient_only = gradient_only
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, inputs):
        marked = (inputs[:, :1] > 50).to(inputs.dtype)
        hidden = self.first(inputs * (1 - marked))
        if self.gradient_only:  # the square root of 0 has an infinite slope, and 0 · ∞ is NaN
            hidden = hidden + torch.sqrt(hidden.square().sum(1, keepdim=True) * (1 - marked)) * (1 - marked)
            return self.second(hidden)
        return self.second(hidden) + torch.where(marked > 0, torch.nan, 0.0)


def poisoned_loss():
    return Poisoned(gradient_only=False)


def poisoned_gradient():
    return Poisoned(gradient_only=True)


def marked_data():
    """64 samples, of which one is marked."""
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    inputs[MARKED, 0] = 100.0
    return TensorDataset(inputs, inputs[:, 1:2].clone())


def poisoned(out, model, **changes):
    settings = {"data": f"{__name__}:marked_data", "batch": 8, "steps": 16, "loss": "mse", "ranks": 2, "save_every": 1}
    return TrainConfig(model=f"{__name__}:{model}", out=str(out), **settings | changes)


def step_of_the_marked_sample():
    """Which step of the run has it, and which of the two ranks."""
    for rank in range(2):
        sampler = mp.ShardedSampler(64, 8, rank=rank, world_size=2)
        for number, indices in enumerate(sampler, start=1):
            if MARKED in indices:
                return number, rank
    raise AssertionError


def all_finite(folder):
    found, _ = checkpoint.latest(folder / "checkpoints")
    return all(bool(torch.isfinite(tensor).all()) for tensor in found.model.values())


def test_a_loss_that_is_not_finite_stops_the_run_and_is_traced(pool, tmp_path):
    step, rank = step_of_the_marked_sample()
    with pytest.raises(mp.errors.RankFailed) as failed:
        run(pool, poisoned(tmp_path / "run", "poisoned_loss"))
    text = str(failed.value)
    assert f"the loss of step {step} is nan" in text
    assert f"rank {rank}: the loss of its own share is nan" in text and f"rank {1 - rank}: the" not in text
    assert "gradients that are not finite: first.weight, first.bias, second.weight" in text
    assert saved(tmp_path / "run")[-1] == f"step-{step - 1:08d}" and all_finite(tmp_path / "run")


@pytest.mark.parametrize("model", ["poisoned_loss", "poisoned_gradient"])
def test_such_steps_can_be_left_out(pool, tmp_path, model):
    step, _ = step_of_the_marked_sample()
    config = poisoned(tmp_path / "run", model, on_nan="skip", keep=100)
    summary = run(pool, config)
    assert summary["steps"] == 16 and summary["left_out"] == 2  # one in each epoch
    before, after = (checkpoint.load(tmp_path / "run" / "checkpoints" / f"step-{n:08d}") for n in (step - 1, step))
    assert all(torch.equal(after.model[name], tensor) for name, tensor in before.model.items())
    assert all_finite(tmp_path / "run")


def test_weights_that_are_not_finite_never_replace_good_ones(pool, tmp_path):
    """The gradient alone is not finite: the loss shows it one step later, and a save is due in between."""
    step, _ = step_of_the_marked_sample()
    with pytest.raises(mp.errors.RankFailed, match=f"weights are not finite after step {step}"):
        run(pool, poisoned(tmp_path / "run", "poisoned_gradient", keep=1))
    assert saved(tmp_path / "run") == [f"step-{step - 1:08d}"] and all_finite(tmp_path / "run")


# ── a bit that flips ────────────────────────────────────────────────────────────────────────────────────────────────


def flips_a_bit(comms, config, guilty, step):
    """Train, and flip a bit of one rank's weights behind the back of everything, after a step."""
    from microparallel.train.training import Training

    after_step = Training.step

    def step_and_flip(self):
        loss = after_step(self)
        if self.steps_done == step and comms.rank == guilty:
            weight = next(iter(self.model.parameters())).detach()
            byte = ctypes.c_ubyte.from_address(weight.data_ptr())
            byte.value ^= 1
        return loss

    Training.step = step_and_flip
    try:
        return train(comms, config, None, True)
    finally:
        Training.step = after_step


def test_a_bit_that_flips_is_found_and_named(pool, tmp_path):
    config = configuration(tmp_path / "run", ranks=3, check_replicas=2, save_every=1, keep=10)
    with pytest.raises(mp.errors.RankFailed, match=r"after step 3 the weights of rank 1 in layers\.0\.weight are not"):
        pool.run(flips_a_bit, 3, config, 1, 3, timeout=50)
    assert saved(tmp_path / "run")[-1] == "step-00000002"  # compared before each save, too


def flips_a_bit_between_copies(comms, config):
    """With a copy in memory after every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saving, "copy_every", lambda *_: 1)
        return flips_a_bit(comms, config, 1, 3)


def test_a_bit_that_flips_comes_into_no_copy(pool, tmp_path):
    """Ranks that are started again would all go on from it, and it would be found no more."""
    config = configuration(tmp_path / "run", ranks=3, check_replicas=1000, save_every=1000)
    with pytest.raises(mp.errors.RankFailed, match=r"after step 3 the weights of rank 1 in layers\.0\.weight are not"):
        pool.run(flips_a_bit_between_copies, 3, config, timeout=50)
    assert saved(tmp_path / "run") == ["step-00000000"]  # the copy of step 2 is forgotten, too


# ── disks and folders ───────────────────────────────────────────────────────────────────────────────────────────────


def trains_while(comms, config, trouble):
    """Train, and call `trouble(step, folder)` on rank 0 after each step; returns summary and warnings."""
    from microparallel.train.progress import Display
    from microparallel.train.training import Training

    after_step, warn = Training.step, Display.warn
    warnings = []

    def step_and_trouble(self):
        loss = after_step(self)
        if comms.rank == 0:
            trouble(self.steps_done, Path(config.out))
        comms.barrier()
        return loss

    Training.step = step_and_trouble
    Display.warn = lambda _, text: warnings.append(text)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("microparallel.train.loop.display_for", lambda *_: Display())
            return train(comms, config, None, True), warnings
    finally:
        Training.step, Display.warn = after_step, warn


def remove_the_folder(step, folder):
    if step == 3:
        shutil.rmtree(folder)


def test_a_folder_that_is_removed_is_made_again(pool, tmp_path):
    out = tmp_path / "run"
    config = configuration(out, save_every=2, wait_for_saves=True)  # nothing is being written while it is removed
    _, warnings = pool.run(trains_while, 2, config, remove_the_folder, timeout=50)[0]
    assert warnings == [f"{out} was removed while the run goes on; it is made again"]
    assert {path.name for path in out.iterdir()} == {"config.toml", "metrics.jsonl", "summary.json", "checkpoints"}
    assert saved(out)[-1] == "step-00000006"
    assert run(pool, configuration(out, steps=8), resume=out)["steps"] == 8


def put_a_file_in_the_way(step, folder):
    if step == 1:
        shutil.rmtree(folder / "checkpoints")
        (folder / "checkpoints").write_text("in the way")
    if step == 5:  # the save of step 2 has ended, since that of step 4 has waited for it
        (folder / "checkpoints").unlink()


@pytest.mark.parametrize("wait", [None, True], ids=["copied", "waited"])
def test_a_save_that_fails_does_not_end_the_run(pool, tmp_path, wait):
    config = configuration(tmp_path / "run", save_every=2, wait_for_saves=wait)
    summary, warnings = pool.run(trains_while, 2, config, put_a_file_in_the_way, timeout=50)[0]
    assert summary["steps"] == 6
    names = saved(tmp_path / "run")
    assert names[-1] == "step-00000006" and "step-00000002" not in names
    [warning] = warnings
    assert warning.startswith("cannot write the checkpoint") and "training goes on" in warning


def test_a_run_has_one_writer(pool, tmp_path):
    config = configuration(tmp_path / "run")
    run(pool, config)
    lock = RunFolder.open(tmp_path / "run")
    lock.take()
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    try:
        with pytest.raises(mp.errors.RankFailed, match=f"is in use by process {os.getpid()} on"):
            run(pool, configuration(tmp_path / "run", steps=9), resume=tmp_path / "run")
    finally:
        lock.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines


# ── going on by itself ──────────────────────────────────────────────────────────────────────────────────────────────


def test_resume_auto_begins_and_goes_on(pool, tmp_path):
    out = tmp_path / "run"
    whole = run(pool, configuration(tmp_path / "whole", steps=8, schedule_lr="constant"))
    assert run(pool, configuration(out, schedule_lr="constant"), resume="auto")["steps"] == 6
    longer = run(pool, configuration(out, steps=8, schedule_lr="constant"), resume="auto")
    assert longer["loss"] == whole["loss"] and losses(out) == losses(tmp_path / "whole")
    with pytest.raises(mp.errors.RankFailed, match="--batch 100 would change the run in"):
        run(pool, configuration(out, batch=100), resume="auto")
    (out / "checkpoints").rename(tmp_path / "gone")  # as if it had ended before its first save
    assert run(pool, configuration(out, steps=2, schedule_lr="constant"), resume="auto")["steps"] == 2


def test_sighup_saves_as_sigterm_does(pool, tmp_path):
    config = configuration(tmp_path / "run", steps=100_000)
    summary, _ = pool.run(trains_while, 2, config, hang_up, timeout=50)[0]
    assert summary["stopped_early"] and saved(tmp_path / "run")[-1] == f"step-{summary['steps']:08d}"


def hang_up(step, folder):
    if step == 3 and threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGHUP)


def test_the_best_by_validation_is_kept(pool, tmp_path):
    """With a learning rate that makes it worse again, and room for one checkpoint beside it."""
    config = configuration(tmp_path / "run", steps=40, lr=0.5, optimizer="sgd", save_every=2, validate_every=2, keep=1)
    run(pool, config)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}
    best = min(measured, key=lambda step: (measured[step], step))
    assert saved(tmp_path / "run") == [f"step-{step:08d}" for step in sorted({best, 40})]
    assert best_of(tmp_path / "run" / "checkpoints") == (best, measured[best])
