"""What does it cost to record a run? The same step with and without a recorder, in turns.

python benchmarks/recording.py
"""

from __future__ import annotations

import statistics
import time

import torch
import typer

import microparallel as mp
from microparallel.comms.record import Recorder


def measure(comms: mp.Comms, width: int, depth: int, batch: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, without and with."""
    torch.manual_seed(0)
    model = mp.DataParallel(mp.models.FullMLP(width, depth), comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(batch, width), torch.randint(2, (batch,))
    recorder = Recorder(comms)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * steps + 6):
        recording = number % 2 == 1
        comms.barrier()
        if recording:
            recorder.start()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()
        seconds = time.perf_counter() - start
        if recording:
            recorder.stop()
        if number >= 6:  # the first ones warm up
            times[recording].append(seconds)
    return times


def main(ranks: int = 2, depth: int = 16, batch: int = 32, steps: int = 150) -> None:
    """Measure small and large layers."""
    print(f"a DataParallel step of {depth} layers, {batch} samples a rank, {ranks} ranks; torch {torch.__version__}\n")
    print(f"{'width':>6}{'without':>12}{'recorded':>12}{'ratio':>8}{'of the quartiles':>20}")
    for width in (128, 512):
        without, recorded = mp.launch(measure, ranks, width, depth, batch, steps)[0]
        medians = statistics.median(without), statistics.median(recorded)
        low, high = (statistics.quantiles(times, n=4) for times in (without, recorded))
        print(
            f"{width:>6}{medians[0] * 1e3:>9.2f} ms{medians[1] * 1e3:>9.2f} ms{medians[1] / medians[0]:>8.3f}"
            f"{high[0] / low[0]:>13.3f} {high[2] / low[2]:.3f}"
        )


if __name__ == "__main__":
    typer.run(main)
