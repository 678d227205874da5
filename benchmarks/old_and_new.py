"""Is this commit slower than another? All-reduces and steps of two source trees, in turns.

    git worktree add /tmp/old COMMIT
    python benchmarks/old_and_new.py --old /tmp/old/src --rounds 10 --cores 2,3,4,5

Every round starts ranks on the old tree, on this one and on the old one again, each rank on a core of its own, and
takes the median of each piece of work. Printed are the medians over the rounds of new ÷ old, with half the distance
between the quartiles, and of old ÷ old beside it: what a ratio can be off by on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SIZES = {"4 KiB": 2**10, "256 KiB": 2**16, "4 MiB": 2**20, "32 MiB": 2**23}  # float32 numbers
HERE = Path(__file__).resolve()


def measure(ranks: int) -> dict[str, float]:
    """Do all pieces of work on this rank; seconds, the median of each."""
    import torch

    import microparallel as mp

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with mp.connect(transport="shm") as comms:
        for name, length in SIZES.items():
            tensor = comms.empty(length)
            tensor.fill_(1.0)
            found[f"all-reduce, {name}"] = _median(lambda tensor=tensor: comms.all_reduce(tensor, op="mean"), comms)
        loose = torch.ones(2**20)
        found["all-reduce, 4 MiB, copied"] = _median(lambda: comms.all_reduce(loose, op="mean"), comms)
        found["broadcast, 256 KiB"] = _median(lambda: comms.broadcast(loose[: 2**16]), comms)

        def layers() -> torch.nn.Sequential:
            torch.manual_seed(0)
            return torch.nn.Sequential(
                *(layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU()))
            )

        inputs, targets = torch.randn(64, 256), torch.randn(64, 256)
        loss_fn = torch.nn.functional.mse_loss
        for overlap in (True, False):
            model = mp.DataParallel(layers(), comms, bucket_mb=0.5, overlap=overlap)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

            def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                optimizer.step()

            found[f"data-parallel step, {'overlap' if overlap else 'one after another'}"] = _median(step, comms)
        for schedule in ("1f1b", "zb-h1"):
            pipe = mp.Pipeline(layers(), comms, schedule, microbatches=8, loss_fn=loss_fn)
            found[f"pipeline step, {schedule}"] = _median(lambda pipe=pipe: pipe.step(inputs, targets), comms)
    del ranks
    return found


def _median(work: Callable[[], object], comms: object, seconds: float = 0.4) -> float:
    """The median time of a piece of work that is done for so long; all ranks do it equally often."""
    import torch

    begun = time.perf_counter()
    for _ in range(3):
        work()
    once = torch.tensor((time.perf_counter() - begun) / 3)
    count = max(5, min(2000, int(seconds / float(comms.all_reduce(once, op="max")))))  # type: ignore[attr-defined]
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def run(source: str, ranks: int, cores: str) -> dict[str, float]:
    """Start the ranks on one source tree; rank 0's medians."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "PYTHONPATH": source}
    pins = [["taskset", "-c", core] for core in cores.split(",")] if cores else [[]] * ranks
    processes = [
        subprocess.Popen(
            [*pins[rank], sys.executable, str(HERE), "--rank"],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"the ranks on {source} failed")
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> None:
    """Compare, or be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="the other tree's src folder")
    parser.add_argument("--new", default=str(HERE.parent.parent / "src"), help="this tree's src folder")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cores", default="", help="pin each rank to one of these, such as 2,3,4,5")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(measure(int(os.environ["WORLD_SIZE"]))))
        return
    if not options.old:
        parser.error("--old is needed: the src folder of the commit to compare with")
    rounds = []
    for number in range(options.rounds):
        order = [("old", options.old), ("new", options.new), ("again", options.old)]
        order = order if number % 2 else order[::-1]  # neither always comes first
        rounds.append({name: run(source, options.ranks, options.cores) for name, source in order})
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print(f"{options.ranks} ranks, {options.rounds} rounds; new ÷ old, and old ÷ old, ± half the quartiles' distance")
    for work in rounds[0]["old"]:
        ratios = [one["new"][work] / statistics.fmean([one["old"][work], one["again"][work]]) for one in rounds]
        alike = [one["again"][work] / one["old"][work] for one in rounds]
        usual = statistics.median(one["old"][work] for one in rounds)
        print(f"{work:<40}{usual * 1e6:>10.1f} µs   {_ratio(ratios)}   A/A {_ratio(alike)}")


def _ratio(ratios: list[float]) -> str:
    first, _, third = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return f"{statistics.median(ratios):.3f} ± {(third - first) / 2:.3f}"


if __name__ == "__main__":
    main()
