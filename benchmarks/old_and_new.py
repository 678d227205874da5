"""Is this commit slower than another? All-reduces and steps of two source trees, in turns.

    git worktree add /tmp/old COMMIT
    python benchmarks/old_and_new.py --old /tmp/old/src --starts 6 --turns 12 --cores 4,6,8,10

Three teams of ranks stand ready at once: one on the old tree, one on this one, one on the old tree again. They share
the same cores, rank r of every team on core r, and work one team at a time, a tenth of a second each, so that what the
machine does to one it does to all. Printed are the medians over all turns of new ÷ old and of old ÷ old, each with
half the distance between the quartiles of the medians of the starts: what a ratio can be off by on this machine.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

SIZES = {"4 KiB": 2**10, "256 KiB": 2**16, "4 MiB": 2**20, "32 MiB": 2**23}  # float32 numbers
SECONDS = 0.1  # of one turn
HERE = Path(__file__).resolve()


def pieces(comms: object) -> Iterator[tuple[str, Callable[[], object]]]:
    """The pieces of work of one rank, each with its name."""
    import torch

    import microparallel as mp

    for name, length in SIZES.items():
        tensor = comms.empty(length)  # type: ignore[attr-defined]
        tensor.fill_(1.0)
        yield f"all-reduce, {name}", lambda tensor=tensor: comms.all_reduce(tensor, op="mean")  # type: ignore[attr-defined]
    loose = torch.ones(2**20)
    yield "all-reduce, 4 MiB, copied", lambda: comms.all_reduce(loose, op="mean")  # type: ignore[attr-defined]
    yield "broadcast, 256 KiB", lambda: comms.broadcast(loose[: 2**16])  # type: ignore[attr-defined]

    small = torch.ones(2**10)
    largest = torch.distributed.ReduceOp.MAX
    yield "all-reduce, 4 KiB, async", lambda: comms.all_reduce(small, op="max", async_op=True).wait()  # type: ignore[attr-defined]
    yield "torch's all_reduce, 4 KiB", lambda: torch.distributed.all_reduce(small, largest)
    yield "torch's all_reduce, 4 KiB, async", lambda: torch.distributed.all_reduce(small, largest, async_op=True).wait()

    def layers(width: int, depth: int) -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            *(layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU()))
        )

    loss_fn = torch.nn.functional.mse_loss
    known = inspect.signature(mp.DataParallel).parameters
    views = {"gradient_as_bucket_view": True} if "gradient_as_bucket_view" in known else {}
    for width, depth, how in (
        (256, 8, "overlap"),
        (256, 8, "views"),
        (256, 8, "one after another"),
        (1024, 4, "overlap"),
    ):
        model = mp.DataParallel(
            layers(width, depth),
            comms,  # type: ignore[arg-type]
            width / 512,
            overlap=how != "one after another",
            **(views if how == "views" else {}),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = torch.randn(64, width), torch.randn(64, width)

        def step(
            model: torch.nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            batch: tuple[torch.Tensor, torch.Tensor] = batch,
        ) -> None:
            optimizer.zero_grad()
            loss_fn(model(batch[0]), batch[1]).backward()
            optimizer.step()

        yield f"data-parallel step, {width}, {how}", step
    batch = torch.randn(64, 256), torch.randn(64, 256)
    for schedule in ("1f1b", "zb-h1"):
        pipe = mp.Pipeline(layers(256, 8), comms, schedule, microbatches=8, loss_fn=loss_fn)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)

        def pipeline_step(pipe: mp.Pipeline = pipe, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            pipe.step(*batch)
            optimizer.step()

        yield f"pipeline step, {schedule}", pipeline_step


def be_a_rank() -> None:
    """Make the pieces; then, for every name that comes in, do that piece for a turn and say its median in seconds."""
    import torch

    import microparallel as mp

    torch.set_num_threads(1)
    with mp.connect(transport="shm") as comms:
        made, counts = dict(pieces(comms)), {}
        for name, work in made.items():
            for _ in range(5):
                work()
            begun = time.perf_counter()
            for _ in range(5):
                work()
            once = torch.tensor((time.perf_counter() - begun) / 5)
            counts[name] = max(5, int(SECONDS / float(comms.all_reduce(once, op="max"))))
        print(json.dumps(list(made)), flush=True)
        for line in sys.stdin:
            work, times = made[line.strip()], []
            work()  # the ranks meet
            for _ in range(counts[line.strip()]):
                begun = time.perf_counter()
                work()
                times.append(time.perf_counter() - begun)
            print(statistics.median(times), flush=True)


class Team:
    """The ranks of one source tree, each a process on a core of its own."""

    def __init__(self, source: str, ranks: int, cores: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "PYTHONPATH": source}
        pins = [["taskset", "-c", core] for core in cores.split(",")] if cores else [[]] * ranks
        self.processes = [
            subprocess.Popen(
                [*pins[rank], sys.executable, str(HERE), "--rank"],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def answers(self) -> list[str]:
        """The next line of every rank."""
        found = [_open(process.stdout).readline() for process in self.processes]
        if not all(found):
            raise SystemExit("a rank failed; its error stands above")
        return found

    def turn(self, work: str) -> float:
        """Every rank does this piece of work for a turn; rank 0's median in seconds."""
        for process in self.processes:
            pipe = _open(process.stdin)
            pipe.write(work + "\n")
            pipe.flush()
        return float(self.answers()[0])

    def end(self) -> None:
        """No more work."""
        for process in self.processes:
            _open(process.stdin).close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def main() -> None:
    """Compare, or be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="the other tree's src folder")
    parser.add_argument("--new", default=str(HERE.parent.parent / "src"), help="this tree's src folder")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--starts", type=int, default=6, help="how often the teams are started anew")
    parser.add_argument("--turns", type=int, default=12, help="of every piece of work, for each team and start")
    parser.add_argument("--cores", default="", help="pin each rank to one of these, such as 4,6,8,10")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_a_rank()
        return
    if not options.old:
        parser.error("--old is needed: the src folder of the commit to compare with")
    usual: dict[str, list[float]] = {}
    ratios: dict[str, list[tuple[float, float]]] = {}  # of every start: new ÷ old, old ÷ old
    for start in range(options.starts):
        sources = {"old": options.old, "new": options.new, "again": options.old}
        order = list(sources) if start % 2 else list(sources)[::-1]  # neither always comes first
        teams = {name: Team(sources[name], options.ranks, options.cores) for name in order}
        try:
            names = [json.loads(team.answers()[0]) for team in teams.values()].pop()
            for work in names:
                turns = []
                for number in range(options.turns):
                    turning = order if number % 2 else order[::-1]
                    turns.append({name: teams[name].turn(work) for name in turning})
                usual.setdefault(work, []).extend(turn["old"] for turn in turns)
                new = statistics.median(turn["new"] * 2 / (turn["old"] + turn["again"]) for turn in turns)
                alike = statistics.median(turn["again"] / turn["old"] for turn in turns)
                ratios.setdefault(work, []).append((new, alike))
        finally:
            for team in teams.values():
                team.end()
        print(f"start {start + 1} of {options.starts}", file=sys.stderr, flush=True)
    print(f"{options.ranks} ranks, {options.starts} starts of {options.turns} turns; ± half the quartiles' distance")
    print(f"{'':<46}{'old':>13}   {'new ÷ old':<15}   old ÷ old")
    for work, found in ratios.items():
        new, alike = zip(*found, strict=True)
        print(f"{work:<46}{statistics.median(usual[work]) * 1e6:>10.1f} µs   {_ratio(new)}   {_ratio(alike)}")


def _ratio(ratios: tuple[float, ...]) -> str:
    first, _, third = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return f"{statistics.median(ratios):.3f} ± {(third - first) / 2:.3f}"


if __name__ == "__main__":
    main()
