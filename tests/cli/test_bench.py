"""`microparallel bench` as a person runs it."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from microparallel.bench import data_parallel, data_parallel_report, pipeline, pipeline_report
from microparallel.bench.all_reduce import Measurements, Timing
from microparallel.bench.all_reduce_report import report_on
from microparallel.bench.data_parallel import Method
from microparallel.bench.engine import Wrong
from microparallel.bench.pipeline import Apart
from microparallel.bench.pipeline_costs import StageTimes
from microparallel.bench.ranks import require_right
from microparallel.cli import main
from microparallel.errors import MicroparallelError, UsageError
from microparallel.schedules import PIPELINES
from microparallel.trace.parts import Shares

SMALL = ["--ranks", "2", "--sizes", "4KB,64KB", "--algorithms", "ring,tree,naive", "--transport", "gloo"]


def refused(capsys, monkeypatch, *arguments, bench="allreduce"):
    """The one line a wrong call is answered with, in this process: nothing is started."""
    monkeypatch.setattr(sys, "argv", ["microparallel", "bench", bench, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    output, errors = capsys.readouterr()
    assert ended.value.code == 2, errors
    assert output == ""
    [line] = errors.splitlines()
    return line


def test_everything_is_in_the_json(microparallel):
    result = microparallel("bench", "allreduce", *SMALL, "--repeats", "3", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["machine"]["cores"] >= 1 and document["machine"]["torch"]
    assert (document["ranks"], document["transport"], document["dtype"]) == (2, "gloo", "float32")
    assert set(document["fit"]) >= {"latency", "seconds_per_byte", "add_seconds_per_byte", "predictions_off_by"}
    rows = {(row["algorithm"], row["size"]): row for row in document["results"]}
    assert list(rows) == [(name, size) for size in (4_000, 64_000) for name in ("torch", "ring", "tree", "naive")]
    ring = rows["ring", 64_000]
    assert ring["repeats"] == 3 == len(ring["calls"])
    assert ring["fastest"] <= ring["lower_quartile"] <= ring["seconds"] <= ring["upper_quartile"] <= ring["slowest"]
    assert (
        ring["algorithm_bandwidth"] == pytest.approx(64_000 / ring["seconds"]) == pytest.approx(ring["bus_bandwidth"])
    )
    assert ring["messages_sent"] == [2, 2] and ring["bytes_sent"] == [64_000, 64_000]
    assert ring["ratio_to_torch"] == pytest.approx(ring["seconds"] / rows["torch", 64_000]["seconds"])
    assert ring["predicted_over_measured"] == pytest.approx(ring["predicted_seconds"] / ring["seconds"])
    assert document["bounds"] == [] and ring["share_of_bound"] is None
    assert "measuring 4 KB" in result.stderr


def test_shared_memory_stands_beside_gloo_and_what_memory_allows(microparallel):
    arguments = ["--ranks", "2", "--sizes", "4KB,64KB", "--algorithms", "none", "--repeats", "3", "--json", "--quiet"]
    result = microparallel("bench", "allreduce", *arguments, "--transport", "shm")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["transport"] == "shm" and document["fit"] is None and document["notes"] != []
    rows = {(row["label"], row["size"]): row for row in document["results"]}
    names = ["torch on gloo", "torch on shm", "shm", "shm, in place"]
    assert list(rows) == [(name, size) for size in (4_000, 64_000) for name in names]
    bounds = {(row["label"], row["size"]): row for row in document["bounds"]}
    assert list(bounds) == [(name, size) for size in (4_000, 64_000) for name in ("bound", "bound, in place")]
    for name, bound in (("torch on shm", "bound"), ("shm", "bound"), ("shm, in place", "bound, in place")):
        row = rows[name, 64_000]
        assert row["bound_seconds"] == bounds[bound, 64_000]["seconds"]
        assert row["share_of_bound"] == pytest.approx(row["bound_seconds"] / row["seconds"])
        assert row["ratio_to_torch"] == pytest.approx(row["seconds"] / rows["torch on gloo", 64_000]["seconds"])
    assert result.stderr == ""


def test_a_table_and_a_picture_for_people(microparallel, tmp_path):
    result = microparallel("bench", "allreduce", *SMALL, "--seconds", "0.3", "--plot", "out.svg", "--quiet")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("all-reduce, 2 ranks on ")
    for word in ("4 KB", "64 KB", "torch", "ring", "tree", "naive", "predicted", "fitted    a message takes"):
        assert word in result.stdout
    assert result.stderr.splitlines() == ["drawn in out.svg"]
    assert (tmp_path / "out.svg").read_text().startswith("<svg")


def made_up_report():
    timings = [Timing("torch", 4_000, (1e-3,) * 9), Timing("ring", 4_000, (2e-3, 4e-3, 30e-3))]
    timings += [Timing("tree", 4_000, (5e-3,)), Timing("recursive-doubling", 4_000, (), "it needs too much")]
    timings += [Timing("add", 4_000, (1e-6,) * 9)]
    return report_on(Measurements(4, 4, 2, "gloo", "cpu", "float32", tuple(timings)))


def test_the_table_says_what_is_missing(capsys):
    made_up_report().show()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["recursive-doubling", "left"] for line in lines)
    assert any(line.split()[:4] == ["tree", "5.00", "ms", "one"] for line in lines)
    assert any(line.split()[:6] == ["ring", "4.00", "ms", "3.00–17.0", "1.00M", "1.50M"] for line in lines)
    notes = " ".join(line for line in lines if line.startswith("!"))
    assert "recursive-doubling at 4 KB was left out: it needs too much" in notes
    assert "tree was called 1×" in notes and "4 ranks share 2 cores" in notes and "two sizes" in notes


def shown_in(report, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(report.table(width))
    return console.file.getvalue()


def report_of_shared_memory(*algorithms):
    calls = {"torch": 100e-3, "torch on shm": 26e-3, "shm": 25e-3, "shm, in place": 12.5e-3}
    calls |= {"bound": 20e-3, "bound, in place": 15e-3, **dict.fromkeys(algorithms, 30e-3), "add": 1e-3}
    timings = [Timing(name, size, (seconds,) * 9) for size in (4_000, 10**8) for name, seconds in calls.items()]
    return report_on(Measurements(2, 2, 2, "shm", "cpu", "float32", tuple(timings)))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("algorithms", [(), ("ring", "recursive-doubling")])
def test_the_share_of_the_memory_s_bandwidth_stands_in_the_table(width, algorithms):
    shown = shown_in(report_of_shared_memory(*algorithms), width)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    methods = ["torch on gloo", "torch on shm", "shm", "shm, in place", "bound", "bound, in place", *algorithms]
    found = [next(name for name in reversed(methods) if line.startswith(name)) for line in lines if " ms " in line]
    assert found == methods * 2
    [shm] = {line for line in lines if line.startswith("shm 25.0 ms") and "G" in line}
    assert " 0.25 80 %" in shm
    assert any(line.startswith("shm, in place") and "120 %" in line for line in lines)
    for heading in ("msgs", "predicted", "÷time"):  # algorithms alone have those
        assert (heading in lines[0]) == (bool(algorithms) and (width > 80 or heading != "msgs"))


def test_a_narrow_terminal_gets_fewer_columns_and_whole_ones():
    shown = shown_in(report_of_shared_memory("recursive-doubling"), 66)
    assert "…" not in shown and "predicted" in shown and "quartiles" not in shown
    assert "predicted" not in shown_in(made_up_report(), 66)  # a single size predicts nothing


def test_the_caption_explains_the_columns_that_are_shown(capsys):
    report_of_shared_memory().show()
    shared = capsys.readouterr().out
    assert "of bound  bound ÷ time" in shared and "torch on gloo" in shared and "predicted" not in shared
    made_up_report().show()
    assert "bound" not in capsys.readouterr().out


def test_under_torchrun_the_first_rank_speaks(torchrun):
    arguments = ["--sizes", "4KB", "--algorithms", "ring", "--repeats", "1", "--json", "--quiet"]
    result = torchrun(2, "microparallel", "bench", "allreduce", *arguments)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["ranks"] == 2


def test_ctrl_c_leaves_nothing_behind(start):
    bench = start("microparallel", "bench", "allreduce", *SMALL, "--seconds", "1000")
    deadline = time.monotonic() + 40
    while "measuring" not in bench.errors:
        assert time.monotonic() < deadline and bench.poll() is None, bench.errors
        time.sleep(0.01)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(bench.pid)], capture_output=True, text=True).stdout
    ranks = [int(pid) for pid in children.split()]
    assert ranks
    os.kill(bench.pid, signal.SIGINT)
    assert bench.wait(20) == 130
    assert bench.output == "" and "Traceback" not in bench.errors
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in ranks)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_wrong_sum_is_a_failure_that_names_algorithm_and_size():
    measurements = Measurements(
        4, 4, 2, "gloo", "cpu", "float32", (), wrong=Wrong("ring", "gave a wrong sum on rank 2, at 64 KB")
    )
    with pytest.raises(MicroparallelError, match="ring gave a wrong sum on rank 2, at 64 KB") as error:
        require_right(measurements, report_on)
    assert not isinstance(error.value, UsageError)  # exit code 1, not 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "4XB"], ["--sizes 4XB", "4KB"]),
        (["--sizes", "4KB,,1MB"], ["--sizes 4KB,,1MB", "''"]),
        (["--sizes", "-4KB"], ["-4KB", "is no size"]),
        (["--sizes", "0"], ["'0'", "at least 1"]),
        (["--sizes", "10"], ["10 bytes", "float32", "try 8"]),
        (["--algorithms", "rnig"], ["rnig", "did you mean 'ring'?"]),
        (["--algorithms", "ring,"], ["--algorithms 'ring,'", "missing"]),
        (["--algorithms", "ring,none"], ["there is no all-reduce 'none'"]),
        (["--ranks", "0"], ["--ranks 0", "at least 1"]),
        (["--ranks", "100000"], ["--ranks 100000", "core"]),
        (["--ranks", "many"], ["many", "--ranks"]),
        (["--dtype", "float31"], ["float31", "did you mean 'float32'?"]),
        (["--seconds", "0"], ["--seconds 0", "above 0"]),
        (["--seconds", "nan"], ["--seconds nan"]),
        (["--repeats", "0"], ["--repeats 0", "at least 1"]),
        (["--transport", "pigeon"], ["pigeon", "gloo"]),
        (["--device", "tpu"], ["tpu", "cpu"]),
        (["--plot", "plot.jpg"], ["plot.jpg", ".svg or .png"]),
        (["--plot", "absent/plot.svg"], ["absent", "no folder"]),
        (["--plot", "/proc/plot.svg"], ["/proc/plot.svg", "cannot be written"]),
        (["--plto", "x.svg"], ["--plto", "--plot"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_wrong_calls(capsys, monkeypatch, arguments, words):
    line = refused(capsys, monkeypatch, *arguments)
    assert all(word in line for word in words), line


def test_the_ranks_of_torchrun_s_world_are_what_they_are(capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert "world of 2 ranks" in refused(capsys, monkeypatch, "--ranks", "3")


# ── bench dp ────────────────────────────────────────────────────────────────────────────────────────────────────────

TINY_DP = ["--models", "mlp-8,mlp-4", "--batch", 2, "--buckets", "0.001,1", "--steps", 2, "--transport", "gloo"]
DP_METHODS = ["none", "naive", "hooks", "buckets", "ddp, 0.001 MB", "ddp, 1 MB", "torch-ddp"]


def test_all_of_data_parallelism_is_in_the_json(microparallel):
    result = microparallel("bench", "dp", *TINY_DP, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["machine"]["cores"] >= 1 and document["machine"]["torch"]
    assert (document["ranks"], document["transport"], document["device"]) == (2, "gloo", "cpu")
    models = {model["name"]: model for model in document["models"]}
    assert list(models) == ["mlp-8", "mlp-4"] and models["mlp-8"]["batch"] == 2
    assert models["mlp-8"]["gradient_bytes"] == 4 * (15 * (8 * 8 + 8) + 8 * 2 + 2)
    rows = {(row["model"], row["label"]): row for row in document["results"]}
    assert list(rows) == [(model, method) for model in models for method in DP_METHODS]
    ddp, none = rows["mlp-8", "ddp, 1 MB"], rows["mlp-8", "none"]
    assert (ddp["method"], ddp["bucket_cap_mb"]) == ("ddp", 1) and ddp["counted"] == 2 == len(ddp["steps"])
    assert ddp["fastest"] <= ddp["lower_quartile"] <= ddp["seconds"] <= ddp["upper_quartile"] <= ddp["slowest"]
    assert ddp["seconds_minus_none"] == pytest.approx(ddp["seconds"] - none["seconds"])
    assert ddp["ratio_to_none"] == pytest.approx(ddp["seconds"] / none["seconds"])
    assert ddp["ratio_to_torch_ddp"] == pytest.approx(ddp["seconds"] / rows["mlp-8", "torch-ddp"]["seconds"])
    best = min((row for row in document["results"] if row["model"] == "mlp-4" and row["method"] == "ddp"),
               key=lambda row: row["seconds"])  # fmt: skip
    assert models["mlp-4"]["best_bucket_mb"] == best["bucket_cap_mb"]
    assert "measuring mlp-8 (0% done)" in result.stderr and "measuring mlp-4 (50% done)" in result.stderr


def test_a_table_of_data_parallelism_for_people(microparallel):
    result = microparallel("bench", "dp", *TINY_DP, "--quiet")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("data-parallel step, 2 ranks on ")
    assert "mlp-8  16 layers of width 8, 4.392 KB of gradients, 2 samples a rank, 2 steps" in lines
    found = [next((name for name in DP_METHODS if line.startswith(f" {name} ")), None) for line in lines]
    assert [name for name in found if name] == DP_METHODS * 2
    for text in ("−none   step − the step of none", "best bucket size of ddp  mlp-8 ", "checked  ", "chance speaks"):
        assert text in result.stdout


@pytest.mark.parametrize("width", [66, 96])
def test_the_table_of_data_parallelism_fits(width):
    timings = tuple(
        data_parallel.Timing(Method(*method), (0.1234, 0.4567, 99.9), 1e-7)
        for method in [("none",), ("ddp", 0.125), ("torch-ddp on shm",), ("torch-ddp",)]
    )
    result = data_parallel.Result("gpt-1024", "4 blocks of width 1024, 64 tokens a sample", 8, 10**8, 6, timings)
    measurements = data_parallel.Measurements(2, 2, 2, "shm", "cpu", (result,))
    console = Console(file=io.StringIO(), width=width)
    console.print(data_parallel_report.report_on(measurements).table(result))
    shown = console.file.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    assert "torch-ddp on shm" in shown and "÷torch" in shown


def test_data_parallelism_under_torchrun(torchrun):
    arguments = ["--models", "mlp-4", "--batch", "2", "--methods", "ddp", "--steps", "1", "--json", "--quiet"]
    result = torchrun(2, "microparallel", "bench", "dp", *arguments)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["ranks"] == 2


def test_wrong_weights_are_a_failure_that_names_method_and_model():
    wrong = Wrong("ddp, 1 MB", "trained mlp-8 wrongly: its ranks ended with different weights")
    measurements = data_parallel.Measurements(2, 2, 2, "shm", "cpu", (), wrong=wrong)
    with pytest.raises(MicroparallelError, match="ddp, 1 MB trained mlp-8 wrongly: its ranks ended with") as error:
        require_right(measurements, data_parallel_report.report_on)
    assert not isinstance(error.value, UsageError)  # exit code 1, not 2


def test_the_help_of_data_parallelism_has_examples(microparallel):
    result = microparallel("bench", "dp", "--help")
    assert result.returncode == 0 and "Examples" in result.stdout and "torch-ddp" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "mpl-8"], ["'mpl-8'", "mlp-1024"]),
        (["--models", "mlp-8,"], ["--models", "missing"]),
        (["--models", "gpt-33"], ["gpt-33", "try gpt-64"]),
        (["--methods", "hoks"], ["hoks", "did you mean 'hooks'?"]),
        (["--methods", "zero"], ["zero", "choose one of naive"]),
        (["--methods", "torch-ddp on shm", "--transport", "gloo"], ["--transport gloo", "shared memory"]),
        (["--buckets", "1,0"], ["'0'", "above 0"]),
        (["--buckets", "1,big"], ["'big'", "megabytes"]),
        (["--batch", "0"], ["--batch 0", "at least 1"]),
        (["--seconds", "0"], ["--seconds 0", "above 0"]),
        (["--steps", "0"], ["--steps 0", "at least 1"]),
        (["--ranks", "0"], ["--ranks 0", "at least 1"]),
        (["--ranks", "100000"], ["--ranks 100000", "core"]),
        (["--transport", "pigeon"], ["pigeon", "gloo"]),
        (["--bucket", "1"], ["--bucket", "--buckets"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_wrong_calls_of_data_parallelism(capsys, monkeypatch, arguments, words):
    line = refused(capsys, monkeypatch, *arguments, bench="dp")
    assert all(word in line for word in words), line


# ── bench shard ─────────────────────────────────────────────────────────────────────────────────────────────────────

TINY_SHARD = ["--quick", "--models", "mlp-8", "--batch", 4, "--steps", 2, "--transport", "gloo"]
SHARD_METHODS = [
    *("none", "ddp", "shard optimizer", "shard gradients", "shard parameters", "shard parameters, kept"),
    *("torch-zero", "torch-fsdp", "none, again", "torch-zero, again", "torch-fsdp, again"),
]


def test_all_of_steps_in_parts_is_in_the_json(microparallel):
    result = microparallel("bench", "shard", *TINY_SHARD, "--accumulate", 2, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["ranks"], document["transport"], document["device"]) == (2, "gloo", "cpu")
    [model] = document["models"]
    assert (model["name"], model["accumulate"], model["batch"]) == ("mlp-8", 2, 4)
    assert model["parameter_bytes"] == 4 * (15 * (8 * 8 + 8) + 8 * 2 + 2)
    rows = {row["method"]: row for row in document["results"]}
    assert list(rows) == SHARD_METHODS
    assert model["torch_zero_to_itself"] == rows["torch-zero, again"]["ratio_to_torch_zero"]
    assert model["torch_fsdp_to_itself"] == rows["torch-fsdp, again"]["ratio_to_torch_fsdp"]
    parameters = rows["shard parameters"]
    assert parameters["sent_bytes_by_formula"] == 3 * 2 * model["parameter_bytes"] / 2
    assert parameters["parts"]["step"] > 0 and rows["torch-fsdp"]["parts"] is None
    gradients = rows["shard gradients"]
    assert gradients["counted"] == 2 == len(gradients["steps"])
    assert gradients["sent_bytes_by_formula"] == 1.5 * model["parameter_bytes"]
    assert "measuring mlp-8 (0% done)" in result.stderr


@pytest.mark.slow  # the same measurements again
def test_tables_of_steps_in_parts_for_people(microparallel):
    result = microparallel("bench", "shard", *TINY_SHARD, "--quiet")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("training step in parts, 2 ranks on ")
    assert "mlp-8  16 layers of width 8, 4.392 KB of parameters, 4 samples a rank, 2 steps" in lines
    found = [next((name for name in SHARD_METHODS if line.startswith(f" {name}  ")), None) for line in lines]
    ours, once = SHARD_METHODS[:6], SHARD_METHODS[:8]
    assert [name for name in found if name] == [*SHARD_METHODS, *ours, *once]
    assert max(map(len, lines[:-2])) <= 100
    for text in ("÷zero", "÷fsdp", "recorded", "exposed", "by formula", "checked  ", "chance speaks"):
        assert text in result.stdout


def test_the_help_of_steps_in_parts_has_examples(microparallel):
    result = microparallel("bench", "shard", "--help")
    assert result.returncode == 0 and "Examples" in result.stdout and "ZeroRedundancyOptimizer" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "mpl-8"], ["'mpl-8'", "mlp-1024"]),
        (["--ranks", "1"], ["--ranks 1: one rank has no other rank to share with", "--ranks 2"]),
        (["--accumulate", "9", "--models", "gpt"], ["--accumulate 9: gpt has 8 samples a rank", "--accumulate 8"]),
        (["--bucket-cap-mb", "0"], ["--bucket-cap-mb 0", "above 0"]),
        (["--steps", "0"], ["--steps 0", "at least 1"]),
        (["--methods", "ddp"], ["--methods"]),
    ],
)
def test_wrong_flags_of_steps_in_parts_are_one_line(microparallel, arguments, words):
    result = microparallel("bench", "shard", *arguments)
    assert result.returncode == 2
    assert all(word in result.stderr for word in words) and "Traceback" not in result.stderr


# ── bench compress ──────────────────────────────────────────────────────────────────────────────────────────────────

TINY_COMPRESS = ["--quick", "--batch", 4, "--steps", 2, "--train-steps", 2, "--methods", "none,bf16,topk:0.1+int8"]
COMPRESS_METHODS = ["none", "bf16", "topk:0.1+int8", "none, again"]


def test_all_of_compressed_steps_is_in_the_json(microparallel):
    result = microparallel("bench", "compress", *TINY_COMPRESS, "--links", "transport,1ms+1Gbit", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["ranks"], document["device"]) == (2, "cpu")
    [model] = document["models"]
    assert (model["name"], model["batch"], model["train_steps"]) == ("mlp-64", 4, 2)
    assert model["gradient_bytes"] == 4 * (15 * (64 * 64 + 64) + 64 * 2 + 2)
    assert [one["method"] for one in model["methods"]] == COMPRESS_METHODS
    assert all(one["sent"] > 0 and one["loss"] > 0 for one in model["methods"])
    rows = {(row["link"], row["method"]): row for row in document["results"]}
    assert list(rows) == [(link, name) for link in ("transport", "1ms+1Gbit") for name in COMPRESS_METHODS]
    assert rows["transport", "bf16"]["predicted_seconds"] is None and rows["transport", "none"]["ratio_to_none"] == 1
    slow = rows["1ms+1Gbit", "bf16"]
    assert slow["counted"] == 2 == len(slow["steps"])
    assert slow["error"] == pytest.approx(slow["predicted_seconds"] / slow["seconds"] - 1)
    assert "measuring mlp-64 learning by none (0% done)" in result.stderr


def test_tables_of_compressed_steps_for_people(microparallel):
    result = microparallel("bench", "compress", *TINY_COMPRESS, "--links", "gloo,10gbit", "--quiet")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("training step with compressed gradients, 2 ranks on ")
    assert any(
        line.startswith("mlp-64  16 layers of width 64, 250.1 KB of gradients, 4 samples a rank") for line in lines
    )
    found = [next((name for name in COMPRESS_METHODS if line.startswith(f" {name}  ")), None) for line in lines]
    assert [name for name in found if name] == [*COMPRESS_METHODS[:-1], *COMPRESS_METHODS, *COMPRESS_METHODS]
    assert max(map(len, lines[:-2])) <= 100
    for text in (
        "over gloo",
        "over 10gbit",
        "by formula",
        "loss after 2 steps",
        "÷none",
        "typically off by",
        "checked  ",
    ):
        assert text in result.stdout, text


def test_the_help_of_compressed_steps_has_examples(microparallel):
    result = microparallel("bench", "compress", "--help")
    assert result.returncode == 0 and "Examples" in result.stdout and "100mbit" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "mpl-8"], ["'mpl-8'", "mlp-1024"]),
        (["--ranks", "1"], ["--ranks 1: one rank sends no gradients", "--ranks 2"]),
        (["--methods", "topkk"], ["topkk", "did you mean 'topk'"]),
        (["--methods", "topk:2"], ["topk", "at most 1"]),
        (["--links", "100mbits"], ["--links 100mbits", "100mbits"]),
        (["--links", "fast"], ["--links fast: there is no link 'fast'", "5ms+50Mbit"]),
        (["--train-steps", "0"], ["--train-steps 0", "at least 1"]),
        (["--quick", "--links", "gloo", "--transport", "gloo"], ["beside shared memory", "--links transport"]),
    ],
)
def test_wrong_flags_of_compressed_steps_are_one_line(microparallel, arguments, words):
    result = microparallel("bench", "compress", *arguments)
    assert result.returncode == 2
    assert all(word in result.stderr for word in words) and "Traceback" not in result.stderr


# ── bench pp ────────────────────────────────────────────────────────────────────────────────────────────────────────

TINY_PP = ["--depth", 4, "--width", 8, "--batch", 8, "--microbatches", 4, "--steps", 2, "--transport", "gloo"]


def test_all_of_pipelines_is_in_the_json(microparallel):
    result = microparallel("bench", "pp", *TINY_PP, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["ranks"], document["transport"], document["device"]) == (2, "gloo", "cpu")
    assert document["model"] == {"name": "mlp", "text": "4 layers of width 8, 8 samples in 4 micro-batches",
                                 "microbatches": 4}  # fmt: skip
    rows = {(row["schedule"], row["by_torch"]): row for row in document["results"]}
    assert [schedule for schedule, by_torch in rows if not by_torch] == list(PIPELINES)
    assert [schedule for schedule, by_torch in rows if by_torch] == list(pipeline.TORCH_SCHEDULES)
    ours, torchs = rows["1f1b", False], rows["1f1b", True]
    assert ours["counted"] == 2 == len(ours["steps"])
    assert ours["fastest"] <= ours["lower_quartile"] <= ours["seconds"] <= ours["upper_quartile"] <= ours["slowest"]
    assert ours["ratio_to_torch"] == pytest.approx(ours["seconds"] / torchs["seconds"])
    assert ours["ratio_to_ideal"] == pytest.approx(ours["seconds"] / ours["ideal_seconds"])
    assert ours["activations"] == ours["activations_of_program"] == [2, 1]
    assert len(ours["saved_bytes"]) == len(ours["shares"]) == 2 and rows["naive", False]["ratio_to_torch"] is None
    assert set(document["stage_times"]) == set(PIPELINES) and set(document["formula"]["ratios"]) == {"gpipe", "1f1b"}
    assert document["zb_h1_against_1f1b"]["measured"][1] == ours["seconds"]
    assert "measuring mlp (0% done)" in result.stderr


def test_a_table_of_pipelines_for_people(microparallel):
    result = microparallel("bench", "pp", *TINY_PP, "--quiet", "--schedules", "zb-h1,1f1b,naive")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("pipeline step, 2 ranks on ")
    assert "mlp  4 layers of width 8, 8 samples in 4 micro-batches, 2 steps" in lines
    table = lines[lines.index("") + 3 :]
    assert [line.split()[0] for line in table[1 : table.index("")]] == ["zb-h1", "torch", "1f1b", "torch", "naive"]
    for text in (
        "÷torch ",
        "2=2",
        "compute  ",
        " against 1f1b, here ",
        "checked  loss and gradients",
        "chance speaks",
    ):
        assert text in result.stdout
    assert max(map(len, lines)) <= 100


def made_up_pipelines(**changes):
    methods = [("naive",), ("interleaved",), ("zb-h1",), ("1f1b",), ("interleaved", True), ("1f1b", True)]
    timings = tuple(
        pipeline.Timing(pipeline.Method(*method), (0.1234, 0.1267, 99.9), (589_824, 0), Apart(1e-8, 1e-7, "weight"))
        for method in methods
    )
    times = {stages: StageTimes(tuple(range(2)) * (stages // 2), *((0.012,) * stages,) * 4) for stages in (2, 4)}
    traced = {
        name: pipeline.TracedSteps(
            0.52, (Shares(0.9, 0.04, 0.06),) * 2, (16, 2), (16, 2), times[4 if name == "interleaved" else 2]
        )
        for name in ("naive", "interleaved", "zb-h1", "1f1b")
    }
    given = ("mlp", "16 layers of width 512, 256 samples in 8 micro-batches", 8, timings, traced, {})
    return pipeline.Measurements(2, 2, 2, "shm", "cpu", *given, **changes)


@pytest.mark.parametrize("width", [60, 70, 80, 100, 140])
def test_the_table_of_pipelines_fits(width):
    report = pipeline_report.report_on(made_up_pipelines())
    console = Console(file=io.StringIO(), width=width)
    console.print(report.table(width))
    console.print(report.legend(width), *report.conclusions(), sep="\n")
    shown = console.file.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    heading = shown.splitlines()[0].split()
    assert ("quartiles" in heading) == (width >= 80) and ("ideal" in heading) == (width >= 100)
    assert "16=16" in shown and "interleaved" in shown and ("590 KB" in shown) == (width >= 70)
    if width >= 80:  # and nothing was broken into lines that are not ours
        below = [*report.legend(width).splitlines(), *report.conclusions()]
        assert len(shown.splitlines()) == 2 + len(report.rows) + len("\n".join(below).splitlines())


def test_without_torch_there_is_nothing_to_compare_with(microparallel, tmp_path):
    flags = ["--quiet", "--no-torch", "--schedules", "dualpipev", "--trace", str(tmp_path / "traces")]
    result = microparallel("bench", "pp", *TINY_PP, *flags)
    events = json.loads((tmp_path / "traces" / "dualpipev.json").read_text())["traceEvents"]
    assert any(event["name"].startswith("F0.0") for event in events)
    assert result.returncode == 0, result.stderr
    assert "torch's" not in result.stdout and "÷torch" not in result.stdout and "zb-h1" not in result.stdout


def test_pipelines_under_torchrun(torchrun):
    arguments = ["--depth", 2, "--width", 4, "--schedules", "1f1b", "--steps", "1", "--json", "--quiet"]
    result = torchrun(2, "microparallel", "bench", "pp", *arguments)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["ranks"] == 2


def test_a_wrong_gradient_is_a_failure_that_names_schedule_and_parameter():
    wrong = Wrong(
        "zbv", "computed something wrong: the gradient of layers.3.bias is 1 of its size from that of a single process"
    )
    with pytest.raises(MicroparallelError, match="zbv computed something wrong: the gradient of layers") as error:
        require_right(made_up_pipelines(wrong=wrong), pipeline_report.report_on)
    assert not isinstance(error.value, UsageError)  # exit code 1, not 2


def test_the_help_of_pipelines_has_examples(microparallel):
    result = microparallel("bench", "pp", "--help")
    assert result.returncode == 0 and "Examples" in result.stdout and "dualpipev" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedules", "1f2b"], ["'1f2b'", "did you mean '1f1b'?"]),
        (["--schedules", "1f1b,"], ["--schedules", "missing"]),
        (["--schedules", "gpipe", "1f1b"], ["write commas between them: --schedules gpipe,1f1b"]),
        (["--schedules", "gpipe,", "1f1b", "--steps", "3"], ["write commas between them: --schedules gpipe,1f1b"]),
        (["--schedules", "gpipe 1f1b"], ["write commas between the names: gpipe,1f1b"]),
        (["--model", "mpl"], ["--model mpl", "mlp"]),
        (["--model", "gpt", "--width", "33"], ["--width 33", "try 64"]),
        (["--depth", "3"], ["--depth 3", "4 stages", "3 layers", "try --depth 4"]),
        (["--depth", "1", "--schedules", "1f1b"], ["--depth 1", "2 stages", "try --depth 2"]),
        (["--microbatches", "0"], ["--microbatches 0", "at least 1"]),
        (["--microbatches", "300"], ["--microbatches 300", "256", "try --batch 300"]),
        (["--batch", "0"], ["--batch 0", "try 256"]),
        (["--width", "0"], ["--width 0", "try 512"]),
        (["--seconds", "0"], ["--seconds 0", "above 0"]),
        (["--steps", "0"], ["--steps 0", "at least 1"]),
        (["--ranks", "0"], ["--ranks 0", "at least 1"]),
        (["--ranks", "100000"], ["--ranks 100000", "core"]),
        (["--transport", "pigeon"], ["pigeon", "gloo"]),
        (["--schedule", "1f1b"], ["--schedule", "--schedules"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_wrong_calls_of_pipelines(capsys, monkeypatch, arguments, words):
    line = refused(capsys, monkeypatch, *arguments, bench="pp")
    assert all(word in line for word in words), line
