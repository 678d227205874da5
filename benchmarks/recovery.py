"""How long a run takes to go on after a rank was killed, and how much work it repeats: ours beside torchrun's restart.

    python benchmarks/recovery.py [--kills 5 --steps 3000 --ranks 2 --gap 200]

Both train the default model with the same command line; SIGKILL hits the same rank at the same steps. `--restarts` has
ranks forked from a warm process, which go on from the newest copy of the state in memory. torchrun's agent
(`--max-restarts`) starts new processes, which go on from the newest checkpoint on the disk; the run saves every 100
steps, so that a crash costs it 50 steps on average. Seconds are counted from the kill to the end of the second step of
the new ranks, as metrics.jsonl shows it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from microparallel.train.chaos import MARK, Disturbed, Fault

TRAIN = ["-m", "microparallel", "train", "--save-every", "100", "--quiet"]


def commands(ranks: int, steps: int, kills: int, folder: Path) -> dict[str, list[str]]:
    """The command of each way, by its name."""
    common = [*TRAIN, "--steps", str(steps), "--out"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={kills}"]
    ours = [*common, str(folder / "ours"), "--ranks", str(ranks), "--restarts", str(kills), "--resume", "auto"]
    return {
        "ours": [sys.executable, *ours],
        "torchrun": [sys.executable, *torchrun, *common, str(folder / "torchrun")],
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("kills", 5), ("steps", 3000), ("ranks", 2), ("gap", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    print(f"default model, {given.ranks} ranks, {given.kills} times SIGKILL of a rank, {given.gap} steps apart")
    with tempfile.TemporaryDirectory() as folder:
        ways = commands(given.ranks, given.steps, given.kills, Path(folder))
        for name, command in ways.items():
            faults = [
                Fault("kill-rank", 150 + given.gap * number, number % given.ranks) for number in range(given.kills)
            ]
            environment = os.environ | {MARK: f"{os.getpid()}-{time.monotonic_ns()}"}
            starts = Disturbed(command, Path(folder) / name, faults, environment, lambda _: None).to_the_end()
            seconds = [fault.seconds for fault in faults if fault.seconds is not None]
            lost = [fault.lost for fault in faults if fault.lost is not None]
            print(
                f"{name:>9}  {statistics.median(seconds):5.2f} s ({min(seconds):.2f} to {max(seconds):.2f})   "
                f"steps done again: {statistics.median(lost):.0f} ({min(lost)} to {max(lost)})   "
                f"{len(seconds)} recoveries, {starts} start of the command"
            )


if __name__ == "__main__":
    main()
