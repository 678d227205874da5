"""`microparallel doctor --between`: every host prints the same, and what is in the way is told with its fix."""

import json
import re
import shutil
from pathlib import Path

import pytest

import microparallel

TAKEN = """
import socket, time
with socket.create_server(("", 29500)):
    print("ready", flush=True)
    time.sleep(60)
"""
WENT_ON = """
import time
from microparallel.analyze.hosts import meet
with meet(["alpha", "beta"], 0, 29500, 0.1, print) as party:
    print("alone", *party.missing, flush=True)
    time.sleep(60)
"""
DOCTOR = ("microparallel", "doctor", "--between")


def start(bed, names="", *flags, **environment):
    """The same command on every host."""
    names = names or ",".join(host.name for host in bed)
    return [host.run(*DOCTOR, names, *flags, **environment) for host in bed]


def ended(runs, code, seconds=50):
    """What each host printed; all have ended with this code."""
    for run in runs:
        assert run.wait(seconds) == code, run.output + run.errors
    return [run.output for run in runs]


def reports(runs, code=0):
    first, *others = (json.loads(said) for said in ended(runs, code))
    assert all(other == first for other in others)
    return first


def test_every_host_prints_the_same(hosts):
    """Their own names stand for 127.0.1.1; the link is limited to 100 Mbit/s, and 20 ms are added to the way."""
    bed = hosts(2)
    bed[1].limit("100mbit")
    bed[1].delay(0.01)
    first, second = ended(start(bed), 0)
    assert first == second
    assert "2 hosts, which met at alpha:29500" in first
    assert re.search(r"alpha +10\.77\.0\.1 +eth0 +\d+\n", first) and re.search(
        r"beta +10\.77\.0\.2 +eth0 +\d+\n", first
    )
    assert "no problems found" in first
    found = re.search(
        r"alpha–beta +(\S+) ms .* +(\S+) Mbit/s +(\S+) Mbit/s +-?\S+ \S+ ± \S+ \S+ +(\S+)ms,(\S+)Mbit", first
    )
    round_trip, there, back, latency, bandwidth = map(float, found.groups())
    assert 20 <= round_trip < 500 and 5 <= latency < 500
    assert 2 < there < 200 and 2 < back < 200 and 2 < bandwidth < 500  # a busy machine makes it slower
    assert f"--between {found[4]}ms,{found[5]}Mbit" in first and f"--links {found[4]}ms+{found[5]}Mbit" in first


@pytest.mark.slow
def test_three_hosts_and_the_clocks_of_their_users(hosts):
    """All hosts here have the same clock in truth (that of people: only monotonic ones can be apart)."""
    report = reports(start(hosts(3, ahead=1000), "", "--json"))
    assert [host["name"] for host in report["hosts"]] == ["alpha", "beta", "gamma"]
    assert sorted((pair["first"], pair["second"]) for pair in report["pairs"]) == [(0, 1), (0, 2), (1, 2)]
    for pair in report["pairs"]:
        assert abs(pair["measured"]["ahead"]) <= pair["measured"]["clock_error"] < 0.1
        assert pair["link"]["seconds_per_byte"] > 0
    assert report["problems"] == report["missing"] == []


def test_a_host_that_never_comes_is_named_and_the_others_are_looked_at(hosts):
    bed = hosts(3)
    names = ",".join(host.name for host in bed)
    report = reports([host.run(*DOCTOR, names, "--wait", "2", "--json") for host in [bed[0], bed[2]]], 1)
    assert report["missing"] == ["beta"]
    assert [host["name"] for host in report["hosts"]] == ["alpha", "gamma"]
    assert report["pairs"][0]["measured"]["there"] > 0
    ((what, fix),) = (problem.values() for problem in report["problems"])
    assert what == "beta did not come to alpha:29500 within 2 s" and "run the same command on beta" in fix


def test_a_host_that_comes_too_late_is_told(hosts, tmp_path):
    bed = hosts(2)
    (tmp_path / "went_on.py").write_text(WENT_ON)
    bed[0].run("python", "went_on.py").until("alone", 20)
    late = bed[1].run(*DOCTOR, "alpha,beta")
    assert late.wait(30) == 1
    assert "error: beta came too late: alpha had waited for 0.1 s, and went on; start all hosts" in late.errors


def test_the_first_host_never_comes(hosts):
    bed = hosts(2)
    alone = bed[1].run(*DOCTOR, "alpha,beta", "--wait", "1")
    assert alone.wait(20) == 1
    assert "beta waits for alpha at port 29500 (connection refused)" in alone.errors
    said = "error: beta could not reach alpha (10.77.0.1) at port 29500 within 1 s: connection refused; was the same"
    assert said in alone.errors


def test_wrong_names(hosts):
    bed = hosts(2)
    cases = {
        "alpha,delta": "alpha knows no host 'delta'",
        "beta,10.77.0.9": "this host, alpha (10.77.0.1), is none of these",
        "alpha,10.77.0.1,beta": "alpha and 10.77.0.1 are both this host, alpha",
    }
    runs = {said: bed[0].run(*DOCTOR, names) for names, said in cases.items()}
    for said, run in runs.items():
        assert run.wait(20) == 2 and said in run.errors and "Traceback" not in run.errors, run.errors


@pytest.mark.slow
def test_a_firewall_is_told_on_every_host(hosts):
    """Nobody may connect to beta: what can be measured still is, from beta's side."""
    bed = hosts(2)
    bed[1].drop("-p", "tcp", "--syn")
    report = reports(start(bed, "", "--json"), 1)
    (problem,) = report["problems"]
    assert problem["what"] == "alpha (10.77.0.1) cannot reach beta at 10.77.0.2: no answer within 8 s"
    assert "let alpha connect to every port of beta" in problem["fix"]
    (pair,) = report["pairs"]
    assert (pair["first"], pair["second"]) == (1, 0) and pair["measured"]["back"] > 0 and pair["link"] is None


@pytest.mark.slow
def test_a_link_that_loses_large_packets(hosts):
    bed = hosts(2)
    bed[1].drop("-m", "length", "--length", "1000:65535")
    report = reports(start(bed, "", "--json"), 1)
    (problem,) = report["problems"]
    assert problem["what"].startswith("alpha reaches beta at 10.77.0.2, but its link breaks: ")
    assert re.search(r"MTU \(\d+ on alpha and \d+ on beta\)", problem["fix"])


@pytest.mark.slow
def test_a_host_that_is_lost_meanwhile(hosts):
    bed = hosts(2)
    runs = start(bed)
    runs[0].until("links, round 1", 30)
    bed[1].kill()
    assert runs[0].wait(100) == 1
    assert "its link breaks" in runs[0].output or "a host ended or was cut off" in runs[0].errors


@pytest.mark.slow
def test_under_torchrun_the_hosts_are_those_of_the_ranks(hosts):
    agents = hosts(2).torchrun("microparallel", "doctor", "--between", "ranks", on_each=2)
    first, second = ended(agents, 0)
    assert first == second and first.count("2 hosts, which met at alpha:29500") == 1
    assert "no problems found" in first


@pytest.mark.slow
def test_code_that_differs_is_named(hosts, tmp_path):
    package = Path(microparallel.__file__).parent
    shutil.copytree(package, tmp_path / "other" / "microparallel", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / "microparallel" / "text.py").open("a") as file:
        file.write("# changed\n")
    bed = hosts(2)
    fresh = {"module": ("-X", "utf8")}  # a new process, which reads PYTHONPATH
    runs = [
        bed[0].run(*DOCTOR, "alpha,beta", "--json", **fresh),
        bed[1].run(*DOCTOR, "alpha,beta", "--json", **fresh, PYTHONPATH=tmp_path / "other"),
    ]
    (problem,) = reports(runs, 1)["problems"]
    assert re.match(r"microparallel's code differs: \w{12} on alpha; \w{12} on beta", problem["what"])


@pytest.mark.slow
def test_a_firewall_before_the_port_where_hosts_meet(hosts):
    bed = hosts(2)
    bed[0].drop("-p", "tcp", "--dport", "29500")
    first, second = start(bed, "", "--wait", "5")
    assert (first.wait(30), second.wait(30)) == (1, 1)
    assert "beta waits for alpha at port 29500 (no answer within 3 s)" in second.errors
    assert "does a firewall let this port through? --port chooses another one" in second.errors
    assert "beta did not come to alpha:29500 within 5 s" in first.output
    assert ended(start(bed, "", "--port", "4711"), 0)[0].startswith("2 hosts, which met at alpha:4711")


@pytest.mark.slow
def test_a_port_that_is_taken(hosts, tmp_path):
    bed = hosts(2)
    (tmp_path / "taken.py").write_text(TAKEN)
    bed[0].run("python", "taken.py").until("ready", 20)
    run = bed[0].run(*DOCTOR, "alpha,beta")
    assert run.wait(20) == 2
    assert "--port 29500: another program on alpha listens there; choose another port" in run.errors
    other = bed[1].run(*DOCTOR, "alpha,beta", "--wait", "2")
    assert other.wait(30) == 1
    assert "error: what listens at alpha, port 29500, does not answer: it may be another program" in other.errors


@pytest.mark.slow
def test_under_slurm_the_hosts_are_those_of_the_tasks(hosts):
    """The variables that srun sets; two tasks on each node, of which one speaks for it."""
    bed = hosts(2)
    shared = {
        "SLURM_NTASKS": 4,
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "alpha,beta",
        "SLURM_JOB_ID": 77,
    }
    runs = [
        host.run(*DOCTOR, "ranks", **shared, SLURM_PROCID=2 * node + local, SLURM_LOCALID=local, SLURM_NODEID=node)
        for node, host in enumerate(bed)
        for local in range(2)
    ]
    said = ended(runs, 0)
    assert said[0] == said[2] and said[0].startswith("2 hosts, which met at alpha:20077")
    assert said[1] == said[3] == ""
