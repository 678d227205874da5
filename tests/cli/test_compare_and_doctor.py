"""The two verbs that examine: strategies against each other, and the machine."""

import json
import os
import subprocess
import sys


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "microparallel", *arguments], capture_output=True, text=True, timeout=58, check=False
    )


def test_compare_finds_that_all_strategies_agree():
    result = run("compare", "--ranks", "2", "--steps", "5", "--dim", "16", "--depth", "4", "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["strategy"]: row for row in json.loads(result.stdout)}
    assert set(rows) == {"single", "naive", "torch-ddp"}
    assert all(row["agrees"] and row["loss_difference"] < 1e-12 for row in rows.values())
    assert rows["naive"]["ranks"] == 2


def test_doctor_measures_transports_and_proves_parity():
    result = run("doctor", "--selftest", "--ranks", "2", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    gloo = next(check for check in report["transports"] if check["name"] == "gloo")
    assert gloo["works"] and all(time["seconds"] > 0 for time in gloo["times"])
    assert report["facts"]["torch"]
    checks = {finding["check"] for finding in report["selftest"]}
    assert checks == {"collectives", "naive, float64", "torch-ddp, float64", "naive, float32", "torch-ddp, float32"}


def test_torchrun_is_not_needed():
    result = subprocess.run(
        [sys.executable, "-m", "microparallel", "compare"],
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 2
    assert "compare starts its own ranks" in result.stderr


def test_doctor_for_people():
    result = run("doctor")
    assert result.returncode == 0
    assert "gloo" in result.stdout and "GB/s" in result.stdout
