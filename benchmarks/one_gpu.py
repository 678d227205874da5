"""What the lesson "One GPU is enough" shows: several ranks on one GPU, with and without MPS.

    python benchmarks/one_gpu.py > benchmarks/results/one-gpu.txt      on a machine with an NVIDIA GPU; some minutes

Each part has a heading, by which the lesson includes it:

    time slices          ranks that compute, each by itself: how much work is done in a second, by 1, 2 and 4 of them
    by hand              examples/one_gpu.py
    all-reduce           gloo, NCCL and ours, 2 and 4 ranks
    a training step      a GPT of 85 million parameters in bfloat16, 2 ranks
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import microparallel as mp
from microparallel.bench.all_reduce import bench_all_reduce
from microparallel.bench.all_reduce_report import report_on as report_on_all_reduce
from microparallel.bench.data_parallel import bench_data_parallel
from microparallel.bench.data_parallel_report import report_on as report_on_data_parallel
from microparallel.bench.settings import AllReduceSettings, DataParallelSettings, with_usual
from microparallel.text import show_seconds, show_size

MODES = {"without MPS": "off", "with MPS": "on"}
SECONDS = 2.0
KERNELS = 100  # in a burst, after which the host waits, as at the end of a step
WIDTH = 256  # of the matrices: too few numbers for a whole GPU


def bursts_a_second(comms: mp.Comms) -> float:
    """How many bursts of small kernels this rank does in a second, beside the others."""
    matrix = torch.randn(WIDTH, WIDTH, device=comms.device) / WIDTH**0.5

    def burst() -> None:
        product = matrix
        for _ in range(KERNELS):
            product = product @ matrix
        torch.cuda.synchronize()

    for _ in range(20):
        burst()
    comms.barrier()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < SECONDS:
        burst()
        count += 1
    return count / (time.perf_counter() - begun)


def heading(text: str) -> None:
    """Print the heading of a part, by which the lesson finds it."""
    print(f"\n── {text} {'─' * (76 - len(text))}")


def time_slices() -> None:
    """What ranks get done that only compute, alone and together."""
    heading("time slices")
    print(f"bursts of {KERNELS} products of {WIDTH} × {WIDTH} matrices, in a second; three runs, their median\n")
    print(f"{'':<14}{'one rank':>12}{'each of 2':>12}{'all 2':>12}{'each of 4':>12}{'all 4':>12}")
    for name, mode in MODES.items():
        cells = []
        for ranks in (1, 2, 4):
            runs = [mp.launch(bursts_a_second, ranks, device="cuda", mps=mode) for _ in range(3)]
            each = statistics.median(statistics.fmean(run) for run in runs)
            cells += [each] if ranks == 1 else [each, ranks * each]
        print(f"{name:<14}" + "".join(f"{cell:>12.0f}" for cell in cells))


def by_hand() -> None:
    """The lab of the lesson."""
    heading("by hand")
    script = Path(__file__).parents[1] / "examples" / "one_gpu.py"
    for ranks in (2, 4):
        print(f"$ python examples/one_gpu.py --ranks {ranks}", flush=True)
        print(subprocess.run([sys.executable, script, "--ranks", str(ranks)], text=True, check=True, stdout=-1).stdout)


def all_reduce() -> None:
    """gloo, NCCL and ours in one run, for 2 and 4 ranks."""
    heading("all-reduce")
    settings = AllReduceSettings(algorithms=(), sizes=(4_000, 25_000_000), repeats=30)
    for ranks in (2, 4):
        for name, mode in MODES.items():
            [measured, *_] = mp.launch(bench_all_reduce, ranks, settings, device="cuda", transport="cuda", mps=mode)
            report = report_on_all_reduce(measured)
            print(f"{ranks} ranks, {name}")
            for row in report.rows:
                if row.seconds is not None:
                    print(f"  {show_size(row.size):>6}  {row.label:<22}{show_seconds(row.seconds):>10}", end="")
                    print(f"  ÷ gloo {row.ratio_to_torch:.3f}")
            print("".join(f"  ! {note}\n" for note in report.notes))


def training_step() -> None:
    """A step of a large GPT: ours beside torch's DDP on gloo."""
    heading("a training step")
    settings = DataParallelSettings(**with_usual(DataParallelSettings, {"device": "cuda", "seconds": 60.0}))
    for name, mode in MODES.items():
        [measured, *_] = mp.launch(bench_data_parallel, 2, settings, device="cuda", transport="cuda", mps=mode)
        report = report_on_data_parallel(measured)
        print(f"2 ranks, {name}")
        for row in report.rows:
            busy = "" if row.use is None or row.use.percent_busy is None else f"  GPU busy {row.use.percent_busy:.0f} %"
            print(f"  {row.label:<24}{show_seconds(row.seconds):>10}  {row.show_quartiles():>12}", end="")
            print(f"  ÷ torch's DDP on gloo {row.ratio_to_torch_ddp:.3f}{busy}")
        print()


def main() -> None:
    """Print all parts."""
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU; run this on a machine with one")
    gpu = torch.cuda.get_device_properties(0)
    print(f"{gpu.name}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print("$ python benchmarks/one_gpu.py > benchmarks/results/one-gpu.txt")
    time_slices()
    by_hand()
    all_reduce()
    training_step()


if __name__ == "__main__":
    main()
