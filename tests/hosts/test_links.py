"""Links that break, and hosts that die, in the middle of a run: what every host is told, and what goes on."""

import re
import time

import pytest

LOOP = """
import sys, torch, microparallel as mp
comms = mp.connect(timeout=float(sys.argv[1]))
try:
    for step in range(10**9):
        comms.all_reduce(torch.full((1000,), float(comms.rank)))
        if step == 20:
            print("going", flush=True)
except mp.errors.CommsError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(7)
"""
TRAIN = ["microparallel", "train", "--quiet", "--batch", "32", "--out", "run", "--timeout"]
IN_VAIN = "waited in vain in all_reduce("


def going(hosts, tmp_path, timeout, on_each=1):
    """Two hosts whose ranks talk to each other all the time."""
    (tmp_path / "loop.py").write_text(LOOP)
    bed = hosts(2)
    ranks = bed.ranks("python", "loop.py", timeout, on_each=on_each)
    for rank in ranks:
        rank.until("going", 40)
    return bed, ranks


def test_both_sides_of_a_link_that_stays_down_are_told_when_their_time_is_up(hosts, tmp_path):
    bed, ranks = going(hosts, tmp_path, timeout=2)
    bed[1].unplug()
    for number, rank in enumerate(ranks):
        assert rank.wait(20) == 7
        assert f"CommsTimeout: rank {number} {IN_VAIN}" in rank.output
        assert "[/" not in rank.output  # where in gloo's own code
        assert "the network between alpha and beta is down or slow, or a machine is slow" in rank.output


@pytest.mark.slow
def test_where_the_system_gives_a_connection_up_first_the_host_is_named(hosts, tmp_path):
    """After 15 minutes without an answer, here two seconds; whoever only listens waits until its time is up."""
    bed = hosts(2)
    (tmp_path / "loop.py").write_text(LOOP)
    for host in bed:
        host.do("sh", "-c", "echo 3 >/proc/sys/net/ipv4/tcp_retries2")
    ranks = bed.ranks("python", "loop.py", 15, on_each=2)
    for rank in ranks:
        rank.until("going", 40)
    bed[1].part()
    said = []
    for rank in ranks:
        assert rank.wait(30) == 7
        said.append(rank.output.splitlines()[1])
    links = [words for words in said if words.startswith("PeerLost")]
    assert links
    for words in links:
        here = re.search(r"rank (\d) cannot reach", words)[1]
        lost, host = ("2, 3", "beta") if here in "01" else ("0, 1", "alpha")
        assert f"cannot reach ranks {lost} any more, in all_reduce(" in words
        assert f"(on {host}: connection timed out)" in words


@pytest.mark.slow
def test_a_host_that_dies_without_a_word(hosts, tmp_path):
    """Its processes are not ended: they are gone, and nothing closes their connections."""
    bed, ranks = going(hosts, tmp_path, timeout=3)
    bed[1].part()
    bed[1].kill()
    assert ranks[0].wait(20) == 7
    assert f"CommsTimeout: rank 0 {IN_VAIN}" in ranks[0].output


def test_a_host_whose_processes_are_ended_is_missed_at_once(hosts, tmp_path):
    bed, ranks = going(hosts, tmp_path, timeout=50)
    bed[1].kill()
    assert ranks[0].wait(20) == 7
    assert "PeerLost: rank 1 went away during all_reduce(" in ranks[0].output


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(bed, *flags, timeout=30, on_each=1):
    return bed.ranks(*TRAIN, timeout, *flags, on_each=on_each)


def at_step(tmp_path, step, seconds=40):
    """Wait until a run has come to a step."""
    deadline, metrics = time.monotonic() + seconds, tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        assert time.monotonic() < deadline, "the run does not go on"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["unplug", "part", "power", "killed"])
def test_training_ends_on_every_host_and_nothing_is_left_running(hosts, tmp_path, fault):
    bed = hosts(2)
    ranks = train(bed, "--steps", "100000", timeout=4, on_each=2)
    at_step(tmp_path, 20)
    if fault in ("part", "power"):
        bed[1].part()
    if fault in ("power", "killed"):
        bed[1].kill()
    if fault == "unplug":
        bed[1].unplug()
    broke = time.monotonic()
    left = ranks if fault in ("unplug", "part") else ranks[:2]
    for number, rank in enumerate(left):
        assert rank.wait(30) == 1, rank.errors
        words = "ranks? (2|3|2, 3) went away during" if fault == "killed" else "waited in vain in"
        assert re.search(words, rank.errors), rank.errors
        print(fault, number, f"{time.monotonic() - broke:.1f} s", rank.errors)
    again = bed[0].run("microparallel", "train", "--resume", "run", "--steps", "30", "--ranks", "1", "--quiet")
    assert again.wait(40) in (0, 2), again.errors  # 2: it had done more than 30 steps


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["heals", "delay", "loss", "rate"])
def test_training_goes_on_over_a_bad_link(hosts, tmp_path, fault):
    """A partition that heals after 5 seconds, 50 ms each way, 5 % of all packets lost, 10 Mbit a second."""
    bed = hosts(2)
    if fault == "delay":
        bed[1].delay(0.05)
    if fault == "loss":
        bed[1].lose(0.05)
    if fault == "rate":
        bed[1].limit("10mbit")
    begun = time.monotonic()
    ranks = train(bed, "--steps", "300" if fault == "heals" else "10", on_each=2)
    if fault == "heals":
        at_step(tmp_path, 20)
        bed[1].part()
        time.sleep(5)  # this is how long it lasts
        bed[1].join()
    for rank in ranks:
        assert rank.wait(55) == 0, rank.errors
    print(fault, f"{time.monotonic() - begun:.1f} s", ranks[0].output)
