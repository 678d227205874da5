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
