"""Tables for the plots of the lessons: what the simulator says over a whole range, and formulas beside it.

    python benchmarks/curves.py > benchmarks/results/curves.txt

Nothing is measured here: the numbers are the same on every machine.
"""

import datetime
import math
from collections.abc import Iterable, Iterator, Sequence

import microparallel as mp
from microparallel.program import Program
from microparallel.trace import Sizes, Trace

Row = Sequence[object]


def sizes_from(low: float, high: float, each_decade: int = 4) -> list[float]:
    """Sizes in equal ratios."""
    steps = round(math.log10(high / low) * each_decade)
    return [low * 10 ** (step / each_decade) for step in range(steps + 1)]


def all_reduces() -> Iterator[Row]:
    """The time of an all-reduce on 8 ranks, by its size: 10 µs a message, 1 GB/s."""
    names = ("gather-add", "tree", "ring", "halving-doubling")
    programs = [mp.collectives.build(name, 8) for name in names]
    yield ("KB", *names)
    for size in sizes_from(1e3, 1e8):
        costs = mp.Costs(latency=1e-5, seconds_per_byte=1e-9, bytes_per_value=size)
        yield (f"{size / 1e3:.3f}", *(f"{1e3 * mp.simulate(program, costs).makespan:.4g}" for program in programs))


def two_nodes() -> Iterator[Row]:
    """Ring and hierarchical on 2 nodes of 4 ranks: 5 µs and 100 GB/s inside, 20 µs and 10 GB/s between."""
    inside, between = mp.Link(5e-6, 1 / 100e9), mp.Link(20e-6, 1 / 10e9)
    programs = mp.collectives.build("ring", 8), mp.collectives.build("hierarchical", 8, ranks_per_node=4)
    yield ("MB", "ring", "hierarchical")
    for size in sizes_from(1e4, 1e9):
        costs = mp.Costs.cluster(nodes=2, per_node=4, inside=inside, between=between, bytes_per_value=size)
        yield (f"{size / 1e6:.3f}", *(f"{1e3 * mp.simulate(program, costs).makespan:.4g}" for program in programs))


def many_nodes() -> Iterator[Row]:
    """The same links, 100 MB and 1 MB, by the number of nodes; a port for each rank, or one for its node."""
    inside, between = mp.Link(5e-6, 1 / 100e9), mp.Link(20e-6, 1 / 10e9)
    names = ("ring", "hierarchical with a port a node", "hierarchical with a port a rank")
    yield ("nodes", *(f"{name} of {size}" for size in ("100 MB", "1 MB") for name in names))
    for nodes in (2, 4, 8, 16, 32):
        ranks, row = 4 * nodes, [str(nodes)]
        ring = mp.collectives.build("ring", ranks)
        hierarchical = mp.collectives.build("hierarchical", ranks, ranks_per_node=4)
        for size in (1e8, 1e6):
            for program, shared in ((ring, True), (hierarchical, True), (hierarchical, False)):
                costs = mp.Costs.cluster(
                    nodes=nodes, per_node=4, inside=inside, between=between, shared_nic=shared, bytes_per_value=size
                )
                row.append(f"{1e3 * mp.simulate(program, costs).makespan:.4g}")
        yield row


PARAMETERS, LAYERS, TOKENS = 1e8, 16, 65_536
OPERATIONS, LATENCY, BANDWIDTH = 3e13, 1e-5, 25e9  # a second, seconds, bytes a second


def step_time(ranks: int, tokens: float) -> float:
    """A step of data parallelism: 100 million parameters in 16 buckets, 30 TFLOP/s, a ring over 10 µs and 25 GB/s."""
    forward = 2 * PARAMETERS * tokens / OPERATIONS / LAYERS
    costs = mp.Costs(
        forward=forward,
        backward_input=forward,
        backward_weight=forward,
        latency=LATENCY,
        seconds_per_byte=1 / BANDWIDTH,
        bytes_per_value=4 * PARAMETERS / LAYERS,
    )
    return mp.simulate(mp.schedules.ddp(LAYERS, LAYERS if ranks > 1 else 1, ranks, "ring"), costs).makespan


def scaling() -> Iterator[Row]:
    """Speed-up and efficiency: strong (65,536 tokens for all), and weak (4,096 tokens a rank)."""
    yield ("ranks", "ideal", "strong", "weak", "strong efficiency", "weak efficiency")
    alone, alone_weak = step_time(1, TOKENS), step_time(1, 4096)
    for ranks in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        strong = alone / step_time(ranks, TOKENS / ranks)
        weak = ranks * alone_weak / step_time(ranks, 4096)
        efficiencies = (f"{100 * one / ranks:.1f}" for one in (strong, weak))
        yield (ranks, ranks, f"{strong:.2f}", f"{weak:.2f}", *efficiencies)


def buckets() -> Iterator[Row]:
    """A step's time by its buckets: 48 layers, F = 48, B = 96, 4 ranks, α = 0.5; a fast link and a slow one."""
    layers, ranks, latency = 48, 4, 0.5
    links = {"fast": 0.5, "slow": 2.0}  # time a layer's bytes
    yield ("buckets", *(f"{what} on the {name} link" for name in links for what in ("formula", "simulator")))
    for count in range(1, 25):
        row: list[object] = [count]
        for each in links.values():
            backward = 2 * layers
            start, transfer = 2 * (ranks - 1) * latency, 2 * (ranks - 1) / ranks * layers * each
            keeping_up = backward + start + transfer / count
            queueing = backward / count + count * start + transfer
            row.append(f"{layers + max(keeping_up, queueing):.2f}")
            if layers % count:  # then buckets differ in size, which the formula does not know
                row.append("–")
                continue
            costs = mp.Costs(latency=latency, seconds_per_byte=each, bytes_per_value=1)
            row.append(f"{mp.simulate(mp.schedules.ddp(layers, count, ranks, 'ring'), costs).makespan:.2f}")
        yield row


def memory_of(traces: dict[str, Trace], rank: int = 0) -> Iterator[Row]:
    """What a rank holds over time, a column for each trace; a row wherever one of them changes."""
    totals = {name: trace.memory[rank].total for name, trace in traces.items()}
    ends = {name: trace.makespan for name, trace in traces.items()}
    yield ("time", *totals)
    for time in sorted({0.0, *ends.values(), *(moment for total in totals.values() for moment, _ in total)}):
        cells = []
        for name, total in totals.items():
            before = [held for moment, held in total if moment <= time + 1e-9]
            cells.append(f"{before[-1]:g}" if before and time <= ends[name] + 1e-9 else "–")
        yield (f"{time:g}", *cells)


def pipeline_memory() -> Iterator[Row]:
    """Activations of rank 0: 4 ranks, 16 micro-batches."""
    costs = mp.Costs(sizes=Sizes(parameters=0, gradients=0, optimizer=0, activations=1))
    programs = {name: mp.schedules.build(name.lower(), 4, 16) for name in ("GPipe", "1F1B")}
    return memory_of({name: mp.simulate(program, costs) for name, program in programs.items()})


def zero_memory() -> Iterator[Row]:
    """Bytes of a rank: 4 ranks, 6 layers of 4 + 4 + 8 bytes, one micro-batch."""
    costs = mp.Costs(bytes_per_value=4, seconds_per_byte=0.1, optimizer=2, sizes=Sizes(parameters=4, activations=0))
    programs: dict[str, Program] = {"DDP": mp.schedules.ddp(6, 6, 4, "ring")}
    programs |= {f"ZeRO-{level}": mp.schedules.zero(level, 6, 4, 1) for level in (1, 2, 3)}
    return memory_of({name: mp.simulate(program, costs) for name, program in programs.items()})


def written(rows: Iterable[Row]) -> str:
    """A table whose columns are two spaces or more apart."""
    table = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)


PARTS = {
    "all-reduces": all_reduces,
    "two nodes": two_nodes,
    "many nodes": many_nodes,
    "scaling": scaling,
    "buckets": buckets,
    "pipeline memory": pipeline_memory,
    "zero memory": zero_memory,
}


def main() -> None:
    """Print where the numbers come from, and a table for each part."""
    print("# command: python benchmarks/curves.py")
    print("# machine: simulated, so the same on every machine")
    print(f"# date: {datetime.datetime.now(datetime.UTC).date()}")
    for heading, rows in PARTS.items():
        print(f"\n── {heading} ──\n# {rows.__doc__}\n{written(rows())}")


if __name__ == "__main__":
    main()
