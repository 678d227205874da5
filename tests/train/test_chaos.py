"""Whatever goes wrong, a run ends as if nothing had; with real processes that are really killed."""

import os

import pytest

from microparallel.train import chaos, checkpoint

# Small models: what matters here is what is lost, not what is learnt.
MLP = ["--steps", "400", "--dim", "16", "--depth", "3", "--batch", "50", "--save-every", "20"]
GPT = ["--model", "gpt", "--steps", "60", "--dim", "16", "--depth", "2", "--heads", "2", "--context", "16"]
GPT += ["--batch", "8", "--save-every", "4"]
LAYOUTS = {
    "dp": ["--ranks", "2"],
    "pp": ["--pp", "2"],
    "dp x pp": ["--dp", "2", "--pp", "2"],
    "optimizer": ["--ranks", "2", "--shard", "optimizer"],
    "parameters": ["--ranks", "2", "--shard", "parameters"],
    "workers": ["--ranks", "2", "--workers", "2"],
}


WITH_FEWER = {
    "dp": ["--ranks", "3"],
    "dp x pp": ["--dp", "2", "--pp", "2"],
    "optimizer": ["--ranks", "3", "--shard", "optimizer"],
    "parameters": ["--ranks", "4", "--shard", "parameters"],
}


# Starting processes is what takes time: two ranks in each run, and a second launcher in one of them alone.
ONE_LAUNCHER = [kind for kind in chaos.KINDS if kind not in ("kill-launcher", "corrupt")]
TWO_LAUNCHERS = [*ONE_LAUNCHER, "corrupt"]


def survives(tmp_path, words, seed, faults, kinds=chaos.KINDS):
    outcome = chaos.chaos(words, tmp_path, seed=seed, faults=faults, kinds=kinds, timeout=1.5)
    for fault in outcome.faults:
        print(f"step {fault.step}: {fault.done or fault.kind + ': no occasion'}; lost {fault.lost} steps")
    log = (tmp_path / "disturbed.log").read_text()
    assert outcome.survived, f"{outcome}\n{log}"
    assert outcome.largest_difference <= (chaos.ROUNDING if chaos.FEWER in kinds else 0)
    return outcome


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "layout", "seed", "kinds"),
    [
        (MLP, "parameters", 1, TWO_LAUNCHERS),
        pytest.param(GPT, "pp", 2, ONE_LAUNCHER, marks=pytest.mark.slow),
    ],
    ids=["mlp-parameters", "gpt-pp"],
)
def test_twenty_faults(tmp_path, model, layout, seed, kinds):
    outcome = survives(tmp_path, [*model, *LAYOUTS[layout]], seed, 20, kinds)
    done = {fault.kind for fault in outcome.faults if fault.done}
    assert {"kill-rank", "stop-rank"} <= done and ("corrupt" in done) == ("corrupt" in kinds)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [MLP, GPT], ids=["mlp", "gpt"])
@pytest.mark.parametrize("seed", [11, 12])
def test_two_hundred_faults(tmp_path, model, layout, seed):
    survives(tmp_path, [*model, *LAYOUTS[layout]], seed, 10)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", WITH_FEWER)
@pytest.mark.parametrize("model", [MLP, GPT], ids=["mlp", "gpt"])
def test_forty_faults_with_other_ranks(tmp_path, model, layout):
    words = [*model, *WITH_FEWER[layout], "--precision", "float64"]
    outcome = survives(tmp_path, words, 13, 5, [chaos.FEWER, "kill-rank", "kill-backward", "stop-rank"])
    assert any(fault.done for fault in outcome.faults if fault.kind == chaos.FEWER)


PIPES = ["--dp", "3", "--pp", "2", "--microbatches", "3"]
# Each layer draws; running statistics, too, must be those of the undisturbed run.
DRAWING = """
from torch import nn

def make_model():
    return nn.Sequential(
        nn.Linear(64, 16), nn.Dropout(0.4), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.3),
        nn.BatchNorm1d(16), nn.Linear(16, 10)
    )
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", [["--ranks", "3"], PIPES, [*PIPES, "--recompute"]])
def test_dropout_is_that_of_the_undisturbed_run_with_other_ranks(tmp_path, monkeypatch, layout):
    (tmp_path / "drawing.py").write_text(DRAWING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = ["--model", "drawing:make_model", "--data", "digits", "--batch", "60", "--optimizer", "sgd", "--lr", "0.05"]
    words += ["--steps", "100", "--save-every", "10", "--precision", "float64", *layout]
    outcome = survives(tmp_path / "runs", words, 3, 4, [chaos.FEWER, "kill-rank"])
    assert any(fault.done for fault in outcome.faults if fault.kind == chaos.FEWER)


# 256 samples in batches of 32: eight steps an epoch.
COUNTING = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.zeros(256))

    def forward(self, sample, _):
        return -32 * self.used[sample].mean()  # SGD with a learning rate of 1 adds 1 for each sample of the batch

def make_data():
    return TensorDataset(torch.arange(256), torch.arange(256))

class Passes(nn.Module):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, loss):
        return loss + 0 * self.nothing

class Uses(Counts):
    def forward(self, sample):
        return super().forward(sample, sample).reshape(1)

def make_layers():
    return nn.Sequential(Uses(), Passes())

def as_it_is(outputs, _):
    return outputs.mean()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout",
    [
        ["--model", "counting:Counts", "--ranks", "2"],
        ["--model", "counting:make_layers", "--loss", "counting:as_it_is", "--dp", "2", "--pp", "2"],
    ],
    ids=["dp", "dp x pp"],
)
def test_every_sample_is_used_once_an_epoch(tmp_path, monkeypatch, layout):
    """The model counts: whatever is lost or done again, at the end each sample has changed it twenty times."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = [*layout, "--data", "counting:make_data", "--optimizer", "sgd", "--lr", "1", "--precision", "float64"]
    words += ["--schedule-lr", "constant", "--batch", "32", "--epochs", "20", "--save-every", "10"]
    kinds = [chaos.FEWER, "kill-rank"] if "--dp" in layout else ["kill-rank", "kill-saving"]
    outcome = survives(tmp_path / "runs", words, 4, 4, kinds)
    assert any(fault.done for fault in outcome.faults)
    for run in ("undisturbed", "disturbed"):
        found, _ = checkpoint.latest(tmp_path / "runs" / run / "checkpoints")
        used = next(one for name, one in found.model.items() if name.endswith("used"))
        assert found.step == 160 and used.tolist() == pytest.approx([20.0] * 256, rel=0, abs=chaos.ROUNDING)


def test_a_plan_has_every_kind_and_depends_on_its_seed_alone():
    first = chaos.plan(5, 12, 100, 4)
    assert first == chaos.plan(5, 12, 100, 4) != chaos.plan(6, 12, 100, 4)
    assert {fault.kind for fault in first[: len(chaos.KINDS)]} == {*chaos.KINDS}
    assert [fault.step for fault in first] == sorted(fault.step for fault in first)


def test_what_chaos_chooses_itself_is_refused(tmp_path):
    with pytest.raises(chaos.ConfigError, match="--out: chaos chooses it itself"):
        chaos.chaos(["--out", "here"], tmp_path)


def test_a_run_that_fails_by_itself_is_not_broken(tmp_path):
    with pytest.raises(chaos.ConfigError, match=r"fails without being disturbed: error: .*--batch"):
        chaos.chaos(["--batch", "0"], tmp_path)
