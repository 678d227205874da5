"""All-reduce between two hosts over a slow link: flat, and over two levels; measured, and as the simulator predicts.

    python benchmarks/between_hosts.py --rate 100mbit
    python benchmarks/between_hosts.py --rate 100mbit > benchmarks/results/between-hosts-2-cores.txt

The hosts are network namespaces of this machine (`tests/hosts/bed.py`), with two ranks each; making them takes root,
and Debian's iproute2. The link is measured with messages between two ranks, and what is measured is what the simulator
is told; in memory, messages count as taking no time. A row's time is the median of the rounds, beside their range.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

import microparallel as mp
from microparallel.collectives import program_of, resolve
from microparallel.text import show_seconds, show_size

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "docs" / "tools")]  # the hosts of the tests
SIZES = (4_000, 400_000, 4_000_000, 16_000_000)
ALGORITHMS = ("ring", "hierarchical", "leaders", "auto")


def seconds(call, rounds: int, comms: mp.Comms) -> list[float]:
    """What a call takes, from the start of all ranks to the end of the last."""
    found = []
    for _ in range(rounds + 1):
        comms.barrier()
        begun = time.perf_counter()
        call()
        took = torch.tensor([time.perf_counter() - begun])
        found.append(comms.all_reduce(took, op="max").item())
    return found[1:]


def link_between(comms: mp.Comms, rounds: int) -> mp.Link:
    """Latency and seconds per byte, from how long messages between the first ranks of the hosts take there and back."""
    times = {}
    for size in (8, 2_000_000):
        took = []
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            if comms.rank == 0:
                comms.send(torch.zeros(size, dtype=torch.uint8), 2)
                comms.recv(size, 2, torch.uint8)
            elif comms.rank == 2:
                comms.send(comms.recv(size, 0, torch.uint8), 0)
            took.append((time.perf_counter() - begun) / 2)
        times[size] = statistics.median(took[1:])
    per_byte = (times[2_000_000] - times[8]) / (2_000_000 - 8)
    return mp.Link(times[8], per_byte)


def rank(transport: str, rounds: int) -> None:
    """What each rank does; rank 0 prints what was found."""
    with mp.connect(transport, timeout=60) as comms:
        link = link_between(comms, 5)
        names = ALGORITHMS if transport != "gloo" else ("auto",)
        rows = []
        for size in SIZES:
            tensor = torch.ones(size // 4)
            for name in names:
                call = functools.partial(comms.all_reduce, tensor, algorithm=name)
                rows.append((size, name, seconds(call, rounds, comms)))
        if comms.rank == 0:
            print(json.dumps([comms.transport_name, link.latency, link.seconds_per_byte, rows]))


def measured(bed, transport: str, rounds: int) -> list:
    """What the ranks of all hosts find."""
    ranks = bed.ranks("python", str(Path(__file__).resolve()), "--as-rank", transport, "--rounds", rounds, on_each=2)
    for one in ranks:
        if one.wait(500):
            raise SystemExit(one.errors)
    return json.loads(ranks[0].output)


def main(
    rate: Annotated[str, typer.Option(help="What the link carries, as tc reads it.")] = "100mbit",
    rounds: Annotated[int, typer.Option(help="How often each is measured.")] = 7,
    as_rank: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure and predict."""
    if as_rank:
        rank(as_rank, rounds)
        return
    from tests.hosts.bed import Bed, starter, why_not

    if reason := why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder:
        bed = Bed(2, starter(None, Path(folder), Path(folder)), [])
        try:
            for host in bed:
                host.limit(rate)
            name, latency, per_byte, rows = measured(bed, "auto", rounds)
            *_, flat = measured(bed, "gloo", rounds)
        finally:
            bed.close()
    link = mp.Link(latency, per_byte)
    print(f"2 hosts with 2 ranks each, {rate} between them; transport {name}")
    print(f"messages between hosts: {show_seconds(latency)} and {8e-6 / per_byte:.0f} Mbit a second")
    print(f"{'bytes':>10}  {'all-reduce':34} {'measured':>9} {'(range)':>19} {'predicted':>10} {'of gloo':>8}")
    beside = {size: statistics.median(times) for size, _, times in flat}
    for size, algorithm, times in [*((size, "torch on gloo", times) for size, _, times in flat), *rows]:
        took = statistics.median(times)
        label, predicted = algorithm, ""
        if algorithm != "torch on gloo":
            chosen = resolve("all-reduce", algorithm, 4, size, name)
            label = f"auto: {chosen}" if algorithm == "auto" else algorithm
            predicted = show_seconds(simulated(chosen, size, link))
        spread = f"({show_seconds(min(times))} to {show_seconds(max(times))})"
        ratio = f"{took / beside[size]:.2f}"
        print(f"{show_size(size):>10}  {label:34} {show_seconds(took):>9} {spread:>19} {predicted:>10} {ratio:>8}")


def simulated(algorithm: str, size: int, link: mp.Link) -> float:
    """The seconds that the simulator says; both ranks of a host share its port."""
    inside = mp.Link(latency=0, seconds_per_byte=0)
    costs = mp.Costs.cluster(nodes=2, per_node=2, inside=inside, between=link, bytes_per_value=size)
    return mp.simulate(program_of("all-reduce", algorithm, 4), costs).makespan


if __name__ == "__main__":
    typer.run(main)
