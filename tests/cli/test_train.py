"""`microparallel train` as a person runs it."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

SMALL = ["--steps", "6", "--dim", "16", "--depth", "3", "--batch", "50", "--json", "--quiet"]


@pytest.fixture
def train(microparallel):
    """A call that succeeds: what it prints."""

    def call(*arguments):
        result = microparallel("train", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return call


def losses(folder):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_torchrun_gives_the_same_result(tmp_path, train, torchrun):
    """3 ranks: their shares of 50 samples differ, and so do their sums when added in another order."""
    ours = json.loads(train(*SMALL, "--ranks", 3, "--out", "ours"))
    result = torchrun(3, "microparallel", "train", *SMALL, "--out", "theirs")
    assert result.returncode == 0, result.stderr
    theirs = json.loads(result.stdout)
    assert theirs["ranks"] == 3
    assert losses(tmp_path / "ours") == losses(tmp_path / "theirs")
    assert ours["validation_loss"] == theirs["validation_loss"]


def test_several_slow_links_and_ranks(tmp_path, train):
    several = [
        ("--slow-link", "0-1=1us"),
        ("--slow-rank", "1=1x"),
        ("--slow-link", "1-2=1Gbit"),
        ("--slow-rank", "2=1x"),
    ]
    train(*SMALL, "--ranks", 3, "--out", "slow", *(word for flag in several for word in flag))
    kept = tomllib.loads((tmp_path / "slow" / "config.toml").read_text())
    assert (kept["slow_link"], kept["slow_rank"]) == ("0-1=1us 1-2=1Gbit", "1=1x 2=1x")


def test_your_own_model_and_data_from_a_config_file(tmp_path, train):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def make_model(): return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))\n"
        "def make_dataset():\n"
        "    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))\n"
        "    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))\n"
        "    return data, data\n"
    )
    (tmp_path / "run.toml").write_text(
        'model = "mine:make_model"\ndata = "mine:make_dataset"\nepochs = 40\nbatch = 16\nlr = 0.02\nranks = 2\n'
    )
    summary = json.loads(train("--config", "run.toml", "--json"))
    assert summary["steps"] == 160
    assert summary["validation_accuracy"] is None  # nothing to count in a regression
    assert summary["validation_loss"] < 0.1


def test_a_run_that_began_with_dtype_goes_on(tmp_path, train):
    train(*SMALL, "--precision", "float64", "--steps", 2, "--out", "old")
    config = tmp_path / "old" / "config.toml"
    config.write_text(config.read_text().replace("precision =", "dtype ="))
    assert json.loads(train("--resume", "old", "--steps", 4, "--json"))["precision"] == "float64"
    assert tomllib.loads(config.read_text())["precision"] == "float64"


def test_a_run_in_float16_shows_its_scale(tmp_path, microparallel):
    result = microparallel("train", *SMALL[:-2], "--precision", "fp16", "--ranks", 2, "--steps", 3, "--out", "run")
    assert result.returncode == 0
    assert ", cpu, fp16\n" in result.stderr and ", scale 65,536" in result.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["loss_scale"] == 2**16
    page = microparallel("report", "run")
    assert page.returncode == 0 and "· fp16" in (tmp_path / "run" / "report.html").read_text()


def test_parts_from_the_command_line_a_file_and_a_run_that_goes_on(tmp_path, train, microparallel):
    """The losses are those of one process, with whatever is kept in parts."""
    exact = ["--precision", "float64", "--schedule-lr", "constant"]
    train(*SMALL, *exact, "--steps", 9, "--out", "alone")
    (tmp_path / "run.toml").write_text('shard = "gradients"\nranks = 3\naccumulate = 3\n')
    summary = json.loads(train("--config", "run.toml", *SMALL, *exact, "--steps", 2, "--trace", "--out", "parts"))
    assert (summary["shard"], summary["strategy"], summary["ranks"]) == ("gradients", "ddp", 3)
    train("--resume", "parts", "--steps", 3, "--quiet")
    train("--resume", "parts", "--steps", 4, "--ranks", 1, "--accumulate", 1, "--quiet")
    summary = json.loads(train("--resume", "parts", "--steps", 5, "--ranks", 2, "--shard", "optimizer", "--json"))
    assert summary["shard"] == "optimizer"
    summary = json.loads(train("--resume", "parts", "--steps", 6, "--shard", "none", "--json", "--quiet"))
    assert "shard" not in summary
    train("--resume", "parts", "--steps", 7, "--ranks", 2, "--shard", "parameters", "--replicas", 2, "--quiet")
    summary = json.loads(train("--resume", "parts", "--steps", 8, "--ranks", 3, "--prefetch", 0, "--json"))
    assert (summary["shard"], summary["replicas_identical"]) == ("parameters", True)
    train("--resume", "parts", "--steps", 9, "--shard", "gradients", "--quiet")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "alone"), rel=1e-12, abs=0)
    assert "optimizer and gradients in parts" in microparallel("train", *SMALL[:-2], "--config", "run.toml").stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shard", "parameters"], "--shard parameters: one rank has no other rank to share with; try --ranks 2"),
        (["--shard", "parameters", "--pp", "2"], "--shard parameters: each rank of a pipeline has layers of its own"),
        (
            ["--shard", "parameters", "--ranks", "2", "--optimizer", "muon"],
            "--optimizer muon looks at whole parameters",
        ),
        (["--ranks", "2", "--keep-parameters"], "--keep-parameters is for --shard parameters; add that"),
        (["--shard", "optimizer"], "--shard optimizer: one rank has no other rank to share with; try --ranks 2"),
        (["--shard", "gradients", "--strategy", "hooks", "--ranks", "2"], "--shard gradients is for --strategy ddp"),
        (["--shard", "optimizer", "--optimizer", "lbfgs"], "--optimizer lbfgs: lbfgs calls the model several times"),
        (["--shard", "gradients", "--dp", "2", "--pp", "2"], "try --shard optimizer"),
        (["--shard", "optimizer", "--pp", "2"], "--dp is 1; try --dp 2"),
    ],
)
def test_what_cannot_be_in_parts_is_refused_in_one_line(microparallel, flags, words):
    result = microparallel("train", *flags)
    assert result.returncode == 2
    assert words in result.stderr and len(result.stderr.splitlines()) == 1


MINE = """
import torch
from torch.utils.data import IterableDataset, TensorDataset
def make_model(): return torch.nn.Linear(3, 2)
def make_dataset():
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return data, data
def broken(outputs, targets): return outputs.nothing
def fine(outputs, targets): return 0.5
class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(3), 1
"""
OWN = ["--model", "mine:make_model", "--data", "mine:make_dataset"]


def test_a_metric_that_fails_costs_one_line_and_not_the_training(tmp_path, microparallel):
    (tmp_path / "mine.py").write_text(MINE)
    several = ["--metric", "mine:broken", "--metric", "mine:fine", "--epochs", 3, "--ranks", 2, "--out", "run"]
    result = microparallel("train", *OWN, *several)
    assert result.returncode == 0
    warnings = [line for line in result.stderr.splitlines() if "warning" in line]
    reason = "AttributeError: 'Tensor' object has no attribute 'nothing' (mine.py:9)"
    assert warnings == [f"warning: validation broken is left out, since it failed: {reason}"]
    assert ", fine 0.5000" in result.stdout and "broken" not in result.stdout
    kept = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert kept["metric"] == "mine:broken mine:fine"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optimizer", "rmspop"], "--optimizer rmspop: did you mean 'rmsprop'?"),
        (["--optimizer", "LBFGS"], "--optimizer LBFGS: LBFGS calls the model several times in a step"),
        (["--optimizer", "mine:nothing"], "module mine has no 'nothing'"),
        (["--optimizer", "rprop", "--weight-decay", 0.1], "--weight-decay 0.1 means nothing to --optimizer rprop"),
        (["--optimizer", "mine:make", "--momentum", 0.9], "--momentum 0.9 is for torch's optimizers; set it in"),
        (["--schedule-lr", "cosin"], "--schedule-lr cosin: did you mean 'cosine'?"),
        (["--lr-schedule", "cosine"], "--lr-schedule is --schedule-lr now"),
        (["--dtype", "float64"], "--dtype is --precision now"),
        (["--precision", "half"], "--precision half"),
        (["--warmup", 1.5], "--warmup 1.5: a number of steps is whole, and a part of all steps is below 1; try 1"),
        (["--warmup", -1], "--warmup -1.0: must be at least 0"),
        (["--clip", 0], "--clip 0.0: must be above 0"),
        (["--weight-decay", -0.1], "--weight-decay -0.1: must be at least 0"),
        (["--workers", -1], "--workers -1: must be at least 0"),
        (["--metric", "broken"], "--metric broken: broken does not name a function; write it as my_module:my_metric"),
        (["--metric", "mine:broke"], "module mine has no 'broke'; did you mean 'broken'?"),
        (["--collate", "pad"], "--collate pad: this does not name a function; write it as my_module:collate"),
        (["--log", "tensorbord"], "--log tensorbord: did you mean 'tensorboard'?"),
        (["--log", "wandb"], "--log wandb: the package wandb is not installed; pip install wandb"),
        (
            ["--data", "mine:Endless"],
            "--data mine:Endless is a stream without __len__, so the length of a pass is not known",
        ),
        (["--data", "mine:Endless", "--steps", 3, "--workers", 2], "--workers 2: a stream is read by one worker"),
        (["--data", "digits", "--collate", "mine:fine"], "--collate mine:fine is for data of your own"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_cannot_be_stops_before_anything_starts(tmp_path, microparallel, flags, words):
    (tmp_path / "mine.py").write_text(MINE)
    result = microparallel("train", *OWN, *flags, "--quiet")
    assert result.returncode == 2
    assert words in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_goes_on_with_other_pipelines_alone(train):
    small = ["--dim", 8, "--depth", 4, "--batch", 20, "--dp", 2, "--pp", 2, "--microbatches", 3, "--steps", 2]
    train(*small, "--schedule", "gpipe", "--out", "run", "--quiet")
    summary = json.loads(train("--resume", "run", "--dp", 1, "--steps", 3, "--json", "--quiet"))
    layout = {"ranks": 2, "dp": 1, "pp": 2, "schedule": "gpipe", "microbatches": 3, "strategy": "pipeline"}
    assert layout.items() <= summary.items()
    summary = json.loads(train("--resume", "run", "--ranks", 2, "--steps", 4, "--json", "--quiet"))
    assert summary["strategy"] == "ddp" and "pp" not in summary


def test_a_stream_without_a_state_says_what_its_resume_costs(tmp_path, microparallel, train):
    (tmp_path / "mine.py").write_text(MINE)
    train("--model", "mine:make_model", "--data", "mine:Endless", "--steps", 3, "--ranks", 2, "--out", "run")
    result = microparallel("train", "--resume", "run", "--steps", 5)
    assert result.returncode == 0
    notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and "no state_dict and load_state_dict, so 3 batches are read again" in notes[0]


def test_text_of_your_own(tmp_path, train):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    small = ["--dim", 32, "--depth", 1, "--heads", 2, "--steps", 30, "--context", 16]
    output = train("--model", "gpt", "--data", "notes", *small)
    assert "validation accuracy" in output
    assert "kept in runs/" in output


@pytest.mark.parametrize(
    ("ranks", "number", "workers"),
    [(1, signal.SIGINT, 1), (2, signal.SIGTERM, 0), pytest.param(2, signal.SIGINT, 2, marks=pytest.mark.slow)],
)
def test_stopping_saves_and_resume_goes_on(tmp_path, train, start, ranks, number, workers):
    small = ["--ranks", ranks, "--workers", workers, "--dim", 16, "--depth", 3, "--schedule-lr", "constant"]
    process = start("microparallel", "train", *small, "--steps", 100_000, "--out", "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 40
    while not (metrics.exists() and metrics.read_text().count("\n") > 20):
        assert time.monotonic() < deadline and process.poll() is None, process.errors
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert process.wait(20) == 130
    assert "Traceback" not in process.errors
    assert "go on with: microparallel train --resume run" in process.errors
    assert "kept in run" in process.output
    done = len(losses(tmp_path / "run"))
    resumed = json.loads(train("--resume", "run", "--steps", done + 5, "--ranks", ranks, "--json", "--quiet"))
    assert resumed["steps"] == done + 5
    assert len(losses(tmp_path / "run")) == done + 5


def test_shortcuts_and_what_a_resumed_run_may_change(train, microparallel):
    """How a step is computed may change; whether parameters or gradients are averaged changes what is learnt."""
    summary = json.loads(train(*SMALL, "--ranks", 2, "--average-every", 2, "--accumulate", 3, "--out", "run"))
    assert (summary["strategy"], summary["steps"]) == ("averaging", 6)
    longer = ["--resume", "run", "--steps", 8, "--json", "--quiet"]
    assert json.loads(train(*longer, "--accumulate", 1))["steps"] == 8
    for flags, words in [
        (["--average-every", 4], "--average-every 4 would change a run that began with 2"),
        (["--strategy", "ddp"], "--average-every 2 is for --strategy averaging, and it is ddp"),
        (["--ranks", 1], "one rank has no other rank to average with"),
    ]:
        result = microparallel("train", *longer, *flags)
        assert result.returncode == 2
        assert words in result.stderr and result.stderr.count("\n") == 1


def test_defaults_reach_the_promised_accuracy_on_one_rank(train):
    summary = json.loads(train("--json", "--quiet"))
    assert summary["validation_accuracy"] >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_defaults_reach_the_promised_accuracy_on_four_ranks(train):
    summary = json.loads(train("--ranks", 4, "--json", "--quiet"))
    assert summary["validation_accuracy"] >= 0.95


KILLS_ITSELF = """
import os, signal
from pathlib import Path
import torch
from torch.utils.data import TensorDataset

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.calls = 0

    def forward(self, inputs):
        self.calls += self.training
        marker = Path(f"killed-{self.calls}")
        dies = os.environ.get("RANK") == "1" and self.calls in (4, 9) and not Path("spare").exists()
        if dies and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(inputs)

def make_model(): return Model()

def make_data():
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))
"""
KILLED = ["--model", "mine_killed:make_model", "--data", "mine_killed:make_data", "--loss", "mse", "--batch", 10]
KILLED += ["--steps", 20, "--ranks", 2, "--save-every", 3, "--json"]


def test_a_run_whose_ranks_are_killed_goes_on_by_itself_bit_for_bit(tmp_path, microparallel):
    """Killed in step 4, and after going on from step 3, again in its ninth step."""
    (tmp_path / "mine_killed.py").write_text(KILLS_ITSELF)
    (tmp_path / "spare").touch()
    whole = microparallel("train", *KILLED, "--out", "whole", "--quiet")
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "spare").unlink()
    result = microparallel("train", *KILLED, "--out", "killed", "--restarts", 5)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("rank 1 was killed by SIGKILL") == 2
    assert "starting again with 2 ranks (restart 2 of 5)" in result.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert json.loads(result.stdout)["loss"] == json.loads(whole.stdout)["loss"]


DIES_ONCE = """
import os, signal
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
from microparallel.train import saving

saving._MOST_TIME_FOR_COPIES = {False: 1e6, True: 1e6}  # a copy after each step, whatever else the machine does

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.calls = 0

    def forward(self, inputs):
        self.calls += self.training
        if os.environ.get("RANK") == "1" and self.calls == 40 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(inputs)

def make_model(): return Model()

def make_data():
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))
"""
DYING = ["train", "--model", "mine_dies:make_model", "--data", "mine_dies:make_data", "--loss", "mse", "--batch", 10]
DYING += ["--steps", 60, "--ranks", 2, "--save-every", 1000, "--json"]


def test_ranks_go_on_from_memory_bit_for_bit(tmp_path, microparallel):
    """The disk has nothing but step 0, so a rank that went on from there would be killed in its fortieth call again."""
    (tmp_path / "mine_dies.py").write_text(DIES_ONCE)
    result = microparallel(*DYING, "--out", "killed", "--restarts", 2)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("rank 1 was killed by SIGKILL") == 1
    assert "copying the state into memory every" in result.stderr
    assert "goes on from step 0" not in result.stderr
    whole = microparallel(*DYING, "--out", "whole", "--quiet")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert json.loads(result.stdout)["loss"] == json.loads(whole.stdout)["loss"]


def test_what_is_in_memory_is_saved_when_there_is_no_restart(tmp_path, microparallel):
    (tmp_path / "mine_dies.py").write_text(DIES_ONCE)
    result = microparallel(*DYING, "--out", "killed")
    assert result.returncode == 1 and "rank 1 was killed by SIGKILL" in result.stderr
    last = max(int(path.name[5:]) for path in (tmp_path / "killed" / "checkpoints").glob("step-*"))
    assert 0 < last < 40 and f"step {last}, which was in memory, is saved\n" in result.stderr
    how = f"step {last} is saved; go on with: microparallel train --resume killed"
    assert result.stderr.splitlines()[-1] == how
    resumed = microparallel("train", "--resume", "killed", "--json", "--quiet")
    whole = microparallel(*DYING, "--out", "whole", "--quiet")
    assert json.loads(resumed.stdout)["loss"] == json.loads(whole.stdout)["loss"]


BECOMES_NAN = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += self.training
        return self.layer(inputs) * (float("nan") if self.calls == 9 else 1)
"""


def test_a_run_that_fails_for_good_says_where_and_how_to_go_on(tmp_path, microparallel):
    """Without lines of ours: the error says itself which rank and which parameters."""
    (tmp_path / "becomes_nan.py").write_text(BECOMES_NAN)
    words = ["--model", "becomes_nan:Model", "--data", "digits", "--steps", 20, "--save-every", 4, "--out", "run"]
    result = microparallel("train", *words, "--ranks", 2, "--restarts", 5, "--quiet")
    lines = result.stderr.splitlines()
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert lines[0].endswith(
        "the loss of step 9 is nan, and nothing of this step was kept; starting again with 2 ranks (restart 1 of 5)"
    )
    assert "  rank 1: gradients that are not finite: layer.weight, layer.bias" in lines
    assert lines[-2:] == [
        "after step 8 this came 2 times: there is no other restart",
        "step 8 is saved; go on with: microparallel train --resume run",
    ]


FAILS_ON_ONE_RANK = """
import threading
import torch

def make_model():
    if torch.distributed.get_rank() == 0:
        threading.Event().wait()
    raise ValueError("no model today")
"""


def test_nothing_is_left_behind_when_the_build_fails(tmp_path, microparallel):
    """Also if rank 0, which has made the folder, is ended while it builds."""
    (tmp_path / "fails.py").write_text(FAILS_ON_ONE_RANK)
    model = ["--model", "fails:make_model", "--data", "digits"]
    result = microparallel("train", *model, "--ranks", 2, "--steps", 2, "--out", "run")
    assert result.returncode == 2 and "no model today" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_torchrun_restarts_and_the_run_goes_on(tmp_path):
    """Without --resume, which is then automatic; and without --out, where torchrun's agent names the folder."""
    (tmp_path / "mine_killed.py").write_text(KILLS_ITSELF)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    command = [*agent, "-m", "microparallel", "train", *map(str, KILLED), "--quiet"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    [run] = (tmp_path / "runs").iterdir()
    assert run.name.startswith("torchrun-")
    assert len(losses(run)) == 20 and {path.name for path in tmp_path.glob("killed-*")} == {"killed-4", "killed-9"}
