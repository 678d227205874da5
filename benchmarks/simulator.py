"""How does the simulator's time grow with the number of operations? It should grow in step: µs an operation stay alike.

    python benchmarks/simulator.py                                             up to a million operations
    python benchmarks/simulator.py > benchmarks/results/simulator-2-cores.txt

Collectives grow with their ranks (4p(p−1) operations), a pipeline with its micro-batches (on 8 ranks here), data
parallelism with its ranks.
"""

import argparse
import gc
import platform
import time

import microparallel as mp
from microparallel.program import Program
from microparallel.topology import available_cores

COSTS = mp.Costs(latency=1e-5, seconds_per_byte=1e-9, add_seconds_per_byte=1e-10, bytes_per_value=1e6)
PIPELINE_RANKS = 8


def ring(operations: int) -> Program:
    """A ring all-reduce of about so many operations."""
    return mp.collectives.build("ring", round((operations / 4) ** 0.5 + 0.5))


def one_f_one_b(operations: int) -> Program:
    """A 1F1B pipeline of about so many operations, its sends and receives among them."""
    each = len(mp.schedules.build("1f1b", PIPELINE_RANKS, 32)) / 32  # operations of one micro-batch, on all ranks
    return mp.schedules.build("1f1b", PIPELINE_RANKS, round(operations / each))


def direct(operations: int) -> Program:
    """A direct all-reduce of about so many operations."""
    return mp.collectives.build("direct", round((operations / 4) ** 0.5 + 0.5))


def ddp(operations: int) -> Program:
    """A data-parallel step of about so many operations, on as many ranks as it takes with 64 layers in 16 buckets."""
    return mp.schedules.ddp(layers=64, buckets=16, ranks=max(1, round(operations / (2 * 64 + 16 + 1))))


def seconds_to_simulate(program: Program, repeats: int) -> float:
    """The fastest of a few runs: whatever else the machine does can only make one slower."""
    times = []
    for _ in range(repeats):
        gc.collect()
        begun = time.perf_counter()
        mp.simulate(program, COSTS)
        times.append(time.perf_counter() - begun)
    return min(times)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1_000_000, help="operations of the largest program")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the fastest counts")
    options = parser.parse_args()
    machine = f"{available_cores()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"mp.simulate on {machine}, microparallel {mp.__version__}; the fastest of {options.repeats} runs\n")
    print(f"{'program':10}{'ranks':>7}{'operations':>14}{'seconds':>11}{'µs an operation':>18}")
    for name, build in (("ring", ring), ("direct", direct), ("1f1b", one_f_one_b), ("ddp", ddp)):
        for operations in (10_000, 30_000, 100_000, 300_000, 1_000_000):
            if operations <= options.most:
                program = build(operations)
                seconds = seconds_to_simulate(program, options.repeats)
                each = seconds / len(program) * 1e6
                print(f"{name:10}{program.world_size:>7}{len(program):>14,}{seconds:>11.3f}{each:>18.2f}", flush=True)


if __name__ == "__main__":
    main()
