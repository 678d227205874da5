from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microparallel.errors import ConfigError, MicroparallelError
from microparallel.files.atomic import sync_folder, write_atomically
from microparallel.train import run_folder
from microparallel.train.config import TrainConfig, read_config
from microparallel.train.run_folder import RunFolder

CONFIG = TrainConfig(model="gpt", ranks=2)
NOON = datetime(2025, 1, 31, 12, 0, 0)


def records(run: RunFolder) -> list[dict[str, object]]:
    return [json.loads(line) for line in run.metrics_file.read_text().splitlines()]


def test_a_new_run_holds_its_configuration(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "deep" / "run", CONFIG)
    assert TrainConfig(**read_config(run.config_file)) == CONFIG
    assert {path.name for path in run.path.iterdir()} == {"config.toml", "lock"}
    run.close()
    assert [path.name for path in run.path.iterdir()] == ["config.toml"]
    assert RunFolder.open(run.path).path == run.path


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    assert RunFolder.create(str(tmp_path), CONFIG).path == tmp_path


def test_the_default_path_says_when_and_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunFolder.default_path(CONFIG, NOON) == Path("runs/20250131-120000-gpt")
    own = TrainConfig(model="a.b:make", data="text")
    assert RunFolder.default_path(own, NOON) == Path("runs/20250131-120000-a.b-make")
    Path("runs/20250131-120000-gpt").mkdir(parents=True)
    assert RunFolder.default_path(CONFIG, NOON) == Path("runs/20250131-120000-gpt-2")


def test_runs_that_start_in_the_same_second_get_their_own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {RunFolder.create(None, CONFIG).path for _ in range(5)}
    assert len(paths) == 5
    assert all((path / "config.toml").exists() for path in paths)


def test_the_loser_of_a_race_for_a_name_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    answers = iter([Path("taken"), Path("free")])  # "taken" was made by another run just after the look
    monkeypatch.setattr(RunFolder, "default_path", lambda config, now: next(answers))
    assert RunFolder.create(None, CONFIG).path == Path("free")


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    with pytest.raises(ConfigError, match=r"--out .*run holds a run without a checkpoint; remove that folder"):
        RunFolder.create(run.path, CONFIG)
    run.checkpoints.mkdir()
    with pytest.raises(ConfigError, match=r"--out .*run holds a run already; .*--resume, .*another --out"):
        RunFolder.create(run.path, CONFIG)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    for place, words in (
        ("photos", "photos holds other files"),
        ("photos/cat.png", r"cat.png is a file"),
        ("photos/cat.png/below", r"below cannot be written: .*cat.png is not a folder .*; choose another"),
    ):
        with pytest.raises(ConfigError, match=words):
            RunFolder.create(tmp_path / place, CONFIG)

    def refuse(path: Path, data: bytes) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(run_folder, "write_atomically", refuse)
    with pytest.raises(ConfigError, match="other cannot be written: Permission denied"):
        RunFolder.create(tmp_path / "other", CONFIG)


def test_what_is_not_a_run_cannot_be_opened(tmp_path: Path) -> None:
    for name, words in (("", r"there is no config\.toml"), ("nowhere", "there is no such folder")):
        with pytest.raises(ConfigError, match=f"is not the folder of a run: {words}"):
            RunFolder.open(tmp_path / name)


def test_metrics_can_be_followed_line_by_line(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.append_metrics({"step": 1, "loss": 0.1 + 0.2})
        assert records(run) == [{"step": 1, "loss": 0.1 + 0.2}]
        run.append_metrics({"step": 2, "loss": float("nan"), "losses": [float("inf"), 1.0]})
    assert records(run)[1] == {"step": 2, "loss": None, "losses": [None, 1.0]}


@given(st.integers(0, 12), st.integers(0, 400))
def test_truncating_after_a_crash_keeps_whole_records_up_to_the_step(
    tmp_path_factory: pytest.TempPathFactory, step: int, cut: int
) -> None:
    with RunFolder(tmp_path_factory.mktemp("run")) as run:
        for number in range(1, 11):
            run.append_metrics({"step": number, "loss": 1 / number})
        whole = run.metrics_file.read_bytes()[:cut]
        run.metrics_file.write_bytes(whole)
        run.truncate_metrics(step)
        complete = range(1, whole.count(b"}") + 1)
        assert [record["step"] for record in records(run)] == [number for number in complete if number <= step]
        run.append_metrics({"step": step + 1})
        assert records(run)[-1] == {"step": step + 1}


def test_truncating_drops_rubbish_and_keeps_records_without_a_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.truncate_metrics(3)
    assert not run.metrics_file.exists()
    run.metrics_file.write_bytes(b'{"event": "start"}\n\xff\x00\n[1]\n{"step": 3}\n{"step": 4}\n{"st')
    run.truncate_metrics(3)
    assert records(run) == [{"event": "start"}, {"step": 3}]


def test_a_run_goes_on_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that will be written again are cut off, and a configuration that is the same is not written."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with RunFolder.create(tmp_path / "run", CONFIG) as run:
        for step in (1, 2, 3):
            run.append_metrics({"step": step})
        monkeypatch.setattr(run_folder, "write_atomically", full)
        run.truncate_metrics(2)
        run.write_config(CONFIG)
    assert records(run) == [{"step": 1}, {"step": 2}]


def test_the_summary_is_replaced_whole(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_summary({"accuracy": 0.5})
    run.write_summary({"accuracy": 0.75, "loss": float("inf")})
    assert json.loads(run.summary_file.read_text()) == {"accuracy": 0.75, "loss": None}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_lost_folder_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "gone")
    with pytest.raises(MicroparallelError, match=r"cannot write .*summary\.json: No such file"):
        run.write_summary({"step": 1})


def test_lines_that_find_no_room_are_written_later(tmp_path: Path) -> None:
    """A limit on the size of files is met as a full disk is: a part of the line is written, then nothing."""
    run = RunFolder(tmp_path)
    assert run.append_metrics({"step": 1}) is None
    size = run.metrics_file.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4, before[1]))
        for step in (2, 3):
            assert isinstance(run.append_metrics({"step": step}), OSError)
            assert records(run) == [{"step": 1}]  # no half of a line
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert run.append_metrics({"step": 4}) is None
    run.close()
    assert records(run) == [{"step": step} for step in (1, 2, 3, 4)]


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    assert not run.make_again_if_removed()
    shutil.rmtree(run.path)
    assert run.make_again_if_removed()
    assert TrainConfig(**read_config(run.config_file)) == CONFIG
    assert run.append_metrics({"step": 9}) is None
    run.close()
    assert records(run) == [{"step": 9}]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_file_systems_that_cannot_sync_a_folder_are_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        def fsync(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    fail(22)
    sync_folder(tmp_path)
    fail(5)
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)


@pytest.mark.parametrize(("failed", "stays"), [(False, False), (True, True)])
def test_a_run_points_to_its_ranks_last_words(tmp_path, failed, stays):
    run = RunFolder.create(tmp_path / "run", TrainConfig())
    run.append_metrics({"step": 1})
    take_away = run.point_to_flight(tmp_path)
    assert (run.path / "flight").resolve() == tmp_path.resolve()
    take_away(ValueError if failed else None, None, None)
    assert (run.path / "flight").is_symlink() == stays
    run.point_to_flight(None)
    assert not (run.path / "flight").is_symlink()
    run.close()
