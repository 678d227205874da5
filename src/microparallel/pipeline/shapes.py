"""Before a step: let every rank know what will cross its boundaries, if that is not what it was the last time.

```
rank 0   describes its batch, or says "as before" ─→ every rank
if new   dry run of stage 0 ─→ what it returns ─→ dry run of stage 1 ─→ …
```
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from microparallel.comms import Comms
from microparallel.errors import UsageError
from microparallel.pipeline.interpreter import PIPELINE_TAG
from microparallel.pipeline.microbatches import batch_size, sizes, split_batch
from microparallel.pipeline.programs import Schedule
from microparallel.pipeline.stage import Boundary, DryRun, Stage

Crossings = dict[int, Boundary]  # what crosses this rank's boundaries, by the stage that returns it; -1 is the batch


@dataclass(frozen=True)
class Plan:
    """What all ranks know of a step: its samples, and what crosses the boundaries for each micro-batch."""

    samples: int
    crossings: list[Crossings]


class Shapes:
    """One rank's knowledge of what crosses its boundaries."""

    def __init__(self, comms: Comms, schedule: Schedule, stages: Mapping[int, Stage], training: bool) -> None:
        self._rank = comms.rank
        self._ranks = comms.world_size
        self._messages = comms.messages
        self._homes = schedule.homes
        self._readers = schedule.readers
        self._stages = stages
        self._training = training
        self._dry_runs = {index: DryRun(index, stage.modules) for index, stage in stages.items()}
        self._plans: dict[str, Plan] = {}
        self._last = ""

    def agree(self, inputs: Any, microbatches: int, allow_fewer: bool) -> Plan:
        """Let the rank with the first stage tell all others what is coming; every rank calls this at once.

        Args:
            inputs: the batch; None on a rank without the first stage, and where there are no samples at all.
            microbatches: into how many micro-batches the batch is cut.
            allow_fewer: cut a batch with fewer samples than that into fewer.
        """
        parts: dict[int, Boundary] = {}
        if self._homes[0] == self._rank:
            text, parts = _describe(inputs, microbatches, allow_fewer)
            for rank in range(self._ranks):
                if rank != self._rank:
                    self._tell(rank, text if text != self._last else "")
        else:
            text = self._hear(self._homes[0]) or self._last
        self._last = text
        if text not in self._plans:
            self._plans[text] = self._learn(json.loads(text), parts)
        return self._plans[text]

    def _learn(self, description: dict[str, Any], parts: Mapping[int, Boundary]) -> Plan:
        """Dry-run this rank's stages on what each size of micro-batch makes of them."""
        by_size = {size: self._crossings(parts.get(size)) for size in dict.fromkeys(description["sizes"])}
        return Plan(description["samples"], [by_size[size] for size in description["sizes"]])

    def _crossings(self, inputs: Boundary | None) -> Crossings:
        crossings = {} if inputs is None else {-1: inputs}
        for index, readers in enumerate(self._readers):
            if index in self._stages:
                crossings[index] = self._dry_run(index, crossings[index - 1])
                for rank in readers:
                    self._tell(rank, crossings[index].to_json())
            elif self._rank in readers:
                crossings[index] = Boundary.from_json(self._hear(self._homes[index]))
        last = len(self._homes) - 1
        if last in self._stages:
            # Nobody waits for what the last stage returns, which may be anything, or need the targets.
            with contextlib.suppress(UsageError):
                self._dry_run(last, crossings[last - 1])
        return crossings

    def _dry_run(self, index: int, inputs: Boundary) -> Boundary:
        """What a stage returns; it may be found to change its input in place."""
        outputs = self._dry_runs[index].outputs(inputs, self._training)
        self._stages[index].copies_input |= self._dry_runs[index].changes_input
        return outputs

    # ── notes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, rank: int, text: str) -> None:
        """Send a text, after its length."""
        content = text.encode()
        self._messages.isend(torch.tensor([len(content)]), rank, PIPELINE_TAG).wait()
        if content:
            self._messages.isend(torch.frombuffer(bytearray(content), dtype=torch.uint8), rank, PIPELINE_TAG).wait()

    def _hear(self, rank: int) -> str:
        length = torch.zeros(1, dtype=torch.int64)
        self._messages.irecv(length, rank, PIPELINE_TAG).wait()
        content = torch.empty(int(length), dtype=torch.uint8)
        if len(content):
            self._messages.irecv(content, rank, PIPELINE_TAG).wait()
        return bytes(content.tolist()).decode()


def _describe(inputs: Any, microbatches: int, allow_fewer: bool) -> tuple[str, dict[int, Boundary]]:
    """The batch in words, for all ranks; and for this one, what a micro-batch of each size looks like."""
    if inputs is None:
        return json.dumps({"samples": 0, "sizes": [], "inputs": []}), {}
    samples = batch_size(inputs, "inputs")
    count = min(microbatches, samples) if allow_fewer else microbatches
    examples = dict(zip(sizes(samples, count), split_batch(inputs, count, "inputs"), strict=True))
    parts = {size: Boundary.of(part, "inputs").without_gradients() for size, part in examples.items()}
    described = [str(part) for part in parts.values()]
    return json.dumps({"samples": samples, "sizes": sizes(samples, count), "inputs": described}), parts
