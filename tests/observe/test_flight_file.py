"""Flight files: what a rank writes is what is read, also after it was killed, and nothing that is half written."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from microparallel.observe import flight_file as layout
from microparallel.observe.flight_file import read
from microparallel.observe.flight_recorder import FlightRecorder, write_exit
from microparallel.observe.place import Place


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank-2.flight"


@pytest.fixture
def recorder(path):
    recorder = FlightRecorder(path, rank=2, world_size=4, world="a world")
    yield recorder
    recorder.forget()


def test_the_head_names_the_writer(recorder, path):
    recorder.at_step(120)
    recorder.doing("forward of stage 1")
    one = read(path)
    assert (one.rank, one.world_size, one.world, one.pid, one.parent) == (2, 4, "a world", os.getpid(), os.getppid())
    assert (one.step, one.doing, one.ending, one.records) == (120, "forward of stage 1", "running", ())
    assert 0 <= one.now - one.doing_since < 5 and abs(time.time() - one.began) < 5


def test_a_call_from_its_beginning_to_its_end(recorder, path):
    log = recorder.group([0, 2, 3])
    entry = log.collective("all_reduce(float32[4])", "all_reduce(float32[4])", 16)
    here = sys._getframe().f_lineno - 1
    (record,) = read(path).records
    assert (record.kind, record.text, record.agreement) == ("collective", "all_reduce(float32[4])", record.text)
    assert (record.group, record.sequence, record.peer, record.size) == ((0, 2, 3), 1, None, 16)
    assert record.place == Place(__file__[-124:], here)
    assert record.waits and record.started is None  # it has not even come back from making it

    entry.started()
    (record,) = read(path).records
    assert not record.waits and record.begin <= record.started

    entry.waits()
    (record,) = read(path).records
    assert record.waits and record.in_main and record.started <= record.wait
    assert read(path).current == record

    entry.ends()
    (record,) = read(path).records
    assert not record.waits and record.outcome == "well" and record.wait <= record.end
    assert read(path).current is None


def test_messages_are_counted_by_peer_and_tag(recorder, path):
    log = recorder.group([1, 2, 5])
    log.send("send", "float32[1]", 0)
    log.send("send", "float32[1]", 2)
    log.send("send", "float32[1]", 2)
    log.send("send", "float32[1]", 2, tag=9)
    log.recv("recv", "float32[1]", 2)
    log.recv("recv", "float32[1]", None)
    found = [(record.kind, record.peer, record.tag, record.sequence) for record in read(path).records]
    assert found == [
        ("send", 1, 0, 1),
        ("send", 5, 0, 1),
        ("send", 5, 0, 2),
        ("send", 5, 9, 1),
        ("recv", 5, 0, 1),
        ("recv", None, 0, 1),
    ]


def test_groups_of_the_same_ranks_are_told_apart(recorder, path):
    for _ in range(2):
        recorder.group([0, 1]).collective("barrier()", "barrier()")
    assert [record.group_name for record in read(path).records] == ["0-1#1", "0-1#2"]


def test_the_newest_are_kept(recorder, path):
    log = recorder.group(range(4))
    for number in range(layout.RECORDS + 10):
        log.collective(f"call {number}", "").ends()
    records = read(path).records
    assert len(records) == layout.RECORDS
    assert [record.text for record in (records[0], records[-1])] == ["call 10", f"call {layout.RECORDS + 9}"]
    assert [record.number for record in records] == sorted(record.number for record in records)


def test_a_call_that_is_waited_for_late_is_written_again(recorder, path):
    log = recorder.group(range(4))
    early = log.recv("irecv", "float32[1]", 0)
    early.started()
    for _ in range(layout.RECORDS):
        log.collective("barrier()", "barrier()").ends()
    assert "irecv" not in [record.text for record in read(path).records]
    early.waits()
    one = read(path)
    assert (one.current.text, one.current.sequence) == ("irecv", 1)
    early.ends()
    assert read(path).current is None


def test_an_end_that_comes_when_the_place_is_taken_changes_nothing(recorder, path):
    log = recorder.group(range(4))
    early = log.collective("early", "")
    for _ in range(layout.RECORDS):
        log.collective("late", "")
    early.started()
    early.ends()
    assert {(record.text, record.outcome) for record in read(path).records} == {("late", "open")}


def test_other_threads_are_told_from_the_main_one(recorder, path):
    log = recorder.group(range(4))
    log.collective("before", "").ends()
    entry = log.collective("async", "")
    entry.started()
    thread = threading.Thread(target=entry.waits)
    thread.start()
    thread.join()
    one = read(path)
    assert one.records[-1].waits and not one.records[-1].in_main
    assert one.current is None  # the main thread is free


def test_a_call_that_failed_is_where_the_rank_stood(recorder, path):
    entry = recorder.group(range(4)).collective("barrier()", "")
    entry.waits()
    entry.fails(timed_out=True)
    assert (read(path).current.outcome, read(path).current.waits) == ("timed out", False)


@pytest.mark.parametrize("length", [10, 128, 129, 180, 181, 5000])
def test_long_texts_are_cut_and_still_differ(recorder, path, length):
    log = recorder.group(range(4))
    for last in "ab":
        text = "é" * (length // 2) + last
        log.collective(text, text)
    first, second = read(path).records
    assert first.text != second.text and first.agreement != second.agreement
    assert first.text.startswith("é" * 5)


def test_a_half_written_record_is_not_shown(recorder, path):
    log = recorder.group(range(4))
    log.collective("whole", "")
    log.collective("torn", "")
    at = layout.RECORDS_AT + 2 * layout.RECORD_BYTES
    assert [record.text for record in read(path).records] == ["whole", "torn"]
    layout.NUMBER.pack_into(recorder._memory, at, 0)  # as it is while the rest is being written
    assert [record.text for record in read(path).records] == ["whole"]


WRITER = """
import sys
from pathlib import Path
from microparallel.observe.flight_recorder import FlightRecorder
log = FlightRecorder(Path(sys.argv[1]), 0, 1, "w").group([0])
number = 0
print("ready", flush=True)
while True:
    number += 1
    entry = log.send(f"{number} " * 20, f"{number} " * 10, 0, tag=number % 100000, size=number)
    entry.started(), entry.waits(), entry.ends()
"""


def test_what_is_read_while_it_is_written_and_after_a_kill_is_never_torn(path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
    writer.stdout.readline()
    chance = random.Random(0)
    seen = 0
    for look in range(60):
        if look == 40:
            writer.send_signal(signal.SIGSTOP)
        if look == 50:
            writer.kill()
            writer.wait()
        for record in read(path).records:
            words = {record.size, *map(int, record.text.split()[:-1]), *map(int, record.agreement.split()[:-1])}
            assert words == {record.size} and record.tag == record.size % 100000
            assert record.end is None or record.begin <= record.started <= record.wait <= record.end
            seen += 1
        time.sleep(chance.random() / 100)
    writer.stdout.close()
    assert seen > 1000


def test_what_a_parent_writes(recorder, path):
    write_exit(path, -signal.SIGKILL)
    assert read(path).exit == "SIGKILL"
    write_exit(path, 3)
    assert read(path).exit == "exit code 3"


def test_the_end_is_written_once(recorder, path):
    recorder.ends("finished")
    recorder.ends("raised", "ValueError: no", Place("/a/model.py", 7))
    recorder.ends("closed")
    one = read(path)
    assert (one.ending, one.end_reason, str(one.end_place)) == ("raised", "ValueError: no", "model.py:7")


def test_what_is_no_flight_file(tmp_path):
    for content in (b"", b"x" * 10, b"x" * layout.FILE_BYTES):
        (tmp_path / "file").write_bytes(content)
        assert read(tmp_path / "file") is None
    assert read(tmp_path / "none") is None


def test_writing_on_when_the_file_has_been_let_go(recorder):
    entry = recorder.group([0]).collective("barrier()", "")
    recorder.forget()
    entry.waits()
    entry.ends()
    recorder.group([0]).collective("barrier()", "").ends()


def calls_made(function):
    """The names of all functions that a function calls, Python's and C's."""
    names = []

    def note(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(argument.__name__)

    gc.disable()  # what others have left behind may call something when it is collected
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return names


def test_it_costs_little(recorder):
    """Some microseconds: few steps, as many for the thousandth call as for the first, and none that could wait.

    `python benchmarks/hangs.py --cost` has the clock.
    """
    log = recorder.group(range(4))

    def one_call():
        entry = log.collective("all_reduce(float32[1048576], op='sum')", "all_reduce")
        entry.started()
        entry.waits()
        entry.ends()

    one_call()  # where in the user's code it is, is looked up once
    made = [calls_made(one_call) for _ in range(1000)]
    assert len(made[0]) < 50
    # Now and then it looks whether it would answer a signal.
    assert {len(names) - len(made[0]) for names in made} <= {0, 1}
    assert not {"open", "write", "flush", "acquire", "sleep", "fsync"} & {name for names in made for name in names}
