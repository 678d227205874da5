"""`microparallel doctor` as a person runs it."""

import json

import pytest


def test_doctor_measures_transports_and_proves_parity(microparallel):
    result = microparallel("doctor", "--selftest", "--ranks", "2", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert [check["name"] for check in report["transports"]] == ["shm", "gloo", "nccl"]
    for check in report["transports"][:2]:
        assert check["works"] and all(time["seconds"] > 0 for time in check["times"]), check
    assert report["facts"]["torch"]
    checks = {finding["check"] for finding in report["selftest"]}
    trained = {f"{strategy}, {dtype}" for strategy in ("naive", "ddp", "torch-ddp") for dtype in ("float64", "float32")}
    assert checks == {"collectives", *trained}
    assert {finding["setting"]["transport"] for finding in report["selftest"]} >= {"shm", "gloo"}


def test_doctor_for_people(microparallel):
    result = microparallel("doctor")
    assert result.returncode == 0
    shm, gloo = (line.split() for line in result.stdout.splitlines() if "4 KiB one way" in line)
    assert shm[:2] == ["✓", "shm"] and gloo[:2] == ["✓", "gloo"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--between", "here"), "name at least two hosts, as in --between here,HOST2"),
        (("--between", "ranks"), "there are no ranks; start it by torchrun or srun, or name the hosts"),
        (("--between", "one,two", "--selftest"), "run one after the other"),
        (("--port", "4711"), "--port 4711 is for several hosts; add --between HOST1,HOST2"),
        (("--wait", "3"), "--wait 3 is for several hosts"),
    ],
)
def test_what_is_asked_of_hosts_makes_sense(microparallel, flags, said):
    result = microparallel("doctor", *flags)
    assert result.returncode == 2 and said in result.stderr, result.stderr
