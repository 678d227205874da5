"""Data parallelism by hand: two copies of a network, each with half of the batch, in one process.

Question   Two copies learn from half a batch each. What must they tell each other so that both
           learn exactly what one network learns from the whole batch?
Look at    the largest difference between weights: copy from copy, and copy from the network that
           saw the whole batch. 0 is exact; 1e-16 is what float64 loses by adding in another order.
Try        python examples/manual_data_parallel.py --forget    leave the averaging out
           python examples/manual_data_parallel.py --batch 3   a half of 2 images, and a half of 1
           and in average_gradients, let each copy count one half: for which --batch is that wrong?
"""

import argparse
import copy
import sys

import torch
from torch import nn

import microparallel as mp
from microparallel.broken_pipe import quiet_broken_pipe
from microparallel.train.data import digits


def average_gradients(copies: list[nn.Module], samples: list[int]) -> None:
    # backward() left in each copy the mean over its own samples: autograd knows nothing of the other copy. In the mean
    # over the whole batch, a copy counts for as many samples as it saw.
    for same_parameter in zip(*(network.parameters() for network in copies), strict=True):
        total = sum(parameter.grad * seen for parameter, seen in zip(same_parameter, samples, strict=True))
        for parameter in same_parameter:
            parameter.grad = total / sum(samples)


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


@quiet_broken_pipe()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps (default 60)")
    parser.add_argument("--batch", type=int, default=65, help="images a step (default 65, odd on purpose)")
    parser.add_argument("--forget", action="store_true", help="forget to average, and see the copies drift apart")
    options = parser.parse_args()
    if options.steps < 1 or options.batch < 2:
        parser.error("--steps must be at least 1, and --batch at least 2: an image for each copy")

    torch.manual_seed(0)
    torch.set_num_threads(1)  # layers this small gain nothing from more
    training = digits(dtype=torch.float64).training
    # The monolith's 16 layers again, from the library; given targets, it returns the mean loss.
    whole = mp.models.FullMLP(64, depth=16, in_features=64, out_features=10).double()
    copies = [copy.deepcopy(whole), copy.deepcopy(whole)]  # they must start from the same weights
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.05) for network in [whole, *copies]]

    print(f"{'':>6}{'loss':>15}{'':>15}{'largest weight difference':>33}")
    print(f"{'step':>6}{'whole batch':>15}{'two halves':>15}{'copy 0 / copy 1':>19}{'copy 0 / whole':>18}")
    for step in range(1, options.steps + 1):
        inputs, targets = training.batch(torch.randint(len(training), (options.batch,)).tolist())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of_whole = whole(inputs, targets)
        loss_of_whole.backward()

        # The copies take turns here; on two devices they would compute at the same time.
        samples, summed_loss = [], 0.0
        for network, my_inputs, my_targets in zip(copies, inputs.chunk(2), targets.chunk(2), strict=True):
            loss = network(my_inputs, my_targets)
            loss.backward()
            samples.append(len(my_targets))
            summed_loss += loss.item() * len(my_targets)
        if not options.forget:
            average_gradients(copies, samples)

        for optimizer in optimizers:
            optimizer.step()
        apart, from_whole = largest_difference(*copies), largest_difference(copies[0], whole)
        if step == 1 or step % max(1, options.steps // 6) == 0:
            print(f"{step:>6}{loss_of_whole.item():>15.6f}{summed_loss / options.batch:>15.6f}", end="")
            print(f"{apart:>19.2g}{from_whole:>18.2g}")

    if options.forget:
        if apart < 1e-6:
            sys.exit("\nthe copies did not drift apart, although nobody averaged")
        print(f"\nconclusion: without averaging the copies drift: {apart:.2g} apart after {options.steps} steps")
        return
    if apart > 0 or from_whole > 1e-8:
        sys.exit(f"\nthe copies are {apart:.2g} apart, and {from_whole:.2g} from the network of the whole batch")
    print("\nconclusion: averaging gradients equals the whole batch: the two copies are identical,")
    print(f"            and {from_whole:.2g} from the network that saw the whole batch, which is rounding")


if __name__ == "__main__":
    main()
