"""The baseline: one process, one network, one training loop, and nothing parallel yet.

Question   How well and how fast does a network of 16 layers learn to read handwritten digits?
Look at    the loss, which falls; the accuracy on images it never trained on; and samples/s,
           the number that every parallel version has to beat.
Try        python examples/monolith.py --width 256      4 times the arithmetic: 4 times slower?
           python examples/monolith.py --batch 8        small steps: what becomes of samples/s?
           python examples/monolith.py --device cuda    is a GPU faster on a network this small?
           python examples/monolith.py --init default   torch's own first weights: what is missing?
"""

import argparse
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional

from microparallel.broken_pipe import quiet_broken_pipe
from microparallel.train.data import digits

LAYERS, PIXELS, CLASSES = 16, 64, 10


def build_network(width: int, init: str) -> nn.Sequential:
    widths = [PIXELS] + [width] * (LAYERS - 1) + [CLASSES]
    network = nn.Sequential()
    for layer in range(LAYERS):
        linear = nn.Linear(widths[layer], widths[layer + 1])
        if init == "he":
            # Each ReLU weakens the signal, and torch's default weights do not make up for it: sixteen layers deep,
            # nothing of the image is left to learn from. He's weights are larger, by just enough to keep its size.
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            nn.init.zeros_(linear.bias)
        network.append(linear)
        if layer < LAYERS - 1:  # the last layer's outputs are scores, and scores may be negative
            network.append(nn.ReLU())
    return network


@quiet_broken_pipe()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps (default 400)")
    parser.add_argument("--batch", type=int, default=64, help="images a step (default 64)")
    parser.add_argument("--width", type=int, default=128, help="width of the hidden layers (default 128)")
    parser.add_argument("--init", choices=["he", "default"], default="he", help="the first weights (default he)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to compute (default cpu)")
    options = parser.parse_args()
    if min(options.steps, options.batch, options.width) < 1:
        parser.error("--steps, --batch and --width must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; leave it out to compute on the CPU")

    torch.manual_seed(0)
    torch.set_num_threads(1)  # one core, as each rank will have one; layers this small gain nothing from more
    data = digits()
    images, labels = (part.to(options.device) for part in data.training.batch(range(len(data.training))))
    unseen, truth = (part.to(options.device) for part in data.validation.batch(range(len(data.validation))))
    network = build_network(options.width, options.init).to(options.device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)

    parameters = sum(parameter.numel() for parameter in network.parameters())
    with torch.no_grad():  # how strongly the outputs vary from image to image, compared with the pixels
        signal = float(network(images).std(dim=0).mean() / images.std(dim=0).mean())
    print(f"data      {data.description}")
    print(f"network   {LAYERS} linear layers, {parameters:,} parameters, on {options.device}")
    print(f"signal    {signal:.2g} of the differences between images reaches the last layer\n")

    print(f"{'step':>6}{'loss':>10}{'samples/s':>12}")
    begun, every, speeds = time.perf_counter(), max(1, options.steps // 8), []
    for step in range(1, options.steps + 1):
        chosen = torch.randint(len(images), (options.batch,), device=options.device)
        loss = functional.cross_entropy(network(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0:
            loss_now = loss.item()  # a GPU works on after Python has moved on; this waits for it, so the clock is right
            speeds.append(every * options.batch / (time.perf_counter() - begun))
            print(f"{step:>6}{loss_now:>10.4f}{speeds[-1]:>12,.0f}")
            begun = time.perf_counter()

    with torch.no_grad():
        accuracy = float((network(unseen).argmax(dim=1) == truth).float().mean())
    if accuracy < 0.5:
        sys.exit(f"\nit did not learn: {accuracy:.1%} of the unseen digits read, and guessing gets {1 / CLASSES:.0%}")
    print(f"\nconclusion: one process reads {accuracy:.1%} of the digits held back (guessing: {1 / CLASSES:.0%}),")
    print(f"            learning from {statistics.median(speeds):,.0f} samples/s: the speed to beat")


if __name__ == "__main__":
    main()
