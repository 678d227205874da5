"""Loss curves of the two shortcuts beside a sum in every step, as tables for the plots of the lessons.

    python benchmarks/shortcuts.py > benchmarks/results/shortcuts.txt

Losses are computed in 64 bits, and are the same in every run on a machine.
"""

import datetime
import json
import platform
import subprocess
import sys

import torch

from microparallel.topology import available_cores

RUNS = {"sgd": (), "adam": ("--optimizer", "adam", "--lr", "0.001")}


def curves(options: tuple[str, ...]) -> list[list[str]]:
    """A column of losses for each way, by the samples that all ranks together have seen."""
    command = [sys.executable, "-m", "microparallel", "compare", "--shortcuts", *options, "--json"]
    ways = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    columns = [dict(zip(way["samples"], way["losses"], strict=True)) for way in ways]
    shared = sorted(set.intersection(*(set(column) for column in columns)))
    rows = [["samples", *(way["way"] for way in ways)]]
    return rows + [[str(samples), *(f"{column[samples]:.4f}" for column in columns)] for samples in shared]


def main() -> None:
    """Print where the numbers come from, and a table for each optimizer."""
    machine = (
        f"{available_cores()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    )
    print("# command: python benchmarks/shortcuts.py")
    print(f"# machine: {machine}, torch {torch.__version__}")
    print(f"# date: {datetime.datetime.now(datetime.UTC).date()}")
    for name, options in RUNS.items():
        rows = curves(options)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print(f"\n── {name} ──")
        for row in rows:
            print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
