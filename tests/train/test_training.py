"""Every random generator goes on where it stood, after a trip through JSON and in another process."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from microparallel.errors import CheckpointError
from microparallel.train import random_state as training


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = training.random_state()
    yield
    training.restore_random_state(before)


def draws() -> list[Any]:
    # gauss and normal keep half of a pair for the next call: that half is part of the state too
    here = [random.random(), random.gauss(0, 1), numpy.random.rand(3).tolist(), numpy.random.normal()]
    there = [torch.rand(5).tolist(), torch.randn(17, dtype=torch.float64).tolist(), torch.randperm(9).tolist()]
    return [*here, *there]


@pytest.mark.parametrize("before", [lambda: None, draws, lambda: (draws(), torch.randn(1))], ids=["0", "1", "2"])
def test_draws_are_bit_identical_after_a_trip_through_json(before: Callable[[], object]) -> None:
    before()
    text = json.dumps(training.random_state(), allow_nan=False)
    first = [draws() for _ in range(3)]
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    assert draws() != first[0]
    training.restore_random_state(json.loads(text))
    assert [draws() for _ in range(3)] == first


def test_capturing_draws_nothing() -> None:
    state = training.random_state()
    assert training.random_state() == state


def go_on(comms: Any, text: str) -> list[Any]:
    training.restore_random_state(json.loads(text))
    return [random.gauss(0, 1), torch.randn(3).tolist()]


def test_another_process_goes_on_where_this_one_stood(pool: Any) -> None:
    text = json.dumps(training.random_state())
    here = [random.gauss(0, 1), torch.randn(3).tolist()]
    assert pool.run(go_on, 1, text, timeout=50) == [here]


def test_numpy_is_captured_only_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        state = training.random_state()
    assert "numpy" not in state
    training.restore_random_state(state)


def test_gpus_that_are_missing_here_are_left_out() -> None:
    state = training.random_state()
    state["cuda"] = state.get("cuda", []) + [state["torch"]] * (0 if torch.cuda.is_available() else 2)
    training.restore_random_state(state)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"torch": "AAAA"}, "the random state of torch cannot be restored"),
        ({"torch": "!"}, "of torch"),
        ({"torch": None}, "of torch"),
        ({"python": [3, [1, 2], None]}, "of python"),
        ({"python": 3}, "of python"),
        ({"numpy": {"bit_generator": "MT19937"}}, "of numpy"),
    ],
)
def test_states_that_do_not_fit_are_named(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        training.restore_random_state(training.random_state() | damage)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_gpu_draws_the_same_again() -> None:
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for device in devices:
        torch.rand(3, device=device)
    state = json.loads(json.dumps(training.random_state()))
    first = [torch.randn(100, device=device).tolist() for device in devices]
    training.restore_random_state(state)
    assert [torch.randn(100, device=device).tolist() for device in devices] == first
