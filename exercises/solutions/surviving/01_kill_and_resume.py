"""Kill and resume.

You write a training that may be killed at any moment, and any number of times. It ends with the same weights, bit for
bit, as a training that was never killed. After each kill `train` is called again with the same folder, in new
processes, and goes on from what it finds there:

    first call     1 ─ 2 ─ 3 ─ 4 ─ save ─ 5 ─ 6 ✗             both ranks are dead, at any line of yours
    second call                        └─ 5 ─ 6 ─ 7 ─ 8 ─ save ─ 9 ✗
    third call                                              └─ 9 ─ 10 ─ 11 ─ 12      the same weights as without ✗

Two things make it hard. Everything that the next step depends on must be in the checkpoint: what is not in it starts
again from its first value. And a kill may come while you save: then the checkpoint before must still be there, and
whole. A power cut is worse: bytes that the system has not brought to the disk are lost, even if the file's name is
there.

Lesson: docs/surviving/01_what_if_a_rank_dies.md          Check it: microparallel learn check kill-and-resume
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import microparallel as mp

BATCH = 4  # samples of each rank in a step


class Order:
    """Which samples come next: every epoch in an order of its own, the same on all ranks.

    Attributes:
        epoch: how many epochs have ended.
        place: how many samples of this epoch were drawn.
    """

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch, self.place = samples, 0, 0

    def draw(self, count: int) -> list[int]:
        """The numbers of the next samples; `count` divides the number of samples."""
        if self.place == self.samples:
            self.epoch, self.place = self.epoch + 1, 0
        shuffled = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.place += count
        return shuffled[self.place - count : self.place]


class Training:
    """All that changes while a rank trains."""

    def __init__(self, comms: mp.Comms, samples: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 1)).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 10))
        self.order = Order(samples)
        self.done = 0  # steps
        torch.manual_seed(1 + comms.rank)  # dropout draws other numbers on each rank


def save(training: Training, comms: mp.Comms, folder: Path) -> None:
    """Put a checkpoint into the folder; every rank calls this after the same step."""
    # ┌ hole
    #: # 1. What does the next step depend on? Model, optimizer and schedule have state_dict(); torch.get_rng_state() is
    #: #    a tensor; the rest are whole numbers. Which of these differ from rank to rank? comms.all_gather(tensor)
    #: #    gives every rank a list of all ranks' tensors.
    #: # 2. torch.save(state, file) writes a dict of such things. The power may fail at any moment: which file may
    #: #    you write into, and when does it get the name that restore looks for? os.fsync(file.fileno()) returns
    #: #    when the system has brought to the disk what it was given of a file; file.flush() gives it the rest.
    #: raise NotImplementedError("save all that the next step depends on, so that a kill cannot spoil it")
    state = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "schedule": training.schedule.state_dict(),
        "epoch": training.order.epoch,
        "place": training.order.place,
        "done": training.done,
        "random": comms.all_gather(torch.get_rng_state()),  # of each rank
    }
    if comms.rank == 0:
        aside = folder / "checkpoint.writing"
        with aside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # first the bytes …
        aside.replace(folder / "checkpoint.pt")  # … then the name: one sees the old one or the new one
        names = os.open(folder, os.O_RDONLY)
        os.fsync(names)  # the new name is on the disk, too
        os.close(names)
    # └


def restore(training: Training, comms: mp.Comms, folder: Path) -> None:
    """Go on from the checkpoint in the folder, if there is one; every rank calls this before its first step."""
    # ┌ hole
    #: # torch.load(path) reads what torch.save has written; model, optimizer and schedule have load_state_dict(…);
    #: # torch.set_rng_state(tensor). Which ranks need what?
    #: raise NotImplementedError("go on from the checkpoint, if there is one")
    path = folder / "checkpoint.pt"
    if not path.exists():
        return
    state = torch.load(path)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.schedule.load_state_dict(state["schedule"])
    training.order.epoch, training.order.place = state["epoch"], state["place"]
    training.done = state["done"]
    torch.set_rng_state(state["random"][comms.rank])
    # └


def train(
    comms: mp.Comms,
    data: Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]],
    samples: int,
    report: Callable[[int, float], None],
    folder: Path,
    steps: int,
    save_every: int,
) -> nn.Module:
    """Train for so many steps in all, and return the model. May be killed, and called again.

    Args:
        comms: of two ranks.
        data: gives inputs and targets of the samples with these numbers; a rank asks once in each step.
        samples: how many there are; each is used exactly once an epoch, by one of the ranks.
        report: to be told, after each step, how many steps are done and this rank's loss. The first is step 1.
        folder: where checkpoints are; all ranks see it. It is there, and empty at first.
        steps: how many.
        save_every: every so many steps a checkpoint is complete before the next step ends.
    """
    training = Training(comms, samples)
    # ┌ hole
    #: # This loop trains, and knows nothing of checkpoints. Where do restore and save belong? (training.done counts.)
    restore(training, comms, folder)
    # └
    while training.done < steps:
        batch = training.order.draw(BATCH * comms.world_size)
        inputs, targets = data(batch[BATCH * comms.rank :][:BATCH])
        training.optimizer.zero_grad()
        loss = (training.model(inputs) - targets).square().mean()
        loss.backward()
        for parameter in training.model.parameters():
            comms.all_reduce(parameter.grad, op="mean")
        training.optimizer.step()
        training.schedule.step()
        training.done += 1
        report(training.done, loss.item())
        # ┌ hole
        #: # Every save_every steps …
        #: raise NotImplementedError("call restore and save where they belong, and write them")
        if training.done % save_every == 0:
            save(training, comms, folder)
        # └
    return training.model


if __name__ == "__main__":

    def try_it(comms: mp.Comms, folder: Path, dies_after: int) -> None:
        values = torch.randn(24, 7, generator=torch.Generator().manual_seed(0)).double()

        def report(step: int, loss: float) -> None:
            if comms.rank == 0:
                print(f"step {step:2}  loss {loss:.6f}")
            if step == dies_after:
                os._exit(1)

        train(comms, lambda numbers: (values[numbers, :6], values[numbers, 6:]), 24, report, folder, 12, save_every=4)

    with tempfile.TemporaryDirectory() as name:
        for dies_after in (6, 9, 0):  # steps 5 and 6 come twice, and step 9: with the same losses as the first time
            try:
                mp.launch(try_it, 2, Path(name), dies_after)
            except mp.errors.RankFailed as failed:
                print(str(failed).splitlines()[0])
