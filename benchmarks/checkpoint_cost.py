"""What checkpoints cost: the mean step with one every 20 steps, beside none, and what the writer's process takes.

    python benchmarks/checkpoint_cost.py [--depth 16 --dim 1024 --ranks 2 --steps 20 --rounds 5]

Three ways take turns on the same ranks, so that a slow minute of the machine slows all of them: no checkpoint, one that
is copied into memory and written by a process of its own, one for which the steps wait. `none again` is the first way
once more: how far apart two measurements of the same thing are.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import microparallel as mp
from microparallel.train.build import build
from microparallel.train.config import TrainConfig
from microparallel.train.copies import Copies
from microparallel.train.progress import Display
from microparallel.train.saving import Saving

WAYS = ("none", "copied", "waited", "none again")


def measure(comms: mp.Comms, config: TrainConfig, steps: int, rounds: int, folder: str) -> dict[str, Any]:
    """Seconds a step of each way, by round; on rank 0 also what the writer took."""
    training = build(config.resolved().with_shares(), comms)
    copies = Copies.into_memory(comms, training.contents, slots=1)  # as a run without --restarts
    assert copies is not None
    savings = {
        "copied": Saving(training, config, Path(folder) / "copied", Display(), copies),
        "waited": Saving(training, config, Path(folder) / "waited", Display(), None),
    }
    for _ in range(3):
        training.step()
    savings["copied"].save()  # the first one takes the memory
    savings["copied"].finish()
    before = copies.writer.processor_total
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    held_up: dict[str, list[float]] = {way: [] for way in savings}
    for _ in range(rounds):
        for way in WAYS:
            comms.barrier()
            begun = time.monotonic()
            if way in savings:
                savings[way].save()
                held_up[way].append(time.monotonic() - begun)
            for _ in range(steps):
                training.step()
            copies.writer.wait()  # as the next save would
            comms.barrier()
            seconds[way].append((time.monotonic() - begun) / steps)
    processor = (copies.writer.processor_total - before) / rounds
    size = sum(file.stat().st_size for file in max((Path(folder) / "copied").glob("step-*")).iterdir())
    copies.close()
    training.close()
    return {"seconds": seconds, "held_up": held_up, "processor": processor, "bytes": size}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("depth", 16), ("dim", 1024), ("ranks", 2), ("steps", 20), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    folder = tempfile.mkdtemp()
    config = TrainConfig(
        ranks=given.ranks, depth=given.depth, dim=given.dim, save_every=given.steps, steps=100_000, keep=1
    )
    try:
        found = mp.launch(measure, given.ranks, config, given.steps, given.rounds, folder)[0]
    finally:
        shutil.rmtree(folder)
    print(
        f"mlp {given.depth} x {given.dim}, {given.ranks} ranks, a checkpoint of {found['bytes'] / 1e6:,.0f} MB "
        f"every {given.steps} steps, {given.rounds} rounds"
    )
    for way in WAYS:
        ratios = [one / none for one, none in zip(found["seconds"][way], found["seconds"]["none"], strict=True)]
        held_up = found["held_up"].get(way)
        waits = f"   steps wait {1e3 * statistics.median(held_up):6.0f} ms a save" if held_up else ""
        print(
            f"{way:>11}  {1e3 * statistics.median(found['seconds'][way]):6.1f} ms a step   "
            f"{statistics.median(ratios):.3f} of none ({min(ratios):.3f} to {max(ratios):.3f}){waits}"
        )
    print(f"     writer  {found['processor']:.2f} s of a core for each save")


if __name__ == "__main__":
    main()
