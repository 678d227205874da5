"""What does it cost to record a run, and what to have been able to?

    python benchmarks/recording.py

on     the same step with and without a recorder, in turns of a few steps: either comes first as often, and the first
       step of a turn is not counted (Python has to get used to what was put in its way)
off    two pairs of ranks take turns, a few steps each. Neither has recorded anything at first; then one of them records
       some steps, and stops. If that had left anything behind, it would be slower beside the other than before.
apart  each thing that is recorded, alone, on one rank; and what it costs to look whether there are observers
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
import typer

import microparallel as mp
from microparallel.comms.record import Recorder

_WARM_UP = 10  # steps
_IN_A_TURN = 3


def step_of(comms: mp.Comms, width: int, depth: int, batch: int) -> Callable[[], None]:
    """A training step of an MLP."""
    torch.manual_seed(0)
    model = mp.DataParallel(mp.models.FullMLP(width, depth), comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(batch, width), torch.randint(2, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()

    return step


Times = tuple[float, float]  # by the clock, and of the processor alone


def seconds(comms: mp.Comms, step: Callable[[], None]) -> Times:
    """How long a step takes, all ranks beginning together."""
    comms.barrier()
    start, busy = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - start, time.process_time() - busy


def warm_up(step: Callable[[], None]) -> None:
    """Buckets are arranged anew after the first step, and memory is taken."""
    for _ in range(_WARM_UP):
        step()


def on(comms: mp.Comms, width: int, depth: int, batch: int, pairs: int) -> list[tuple[Times, Times]]:
    """Seconds of a step without a recorder, and with it."""
    step = step_of(comms, width, depth, batch)
    warm_up(step)
    recorder = Recorder(comms)
    found = []
    for number in range(pairs):
        pair = {}
        for recording in (number % 2 == 0, number % 2 == 1):
            if recording:
                recorder.start()
            step()
            taken = zip(*(seconds(comms, step) for _ in range(_IN_A_TURN)), strict=True)
            pair[recording] = tuple(map(statistics.median, taken))
            if recording:
                recorder.stop()
        found.append((pair[False], pair[True]))
    return found


def off(comms: mp.Comms, width: int, depth: int, batch: int, turns: int, steps: int) -> list[list[Times]]:
    """Seconds of this rank's turns, before one of the pairs has recorded something, and after that."""
    groups = [comms.group([0, 1]), comms.group([2, 3])]
    which = comms.rank // 2
    mine = groups[which]
    step = step_of(mine, width, depth, batch)
    warm_up(step)
    found: list[list[Times]] = []
    for recorded in (False, True):
        if recorded and which == 1:
            with mp.record(mine):
                warm_up(step)
        times: list[Any] = []
        for number in range(2 * turns):
            comms.barrier()  # the other pair sleeps in it
            if (number + number // 2) % 2 == which:  # 0 1 1 0: either is first as often
                step()  # its weights have left the caches meanwhile
                taken = zip(*(seconds(mine, step) for _ in range(steps)), strict=True)
                times.append(tuple(map(statistics.median, taken)))
        found.append(times)
    return found


def apart(comms: mp.Comms, rounds: int = 60, calls: int = 200) -> dict[str, tuple[float, float]]:
    """For each thing that is recorded, its seconds without, and with: the least of many rounds."""
    layer, inputs, one = torch.nn.Linear(4, 4), torch.ones(1, 4), torch.ones(1)
    loss = layer(inputs).sum()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    things: dict[str, Callable[[], Any]] = {
        "forward": lambda: layer(inputs),
        "backward": lambda: loss.backward(retain_graph=True),
        "optimizer": optimizer.step,
        "all_reduce": lambda: comms.all_reduce(one),
    }
    loss.backward(retain_graph=True)
    found = {}
    for name, thing in things.items():
        recorder = Recorder(comms)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            times[0].append(timeit.timeit(thing, number=calls) / calls)
            recorder.start()
            times[1].append(timeit.timeit(thing, number=calls) / calls)
            recorder.stop()
        found[name] = (min(times[0]), min(times[1]))
    return found


def looking(comms: mp.Comms, calls: int = 100_000) -> tuple[float, float]:
    """What a call spends on asking whether there are observers; and the whole call, of one element, on one rank."""
    names = {"comms": comms, "heard": None}
    asked = "observers = comms.observers; (1 if observers else None); heard is not None; heard is not None"
    empty = min(timeit.repeat("pass", number=calls, repeat=9))
    asking = min(timeit.repeat(asked, number=calls, repeat=9, globals=names))
    one = torch.ones(1)
    whole = min(timeit.repeat(lambda: comms.all_reduce(one), number=calls // 50, repeat=9)) * 50
    return (asking - empty) / calls, whole / calls


def line(name: str, one: list[Times], other: list[Times]) -> str:
    """Two medians, and the median of their ratios, pair by pair, with its error and quartiles: by each clock."""
    medians = [1e3 * statistics.median(clock for clock, _ in times) for times in (one, other)]
    text = f"{name:<22}{medians[0]:>8.3f} ms{medians[1]:>9.3f} ms"
    for clock in range(2):
        ratios = [later[clock] / former[clock] for former, later in zip(one, other, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        error = 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5  # of a median, as if the ratios were normal
        text += f"   {middle:.3f} ±{error:.3f} ({low:.3f}–{high:.3f})"
    return text


def heading(name: str, one: str, other: str) -> str:
    """What stands above such lines."""
    return f"\n{name:<22}{one:>11}{other:>12}   {'ratio, ± error (quartiles)':<29}{'of processor time'}"


def main(depth: int = 16, batch: int = 32, pairs: int = 400, turns: int = 150, steps: int = 5) -> None:
    """Measure with small and large layers."""
    print(f"a DataParallel step of {depth} layers, {batch} samples a rank, 2 ranks; torch {torch.__version__}")
    print(heading("on", "without", "recorded"))
    for width, count in ((128, 2 * pairs), (512, pairs)):
        found = mp.launch(on, 2, width, depth, batch, count, device="cpu")[0]
        print(line(f"width {width}", *map(list, zip(*found, strict=True))))
    print(heading("off", "never", "other pair"))
    for width in (128, 512):
        never, _, other, _ = mp.launch(off, 4, width, depth, batch, turns, steps, device="cpu")
        print(line(f"width {width}, before", never[0], other[0]))
        print(line(f"width {width}, afterwards", never[1], other[1]))
    print(f"\n{'apart':<22}{'without':>11}{'recorded':>12}{'costs':>12}")
    for name, (without, recorded) in mp.launch(apart, 1, device="cpu")[0].items():
        print(f"{name:<22}{1e6 * without:>8.1f} µs{1e6 * recorded:>9.1f} µs{1e6 * (recorded - without):>9.1f} µs")
    asking, whole = mp.launch(looking, 1, device="cpu")[0]
    print(f"asking whether there are observers: {1e9 * asking:.0f} ns of an all_reduce of {1e6 * whole:.1f} µs")


if __name__ == "__main__":
    typer.run(main)
