"""Before a step: every rank learns the shapes of the tensors that its stages will receive and return.

```
rank 0   describes its batch, or sends "" for "as in the last step" ─→ every rank
if new   dry run of stage 0 ─→ what it returns ─→ dry run of stage 1 ─→ …
```
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from microparallel.comms import Comms
from microparallel.errors import UsageError
from microparallel.pipeline.interpreter import PIPELINE_TAG
from microparallel.pipeline.microbatches import batch_size, sizes, split_batch
from microparallel.pipeline.programs import Schedule
from microparallel.pipeline.stage import Boundary, DryRun, Stage

Boundaries = dict[int, Boundary]  # what a stage returns, by the number of the stage; -1 is the batch itself


@dataclass(frozen=True)
class BatchShapes:
    """What a rank knows of a batch before its step.

    Attributes:
        lengths: for each share of the batch, the samples of each of its micro-batches.
        microbatches: for each micro-batch of all shares, one after another, what crosses boundaries.
    """

    lengths: list[list[int]]
    microbatches: list[Boundaries]

    @property
    def samples(self) -> int:
        """How many samples all shares have."""
        return sum(map(sum, self.lengths))


class Shapes:
    """What one rank knows of the batches so far, and how it learns the shapes of a new one."""

    def __init__(self, comms: Comms, schedule: Schedule, stages: Mapping[int, Stage], training: bool) -> None:
        self._rank = comms.rank
        self._ranks = comms.world_size
        self._messages = comms.messages
        self._homes = schedule.homes
        self._readers = schedule.readers
        self._stages = stages
        self._training = training
        self._device = comms.device
        self._dry_runs = {
            index: DryRun(index, stage.modules, stage.precision, comms.device) for index, stage in stages.items()
        }
        self._known: dict[str, BatchShapes] = {}  # by the description that rank 0 sends
        self._last = ""  # the description of the last batch

    def agree(self, shares: Sequence[Any], microbatches: int, allow_fewer: bool) -> BatchShapes:
        """Let the rank with the first stage describe the batch to all others; every rank calls this before a step.

        Args:
            shares: the inputs of each share of the batch; there are none where there are no samples. They are looked
                at on the rank with the first stage alone.
            microbatches: into how many micro-batches each share is cut.
            allow_fewer: cut a share with fewer samples than that into fewer.
        """
        kinds: list[Boundary] = []
        if self._homes[0] == self._rank:
            text, kinds = _describe(shares, microbatches, allow_fewer, self._device.type)
            for rank in range(self._ranks):
                if rank != self._rank:
                    self._send(rank, text if text != self._last else "")
        else:
            text = self._receive(self._homes[0]) or self._last
        self._last = text
        if text not in self._known:
            self._known[text] = self._learn(json.loads(text), kinds)
        return self._known[text]

    def _learn(self, description: dict[str, Any], kinds: Sequence[Boundary]) -> BatchShapes:
        """Dry-run this rank's stages, once for each kind of micro-batch; the rank with the first stage has these."""
        known = [self._boundaries(kinds[number] if kinds else None) for number in range(len(description["kinds"]))]
        return BatchShapes(description["lengths"], [known[number] for number in description["kind"]])

    def _boundaries(self, inputs: Boundary | None) -> Boundaries:
        """What crosses this rank's boundaries: it dry-runs its own stages, and other ranks send what theirs return."""
        boundaries = {} if inputs is None else {-1: inputs}
        for index, readers in enumerate(self._readers):
            if index in self._stages:
                boundaries[index] = self._dry_run(index, boundaries[index - 1])
                for rank in readers:
                    self._send(rank, boundaries[index].to_json())
            elif self._rank in readers:
                boundaries[index] = Boundary.from_json(self._receive(self._homes[index]))
        last = len(self._homes) - 1
        if last in self._stages:
            # No rank receives what the last stage returns, so it may be anything, or need the targets.
            with contextlib.suppress(UsageError):
                self._dry_run(last, boundaries[last - 1])
        return boundaries

    def _dry_run(self, index: int, inputs: Boundary) -> Boundary:
        """What a stage returns; and note whether it changes its input in place."""
        outputs = self._dry_runs[index].outputs(inputs, self._training)
        self._stages[index].copies_input |= self._dry_runs[index].changes_input
        return outputs

    # ── texts as messages ───────────────────────────────────────────────────────────────────────────────────────

    def _send(self, rank: int, text: str) -> None:
        """Send the length of a text, then the text."""
        content = text.encode()
        self._messages.isend(torch.tensor([len(content)], device="cpu"), rank, PIPELINE_TAG).wait()
        if content:
            self._messages.isend(torch.frombuffer(bytearray(content), dtype=torch.uint8), rank, PIPELINE_TAG).wait()

    def _receive(self, rank: int) -> str:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._messages.irecv(length, rank, PIPELINE_TAG).wait()
        content = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        if len(content):
            self._messages.irecv(content, rank, PIPELINE_TAG).wait()
        return bytes(content.tolist()).decode()


def _describe(shares: Sequence[Any], microbatches: int, allow_fewer: bool, device: str) -> tuple[str, list[Boundary]]:
    """The batch as a text for all ranks; and for this rank, the kinds of micro-batches that there are.

    Micro-batches of one size are of one kind if they are of one share, or if their shares have tensors of the same
    shapes.
    What stages return depends on `torch.autocast`, too.
    """
    lengths: list[list[int]] = []
    kind: list[str] = []  # of each micro-batch
    kinds: dict[str, Boundary] = {}
    for inputs in shares:
        samples = batch_size(inputs, "inputs")
        count = min(microbatches, samples) if allow_fewer else microbatches
        lengths.append(sizes(samples, count))
        examples = dict(zip(lengths[-1], split_batch(inputs, count, "inputs"), strict=True))
        described = {size: Boundary.of(part, "inputs").without_gradients() for size, part in examples.items()}
        kinds |= {str(boundary): boundary for boundary in described.values()}
        kind += [str(described[size]) for size in lengths[-1]]
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    numbers = {text: number for number, text in enumerate(kinds)}
    text = {"lengths": lengths, "kind": [numbers[one] for one in kind], "kinds": [*kinds], "autocast": autocast}
    return json.dumps(text), list(kinds.values())
