"""Pipeline parallelism by hand: one network cut in two, with a hand-off at the cut, in one process.

Question   Cut a network into part 1 and part 2. What must cross the cut, and in which direction,
           so that both parts learn as if there were no cut?
Look at    which part has gradients before and after part 2 hands its gradient back; and whether
           the gradients equal those of the uncut network, bit for bit.
Try        python examples/manual_pipeline.py --cut 4       an earlier cut: does anything change?
           python examples/manual_pipeline.py --batch 256   what grows at the cut, what does not?
           and leave out `.detach()` and `sent.backward(...)`: who gets gradients now, and how?
"""

import argparse
import copy
import sys

import torch
from torch import nn
from torch.nn import functional

import microparallel as mp
from microparallel.broken_pipe import quiet_broken_pipe
from microparallel.train.data import digits

LAYERS = 16


def count_gradients(*parts: nn.Module) -> list[int]:
    return [sum(parameter.grad is not None for parameter in part.parameters()) for part in parts]


@quiet_broken_pipe()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps (default 60)")
    parser.add_argument("--batch", type=int, default=64, help="images a step (default 64)")
    parser.add_argument("--cut", type=int, default=8, help="layers in part 1, of 16 (default 8)")
    options = parser.parse_args()
    if min(options.steps, options.batch) < 1 or not 0 < options.cut < LAYERS:
        parser.error(f"--steps and --batch must be at least 1, and --cut from 1 to {LAYERS - 1}")

    torch.manual_seed(0)
    torch.set_num_threads(1)  # layers this small gain nothing from more
    training = digits(dtype=torch.float64).training
    # The monolith's 16 layers again, from the library: each is a linear layer with its ReLU.
    uncut = nn.Sequential(*mp.models.FullMLP(64, depth=LAYERS, in_features=64, out_features=10).layers).double()
    pieces = copy.deepcopy(uncut)  # slices share their layers with the network they come from
    part1, part2 = pieces[: options.cut], pieces[options.cut :]
    # Each part has an optimizer of its own, as it will in a process of its own.
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.05) for network in (uncut, part1, part2)]

    for step in range(1, options.steps + 1):
        inputs, targets = training.batch(torch.randint(len(training), (options.batch,)).tolist())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of_uncut = functional.cross_entropy(uncut(inputs), targets)
        loss_of_uncut.backward()

        # Forward. What part 1 sends crosses the cut as bare numbers: a message between two processes cannot carry
        # autograd's graph. So part 2 starts a graph of its own, and what it received is where that graph begins.
        sent = part1(inputs)
        received = sent.detach().requires_grad_()
        loss = functional.cross_entropy(part2(received), targets)

        # Backward. Autograd follows the graph to where it begins, and stops there: at the cut.
        loss.backward()
        before = count_gradients(part1, part2)
        # So part 2 hands back the gradient of what it received, and part 1 takes it from there.
        sent.backward(received.grad)
        after = count_gradients(part1, part2)

        pairs = zip(uncut.parameters(), pieces.parameters(), strict=True)
        worst = max(float((whole.grad - piece.grad).abs().max()) for whole, piece in pairs)
        if step == 1:
            print(f"parameters with a gradient{'part 1':>10}{'part 2':>10}")
            print(f"  after loss.backward(){before[0]:>13}{before[1]:>10}")
            print(f"  after the hand-off{after[0]:>16}{after[1]:>10}\n")
            print(f"{'step':>6}{'loss uncut':>14}{'loss cut':>14}{'gradients':>14}")
        if step == 1 or step % max(1, options.steps // 6) == 0:
            verdict = "identical" if worst == 0 else f"{worst:.2g} off"
            print(f"{step:>6}{loss_of_uncut.item():>14.6f}{loss.item():>14.6f}{verdict:>14}")
        if before[0] > 0:
            sys.exit("\nautograd did not stop at the cut: the parts share a graph, as two processes never can")
        if worst != 0:
            sys.exit(f"\nstep {step}: a gradient of the cut network is off by {worst:.2g}")
        for optimizer in optimizers:
            optimizer.step()

    crossing = f"{' x '.join(map(str, received.shape))} numbers ({received.nbytes / 1024:,.0f} KiB)"
    print(f"\nconclusion: in all {options.steps} steps the gradients equal those of the uncut network, bit for bit.")
    print(f"            A step sends {crossing} across the cut, and as many come back.")


if __name__ == "__main__":
    main()
