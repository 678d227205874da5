"""bf16 and fp16 on a GPU, beside torch's DDP with autocast and GradScaler: loss, skipped steps, time of a step.

    python benchmarks/precision_on_a_gpu.py              # gloo with 2 ranks on one GPU, nccl with 1
    python benchmarks/precision_on_a_gpu.py --device cpu # the same without a GPU, to try it

Both train the same small GPT from the same weights on the same tokens. In one step the loss is multiplied by infinity
on the last rank: no rank may take that step. Ratios are those of one run, in which the contenders take turns.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import microparallel as mp
from microparallel.models import GPT

STEPS, OVERFLOW, BATCH, CONTEXT, VOCABULARY = 40, 12, 16, 128, 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def model() -> nn.Module:
    """The same weights on every rank and for every contender."""
    torch.manual_seed(0)
    return GPT(VOCABULARY, CONTEXT, dim=256, heads=8, depth=6)


class Contender:
    """A model that trains, step by step."""

    def __init__(self, comms: mp.Comms, precision: str, ours: bool) -> None:
        self.comms, self.precision, self.ours = comms, precision, ours
        self.plain = model().to(comms.device)
        self.scaler = None
        if ours:
            self.wrapped = mp.DataParallel(self.plain, comms, precision=precision)
        else:
            self.wrapped = DistributedDataParallel(self.plain, process_group=comms.process_group)
            self.scaler = torch.amp.GradScaler(comms.device.type, enabled=precision == "fp16")
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=3e-4)
        self.losses: list[float] = []
        self.taken = 0

    def step(self, number: int) -> float:
        """One step; returns its seconds on this rank."""
        random = torch.Generator().manual_seed(number * 100 + self.comms.rank)
        text = torch.randint(VOCABULARY, (BATCH, 1), generator=random) + torch.arange(CONTEXT + 1)
        text = (text % VOCABULARY).to(self.comms.device)
        before = next(self.plain.parameters()).detach().clone()
        self._wait()
        self.comms.barrier()
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        with torch.autocast(
            self.comms.device.type, DTYPES.get(self.precision), enabled=not self.ours and self.precision in DTYPES
        ):
            logits = self.wrapped(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        self.losses.append(loss.item())
        if number == OVERFLOW and self.comms.rank == self.comms.world_size - 1 and self.precision == "fp16":
            loss = loss * float("inf")
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        self._wait()
        seconds = time.perf_counter() - begun
        self.taken += not torch.equal(before, next(self.plain.parameters()).detach())
        return seconds

    def _wait(self) -> None:
        if self.comms.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def scale(self) -> float:
        """The scale of the loss at the end; 1 where there is none."""
        if self.ours:
            return 1.0 if self.wrapped.loss_scale is None else self.wrapped.loss_scale.value
        return self.scaler.get_scale() if self.scaler.is_enabled() else 1.0


def measure(comms: mp.Comms) -> list[tuple[str, float, float, int, float, bool]]:
    """Train all contenders in turns: name, median seconds, last loss, steps taken, scale, whether ranks are alike."""
    contenders = {
        f"{'mp.DataParallel' if ours else 'torch DDP, autocast'} {precision}": Contender(comms, precision, ours)
        for precision in ("float32", "bf16", "fp16")
        for ours in (True, False)
    }
    contenders["mp.DataParallel bf16, again"] = Contender(comms, "bf16", True)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(STEPS):
        for name, contender in contenders.items():
            seconds[name].append(contender.step(number))
    rows = []
    for name, one in contenders.items():
        weights = torch.cat([parameter.detach().cpu().view(-1) for parameter in one.plain.parameters()])
        alike = all(torch.equal(weights, other) for other in comms.all_gather(weights))
        loss = statistics.fmean(map(float, comms.all_gather(torch.tensor(one.losses[-5:]).mean())))
        rows.append((name, statistics.median(seconds[name][5:]), loss, one.taken, one.scale, alike))
    return rows


def main() -> None:
    """Print a table for each transport."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    worlds = [("gloo", 2), ("nccl", 1)] if device == "cuda" else [("gloo", 2), ("shm", 2)]
    for transport, ranks in worlds:
        print(f"{transport}, {ranks} rank{'s' * (ranks > 1)} on one {device}, torch {torch.__version__}")
        print(f"{'':28} {'ms a step':>10} {'last loss':>10} {'steps taken':>12} {'scale':>8}  ranks alike")
        for name, each, loss, taken, scale, alike in mp.launch(
            measure, ranks, transport=transport, device=device, timeout=500
        )[0]:
            print(f"{name:28} {each * 1e3:10.2f} {loss:10.4f} {taken:9}/{STEPS} {scale:8.0f}  {alike}")


if __name__ == "__main__":
    main()
