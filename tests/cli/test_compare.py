"""`microparallel compare` as a person runs it."""

import json
import re

import pytest
import torch

from microparallel.cli.compare import _about_torch
from microparallel.schedules import PIPELINES
from microparallel.train.compare import Comparison
from microparallel.train.config import SHARDED, TrainConfig


def test_compare_finds_that_all_strategies_agree(microparallel):
    result = microparallel("compare", "--ranks", "2", "--steps", "5", "--dim", "16", "--depth", "4", "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["strategy"]: row for row in json.loads(result.stdout)}
    assert set(rows) == {"single", "naive", "hooks", "ddp", "torch-ddp"}
    assert all(row["agrees"] and row["loss_difference"] < 1e-12 for row in rows.values())
    assert rows["naive"]["ranks"] == 2


def test_compare_pipelines_and_keep_their_traces(microparallel, tmp_path):
    flags = ["--ranks", "2", "--steps", "3", "--dim", "8", "--depth", "4", "--batch", "10", "--microbatches", "3"]
    result = microparallel("compare", "--pipelines", *flags, "--trace", str(tmp_path / "traces"), "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["strategy"]: row for row in json.loads(result.stdout)}
    assert list(rows) == ["single", *(f"pp {name}" for name in PIPELINES)]
    assert all(row["agrees"] and row["weight_difference"] < 1e-12 for row in rows.values())
    files = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert files == sorted(["single.json", *(f"pp-{name}.json" for name in PIPELINES)])
    events = json.loads((tmp_path / "traces" / "pp-1f1b.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pipelines", "--in-process"], "--pipelines compares schedules between ranks"),
        (["--trace", "there", "--in-process"], "--trace records strategies between ranks"),
        (["--pipelines", "--ranks", "5", "--depth", "4"], "5 stages need at least 5 layers"),
        (["--pipelines", "--batch", "4", "--microbatches", "5"], "try --microbatches 4"),
    ],
)
def test_compare_refuses_pipelines_in_one_line(microparallel, flags, words):
    result = microparallel("compare", *flags)
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr


def test_compare_what_is_kept_in_parts(microparallel, tmp_path):
    flags = ["--ranks", "3", "--steps", "4", "--dim", "8", "--depth", "4", "--batch", "20", "--accumulate", "3"]
    result = microparallel("compare", "--shard", "parameters", *flags, "--trace", str(tmp_path / "traces"), "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["strategy"]: row for row in json.loads(result.stdout)}
    assert list(rows) == ["single", "ddp", "shard optimizer", "shard gradients", "shard parameters"]
    assert all(row["agrees"] and row["weight_difference"] < 1e-12 for row in rows.values())
    traces = tmp_path / "traces"
    assert [(traces / f"shard-{name}.json").read_text().count("U0.1@dp") > 0 for name in SHARDED] == [False, True, True]
    assert "~T0@dp" in (traces / "shard-parameters.json").read_text()
    result = microparallel("compare", "--shard", "optimizer", "--steps", "2", "--dim", "8", "--depth", "2")
    assert result.returncode == 0 and "shard optimizer" in result.stdout and "shard gradients" not in result.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shard", "weights"], "--shard weights: did you mean 'parameters'?"),
        (["--shard", "gradients", "--prefetch", "2"], "--prefetch 2 is for --shard parameters; add that"),
        (["--shard", "optimizer", "--in-process"], "--shard optimizer compares parts between ranks; leave"),
        (["--shard", "optimizer", "--shortcuts"], "--shard optimizer compares parts between ranks; leave"),
        (["--accumulate", "2"], "--accumulate 2: naive and hooks compute a step at once; try --shard gradients"),
    ],
)
def test_compare_refuses_parts_in_one_line(microparallel, flags, words):
    result = microparallel("compare", *flags)
    assert result.returncode == 2
    assert words in result.stderr and len(result.stderr.splitlines()) == 1


SMALL = ["--dim", "16", "--depth", "4", "--batch", "7", "--device", "cpu"]


def test_compare_in_process_finds_that_replicas_agree_with_plain_training(microparallel):
    result = microparallel("compare", "--in-process", "--ranks", "3", "--steps", "5", *SMALL, "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["strategy"]: row for row in json.loads(result.stdout)}
    assert list(rows) == ["single", "replicas-cpu", "replicas-ring"]
    assert all(row["agrees"] and row["weight_difference"] < 1e-12 for row in rows.values())
    assert [len(row["losses"]) for row in rows.values()] == [5, 5, 5]
    assert rows["replicas-ring"]["ranks"] == 3
    assert "nn.DataParallel needs a GPU, and --device is cpu" in result.stderr.replace("\n", " ")


def test_compare_in_process_for_people(microparallel):
    result = microparallel("compare", "--in-process", "--steps", "30", *SMALL)
    assert result.returncode == 0, result.stderr
    losses, differences = result.stdout.split("mlp, 30 steps of 7 samples, float64, sgd")
    steps = re.findall(r"^│ +(\d+) │", losses, re.MULTILINE)
    assert (len(steps), steps[0], steps[-1]) == (20, "1", "30")
    assert "replicas" in differences and "same" in differences and "differs" not in differences
    assert differences.count("replicas-ring") == 1  # not cut short where the terminal is narrow
    assert "nn.DataParallel needs a GPU" in differences


@pytest.mark.parametrize(
    ("gpus", "device", "words"),
    [
        (0, "auto", "needs a GPU, and torch sees none here"),
        (0, "cpu", "needs a GPU, and --device is cpu"),
        (1, "auto", "with 1 GPU that is plain training"),
        (2, "cuda", "torch-dp is nn.DataParallel, on 2 GPUs"),
    ],
)
def test_what_torch_s_own_was_compared_with_is_said(gpus, device, words):
    strategies = {"single": 1, "replicas-cpu": 3} | ({"torch-dp": gpus} if gpus else {})
    rows = [Comparison(name, ranks, 1.0, 0.0, 0.0, 0.1, True, [1.0]) for name, ranks in strategies.items()]
    assert words in _about_torch(TrainConfig(device=device), rows)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--transport", "gloo"], "--transport gloo: with --in-process nothing is transported"),
        (["--ranks", "1"], "--ranks 1"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda: torch sees no GPU here; try --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
    ],
)
def test_compare_in_process_refuses_in_one_line(microparallel, flags, words):
    result = microparallel("compare", "--in-process", *flags)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_compare_in_process_fails_when_replicas_differ(microparallel):
    """In float32 with a learning rate that blows everything up: what is not a number agrees with nothing."""
    result = microparallel("compare", "--in-process", "--steps", "8", *SMALL, "--precision", "float32", "--lr", "1e30")
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.count("differs") == 3


def test_compare_shortcuts(microparallel):
    """One call shows everything to people; the numbers for scripts are those of a test of `train/shortcuts.py`."""
    arguments = ["compare", "--shortcuts", "--steps", "6", "--every", "3", *SMALL]
    result = microparallel(*arguments)
    assert result.returncode == 0, result.stderr
    table = {line.split()[1]: line for line in result.stdout.splitlines() if line.startswith("│ ")}
    assert list(table) == ["every", "accumulation", "averaging"]  # not cut short in 80 columns
    assert "…" not in result.stdout
    assert "● every step   ▲ accumulation   × averaging" in result.stdout
    text = " ".join(result.stdout.split())
    assert "exactly the step of a batch 3 times as large" in text
    assert "averaging parameters is not averaging gradients" in text
    rows = json.loads(microparallel(*arguments, "--json").stdout)
    assert [row["way"] for row in rows] == ["every step", "accumulation", "averaging"]
    assert [row["synchronisations"] for row in rows] == [6, 2, 2]
    assert [len(row["losses"]) for row in rows] == [3, 3, 3]
    assert rows[0]["bytes_a_sample"] == pytest.approx(3 * rows[1]["bytes_a_sample"], rel=0.01)


def test_compare_compression(microparallel):
    result = microparallel("compare", "--compress", "sign", "--seeds", "1", "--steps", "4", *SMALL)
    assert result.returncode == 0, result.stderr
    for words in ("with feedback", "without feedback", "÷ whole", "● whole", "error feedback"):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--compress", "topk:7"], "topk:7"),
        (["--seeds", "3"], "--seeds 3: it is for --compress"),
        (["--compress", "int8", "--seeds", "0"], "--seeds 0: .* at least 1"),
        (["--compress", "int8", "--shortcuts"], "--compress int8 compares sums between ranks"),
        (["--compress", "int8", "--trace", "there"], "--trace records strategies"),
        (["--compress", "int8", "--shard", "optimizer"], "--compress int8: a compressed sum"),
        (["--shortcuts", "--every", "0"], "--every 0: must be at least 1; try 4"),
        (["--shortcuts", "--steps", "10"], "--every 4 does not divide --steps 10, .* try --steps 12"),
        (["--every", "4"], "--every 4 is for --shortcuts"),
        (["--shortcuts", "--in-process"], "--shortcuts and --in-process"),
        (["--shortcuts", "--ranks", "1"], "--ranks 1"),
        (["--shortcuts", "--transport", "nccl"], "--transport nccl: .* leave it out"),
        (["--config", "averaging.toml"], "average_every = 4: .* try --shortcuts"),
        (["--shortcuts", "--config", "averaging.toml"], "leave them out"),
    ],
    ids=" ".join,
)
def test_compare_refuses_shortcuts_in_one_line(microparallel, tmp_path, flags, words):
    (tmp_path / "averaging.toml").write_text("average_every = 4\nranks = 2\n")
    result = microparallel("compare", *flags)
    assert result.returncode == 2
    assert re.search(words, result.stderr)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ranks", "3"], "--ranks 3: this process belongs to a world of 2 ranks; leave it out"),
        (["--shortcuts"], "run them without torchrun or srun"),
        (["--in-process"], "run them without torchrun or srun"),
    ],
    ids=" ".join,
)
def test_what_starts_ranks_of_its_own_is_refused_under_torchrun(microparallel, flags, said):
    result = microparallel("compare", *flags, RANK=0, WORLD_SIZE=2, MASTER_PORT=29500)
    assert result.returncode == 2
    assert said in result.stderr


def test_the_ranks_of_torchrun_are_compared(torchrun):
    result = torchrun(2, "microparallel", "compare", "--steps", "3", "--json", "--transport", "gloo")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["ranks"] for row in rows] == [1, 2, 2, 2, 2] and all(row["agrees"] for row in rows)
