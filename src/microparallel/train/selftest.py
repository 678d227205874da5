"""Prove on this machine that many ranks do what one does: every collective, and a short training run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.errors import MicroparallelError
from microparallel.text import count
from microparallel.train.compare import compare
from microparallel.train.config import TrainConfig
from microparallel.transport.shared_memory import futex
from microparallel.world import Pool
from microparallel.world.given_ranks import GivenRanks


@dataclass(frozen=True)
class Setting:
    """A way to run ranks on this machine."""

    transport: str
    device: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.transport}, {count(self.ranks, 'rank')} on {self.device}"


@dataclass(frozen=True)
class Finding:
    """What the self-test found in one setting."""

    setting: Setting
    check: str
    passed: bool
    detail: str


def settings_here(ranks: int | None = None) -> list[Setting]:
    """The ways to run ranks that this machine allows."""
    on_the_cpu = ["gloo"] if futex.why_not() else ["shm", "gloo"]
    settings = [Setting(transport, "cpu", ranks or 4) for transport in on_the_cpu]
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        settings.append(Setting("gloo", "cuda", ranks or max(2, gpus)))
        if torch.distributed.is_nccl_available() and (ranks or gpus) <= gpus:
            settings.append(Setting("nccl", "cuda", ranks or gpus))
    return settings


def selftest(setting: Setting, pool: Pool, progress: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Check the collectives and a training run in one setting."""
    progress(f"{setting}: collectives")
    findings = []
    try:
        wrong = pool.run(
            wrong_collectives, setting.ranks, transport=setting.transport, device=setting.device, check=True
        )
        names = sorted({name for names in wrong for name in names})
        findings.append(_of_collectives(setting, names))
        for precision in ("float64", "float32"):
            findings += _parity(setting, precision, pool, progress)
    except MicroparallelError as error:
        findings.append(Finding(setting, "running", False, str(error)))
    return findings


def selftest_of_ranks(comms: Comms, progress: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Check the ranks that torchrun or Slurm has started, all of which call this; rank 0 has what was found."""
    setting = Setting(comms.transport_name, comms.device.type, comms.world_size)
    progress(f"{setting}: collectives")
    names = sorted({name for names in gather_json(wrong_collectives(comms), comms) for name in names})
    findings = [_of_collectives(setting, names)]
    for precision in ("float64", "float32"):
        findings += _parity(setting, precision, GivenRanks(comms), progress)
    return findings if comms.rank == 0 else []


def _of_collectives(setting: Setting, wrong: list[str]) -> Finding:
    return Finding(setting, "collectives", not wrong, f"wrong: {', '.join(wrong)}" if wrong else "all right")


def _parity(
    setting: Setting, precision: str, pool: Pool | GivenRanks, progress: Callable[[str], None]
) -> list[Finding]:
    config = TrainConfig(
        ranks=setting.ranks,
        transport=setting.transport if isinstance(pool, Pool) else "auto",  # decided when they met
        device=setting.device,
        precision=precision,
        # A smooth model: where there is a ReLU, rounding may push a number over its edge and the runs part.
        model="gpt",
        dim=32,
        depth=2,
        heads=2,
        context=32,
        steps=20,
        batch=25,  # which few numbers of ranks divide
        optimizer="sgd",
        lr=0.05,
        schedule_lr="constant",
    ).resolved()
    rows = compare(
        config, ["naive", "ddp", "torch-ddp"], pool, lambda text: progress(f"{setting}: {precision}, {text}")
    )
    return [
        Finding(
            setting,
            f"{row.strategy}, {precision}",
            row.agrees,
            f"loss differs by {row.loss_difference:.1e}, weights by {row.weight_difference:.1e}",
        )
        for row in rows[1:]
    ]


def wrong_collectives(comms: Comms) -> list[str]:
    """Call every primitive once, and name those whose result is wrong."""
    rank, ranks = comms.rank, comms.world_size

    def mine(of: int) -> torch.Tensor:
        return torch.arange(5, dtype=torch.float32, device=comms.device) + 10 * of

    total = sum((mine(other) for other in range(ranks)), torch.zeros(5, device=comms.device))
    of_all = [mine(other) for other in range(ranks)]
    last = ranks - 1
    gathered = comms.gather(mine(rank), dst=last)
    reduced = comms.reduce(mine(rank), dst=last)
    in_place = comms.empty(5).copy_(mine(rank))
    results = {
        "all_reduce": torch.equal(comms.all_reduce(mine(rank)), total),
        "all_reduce of comms.empty": torch.equal(comms.all_reduce(in_place), total.cpu()),
        "all_reduce_mean": torch.allclose(comms.all_reduce_mean(mine(rank)), total / ranks),
        "broadcast": torch.equal(comms.broadcast(mine(rank), src=last), mine(last)),
        "all_gather": all(map(torch.equal, comms.all_gather(mine(rank)), of_all)),
        "gather": gathered is None if rank != last else all(map(torch.equal, gathered or [], of_all)),
        "scatter": torch.equal(comms.scatter(of_all if rank == 0 else None), mine(rank)),
        "reduce": torch.equal(reduced, total if rank == last else mine(rank)),
        "reduce_scatter": torch.equal(comms.reduce_scatter([mine(rank)] * ranks), total),
        "all_to_all": all(map(torch.equal, comms.all_to_all(of_all), [mine(rank)] * ranks)),
        "messages": _ring_is_right(comms, mine),
    }
    comms.barrier()
    return [name for name, right in results.items() if not right]


def _ring_is_right(comms: Comms, mine: Callable[[int], torch.Tensor]) -> bool:
    if comms.world_size == 1:
        return True
    before, after = (comms.rank - 1) % comms.world_size, (comms.rank + 1) % comms.world_size
    if comms.rank % 2:  # NCCL pairs sends with receives in order, so neighbours take turns
        received = comms.recv_tensor((5,), before)
        comms.send_tensor(mine(comms.rank), after)
    else:
        comms.send_tensor(mine(comms.rank), after)
        received = comms.recv_tensor((5,), before)
    return torch.equal(received, mine(before))
