"""A training loop that goes on when a rank is killed, with the weights of one that was left alone.

Question   A rank is killed in the middle of a step. What must be saved so that nothing is lost?
Look at    the step from which the ranks go on; whether all weights have the same bits in the end.
Try        python examples/survive.py --every 10            what does a failure cost now?
           python examples/survive.py --forget sampler      is every sample used once an epoch?
           python examples/survive.py --forget optimizer    AdamW begins anew: what of the loss?
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import microparallel as mp
from microparallel.broken_pipe import quiet_broken_pipe
from microparallel.train.data import digits

BATCH = 64


def train(comms: mp.Comms, folder: Path, options: argparse.Namespace, kill: bool) -> tuple[float, dict]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    model = mp.DataParallel(network, comms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    data = digits().training
    sampler = mp.ShardedSampler(len(data), BATCH, comms=comms)
    torch.manual_seed(100 + comms.rank)  # each rank drops other neurons

    state = {"optimizer": optimizer, "sampler": sampler}
    state.pop(options.forget, None)  # what is not in the checkpoint begins anew
    with mp.Checkpointer(folder, comms, model, **state) as checkpointer:
        step = checkpointer.restore()
        if comms.rank == 0 and step:
            print(f"                   going on from step {step}")
        while step < options.steps:
            for indices in sampler:
                if kill:
                    kill_if_wanted(comms.rank, step, folder, options.kill)
                images, labels = data.batch(indices)
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                step += 1
                if step % options.every == 0:
                    checkpointer.save(step)
                if step == options.steps:
                    break
    return loss.item(), model.state_dict()


def kill_if_wanted(rank: int, step: int, folder: Path, kills: list[str]) -> None:
    """What the system does to a process when memory runs out, say: it has no time to say goodbye."""
    for number, kill in enumerate(kills):
        done = folder / f"killed-{number}"
        if kill == f"{rank}:{step}" and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def tell(error: mp.errors.LaunchError, number: int, ranks: int) -> None:  # noqa: ARG001
    print(f"failure {number}:         {str(error).partition(' (')[0]}")


@quiet_broken_pipe()
def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder, "alone")
        (loss, whole), _ = mp.launch(train, 2, alone, options, False)
        print(f"left alone:        loss {loss:.4f} after {options.steps} steps")
        killed = Path(folder, "killed")
        restarts = {"restarts": len(options.kill), "on_restart": tell}
        (loss, again), _ = mp.launch(train, 2, killed, options, True, **restarts)
        print(f"and killed:        loss {loss:.4f} after {options.steps} steps")
    if all(torch.equal(again[name], tensor) for name, tensor in whole.items()):
        print("conclusion: all weights are the same, to the last bit")
        return 0
    furthest = max((again[name] - tensor).abs().max().item() for name, tensor in whole.items())
    print(f"conclusion: weights differ by up to {furthest:.2g}: something was not in the checkpoint")
    return 0 if options.forget else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=1, help="steps from one save to the next")
    parser.add_argument("--kill", action="append", metavar="RANK:STEP", help="default: 1:25")
    parser.add_argument("--forget", choices=["optimizer", "sampler"], help="what is left out of the checkpoint")
    options = parser.parse_args()
    options.kill = options.kill or ["1:25"]
    if options.steps < 1 or options.every < 1:
        parser.error("--steps and --every must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main(parse()))
