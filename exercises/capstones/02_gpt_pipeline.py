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
