"""A wrong call gets one line that names the value, the place and the fix, exit code 2, and no traceback."""

import socket
import subprocess
import sys

import pytest
import torch


def refused(result):
    """The one line a wrong call is answered with."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--rnaks", "4"], ["--rnaks", "--ranks"]),
        (["trian"], ["trian", "train"]),
        (["train", "--ranks", "four"], ["four", "--ranks"]),
        (["train", "--ranks", "0"], ["--ranks 0", "at least 1"]),
        (["train", "--ranks", "-2"], ["--ranks -2", "at least 1"]),
        (["train", "--ranks", "100000"], ["--ranks 100000", "core"]),
        (["train", "--batch", "2", "--ranks", "4"], ["--batch 2", "--ranks 4", "try --batch 4"]),
        (["train", "--optimizer", "adma"], ["adma", "did you mean 'adam'"]),
        (["train", "--model", "mpl"], ["mpl", "mlp"]),
        (["train", "--strategy", "nave"], ["nave", "naive"]),
        (["train", "--lr", "-1"], ["--lr -1", "above 0"]),
        (["train", "--steps", "3", "--epochs", "2"], ["--steps 3", "--epochs 2"]),
        (["train", "--config", "absent.toml"], ["absent.toml", "no such file"]),
        (["train", "--config", "bad.toml"], ["'bacth'", "bad.toml", "batch"]),
        (["train", "--data", "absent.txt", "--model", "gpt"], ["absent.txt", "does not exist"]),
        (["train", "--data", "binary.bin", "--model", "gpt"], ["binary.bin", "not UTF-8"]),
        (["train", "--data", "digits", "--model", "gpt"], ["--data digits", "--data text"]),
        (["train", "--data", "text"], ["--model mlp", "--model gpt"]),
        (["train", "--out", "/proc/nowhere"], ["/proc/nowhere"]),
        (["train", "--out", "bad.toml"], ["bad.toml", "not a folder"]),
        (["train", "--out", "full"], ["full", "empty folder"]),
        (["train", "--resume", "full"], ["full", "not the folder of a run"]),
        (["train", "--model", "own:make_modell", "--data", "digits"], ["make_modell", "make_model"]),
        (["train", "--model", "absent_module:make", "--data", "digits"], ["absent_module"]),
        (["train", "--data", "own:raises"], ["own:raises", "ValueError: no data today"]),
        (["train", "--device", "cuda", "--transport", "nccl"], ["GPU"]),
        (["train", "--mps", "onn"], ["--mps onn", "did you mean 'on'"]),
        (["train", "--ranks", "2", "--quiet", "--mps", "on"], ["mps 'on'", "torch sees no GPU", "'auto'"]),
        (["bench", "allreduce", "--quiet", "--mps", "on"], ["mps 'on'", "torch sees no GPU", "'auto'"]),
        (["analyze", "--quiet", "--mps", "on"], ["mps 'on'", "torch sees no GPU", "'auto'"]),
        (["train", "--ranks", "1", "--quiet", "--mps", "on"], ["--mps on", "no MPS daemon runs here", "leave it out"]),
        (["compare", "--in-process", "--mps", "off"], ["--mps off", "--in-process", "leave it out"]),
        (["train", "--data", "dgits"], ["dgits", "did you mean 'digits'"]),
        (["train", "--data", "own:ragged", "--model", "own:make_model", "--quiet"], ["samples [", "put together"]),
        (
            ["train", "--data", "own:bad7", "--model", "own:make_model", "--quiet"],
            ["sample 7", "ValueError: corrupt image"],
        ),
        (["train", "--data", "own:real", "--model", "own:one", "--quiet"], ["(32,)", "(32, 1)", "unsqueeze"]),
        (["train", "--loss", "mse", "--quiet"], ["(64,)", "(64, 10)"]),
        (
            ["train", "--ranks", "2", "--strategy", "torch-ddp", "--slow-link", "0-1=5ms"],
            ["--slow-link 0-1=5ms", "--strategy torch-ddp", "try --strategy ddp"],
        ),
        (["train", "--ranks", "3.5"], ["--ranks 3.5: a whole number is needed; see --help"]),
        (["train", "--lr", "high"], ["--lr high: a number is needed"]),
        (["draw", "1f1b", "--width", "30"], ["--width 30: must be at least 40; see --help"]),
        (["learn", "hint", "--step", "7"], ["--step 7: must be at most 3"]),
        (["why", "--after", "-1"], ["--after -1: must be at least 0"]),
        (["compare", "--ranks", "1"], ["--ranks 1", "--ranks 2"]),
        (["draw", "interleaved", "--chunks", "2"], ["--chunks is --stages-per-rank now; see --help"]),
        (["doctor", "--ranks", "3"], ["--ranks 3", "--selftest"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in ("train", "compare", "trian", "doctor") else "",
)
def test_wrong_calls(tmp_path, microparallel, arguments, words):
    if {"nccl", "on"} & set(arguments) and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    (tmp_path / "bad.toml").write_text("bacth = 3\n")
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def make_model(): return torch.nn.Linear(64, 10)\n"
        "def one(): return torch.nn.Linear(64, 1)\n"
        "def raises(): raise ValueError('no data today')\n"
        "def ragged(): return [(torch.zeros(size), 0) for size in range(1, 40)]\n"
        "def real(): return [(torch.zeros(64), 0.5)] * 40\n"
        "class Bad(list):\n"
        "    def __getitem__(self, index):\n"
        "        if index == 7: raise ValueError('corrupt image')\n"
        "        return torch.zeros(64), 0\n"
        "def bad7(): return Bad(range(9))\n"
    )
    line = refused(microparallel(*arguments))
    for word in words:
        assert word in line
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "full" / "thesis.txt").read_text() == "precious"


def test_a_wrong_call_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-m", "microparallel", "train", "--rnaks", "4"]
    line = refused(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False))
    assert "--rnaks" in line and "--ranks" in line


def test_a_port_in_use(microparallel):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        world = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        line = refused(microparallel("train", **world))
    assert f"port {port}" in line and "MASTER_PORT" in line


def test_an_out_folder_that_holds_a_run(microparallel):
    settings = ["train", "--steps", "1", "--dim", "8", "--depth", "2", "--out", "run", "--quiet"]
    assert microparallel(*settings).returncode == 0
    line = refused(microparallel(*settings))
    assert "--out run holds a run already" in line and "--resume" in line
    line = refused(microparallel("train", "--resume", "run", "--batch", "10"))
    assert "--batch 10 would change a run" in line


def test_a_failing_rank_is_a_failure_of_the_work_with_its_traceback(tmp_path, microparallel):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Broken(torch.nn.Linear):\n"
        "    def forward(self, inputs): raise RuntimeError('deliberate')\n"
        "def make_model(): return Broken(64, 10)\n"
    )
    result = microparallel("train", "--ranks", "2", "--model", "own:make_model", "--data", "digits")
    assert result.returncode == 1
    assert "deliberate" in result.stderr and "own.py" in result.stderr
