"""What a rank of FullyShardedDataParallel holds on a GPU, beside the formula: run it where there is one.

    python benchmarks/units_on_a_gpu.py

Each rank keeps 1/p of the weights, of the gradients and of AdamW's state, 16 bytes a parameter. Beside that it has the
units that are whole (prefetch + 1), the gradients of a unit as autograd makes them, and as they are summed. gloo with
several ranks on one GPU, and nccl with one rank, which has everything.
"""

import torch
from torch import nn

import microparallel as mp

WIDTH, LAYERS, BATCH, STEPS = 4096, 24, 16, 4
UNIT = 4 * (WIDTH * WIDTH + WIDTH)


def measure(comms: mp.Comms, prefetch: int) -> tuple[float, float, float]:
    """The most bytes that torch had allocated on the GPU, between steps and in a step; and the last loss."""
    torch.ones(WIDTH, WIDTH, device=comms.device) @ torch.ones(WIDTH, BATCH, device=comms.device)
    nn.functional.linear(*(torch.ones(BATCH, BATCH, device=comms.device),) * 2, torch.ones(BATCH, device=comms.device))
    workspaces = torch.cuda.memory_allocated()  # of the libraries that multiply matrices
    torch.manual_seed(0)
    with mp.deferred_init():
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = mp.FullyShardedDataParallel(module, comms, prefetch=prefetch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(comms.rank)).to(comms.device)
    between = most = 0.0
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        most = torch.cuda.max_memory_allocated() - workspaces
        optimizer.step()
        between = torch.cuda.memory_allocated() - workspaces
    return between, most, loss.item()


def main() -> None:
    """Print a line for each number of ranks and each prefetch."""
    print(f"{LAYERS} layers of {WIDTH} x {WIDTH}, a unit each: {UNIT * LAYERS / 2**20:,.0f} MiB of weights, MiB a rank")
    print("transport ranks prefetch | between steps  formula | in a step  formula with units  loss")
    for transport, ranks in (("nccl", 1), ("gloo", 2), ("gloo", 4)):
        for prefetch in (0, 1, 2):
            found = mp.launch(measure, ranks, prefetch, transport=transport, device="cuda", timeout=300)
            between, most, loss = (max(column) for column in zip(*found, strict=True))
            kept = 4 * UNIT * LAYERS / ranks
            units = 0 if ranks == 1 else prefetch + 1
            # Without the optimizer's temporaries; gradients: one unit from autograd, up to three being summed.
            whole = kept + (units + 4) * UNIT
            row = (between, kept, most, whole)
            print(
                f"{transport:>9} {ranks:5} {prefetch:8} | " + "  ".join(f"{size / 2**20:10,.0f}" for size in row), loss
            )


if __name__ == "__main__":
    main()
