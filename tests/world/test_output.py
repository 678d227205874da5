"""What ranks print comes in whole lines, at once, and all of it."""

import ctypes
import os
import signal
import subprocess
import sys
import threading

import pytest

import microparallel as mp
from microparallel.world import output


@pytest.fixture
def printed(capfd, quick_ranks):
    """Runs a function on ranks, and returns what they have printed: stdout, or stdout and stderr."""

    def run(function, ranks=2, *, fails=False, **named):
        capfd.readouterr()
        try:
            mp.launch(function, ranks, device="cpu", **named)
            assert not fails
        except mp.errors.RankFailed:
            assert fails
        return capfd.readouterr()

    return run


def print_words(comms):
    def speak(thread):
        for number in range(20):
            print("rank", comms.rank, "thread", thread, "line", number, "x" * 5000)
            print("and", "an", "error", file=sys.stderr)

    threads = [threading.Thread(target=speak, args=(thread,)) for thread in range(3)]
    comms.barrier()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_lines_of_ranks_and_threads_do_not_mix(printed):
    out, errors = printed(print_words, 3)
    wanted = [
        f"rank {rank} thread {thread} line {line} {'x' * 5000}"
        for rank in range(3)
        for thread in range(3)
        for line in range(20)
    ]
    assert sorted(out.splitlines()) == sorted(wanted)
    assert set(errors.splitlines()) == {"and an error"} and errors.count("\n") == 180


def from_c(comms):
    libc = ctypes.CDLL(None)
    comms.barrier()
    for number in range(300):
        libc.printf(b"rank %d ", comms.rank)
        libc.printf(b"line %d\n", number)
        print("rank", comms.rank, "line", number)
    os.write(1, b"as bytes\n")
    sys.stdout.buffer.write(b"through the buffer\n")
    subprocess.run(["echo", "a program"], check=True)


def test_lines_from_c_and_from_programs_do_not_mix_either(printed):
    out, _ = printed(from_c)
    wanted = [f"rank {rank} line {line}" for rank in range(2) for line in range(300)]
    others = ["as bytes", "through the buffer", "a program"]
    assert sorted(out.splitlines()) == sorted(2 * wanted + 2 * others)


def with_prefix(comms):
    if comms.rank == 1:
        print("one\ntwo\n\nthree")
        print("\r 10%", end="", flush=True)
        print("\r 20%", end="", flush=True)
        print(" done")
        print("to errors", file=sys.stderr)
    comms.barrier()
    if comms.rank == 0:
        print("a", end="", flush=True)
        print("b")


def test_lines_can_say_which_rank_they_are_from(printed):
    out, errors = printed(with_prefix, prefix=True)
    bar = "\r[rank 1]  10%\r[rank 1]  20% done\n"
    assert out == f"[rank 1] one\n[rank 1] two\n\n[rank 1] three\n{bar}[rank 0] ab\n"
    assert errors == "[rank 1] to errors\n"


def progress(comms):
    for step in range(3):
        if comms.rank == 0:
            print(f"\r{step} of 3", end="", flush=True)
        comms.barrier()
        if comms.rank == 1 and step == 1:
            print("saved")
        comms.barrier()


def test_a_progress_bar_appears_at_once_and_other_lines_stand_apart(printed):
    out, _ = printed(progress)
    assert out == "\r0 of 3\r1 of 3\nsaved\n\r2 of 3"


def end_in_a_line(comms, how):
    if comms.rank == 1:
        print("half a line", end="")
        print("half an error", end="", file=sys.stderr)
        how()
    comms.barrier()


def raise_error():
    raise ValueError


def exit_at_once():
    os._exit(3)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def return_as_usual():
    pass


@pytest.mark.parametrize(
    ("how", "prefix"),
    [(return_as_usual, False), (raise_error, True), (sys.exit, False), (exit_at_once, False), (die, True)],
)
def test_a_line_without_its_end_is_not_lost(printed, how, prefix):
    out, errors = printed(lambda comms: end_in_a_line(comms, how), fails=how is not return_as_usual, prefix=prefix)
    before = "[rank 1] " * prefix
    assert (out.strip("\n"), errors.strip("\n")) == (f"{before}half a line", f"{before}half an error")


def fork_while_printing(comms):
    stop = threading.Event()

    def speak():
        while not stop.is_set():
            print("rank", comms.rank)

    thread = threading.Thread(target=speak)
    thread.start()
    for _ in range(5):
        child = os.fork()
        if child == 0:
            print("a", "child")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
    stop.set()
    thread.join()


def test_a_fork_of_a_rank_can_print(printed):
    out, _ = printed(fork_while_printing, 1)
    assert set(out.splitlines()) == {"rank 0", "a child"}
    assert out.count("a child") == 5


def test_a_stream_says_of_itself_what_its_file_says(pool):
    def ask(comms):
        return [(stream.fileno(), stream.isatty(), stream.encoding, stream.writable()) for stream in streams()]

    def streams():
        return sys.stdout, sys.stderr

    assert pool.run(ask, 1) == [[(1, os.isatty(1), "utf-8", True), (2, os.isatty(2), "utf-8", True)]]


def test_a_line_without_an_end_is_not_kept_for_ever(printed):
    def endless(comms):
        print("x" * 200_000, end="")
        die()

    assert len(printed(endless, 1, fails=True).out.strip()) == 200_000


@pytest.mark.parametrize(
    ("text", "begins", "wanted"),
    [
        (b"a\nb\n", True, b"> a\n> b\n"),
        (b"a\nb", False, b"a\n> b"),
        (b"\r 5%", True, b"\r>  5%"),
        (b"a\r\nb\r\n", True, b"> a\r\n> b\r\n"),
        (b"\n\n", True, b"\n\n"),
    ],
)
def test_prefixes(text, begins, wanted):
    assert output._prefixed(text, b"> ", begins) == wanted
