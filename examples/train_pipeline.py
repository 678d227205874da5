"""Train your own model as a pipeline: what a script needs, from the first batch to the saved model.

Question   You have a model, a loss and an optimizer. What changes in the script when the layers
           are spread over several processes?
Look at    train(): the pipeline takes the place of the model, `pipe.step` that of forward and
           backward. Every rank has an optimizer for its own layers, and clips by the norm of all
           gradients. In the end the saved file fits the plain model, which has the same loss.
Try        python examples/train_pipeline.py --ranks 2 --schedule gpipe
           python examples/train_pipeline.py --schedule interleaved   two stages on every rank
           python examples/train_pipeline.py --batch 50               micro-batches of 6 and 7
           torchrun --nproc-per-node=4 examples/train_pipeline.py     ranks that torchrun starts
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import microparallel as mp
from microparallel.broken_pipe import quiet_broken_pipe
from microparallel.train.data import digits

TORCHRUN = "WORLD_SIZE" in os.environ  # it started this process, as one of its ranks
PIXELS, CLASSES = 64, 10
SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved", "zb-h1"]


def build_model(width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(PIXELS, width), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(width, CLASSES))


def train(comms: mp.Comms, options: argparse.Namespace, path: Path) -> float:
    """Every rank runs this; returns the loss on the images held back, which is the same on every rank."""
    torch.manual_seed(0)  # every rank builds the same model, and keeps its own layers
    pipe = mp.Pipeline(
        build_model(options.width),
        comms,
        schedule=options.schedule,
        microbatches=options.microbatches,
        loss_fn=functional.cross_entropy,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)  # of this rank's layers
    data = digits()
    order = torch.Generator().manual_seed(1)  # the same batches on every rank
    unseen, truth = data.validation.batch(range(len(data.validation)))
    if comms.rank == 0:
        print(f"{data.description}; {pipe.program.name} on {comms.world_size} ranks")
        print(f"{'step':>6}{'loss':>10}{'gradient norm':>16}{'unseen images':>16}")

    for step in range(1, options.steps + 1):
        inputs, targets = data.training.batch(torch.randint(len(data.training), (options.batch,), generator=order))
        optimizer.zero_grad()
        loss = pipe.step(inputs, targets)
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
        if step == 1 or step % max(1, options.steps // 5) == 0:
            validation = pipe.evaluate(unseen, truth)  # dropout is off, and on again after it
            if comms.rank == 0:
                print(f"{step:>6}{loss.item():>10.4f}{norm.item():>16.3f}{validation.item():>16.4f}")

    state = pipe.whole_state_dict()  # all ranks call it; the first has the whole
    if state is not None:
        torch.save(state, path)
    return pipe.evaluate(unseen, truth).item()


def check_saved_model(path: Path, width: int, expected: float) -> str:
    """Load the file into the plain model, and compare its loss with the pipeline's."""
    model = build_model(width)
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    model.eval()
    unseen = digits().validation
    inputs, targets = unseen.batch(range(len(unseen)))
    with torch.no_grad():
        scores = model(inputs)
    loss = functional.cross_entropy(scores, targets).item()
    accuracy = (scores.argmax(dim=1) == targets).float().mean().item()
    if abs(loss - expected) > 1e-5 * max(1.0, expected):
        sys.exit(f"\nthe plain model's loss is {loss:.6f}, and the pipeline's was {expected:.6f}")
    return (
        f"\nconclusion: the saved model, whole in one process, has the pipeline's loss:\n"
        f"            {loss:.6f} (pipeline: {expected:.6f}) on unseen images, {accuracy:.1%} read right"
    )


def run(options: argparse.Namespace, path: Path) -> None:
    if TORCHRUN:
        with mp.connect() as comms:
            expected = train(comms, options, path)
            first = comms.rank == 0
    else:
        expected, first = mp.launch(train, options.ranks, options, path, timeout=600)[0], True
    if first:
        print(check_saved_model(path, options.width, expected))


@quiet_broken_pipe()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes (default 4); torchrun brings its own")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="default 1f1b")
    parser.add_argument("--microbatches", type=int, default=8, help="of a batch (default 8)")
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    parser.add_argument("--batch", type=int, default=64, help="images a step (default 64)")
    parser.add_argument("--width", type=int, default=128, help="width of the hidden layers (default 128)")
    parser.add_argument("--out", type=Path, help="where to save the model (default: not kept)")
    options = parser.parse_args()
    if TORCHRUN and options.ranks is not None:
        parser.error(f"--ranks {options.ranks}: torchrun decides on that, with --nproc-per-node; leave it out")
    options.ranks = 4 if options.ranks is None else options.ranks
    if min(options.ranks, options.microbatches, options.steps, options.width) < 1:
        parser.error("--ranks, --microbatches, --steps and --width must be at least 1")
    if options.batch < options.microbatches:
        parser.error(f"--batch {options.batch}: {options.microbatches} micro-batches need an image each")
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(options, options.out or Path(folder) / "model.pt")
    except (mp.errors.UsageError, mp.errors.LaunchError) as failure:
        sys.exit(getattr(failure, "refusal", None) or str(failure))


if __name__ == "__main__":
    main()
