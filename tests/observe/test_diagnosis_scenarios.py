"""Some of the scenarios of benchmarks/hangs.py, which runs them all: real ranks that hang, die or disagree."""

import importlib.util
import sys
from pathlib import Path

import pytest

import microparallel as mp

FILE = Path(__file__).parent.parent.parent / "benchmarks" / "hangs.py"


@pytest.fixture(scope="module")
def hangs():
    spec = importlib.util.spec_from_file_location("hangs", FILE)
    module = sys.modules["hangs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["hangs"]


@pytest.fixture
def scenario_pool(quick_ranks, monkeypatch):
    monkeypatch.syspath_prepend(FILE.parent)  # where the ranks find the scenarios
    with mp.Pool() as pool:
        yield pool


@pytest.mark.parametrize(
    "name",
    [
        "wrong order: other call, gloo",
        "mismatched shape: other shape, shm",
        "missing rank: leaves early, gloo",
        "straggler: computes of torch, shm",
        "straggler: is late with a message, gloo",
        "deadlock: all receive of torch, shm",
        "deadlock: message against collective, gloo",
        "death: is killed, gloo",
        "stopped: is stopped, shm",
    ],
)
def test_it_is_diagnosed(hangs, scenario_pool, name):
    (scenario,) = [scenario for scenario in hangs.SCENARIOS if str(scenario).startswith(name)]
    verdict = hangs.run(scenario, seed=1, pool=scenario_pool)
    assert not verdict.wrong, f"{verdict.wrong}: {verdict.sentence} ({verdict.seconds:.1f} s)"


def test_there_are_thirty_of_each_kind_on_each_transport(hangs):
    assert len(hangs.SCENARIOS) >= 30
    assert {scenario.transport for scenario in hangs.SCENARIOS} == {"shm", "gloo", "script"}
    kinds = {scenario.kind.split()[0] for scenario in hangs.SCENARIOS}
    assert kinds == {"wrong", "mismatched", "missing", "straggler", "deadlock", "death", "stopped"}
    for scenario in hangs.SCENARIOS:
        assert hangs.line_of(scenario.function) > 0
