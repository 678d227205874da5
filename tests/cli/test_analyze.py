"""`microparallel analyze` and `bench predict`, from their flags to what they print."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from tests.pairwise import every
from tests.spans import recorded, span

from microparallel.analyze import table as analyze_table
from microparallel.analyze.step_timing import Phases, median_of, time_steps
from microparallel.bench.settings import COMPRESSED
from microparallel.cli import analyze
from microparallel.program import Bucket
from microparallel.schedules import data_parallel_step
from microparallel.simulator import Costs, simulate

SMALL = ("--dim", "8", "--depth", "2", "--batch", "8", "--steps", "3", "--device", "cpu", "--transport", "gloo")


def two_ranks(straggler=1.0):
    """Two steps of two ranks, of which the second may be slower."""
    events = []
    for number in range(2):
        start = 10.0 * number
        for rank, work in enumerate((2.0, 2.0 * straggler)):
            events += [
                span(rank, "forward", "forward of MLP", start, start + work, number),
                span(rank, "backward", "backward", start + work, start + 2 * work, number),
                span(rank, "optimizer", "SGD", start + 9, start + 10, number),
            ]
            waited = start + 2 * work
            ended = start + 4.0 * max(1, straggler) + 1
            meeting = {"waited": waited, "bytes": 1000, "group": (0, 1), "number": number}
            events.append(span(rank, "collective", "all_reduce", waited, ended, number, **meeting))
    return recorded(2, events, about={"model": "mlp", "batch": 64})


def test_parts_estimate_scaling_and_verdict_of_a_run_of_its_own(microparallel, tmp_path):
    result = microparallel("analyze", *SMALL, "--ranks", 2, "--scaling", "both", "--barriers", "--plot", "scaling.svg")
    assert result.returncode == 0, result.stderr
    words = ("a step", "waiting", "hidden", "overhead", "barriers", "estimate", "halving-doubling")
    for word in (*words, "strong scaling", "weak scaling", "speed-up", "efficiency", "bottleneck", "simulated"):
        assert word in result.stdout, word
    assert "measuring" in result.stderr  # progress, as lines where there is no terminal
    assert (tmp_path / "scaling.svg").read_text().startswith("<svg")


def test_the_shares_add_up_and_are_said_once(microparallel, tmp_path):
    """What is measured is a share of the step, and what is simulated says so: two different numbers for waiting."""
    straggling = two_ranks(straggler=2.0)
    straggling.save(tmp_path / "run")
    result = microparallel("analyze", "run")
    [row] = [line for line in result.stdout.splitlines() if line.startswith("mean ")]
    shares = [float(word.rstrip("%")) for word in row.split()[1:]]
    assert len(shares) == 6 and sum(shares) == pytest.approx(100)
    timing = median_of(time_steps(straggling, 64)[1:])
    assert shares[3] == pytest.approx(100 * timing.waiting / timing.total, abs=0.1)
    words = " ".join(result.stdout.split())
    assert f"{shares[2]:.1f}% of a rank's step is exposed communication and {shares[3]:.1f}% waiting" in words
    assert "simulated with rank 1 as fast as the others, the step is" in words
    assert "each simulated by itself, in samples a second: " in words


def test_json_has_every_number_and_the_parts_add_up(microparallel):
    result = microparallel("analyze", *SMALL, "--ranks", 2, "--scaling", "weak", "--json", "--quiet")
    assert result.returncode == 0 and not result.stderr
    found = json.loads(result.stdout)
    assert found["transport"] == "gloo" and len(found["step"]["every"]) == 3
    for rank in found["step"]["ranks"]:
        parts = sum(rank[part] for part in ("forward", "backward", "optimizer", "communicating", "waiting", "other"))
        assert parts == pytest.approx(found["step"]["seconds"], rel=0.02)
    [weak] = found["scaling"]
    assert [(point["ranks"], point["batch"]) for point in weak["points"]] == [(1, 4), (2, 8)]
    assert found["bottleneck"]["kind"] in ("compute", "communication", "memory", "straggler", "other")
    assert {one["world_size"] for one in found["estimates"]} == {2, 8, 64} or found["estimates"] == []
    names = [change["name"] for change in found["bottleneck"]["changes"]]
    assert not any(name.startswith("compress") for name in names)  # tensors of eight numbers are left alone


def test_what_compression_would_give_is_simulated(microparallel):
    flags = ("--dim", 64, "--depth", 3, "--batch", 8, "--steps", 3, "--scaling", "none", "--device", "cpu")
    result = microparallel("analyze", *flags, "--ranks", 2, "--json", "--quiet")
    assert result.returncode == 0, result.stderr
    names = [change["name"] for change in json.loads(result.stdout)["bottleneck"]["changes"]]
    assert [name for name in names if name.startswith("compress")] == [f"compress {method}" for method in COMPRESSED]


def test_a_step_that_is_compressed_is_not_advised_to_be(microparallel):
    flags = ("--dim", 64, "--depth", 3, "--batch", 8, "--steps", 3, "--device", "cpu", "--compress", "sign")
    result = microparallel("analyze", *flags, "--ranks", 2, "--json", "--quiet")  # its scaling has one rank, too
    assert result.returncode == 0, result.stderr
    assert not any(
        change["name"].startswith("compress") for change in json.loads(result.stdout)["bottleneck"]["changes"]
    )


@pytest.mark.parametrize("strategy", every(3, ["torch-ddp", "naive", "hooks"]))
def test_every_strategy_can_be_analysed(microparallel, strategy):
    result = microparallel("analyze", *SMALL, "--ranks", 2, "--strategy", strategy, "--scaling", "none", "--quiet")
    assert result.returncode == 0, result.stderr
    assert strategy in result.stdout and "scaling" not in result.stdout


def test_a_pipeline_can_be_analysed(microparallel):
    flags = ("--pp", 2, "--schedule", "gpipe", "--microbatches", 4, "--scaling", "strong", "--quiet")
    result = microparallel("analyze", *SMALL, *flags)
    assert result.returncode == 0, result.stderr
    assert "gpipe on --dp 1 --pp 2" in result.stdout and "bubble" in result.stdout


def test_one_rank_alone(microparallel):
    result = microparallel("analyze", *SMALL, "--strategy", "single", "--quiet")
    assert result.returncode == 0, result.stderr
    assert "estimate" not in result.stdout and "bottleneck" in result.stdout


def test_a_recorded_run_is_read_from_its_folder_or_file(microparallel, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "trace.json").write_text(two_ranks().to_json())
    for place in ("run", "run/trace.json"):
        result = microparallel("analyze", place)
        assert result.returncode == 0, result.stderr
        assert "batch 64" in result.stdout and "10.0 s" in result.stdout and "6 samples/s" in result.stdout
    found = json.loads(microparallel("analyze", "run", "--json").stdout)
    assert [rank["communicating"] for rank in found["step"]["ranks"]] == [1, 1]
    assert found["scaling"] == found["estimates"] == []


@pytest.mark.parametrize("width", [76, 80, 120])
def test_no_line_is_wider_than_the_terminal(monkeypatch, tmp_path, width):
    (tmp_path / "trace.json").write_text(two_ranks(straggler=2.0).to_json())
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, highlight=False)
    monkeypatch.setattr(analyze_table, "console_for_results", lambda: console)
    analysis = analyze._recorded(tmp_path)
    barriers = replace(analysis.timing, phases=Phases(0.0123, 0.0123, 0.0123), with_barriers=analysis.timing)
    analyze_table.show(replace(analysis, timing=barriers))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    first = next(number for number, line in enumerate(lines) if line.startswith("try "))
    if width < 100:
        assert lines[first + 1].startswith(" " * 12)  # a sentence goes on where it began


@pytest.mark.parametrize("slow", [True, False])
def test_compression_is_advised_over_a_slow_link_and_not_over_a_fast_one(microparallel, tmp_path, slow):
    latency, seconds_per_byte = (1e-3, 8e-8) if slow else (1e-6, 1e-10)
    costs = Costs(
        forward=0.05,
        latency=latency,
        seconds_per_byte=seconds_per_byte,
        bytes_per_value=lambda value: 4e6 if isinstance(value, Bucket) else 8,
    )
    (tmp_path / "trace.json").write_text(simulate(data_parallel_step(1, 2, loss=True), costs).to_json())
    result = microparallel("analyze", "trace.json")
    assert result.returncode == 0, result.stderr
    assert ("compress gradients with" in result.stdout) == slow
    assert "compress topk:0.01 " in " ".join(result.stdout.split())  # what it would give is shown in any case
    verdict = json.loads(microparallel("analyze", "trace.json", "--json").stdout)["bottleneck"]
    assert (verdict["compression"] is not None) == slow


def test_the_straggler_of_a_recorded_run_is_named(microparallel, tmp_path):
    (tmp_path / "trace.json").write_text(two_ranks(straggler=2.0).to_json())
    found = json.loads(microparallel("analyze", "trace.json", "--json").stdout)
    quick, slow = found["step"]["ranks"]
    assert (quick["waiting"], quick["communicating"]) == (4, 1) and slow["waiting"] == 0
    assert found["bottleneck"]["kind"] == "straggler"
    assert "rank 1" in found["bottleneck"]["advice"]["advice"]


def test_a_real_straggler_is_found(microparallel):
    flags = ("--dim", 64, "--depth", 4, "--batch", 64, "--steps", 3, "--device", "cpu", "--slow-rank", "1=60x")
    result = microparallel("analyze", *flags, "--scaling", "strong", "--json", "--quiet")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    quick, slow = found["step"]["ranks"]
    assert quick["waiting"] > quick["communicating"] and quick["waiting"] > slow["waiting"]
    assert found["bottleneck"]["kind"] == "straggler"
    assert any("rank 1" in reason for reason in found["bottleneck"]["reasons"])
    assert len(found["scaling"][0]["points"]) == 2


def test_what_train_recorded_can_be_analysed(microparallel):
    flags = ("--ranks", 2, "--steps", 6, "--dim", 8, "--depth", 2, "--batch", 8, "--device", "cpu")
    assert microparallel("train", *flags, "--trace", "--out", "mine", "--quiet").returncode == 0
    result = microparallel("analyze", "mine")
    assert result.returncode == 0, result.stderr
    assert "bottleneck" in result.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["nowhere"], "nowhere is not there"),
        (["."], "has no trace.json"),
        (["broken.json"], "broken.json is broken: "),
        (["empty.json"], "holds no steps"),
        (["full.json", "--ranks", "4"], "--ranks"),
        (["full.json", "--barriers"], "--barriers"),
        (["--scaling", "strng"], "did you mean 'strong'?"),
        (["--steps", "0"], "--steps 0"),
        (["--model", "mlpp"], "did you mean 'mlp'?"),
        (["--ranks", "4", "--batch", "2"], "--batch 2"),
        (["--pp", "2", "--barriers"], "--barriers"),
        (["--plot", "picture.gif"], ".svg or .png"),
        (["--plot", "nowhere/picture.svg"], "no folder"),
        (["--pp", "4", "--depth", "2"], "layers"),
    ],
)
def test_a_wrong_call_ends_with_2_and_one_line(microparallel, tmp_path, flags, words):
    (tmp_path / "broken.json").write_text('{"spans": 3')
    (tmp_path / "empty.json").write_text(recorded(2, []).to_json())
    (tmp_path / "full.json").write_text(two_ranks().to_json())
    result = microparallel("analyze", *flags)
    assert result.returncode == 2
    assert words in result.stderr and result.stderr.startswith("error: ")


def test_predictions_stand_beside_what_was_measured(microparallel):
    flags = ("--width", 8, "--depth", 4, "--batch", 8, "--microbatches", 2, "--steps", 1, "--device", "cpu")
    result = microparallel("bench", "predict", *flags)
    assert result.returncode == 0, result.stderr
    for word in ("predicted", "measured", "error", "naive", "ddp", "gpipe", "1f1b", "typically off by"):
        assert word in result.stdout, word
    found = json.loads(microparallel("bench", "predict", *flags, "--methods", "ddp,1f1b", "--json", "--quiet").stdout)
    assert [row["method"] for row in found["results"]] == ["ddp", "1f1b"]
    assert all(row["predicted_seconds"] > 0 and row["measured_seconds"] > 0 for row in found["results"])
    assert len(found["calibration"]["work"]) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--methods", "ddpp"], "did you mean 'ddp'?"),
        (["--ranks", "1"], "--ranks 1"),
        (["--bucket-cap-mb", "0"], "--bucket-cap-mb 0"),
        (["--microbatches", "0"], "--microbatches 0"),
        (["--batch", "1"], "--batch"),
        (["--model", "cnn"], "--model cnn"),
        (["--seconds", "-1"], "--seconds"),
    ],
)
def test_wrong_calls_of_predict_end_with_2(microparallel, flags, words):
    result = microparallel("bench", "predict", *flags)
    assert result.returncode == 2
    assert words in result.stderr


def test_help_has_examples_and_does_not_import_torch():
    program = (
        "import sys\n"
        "from microparallel.cli import main\n"
        "for verb in (['analyze'], ['bench', 'predict']):\n"
        "    sys.argv = ['microparallel', *verb, '--help']\n"
        "    try: main()\n"
        "    except SystemExit as ended: print(verb, 'ended with', ended.code, 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "['analyze'] ended with 0 False" in result.stdout
    assert "['bench', 'predict'] ended with 0 False" in result.stdout
    assert result.stdout.count("Examples") == 2
