"""Hosts that come and go while a run goes on, under torchrun's own rendezvous: what is learned stays the same."""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
from tests.hosts.bed import HERE, PORT
from tests.hosts.test_training import difference

from microparallel.train.checkpoint_folder import checkpoints

# As long as there is a file "slow", the run takes so long that it does not end before a host has come.
MODEL = """
import os, time, torch
class Paced(torch.nn.Linear):
    def forward(self, images):
        time.sleep(0.05 * os.path.exists("slow"))
        return super().forward(images)
def make_model():
    return torch.nn.Sequential(Paced(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
"""
STORE = """
import threading, torch.distributed as dist
store = dist.TCPStore("0.0.0.0", 29400, is_master=True, wait_for_workers=False)
print("ready", flush=True)
threading.Event().wait()
"""
TRAIN = ["microparallel", "train", "--model", "mine:make_model", "--data", "digits", "--batch", "48", "--quiet"]
TRAIN += ["--precision", "float64", "--transport", "gloo"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "slow").touch()
    return tmp_path


def records(run):
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        return []


def settings(run):
    try:
        return (run / "config.toml").read_text()
    except OSError:
        return ""


def losses(run):
    return [(one["step"], one["loss"]) for one in records(run) if "loss" in one]


def await_ranks(run, ranks, *agents, seconds=100):
    """Wait until a run goes on with so many ranks, in which no agent ends."""
    deadline = time.monotonic() + seconds
    while f"ranks = {ranks}\n" not in settings(run):
        assert time.monotonic() < deadline, f"never {ranks} ranks: {[agent.errors for agent in agents]}"
        for agent in agents:
            assert agent.poll() is None, agent.errors
        time.sleep(0.01)


def to_the_end(run, *agents, seconds=100):
    """Let the run go on at full speed, and wait until all agents have ended well."""
    (run.parent / "slow").unlink()
    for agent in agents:
        assert agent.wait(seconds) == 0, agent.errors


def at_step(run, step, seconds=40):
    """Wait until a run has come to a step."""
    deadline = time.monotonic() + seconds
    while not any(one["step"] == step for one in records(run)):
        assert time.monotonic() < deadline, f"never at step {step}"
        time.sleep(0.01)


def require_undisturbed(bed, command, run, host=None):
    """Each step was done once in the end, and learned what it learns in one process that nothing happens to."""
    alone = (host or bed[0]).run(*command, "--ranks", "1", "--out", "alone")
    assert alone.wait(60) == 0, alone.errors
    expected, found = losses(run.parent / "alone"), losses(run)
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert max(abs(one - other) for (_, one), (_, other) in zip(found, expected, strict=True)) < 1e-12
    assert difference(run, run.parent / "alone") < 1e-12


def inside(agent):
    """The number of the process that a host runs for the test, which waits for it."""
    return int(Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()[0])


def told(moment, begun):
    print(f"{moment}: {time.monotonic() - begun:.1f} s")
    return time.monotonic()


def test_a_host_joins_and_what_is_learned_is_that_of_an_undisturbed_run(hosts, folder):
    """torchrun ends the ranks that are there, which save first; that is no failure, and no step is done twice."""
    bed, run = hosts(2), folder / "run"
    command = [*TRAIN, "--shares", "2", "--steps", "300"]
    agents = [bed.elastic(bed[0], *command, "--out", "run", hosts="1:2")]
    at_step(run, 10)
    agents.append(bed.elastic(bed[1], *command, "--out", "run", hosts="1:2"))
    await_ranks(run, 2, *agents)
    to_the_end(run, *agents)
    assert not any("failed (exitcode" in agent.errors for agent in agents)
    assert "closing signal SIGTERM" in agents[0].errors
    require_undisturbed(bed, command, run)


# ── hosts that are lost, and come back ──────────────────────────────────────────────────────────────────────────────

SIX = [*TRAIN, "--shares", "6", "--save-every", "20", "--timeout", "15"]


@pytest.fixture
def running(hosts, folder):
    """Three hosts with so many ranks each, in the middle of a run of so many steps."""

    def running(steps, on_each=1):
        bed, command = hosts(3), [*SIX, "--steps", steps]
        agents = [bed.elastic(host, *command, "--out", "run", on_each=on_each) for host in bed]
        await_ranks(folder / "run", 3 * on_each, *agents)
        at_step(folder / "run", 25)
        return bed, command, agents

    return running


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("lost", "left", "on_each"), [(1, 4, 2), (0, 1, 1)])
def test_a_host_whose_link_is_down_is_taken_in_again(running, folder, lost, left, on_each):
    """The others go on, whichever it is; but for the host of the rendezvous: then it goes on alone."""
    run = folder / "run"
    bed, command, agents = running(300, on_each)
    bed[lost].unplug()
    begun = time.monotonic()
    await_ranks(run, left, *agents)
    begun = told("the others go on after", begun)
    bed[lost].plug()
    await_ranks(run, 3 * on_each, *agents)
    told("it is taken in again after", begun)
    to_the_end(run, *agents)
    assert all("waited in vain in" in agent.errors for agent in agents)
    require_undisturbed(bed, command, run)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_others_go_on_without_a_host_that_dies(running, folder):
    run = folder / "run"
    bed, command, agents = running(300)
    bed[1].kill()
    begun = time.monotonic()
    await_ranks(run, 2, agents[0], agents[2])
    told("the others go on after", begun)
    to_the_end(run, agents[0], agents[2])
    assert all("error: rank 1 went away during" in agent.errors for agent in (agents[0], agents[2]))
    require_undisturbed(bed, command, run)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_without_the_host_of_the_rendezvous_all_end_and_the_same_commands_go_on(running, hosts, folder):
    run = folder / "run"
    bed, command, agents = running(300)
    bed[0].kill()
    begun = time.monotonic()
    for agent in agents[1:]:
        assert agent.wait(60) == 1
        assert "RendezvousConnectionError" in agent.errors
    told("all have ended after", begun)
    bed = hosts(3)
    to_the_end(run, *(bed.elastic(host, *command, "--out", "run") for host in bed))
    require_undisturbed(bed, command, run)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_host_that_is_told_to_leave_saves_first(running, folder):
    """What torchrun's own SIGTERM does: no step is done twice, and the others go on without it."""
    run = folder / "run"
    bed, command, agents = running(300)
    os.kill(inside(agents[1]), signal.SIGTERM)
    begun = time.monotonic()
    assert agents[1].wait(40) == 1
    told("it has ended after", begun)
    saved = max(checkpoints(run / "checkpoints"))
    assert saved == losses(run)[-1][0]
    await_ranks(run, 2, agents[0], agents[2])
    told("the others go on after", begun)
    to_the_end(run, agents[0], agents[2])
    assert all(agent.errors.count("failed (exitcode: 130)") == 1 for agent in (agents[0], agents[2]))
    require_undisturbed(bed, command, run)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rendezvous_on_a_host_that_does_not_train_outlives_the_others(hosts, folder):
    """Then no host is needed: not even that of rank 0, which writes the run's folder."""
    bed, run = hosts(3), folder / "run"
    (folder / "store.py").write_text(STORE)
    bed[2].run("python", "store.py").until("ready", 20)
    command = [*SIX, "--steps", "150"]
    meeting = [f"--rdzv-endpoint=gamma:{PORT}", "--rdzv-conf=is_host=0,last_call_timeout=2"]
    agents = [bed.elastic(host, *command, "--out", "run", flags=meeting) for host in (bed[0], bed[1])]
    await_ranks(run, 2, *agents)
    at_step(run, 25)
    bed[0].kill()
    to_the_end(run, agents[1], seconds=80)
    assert "error: rank 0 went away during" in agents[1].errors
    require_undisturbed(bed, command, run, bed[1])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_command_of_the_page(hosts, folder):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "leaving_one_machine.md").read_text()
    variable, command = re.search(r"^(\w+)=1 (torchrun --nnodes=1:3 .*)$", page, re.MULTILINE).groups()
    words = [*shlex.split(command)[1:], "--steps", "4"]
    agents = [host.run("python", HERE / "agent.py", *words, **{variable: 1}) for host in hosts(3)]
    for agent in agents:
        assert agent.wait(120) == 0, agent.errors
    assert "ranks = 6\n" in settings(folder / "runs" / "big")


# ── the rendezvous ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("said", ["is_host=1", "--local-addr"])
def test_an_address_in_place_of_a_name(hosts, folder, said):
    """Where a host's name stands for 127.0.1.1, it does not know by its address that the rendezvous is its own."""
    bed, run = hosts(2), folder / "run"
    agents = []
    for host in bed:
        own = ["is_host=1"] if host is bed[0] else []
        flags = [f"--local-addr={host.address}"] if said == "--local-addr" else []
        meeting = [f"--rdzv-endpoint={bed[0].address}:{PORT}", f"--rdzv-conf={','.join(['last_call_timeout=1', *own])}"]
        agents.append(bed.elastic(host, *TRAIN, "--steps", "4", "--out", "run", flags=[*meeting, *flags]))
    for agent in agents:
        assert agent.wait(60) == 0, agent.errors
    assert "ranks = 2\n" in settings(run)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_without_torch_s_variable_no_host_can_join(hosts, folder):
    """The agents share their store with the ranks, and the first says in its first round alone where it is.

    Where this test fails, torch has mended that, and the page can do without the variable.
    """
    bed, run = hosts(2), folder / "run"
    shared, brief = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 0}, ["--rdzv-conf=last_call_timeout=1,read_timeout=8"]
    bed.elastic(bed[0], *TRAIN, "--steps", "100000", "--out", "run", flags=brief, **shared)
    at_step(run, 10)
    beta = bed.elastic(bed[1], *TRAIN, "--steps", "100000", "--out", "run", flags=brief, **shared)
    assert beta.wait(60) == 1
    assert "MASTER_ADDR" in beta.errors


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ahead", "taken_in"), [(-60, False), (-4, True), (4, True)])
def test_clocks_that_are_apart(hosts, folder, ahead, taken_in):
    """Agents compare the others' last signs of life, which have the time of day, with their own clock."""
    bed, run = hosts(2), folder / "run"
    command = [*TRAIN, "--shares", "2", "--steps", "300" if taken_in else "100", "--out", "run"]
    alpha = bed.elastic(bed[0], *command)
    at_step(run, 10)
    beta = bed.elastic(bed[1], *command, CLOCK_AHEAD=ahead)
    if taken_in:
        await_ranks(run, 2, alpha, beta)
        to_the_end(run, alpha, beta)
    else:
        assert alpha.wait(60) == 0, alpha.errors
        assert "ranks = 1\n" in settings(run)
        assert beta.wait(60) == 1
