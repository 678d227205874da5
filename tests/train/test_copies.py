"""Copies of a run's state in memory: what they hold, who goes on from them, and the process that writes them."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tests.train.test_surviving import configuration, losses, saved, trains_while

from microparallel.errors import CheckpointError, RankFailed
from microparallel.files.state_memory import StateMemory, newest
from microparallel.train import checkpoint, checkpoint_writer
from microparallel.train.checkpoint_folder import best_of
from microparallel.train.checkpoint_reader import open_memory
from microparallel.train.checkpoint_writer import Writer, write_from_memory
from microparallel.train.config import read_config
from microparallel.train.copies import Copies, _all_see
from microparallel.train.loop import train_on_rank as train
from microparallel.train.rescue import save_what_is_in_memory
from microparallel.train.run_folder import RunFolder


@pytest.fixture
def memory():
    with StateMemory(2) as held:
        yield held


def copy_one_rank(memory, slot, step, values):
    tensors = {"w": torch.arange(values, dtype=torch.float64), "b": torch.tensor([1, 2], dtype=torch.int64)}
    optimizer = {"state": {0: {"step": torch.tensor(step)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return checkpoint.copy(memory.slots, lambda: slot, step, tensors, optimizer, {"loss": 0.5}), tensors


def test_a_copy_is_read_as_a_checkpoint_is(memory):
    number, tensors = copy_one_rank(memory, 1, 7, 10)
    assert number == 1 and newest(memory.slots) == 1 and memory.slots[0].step is None
    found = open_memory(memory.slots[1])
    assert found.step == 7 and found.state == {"loss": 0.5}
    assert all(torch.equal(found.model[name], tensor) for name, tensor in tensors.items())
    assert found.optimizer_state["state"][0]["step"].item() == 7


def test_a_smaller_state_over_a_larger_one(memory):
    copy_one_rank(memory, 0, 1, 1000)
    _, tensors = copy_one_rank(memory, 0, 2, 3)
    assert torch.equal(open_memory(memory.slots[0]).model["w"], tensors["w"])


def test_what_is_cut_off_is_no_state(memory):
    copy_one_rank(memory, 0, 1, 5)
    copy_one_rank(memory, 1, 2, 5)
    record = Path(memory.slots[1].record)
    text = record.read_bytes()
    for length in (0, 1, len(text) // 2, len(text) - 1):
        record.write_bytes(text[:length])
        assert newest(memory.slots) == 0


def test_what_the_writer_writes_is_what_save_writes(memory, tmp_path):
    _, tensors = copy_one_rank(memory, 0, 4, 10)
    written = write_from_memory(memory.slots[0], tmp_path / "memory", keep=3)
    found = open_memory(memory.slots[0])
    saved = checkpoint.save(tmp_path / "disk", 4, tensors, found.optimizer_state, {"loss": 0.5})
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert files == {path.name: path.read_bytes() for path in written.iterdir()}
    checkpoint.load(written)


def test_memory_is_gone_with_its_holder():
    with StateMemory(1) as held:
        path = held.slots[0].record
        assert Path(path).exists()
    assert not Path(path).exists()


def test_where_no_slot_is_free_nothing_is_copied(memory):
    copy_one_rank(memory, 0, 1, 5)
    assert copy_one_rank(memory, None, 2, 5)[0] is None
    assert [slot.step for slot in memory.slots] == [1, None]


def test_memory_that_is_gone_is_an_error_in_one_line():
    with StateMemory(1) as held:
        pass
    with pytest.raises(CheckpointError, match="rank 0 cannot copy its state into memory: No such file or directory"):
        copy_one_rank(held, 0, 1, 5)


def test_no_room_is_an_error_that_names_the_bytes(memory, monkeypatch):
    monkeypatch.setattr(checkpoint, "available_memory", lambda: 100)
    with pytest.raises(CheckpointError, match=r"takes 100,0\d\d bytes, and 50 are to be had"):
        copy_one_rank(memory, 0, 1, 12_500)
    assert newest(memory.slots) is None


# ── the writer ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def writer():
    with contextlib.closing(Writer()) as one:
        yield one


def test_the_writer_says_what_it_could_not_write(writer, memory, tmp_path):
    copy_one_rank(memory, 0, 1, 5)
    (tmp_path / "file").touch()
    writer.save(0, memory.slots[0], tmp_path / "file" / "checkpoints", 3, None)
    assert writer.reading in (0, None)  # it may have been quick
    writer.wait()
    assert "Not a directory" in writer.take_failure()
    assert writer.take_failure() is None and writer.reading is None


def test_a_killed_writer_is_followed_by_another(writer, memory, tmp_path):
    copy_one_rank(memory, 0, 1, 5)
    writer.save(0, memory.slots[0], tmp_path, 3, None)
    writer.wait()
    first = writer.pid
    os.kill(first, signal.SIGSTOP)  # so that it dies with something to do
    writer.save(0, memory.slots[0], tmp_path, 3, None)
    os.kill(first, signal.SIGKILL)
    writer.wait()
    assert writer.take_failure() == "the process that writes checkpoints has ended (exit status -9)"
    writer.save(0, memory.slots[0], tmp_path, 3, None)
    writer.wait()
    assert writer.take_failure() is None and writer.pid != first
    assert checkpoint.load(tmp_path / "step-00000001").step == 1


def test_a_writer_that_hangs_is_given_up(writer, memory, tmp_path):
    """It was stopped, or its disk gives no answer: the save has failed, and the next one has another process."""
    copy_one_rank(memory, 0, 1, 5)
    writer.save(0, memory.slots[0], tmp_path, 3, None)
    writer.wait()
    first = writer.pid
    os.kill(first, signal.SIGSTOP)
    writer.patience, before = 0.1, writer.patience
    writer.save(0, memory.slots[0], tmp_path, 3, None)
    writer.wait()
    assert "of silence: was it stopped, or does the disk hang?" in writer.take_failure()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    writer.patience = before
    writer.save(0, memory.slots[0], tmp_path, 3, None)
    writer.wait()
    assert writer.take_failure() is None and writer.pid != first


def test_a_writer_that_hangs_is_said(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_SAY_SILENT_AFTER", 0.0)
    said = []
    with contextlib.closing(Writer(tell=said.append)) as writer:
        copy_one_rank(memory, 0, 1, 5)
        writer.save(0, memory.slots[0], tmp_path, 3, None)
        os.kill(writer.pid, signal.SIGSTOP)
        for _ in range(3):
            assert writer.reading == 0
        [line] = said  # once
        assert line.startswith(f"process {writer.pid}, which writes checkpoints, is silent since")
        os.kill(writer.pid, signal.SIGCONT)
        writer.wait()
        assert writer.take_failure() is None


def test_a_writer_that_was_stopped_with_nothing_to_do_is_ended(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_SECONDS_TO_END", 0.1)
    copy_one_rank(memory, 0, 1, 5)
    with contextlib.closing(Writer()) as writer:
        writer.save(0, memory.slots[0], tmp_path, 3, None)
        writer.wait()
        pid = writer.pid
        os.kill(pid, signal.SIGSTOP)
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        assert select.select([ended], [], [], 10)[0]
        os.close(ended)


def test_a_best_that_could_not_be_saved_is_not_the_best(writer, tmp_path):
    told = []
    writer.keep_best(tmp_path / "step-00000001", 0.5, 3, None, lambda: told.append("no"))
    writer.wait()
    assert told == ["no"] and best_of(tmp_path)[0] is None


def test_signs_of_life_come_each_second(monkeypatch):
    printed = []
    monkeypatch.setattr("builtins.print", lambda text, flush: printed.append(json.loads(text)))
    signs = checkpoint_writer._Signs()
    signs()
    assert printed == []
    signs._last -= 2 * checkpoint_writer._SECONDS_BETWEEN_SIGNS
    signs()
    signs()
    assert printed == [{}]


def test_the_writer_ends_with_its_rank(memory, tmp_path, pool):
    """Also when the rank is killed, and a process that it has forked holds the pipe open."""
    with pytest.raises(RankFailed, match="SIGKILL"):
        pool.run(dies_with_a_writer, 1, memory.slots, tmp_path, timeout=30)
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(int((tmp_path / "pid").read_text()))
        assert select.select([ended], [], [], 10)[0]
        os.close(ended)


def dies_with_a_writer(comms, slots, folder):
    checkpoint.copy(slots, lambda: 0, 1, {"w": torch.zeros(3)}, {}, {})
    writer = Writer()
    writer.save(0, slots[0], folder, 3, None)
    writer.wait()
    assert checkpoint.load(folder / "step-00000001").step == 1
    (folder / "pid").write_text(str(writer.pid))
    os.kill(os.getpid(), signal.SIGKILL)


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def kill_the_writer(step, _folder):
    """Every process that this rank has started is one that writes."""
    if step == 3:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        writers = [pid for pid in children if b"checkpoint_writer" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert writers
        for pid in writers:
            os.kill(int(pid), signal.SIGKILL)


def test_a_run_goes_on_when_its_writer_is_killed(pool, tmp_path):
    config = configuration(tmp_path / "run", save_every=1, keep=10)
    summary, _ = pool.run(trains_while, 2, config, kill_the_writer, timeout=50)[0]
    assert summary["steps"] == 6
    assert saved(tmp_path / "run")[-3:] == ["step-00000004", "step-00000005", "step-00000006"]
    for name in saved(tmp_path / "run"):
        checkpoint.load(tmp_path / "run" / "checkpoints" / name)


def looks_into_a_pipe(comms):
    """Rank 1 is on another machine, where a process of that number has something else open."""
    with StateMemory(1) as held:
        read, write = os.pipe()
        path = Path(f"/proc/{os.getpid()}/fd/{read}") if comms.rank else Path(held.slots[0].record)
        sees = _all_see(path, comms)
        os.close(read)
        os.close(write)
    return sees


def test_ranks_that_do_not_see_the_memory_notice(pool):
    assert pool.run(looks_into_a_pipe, 2, timeout=30) == [False, False]


def memory_of_two_copies(comms, slots):
    def contents():
        return {"step": 1, "model": {"w": torch.zeros(50_000)}, "optimizer_state": {}, "state": {}, "comms": comms}

    comms.take_held_states()
    with contextlib.closing(Copies.into_memory(comms, contents, slots=slots)) as copies:
        copies.copy()
        copies.copy()
        taken = sum(slot.bytes for slot in copies._slots) // 200_000
        comms.barrier()  # rank 0 holds the memory
        return taken


def test_where_nobody_goes_on_from_memory_one_slot_is_enough(pool):
    assert pool.run(memory_of_two_copies, 2, 1, timeout=30) == [1, 1]
    assert pool.run(memory_of_two_copies, 2, 2, timeout=30) == [2, 2]


def trains_with(comms, held, *arguments):
    comms.held_states = held
    return train(comms, *arguments)


def test_a_run_whose_folder_was_removed_goes_on_from_memory(memory, pool, tmp_path):
    whole, broken = (configuration(tmp_path / name, schedule_lr="constant") for name in ("whole", "broken"))
    pool.run(train, 2, whole, None, True, timeout=50)
    pool.run(trains_with, 2, memory.held, replace(broken, steps=4), None, True, timeout=50)
    shutil.rmtree(broken.out)
    (tmp_path / "broken" / "checkpoints").mkdir(parents=True)  # the writer has made it again
    pool.run(trains_with, 2, memory.held, broken, "auto", True, timeout=50)
    assert losses(broken.out) == losses(whole.out)[4:]
    one, other = (checkpoint.latest(Path(run.out) / "checkpoints")[0] for run in (whole, broken))
    assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_last_step_that_was_in_memory_alone_comes_to_the_disk(memory, pool, tmp_path, on_disk):
    """Ranks and their writer were killed while they saved it; there is nothing left to do but that."""
    config = configuration(tmp_path / "run")
    pool.run(trains_with, 2, memory.held, config, None, True, timeout=50)
    folder = tmp_path / "run" / "checkpoints"
    kept = checkpoint.latest(folder)[0].model
    cut_off = folder / ".step-00000006-writing"
    cut_off.mkdir()
    (cut_off / "rank_0.safetensors").write_bytes(b"cut")
    if not on_disk:
        shutil.rmtree(folder / "step-00000006")
    pool.run(trains_with, 2, memory.held, config, "auto", True, timeout=50)
    assert "step-00000006" in saved(config.out) and not cut_off.exists()
    assert all(torch.equal(kept[name], tensor) for name, tensor in checkpoint.latest(folder)[0].model.items())


def saves_what_is_in_memory(memory, run):
    folder, settings = str(run / "checkpoints"), asdict(configuration(run).resolved())
    save_what_is_in_memory(memory.slots, folder=folder, keep=3, keep_every=None, go_on="…", run=settings)


def test_what_is_in_memory_is_saved_into_a_folder_that_was_removed(memory, tmp_path, capsys):
    copy_one_rank(memory, 0, 7, 5)
    saves_what_is_in_memory(memory, tmp_path / "run")
    assert "step 7, which was in memory, is saved; go on with" in capsys.readouterr().err
    assert read_config(RunFolder.open(tmp_path / "run").config_file)["dim"] == 16
    assert checkpoint.latest(tmp_path / "run" / "checkpoints")[0].step == 7
    assert not (tmp_path / "run" / "lock").exists()


def test_what_is_in_memory_is_not_saved_over_a_run_that_goes_on_elsewhere(memory, tmp_path, capsys):
    copy_one_rank(memory, 0, 7, 5)
    being_written = tmp_path / "run" / "checkpoints" / ".step-00000003-writing"
    being_written.mkdir(parents=True)
    lock = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True)"
    command = [sys.executable, "-c", f"{lock}; sys.stdin.read()", str(tmp_path / "run" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        saves_what_is_in_memory(memory, tmp_path / "run")
    assert "step 7 is in memory, and could not be saved" in capsys.readouterr().err
    assert being_written.exists() and saved(tmp_path / "run") == []


def trains_without_room(comms, config):
    from microparallel.train import checkpoint

    checkpoint.available_memory, before = lambda: 0, checkpoint.available_memory
    try:
        return train(comms, config, None, True)
    finally:
        checkpoint.available_memory = before


def test_without_memory_for_copies_the_ranks_write(pool, tmp_path):
    summary = pool.run(trains_without_room, 2, configuration(tmp_path / "run", save_every=2), timeout=50)[0]
    assert summary["steps"] == 6 and saved(tmp_path / "run") == [f"step-0000000{step}" for step in (2, 4, 6)]


def test_copies_or_not_the_checkpoints_are_the_same(pool, tmp_path):
    """And a run that waits for its saves holds no copies."""
    for name, wait in (("copied", None), ("waited", True)):
        pool.run(train, 2, configuration(tmp_path / name, save_every=3, wait_for_saves=wait), None, True, timeout=50)
    for step in (3, 6):
        one, other = (
            checkpoint.load(tmp_path / name / "checkpoints" / f"step-{step:08d}") for name in ("copied", "waited")
        )
        assert all(torch.equal(one.model[name], other.model[name]) for name in other.model)
        assert one.state["random"] == other.state["random"] and one.state["sampler"] == other.state["sampler"]
