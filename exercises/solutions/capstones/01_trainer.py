"""A data-parallel trainer that survives a kill. You write this file; here is its contract.

    def train(comms: mp.Comms, job) -> None

Every rank calls `train` with the same job. When it returns, `job.model` has been trained for
`job.steps` steps in all.

  - `job.model`: an nn.Module in float64. The weights that it has on rank 0 are those to begin
    with.
  - `job.optimizer`: a torch.optim.Optimizer for the model's parameters; it keeps a state.
  - `job.loss(outputs, targets)`: the mean over these samples.
  - `job.data(numbers)`: inputs and targets of the samples with these numbers. A rank calls it
    once in each step.
  - `job.samples`, `job.batch`: how many samples there are, 0, 1, 2, …, and how many all ranks
    together use in a step.
  - `job.report(step, loss)`: to be called after each step: how many steps are done, and the loss
    of the whole batch.
  - `job.folder`: a Path, where checkpoints are; all ranks see it. It is there, and empty at
    first.
  - `job.steps`: how many in all. `job.save_every`: every so many steps a checkpoint is complete
    before the next begins.

What must hold:

  1. An epoch uses each sample exactly once, in another order than the epoch before. Its last
     batch has what is left.
  2. Each rank computes its share of each batch; shares differ by one sample at most, and none is
     empty.
  3. Losses and weights are those of one process that has the whole batch, within 1e-12; and the
     same bits on all ranks.
  4. Any rank, or all of them, may be killed at any moment (SIGKILL, or a power cut), also in a
     save. Then `train` is called again with the same folder, in new processes, as often as it
     takes. It goes on from the last complete checkpoint, and in the end the weights are those of
     an undisturbed run, bit for bit.

Everything in `comms` may be used; the library's own trainers, samplers and checkpoints may not.

Lesson: docs/capstones/01_trainer.md          Check it: microparallel learn check trainer
"""

# ┌ hole
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import microparallel as mp


def train(comms: mp.Comms, job) -> None:
    """Train from the last checkpoint on, if there is one, and save every so many steps."""
    done = restore(comms, job)
    while done < job.steps:
        batch = batch_of(done, job.samples, job.batch)
        loss = compute(comms, job, batch)
        job.optimizer.step()
        done += 1
        job.report(done, loss)
        if done % job.save_every == 0:
            save(comms, job, done)


def batch_of(step: int, samples: int, size: int) -> list[int]:
    """The samples of a step: a function of its number, so that no place in an epoch can be forgotten."""
    epoch, place = divmod(step, -(-samples // size))
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[place * size :][:size]


def compute(comms: mp.Comms, job, batch: list[int]) -> float:
    """Leave the gradients of the whole batch on every rank, and return its loss."""
    inputs, targets = job.data(batch[comms.rank :: comms.world_size])
    job.optimizer.zero_grad()
    loss = job.loss(job.model(inputs), targets) * (len(inputs) / len(batch))  # this rank's part of the mean
    loss.backward()
    gradients = [parameter.grad for parameter in job.model.parameters()]
    row = torch.cat([loss.detach().reshape(1), *(gradient.reshape(-1) for gradient in gradients)])
    row = comms.all_reduce(row)
    parts = row[1:].split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return row[0].item()


def save(comms: mp.Comms, job, done: int) -> None:
    """Rank 0 writes aside, brings the bytes to the disk, and only then gives the file its name."""
    if comms.rank == 0:
        aside = job.folder / "checkpoint.writing"
        with aside.open("wb") as file:
            torch.save({"done": done, "model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(job.folder / "checkpoint.pt")
        names = os.open(job.folder, os.O_RDONLY)
        os.fsync(names)  # the new name is on the disk, too
        os.close(names)
    comms.barrier()  # nobody is a step ahead of what can be restored


def restore(comms: mp.Comms, job) -> int:
    """How many steps are done: those of the checkpoint, or none, and then all ranks begin with rank 0's weights."""
    path = job.folder / "checkpoint.pt"
    if not path.exists():
        for parameter in job.model.parameters():
            comms.broadcast(parameter.data, 0)
        return 0
    state = torch.load(path)
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    return state["done"]


if __name__ == "__main__":

    def try_it(comms: mp.Comms, folder: Path) -> None:
        values = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).double()
        model = nn.Linear(3, 1).double()

        def report(step: int, loss: float) -> None:
            if comms.rank == 0:
                print(f"step {step:2}  loss {loss:.6f}")
            if step == 6 and not (folder / "died").exists():
                comms.barrier()
                (folder / "died").touch()
                os._exit(1)

        job = SimpleNamespace(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            loss=nn.functional.mse_loss,
            data=lambda numbers: (values[numbers, :3], values[numbers, 3:]),
            samples=20,
            batch=8,
            report=report,
            folder=folder,
            steps=12,
            save_every=4,
        )
        train(comms, job)

    with tempfile.TemporaryDirectory() as name:
        for _ in range(2):  # steps 5 and 6 come twice, with the same losses
            try:
                mp.launch(try_it, 3, Path(name))
            except mp.errors.RankFailed as failed:
                print(str(failed).splitlines()[0])
# └
