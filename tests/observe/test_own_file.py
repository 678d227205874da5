"""`why FOLDER` reads what strangers may have put there: it only reads, and only what is the user's own."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from microparallel.observe import folders
from microparallel.observe.flight import agreed_folder
from microparallel.observe.flight_file import read
from microparallel.observe.flight_recorder import FlightRecorder
from microparallel.observe.folders import gather
from microparallel.observe.own_file import append_to_own, open_own
from microparallel.observe.processes import ask_for_stack, stack_file

CATCHES = "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('hit')); print('ready', flush=True); input()"


@pytest.fixture
def flight(tmp_path):
    """The flight file of a rank that another process has left."""
    recorder = FlightRecorder(folders.flight_file(tmp_path, 0), 0, 2, "world")
    recorder.dumps_stack(True)
    recorder.forget()
    return folders.flight_file(tmp_path, 0)


def test_a_link_in_the_place_of_a_stack_is_not_followed_and_nothing_is_cut_off(flight, tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * (2**20 + 1))
    stack_file(flight).symlink_to(precious)
    assert ask_for_stack(flight, os.getpid(), 0.1) == ()
    assert [one.rank for one in gather(tmp_path)] == [0, 1]
    assert precious.stat().st_size == 2**20 + 1


def test_a_process_that_does_not_write_the_file_is_sent_no_signal(flight):
    """A flight file may name any process of this user's."""
    with subprocess.Popen(
        [sys.executable, "-c", CATCHES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "ready\n"
        stack_file(flight).touch()
        assert ask_for_stack(flight, other.pid, 0.1) == ()
        assert other.communicate("\n", timeout=20)[0] == ""


def test_links_pipes_and_files_of_other_users_are_no_flight_files(flight, tmp_path, monkeypatch):
    link, pipe = tmp_path / "rank-1.flight", tmp_path / "rank-2.flight"
    link.symlink_to(flight)
    os.mkfifo(pipe)  # to open one waits for a writer
    assert read(flight).rank == 0
    assert (read(link), read(pipe)) == (None, None)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert read(flight) is None


def test_dumps_are_not_written_through_a_link(tmp_path):
    (tmp_path / "rank-0.stack").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"rank-0\.stack"):
        append_to_own(tmp_path / "rank-0.stack")
    assert not (tmp_path / "target").exists()


def test_a_file_of_the_user_s_own_is_opened(tmp_path):
    with append_to_own(tmp_path / "mine") as file:
        file.write(b"words")
    with open_own(tmp_path / "mine") as file:
        assert file.read() == b"words"


@pytest.mark.parametrize("word", ["/etc", "../../etc", "20250131-093000-4711-1", ""])
def test_who_writes_into_the_store_does_not_choose_the_folder(word, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    store = dist.HashStore()
    store.set("microparallel/flight", word)
    folder = agreed_folder(store)
    assert folder.parent == folders.private_folder()
    assert folder.name != word
    assert folder == agreed_folder(store)  # the same for all ranks


def test_the_user_s_own_choice_of_a_folder_counts(tmp_path, monkeypatch):
    monkeypatch.setenv(folders.FOLDER_VARIABLE, str(tmp_path / "mine"))
    assert agreed_folder(dist.HashStore()) == tmp_path / "mine"


def test_crafted_numbers_are_no_error(flight):
    content = bytearray(flight.read_bytes())
    content[2048:2064] = b"\xff" * 16  # how the rank ended: a number that no rank writes
    flight.write_bytes(content)
    assert read(flight) is None
