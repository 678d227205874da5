"""A pipeline for a small GPT, within a limit of memory. You write this file; here is its contract.

    def cut(model: mp.models.GPT, rank: int, ranks: int) -> nn.Module
    def train_step(stage: nn.Module, comms: mp.Comms, inputs, targets, microbatches: int)
        -> torch.Tensor | None

`cut` is called once on each rank, with the whole model, which is the same on all ranks. It
returns this rank's part. `train_step` is called on all ranks, and does the forward and the
backward of one batch.

  - `model.pipeline_layers()`: an embedding, blocks, and a head, one after another; a pipeline
    may cut between any two. The head reads its logits off the embedding's weights: `tied=True`,
    one parameter in two layers.
  - `inputs`, `targets`: the tokens, and the token after each; numbers of shape (samples, time),
    the same on all ranks.
  - `microbatches`: into how many parts the batch is cut; no part is empty, and they need not
    have equally many samples.
  - What to return: the mean loss of the batch (`mp.models.cross_entropy`) on the rank that knows
    it, None on others.

What must hold:

  1. Each layer is on one rank, and no rank has more than ⌈layers / ranks⌉. After `cut`, nothing
     else of the model is in a rank's memory. The tied weight is on both ranks that need it.
  2. The loss, and the gradients in `stage.parameters()`, are those of one process with the whole
     batch; so are those of the tied weight, the same bits on both of its ranks. Gradients are
     None before each step; the caller updates.
  3. Memory: of what its layers compute, a rank never holds more than one process holds after the
     forward of ONE micro-batch through the whole model, and a quarter more.
  4. Time: a layer's forward takes 1, its backward 2, and messages nothing. A step of p ranks and
     m micro-batches takes at most 1.4 · 3 · ⌈layers / ranks⌉ · (m + p − 1).
  5. Nobody waits for ever, though a send waits until it is received: messages are those of
     `send`, `recv`, `isend` and `irecv`, between any two ranks. When the step ends, all of them
     have been waited for.

Any number of ranks from 1 on, and of micro-batches from 1 on. Weights and activations are
float64.

Lesson: docs/capstones/02_gpt_pipeline.md          Check it: microparallel learn check gpt-pipeline
"""

# ┌ hole
from collections import deque

import torch
from torch import nn

import microparallel as mp


def cut(model: mp.models.GPT, rank: int, ranks: int) -> nn.Module:
    """Give each rank a run of layers, as evenly as it goes; the first ranks have one more."""
    layers = model.pipeline_layers()
    mine = torch.arange(len(layers)).tensor_split(ranks)[rank]
    return nn.Sequential(*(layers[number] for number in mine.tolist()))


class Neighbour:
    """Sends to a rank without waiting for it, but for the message before: so at most one is on its way."""

    def __init__(self, comms: mp.Comms, rank: int) -> None:
        self._comms, self._rank = comms, rank
        self._open: mp.Request | None = None

    def send(self, tensor: torch.Tensor) -> None:
        self.wait()
        self._open = self._comms.isend(tensor, self._rank)

    def recv(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._comms.recv(shape, self._rank, torch.float64)

    def wait(self) -> None:
        if self._open is not None:
            self._open.wait()
            self._open = None


def train_step(
    stage: nn.Module, comms: mp.Comms, inputs: torch.Tensor, targets: torch.Tensor, microbatches: int
) -> torch.Tensor | None:
    """1F1B: rank r is p − 1 − r forwards ahead, then one forward and one backward in turn; then sum the tied weight."""
    rank, last = comms.rank, comms.world_size - 1
    before, behind = Neighbour(comms, rank - 1), Neighbour(comms, rank + 1)
    parts = list(zip(inputs.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True))
    dim = next(stage.parameters()).shape[-1]  # every layer's first parameter ends with it
    kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # what came in and went out, until its backward
    losses = []

    def forward(number: int) -> None:
        tokens, wanted = parts[number]
        came = tokens if rank == 0 else before.recv((*tokens.shape, dim)).requires_grad_()
        outputs = stage(came)
        if rank == last:
            outputs = mp.models.cross_entropy(outputs, wanted) * (len(tokens) / len(inputs))
            losses.append(outputs.detach())
        else:
            behind.send(outputs.detach())
        kept.append((came, outputs))

    def backward() -> None:
        came, outputs = kept.popleft()
        outputs.backward(None if rank == last else behind.recv(outputs.shape))
        if rank > 0:
            before.send(came.grad)

    ahead = min(last - rank, microbatches)
    for number in range(ahead):
        forward(number)
    for number in range(ahead, microbatches):
        forward(number)
        backward()
    for _ in range(ahead):
        backward()
    before.wait()
    behind.wait()
    if last > 0 and rank in (0, last):
        add_the_other_end(tied_weight(stage, rank), Neighbour(comms, last - rank))
    return sum(losses) if rank == last else None


def tied_weight(stage: nn.Module, rank: int) -> nn.Parameter:
    return stage[0].token.weight if rank == 0 else stage[-1].linear.weight


def add_the_other_end(weight: nn.Parameter, other: Neighbour) -> None:
    """The embedding's gradient and the head's are parts of one: both ranks add them up, and get the same bits."""
    other.send(weight.grad.clone())
    weight.grad += other.recv(weight.shape)
    other.wait()


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> None:
        torch.manual_seed(0)
        model = mp.models.GPT(vocabulary=16, context=8, dim=16, heads=2, depth=4, tied=True).double()
        tokens = torch.randint(16, (8, 9))
        alone = model(tokens[:, :-1], tokens[:, 1:])
        stage = cut(model, comms.rank, comms.world_size)
        loss = train_step(stage, comms, tokens[:, :-1], tokens[:, 1:], 4)
        if loss is not None:
            print(f"one process: {alone.item():.9f}, the pipeline: {loss.item():.9f}")

    mp.launch(try_it, 3)
# └
