"""Injected links against simulated ones: does a collective over slow links take the time that the simulator says?

    python benchmarks/slow_links.py
    python benchmarks/slow_links.py > benchmarks/results/slow-links-2-cores.txt

Both read one program. The ranks run it message by message over links that are slowed down (`slow_down`); the simulator
walks through it with the same links. Adding and the real transfers, through shared memory, cost nothing there.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
import typer

import microparallel as mp
from microparallel.collectives import GroupKind, program_of
from microparallel.comms.slow_links import slow_down
from microparallel.topology import available_cores

WARM_UP = 1
ELEMENTS = 5040  # of every rank's slice: a tensor has as many for each rank


class Case(NamedTuple):
    """A collective by one of its algorithms."""

    collective: GroupKind
    algorithm: str

    def __str__(self) -> str:
        return f"{self.algorithm} {self.collective}"


# By transport: what "auto" stands for there, so that the collective runs as it does without slow links.
CASES = {
    "gloo": [Case("reduce-scatter", "ring"), Case("all-gather", "ring"), Case("broadcast", "tree")],
    "shm": [
        *(Case("all-reduce", name) for name in ("ring", "direct", "gather-add", "tree", "halving-doubling")),
        *(Case("reduce-scatter", "direct"), Case("all-gather", "direct"), Case("broadcast", "direct")),
        *(Case("reduce", "direct"), Case("gather", "direct")),
    ],
}


def measure(comms: mp.Comms, cases: list[Case], link: mp.Link, rounds: int) -> list[list[float]]:
    """The seconds of each case in each round, from the start of the first rank to the end of the last."""
    slow = slow_down(comms, {frozenset(pair): link for pair in itertools.combinations(range(comms.world_size), 2)})
    pieces = [torch.ones(ELEMENTS) for _ in range(comms.world_size)]
    tensor = torch.cat(pieces)
    calls: dict[GroupKind, Callable[[Case], object]] = {
        "all-reduce": lambda case: slow.all_reduce(tensor, algorithm=case.algorithm),
        "reduce-scatter": lambda _: slow.reduce_scatter(pieces),
        "all-gather": lambda _: slow.all_gather(pieces[0]),
        "broadcast": lambda _: slow.broadcast(tensor),
        "reduce": lambda _: slow.reduce(tensor),
        "gather": lambda _: slow.gather(pieces[0]),
    }
    seconds: list[list[float]] = [[] for _ in cases]
    for number in range(WARM_UP + rounds):
        for case, times in zip(cases, seconds, strict=True):
            comms.barrier()
            begun = time.monotonic()  # the ranks of one machine share this clock
            calls[case.collective](case)
            mine = torch.tensor([-begun, time.monotonic()], dtype=torch.float64)
            first, ended = comms.all_reduce(mine, op="max").tolist()
            if number >= WARM_UP:
                times.append(ended + first)
    slow.close()
    return seconds


def predict(case: Case, ranks: int, link: mp.Link) -> float:
    """What the simulator says that a case takes."""
    root = 0 if case.collective in ("broadcast", "reduce", "gather") else None
    links = dict.fromkeys(itertools.permutations(range(ranks), 2), link)
    costs = mp.Costs(links=links, bytes_per_value=ranks * ELEMENTS * 4)
    return mp.simulate(program_of(case.collective, case.algorithm, ranks, root), costs).makespan


def main(
    milliseconds: Annotated[float, typer.Option(help="The latency of every message.")] = 20.0,
    megabytes: Annotated[float, typer.Option(help="The bandwidth of every link, in MB a second.")] = 0.5,
    rounds: Annotated[int, typer.Option(help="How often each collective is measured.")] = 9,
) -> None:
    """Measure and simulate, and print both."""
    link = mp.Link(milliseconds / 1e3, 1 / (megabytes * 1e6))
    print(
        f"collectives over links of {milliseconds:g} ms and {megabytes:g} MB/s, {ELEMENTS * 4} bytes for each rank, on "
        f"{available_cores()} cores,\ntorch {torch.__version__}, load average {os.getloadavg()[0]:.1f} before; "
        f"median and quickest of {rounds} rounds\n\n"
        f"{'':<34}{'ranks':>6}{'predicted':>12}{'median':>12}{'ratio':>7}{'quickest':>12}{'ratio':>7}"
    )
    for transport, cases in CASES.items():
        for ranks in (2, 4):
            measured = mp.launch(measure, ranks, cases, link, rounds, transport=transport, device="cpu")[0]
            for case, times in zip(cases, measured, strict=True):
                predicted = predict(case, ranks, link)
                row = f"{case!s:<28}{transport:<6}{ranks:>6}{predicted * 1e3:>9.1f} ms"
                for seconds in (statistics.median(times), min(times)):
                    row += f"{seconds * 1e3:>9.1f} ms{predicted / seconds:>7.3f}"
                print(row)
    print("\nratio: predicted over measured. What else runs on the machine makes rounds longer, and never shorter.")


if __name__ == "__main__":
    typer.run(main)
