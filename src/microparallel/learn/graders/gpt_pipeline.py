"""A pipeline for a GPT: the cut, the numbers of one process, memory, time, and the tied weight.

How a learner cuts the model and orders the work is not looked at. Every parameter has other numbers at first, so a
parameter of a stage is known by its numbers; the model's layers tell when they compute; and memory is what is there.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import descend, require_all_waited
from microparallel.learn.graders._layers import LayerWatch, forwards, makespan
from microparallel.learn.graders._memory import collect_garbage
from microparallel.learn.log import Row
from microparallel.learn.requirements import Suspect, flat, listed, require_equal, require_like, require_type
from microparallel.learn.verdict import Wrong
from microparallel.models import GPT, cross_entropy
from microparallel.text import count

_VOCABULARY, _TIME, _DIM = 23, 8, 16
_TIED = "layers.0.token.weight"
_RATE, _STEPS = 0.5, 2
_MORE_MEMORY, _MORE_TIME = 1.25, 1.4
_TOLERANCE = 1e-10
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A number of ranks, a model of so many blocks, and a batch."""

    ranks: int
    depth: int
    samples: int
    microbatches: int

    @property
    def layers(self) -> int:
        """How many the model has: an embedding, blocks, and a head."""
        return self.depth + 2

    @property
    def most_layers(self) -> int:
        """How many a rank may have."""
        return -(-self.layers // self.ranks)

    @property
    def parts(self) -> list[torch.Tensor]:
        """The numbers of the samples of each micro-batch."""
        return list(torch.arange(self.samples).tensor_split(self.microbatches))


@dataclass(frozen=True)
class Outcome:
    """What one rank has found in each step, and what it has held."""

    names: list[str]  # of its parameters, as the whole model calls them
    losses: list[torch.Tensor | None]
    gradients: list[list[torch.Tensor | None]]
    weights: list[torch.Tensor]  # at the end
    held: int


def check(exam: Exam) -> None:
    """The cut; numbers; memory and time; then other shapes."""
    case = Case(3, 6, 12, 6)
    with exam.step("eight layers on three ranks, each on one, and nothing else in memory") as notes:
        outcomes = _run(exam, case, steps=0)
        notes.append(_require_cut(case, outcomes))
    with exam.step("six micro-batches: the loss and the gradients of one process"):
        outcomes = _run(exam, case)
        _Truth(case).require(outcomes)
        _require_layers_used(exam.rows, case)
    with exam.step("no rank holds more than one micro-batch of the whole model, and a quarter") as notes:
        notes.append(_require_memory(case, outcomes))
    with exam.step("the ranks work at the same time") as notes:
        notes.append(_require_time(case, makespan(exam.rows) / _STEPS))
    for title, other in (
        ("micro-batches of different sizes, on two ranks", Case(2, 4, 7, 4)),
        ("more micro-batches, on four ranks", Case(4, 6, 10, 10)),
        ("fewer micro-batches than ranks", Case(4, 3, 4, 2)),
        ("one rank", Case(1, 2, 4, 2)),
    ):
        with exam.step(title) as notes:
            outcomes = _run(exam, other)
            _require_cut(other, outcomes)
            _Truth(other).require(outcomes)
            _require_layers_used(exam.rows, other)
            notes += [_require_memory(other, outcomes), _require_time(other, makespan(exam.rows) / _STEPS)]


def _run(exam: Exam, case: Case, steps: int = _STEPS) -> list[Outcome]:
    outcomes: list[Outcome] = exam.run(_on_rank, case.ranks, case, steps, _MORE_MEMORY * _held_by_one_process(case))
    return outcomes


# ── on a rank ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _on_rank(learner: Any, comms: Any, case: Case, steps: int, limit: float) -> Outcome:
    """Let the learner cut the model, and do some steps; the update is ours."""
    stage, names, watch = _cut(learner, comms, case, limit)
    losses, gradients = [], []
    for step in range(steps):
        inputs, targets = _batch(case, step)
        with watch.watching():
            loss = learner.train_step(stage, comms, inputs, targets, case.microbatches)
        require_all_waited(comms)
        losses.append(_read_loss(loss, comms.rank))
        gradients.append([None if one.grad is None else one.grad.clone() for one in stage.parameters()])
        descend(stage, gradients[-1], _RATE)
        stage.zero_grad()
    return Outcome(names, losses, gradients, [one.detach().clone() for one in stage.parameters()], watch.most)


def _cut(learner: Any, comms: Any, case: Case, limit: float) -> tuple[nn.Module, list[str], LayerWatch]:
    """A rank's stage, what its parameters are called in the whole model, and the watch on its layers."""
    model = _model(case)
    watch = LayerWatch(model.layers, comms.log, limit)
    there = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    numbers = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    stage = require_type(learner.cut(model, comms.rank, comms.world_size), nn.Module, "what cut returns", "a module")
    watch.leave_out(stage)  # a copy of a layer will do
    del model
    collect_garbage()
    names = [_name_of(parameter, numbers, comms.rank) for parameter in stage.parameters()]
    left = [name for name, parameter in there.items() if parameter() is not None and name not in names]
    if left:
        raise Wrong(
            f"after cut, rank {comms.rank} still holds {left[0]}{' and more' * (len(left) > 1)}, which is not in its "
            "stage: let go of what other ranks compute, or a larger model will not fit"
        )
    return stage, names, watch


def _name_of(parameter: torch.Tensor, numbers: Gradients, rank: int) -> str:
    for name, right in numbers.items():
        if right.shape == parameter.shape and torch.equal(right, parameter):
            return name
    raise Wrong(
        f"the stage of rank {rank} has a parameter of shape {[*parameter.shape]} that is none of the model's: use the "
        "layers of the model, with the weights that they have"
    )


def _read_loss(loss: Any, rank: int) -> torch.Tensor | None:
    if loss is None:
        return None
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        raise Wrong(
            f"the loss that rank {rank} returns still hangs on its graph, and with it everything that was computed: "
            "detach it"
        )
    value = torch.as_tensor(loss, dtype=torch.float64) if isinstance(loss, int | float) else loss
    return require_like(value, torch.zeros((), dtype=torch.float64), f"the loss that rank {rank} returns").clone()


def _model(case: Case, tied: bool = True) -> GPT:
    """The model; every parameter has other numbers, and without `tied` the head has those of the embedding."""
    model = GPT(_VOCABULARY, _TIME, _DIM, heads=2, depth=case.depth, tied=tied).double()
    generator = torch.Generator().manual_seed(case.depth)
    for parameter in model.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if not tied:
        model.load_state_dict(_model(case).state_dict())
    return model


def _batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(_VOCABULARY, (case.samples, _TIME + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def _require_cut(case: Case, outcomes: Sequence[Outcome]) -> str:
    """Refuse layers that are on no rank, in part or twice, and a rank that has too many; returns how many each has."""
    layers: list[set[int]] = []
    for rank, outcome in enumerate(outcomes):
        layers.append({_layer(name) for name in outcome.names if name != _TIED})
        if len(layers[rank]) > case.most_layers:
            raise Wrong(
                f"rank {rank} has {count(len(layers[rank]), 'layer')}, and {case.most_layers} are the most: "
                f"{case.layers} layers on {count(case.ranks, 'rank')}"
            )
        twice = next((name for name in outcome.names if outcome.names.count(name) > 1), "")
        if twice:
            raise Wrong(
                f"rank {rank} has {twice} twice, as two parameters"
                + (": it is tied, one parameter in two layers, and a copy is no longer tied" * (twice == _TIED))
            )
    for name, _ in _model(case).named_parameters():
        owners = [rank for rank, outcome in enumerate(outcomes) if name in outcome.names]
        if not owners:
            raise Wrong(f"no rank has {name}: layer {_layer(name)} is left out")
        if len(owners) > 1 and name != _TIED:
            raise Wrong(f"ranks {listed(owners)} have {name}: each layer is on one rank")
    ends = sorted({next(rank for rank, mine in enumerate(layers) if layer in mine) for layer in (0, case.layers - 1)})
    owners = [rank for rank, outcome in enumerate(outcomes) if _TIED in outcome.names]
    if owners != ends:
        raise Wrong(f"the tied weight is on ranks {listed(owners)}, and is needed on {listed(ends)}")
    return f"{' '.join(str(len(mine)) for mine in layers)} layers"


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _require_layers_used(rows: Sequence[Row], case: Case) -> None:
    """Refuse a step that does not compute with the model's own layers, micro-batch by micro-batch."""
    done = forwards(rows)
    for layer in range(case.layers):
        if done[layer] < case.microbatches * _STEPS:
            raise Wrong(
                f"layer {layer} has done {count(done[layer] // _STEPS, 'forward')} in a step, and there "
                f"{'is' if case.microbatches == 1 else 'are'} {count(case.microbatches, 'micro-batch', 'es')}: compute "
                "with the layers of the model, one micro-batch after another"
            )


def _require_memory(case: Case, outcomes: Sequence[Outcome]) -> str:
    """Refuse a rank that holds too much; returns what each holds, as a part of what it may."""
    limit = _MORE_MEMORY * _held_by_one_process(case)
    parts = [outcome.held / limit for outcome in outcomes]
    for rank, (part, outcome) in enumerate(zip(parts, outcomes, strict=True)):
        if part > 1:
            each = _held_by_one_process(case) / case.layers
            about = outcome.held / (each * case.most_layers)
            raise Wrong(
                f"the gradients are right, but rank {rank} holds {outcome.held:,} bytes of what its layers compute, "
                f"and {limit:,.0f} are the limit: that is what about {about:.0f} of the {case.microbatches} "
                f"micro-batches leave in {case.most_layers} layers. Begin backwards earlier, and let go of what is done"
            )
    return f"{' '.join(f'{100 * part:.0f}' for part in parts)} % of the limit"


@functools.cache
def _held_by_one_process(case: Case) -> int:
    """How many bytes one process holds after the forward of its largest micro-batch."""
    model = _model(case)
    watch = LayerWatch(model.layers)
    inputs, targets = (tokens[case.parts[0]] for tokens in _batch(case, 0))
    with watch.watching():
        model(inputs, targets)
    return watch.most


def _require_time(case: Case, found: float) -> str:
    even = 3 * case.most_layers * (case.microbatches + case.ranks - 1)
    if found > _MORE_TIME * even:
        alone = 3 * case.layers * case.microbatches
        words = ": as long as one process" if math.isclose(found, alone, rel_tol=0.1) else ""
        raise Wrong(
            f"the gradients are right, but a step takes {found:g}{words}, and {_MORE_TIME * even:g} is the most. The "
            "ranks must work at the same time: while a rank does one micro-batch, the one before it does the next"
        )
    return f"time {found:g} of {_MORE_TIME * even:g}"


# ── one process ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Truth:
    """What one process finds in the same steps."""

    def __init__(self, case: Case) -> None:
        self.case = case
        model = _model(case)
        self._first = copy.deepcopy(model)
        self.losses: list[torch.Tensor] = []
        self.gradients: list[Gradients] = []
        for step in range(_STEPS):
            loss, found = _of(model, *_batch(case, step))
            self.losses.append(loss)
            self.gradients.append(found)
            descend(model, [*found.values()], _RATE)

    def require(self, outcomes: Sequence[Outcome]) -> None:
        """Refuse gradients and losses that are not these, and tied weights that are not the same bits."""
        for step in range(_STEPS):
            for rank in reversed(range(len(outcomes))):
                self._require_gradients(outcomes[rank], rank, step)
            self._require_losses(outcomes, step)
        tied = [
            weight
            for outcome in outcomes
            for name, weight in zip(outcome.names, outcome.weights, strict=True)
            if name == _TIED
        ]
        if not all(torch.equal(one, tied[0]) for one in tied):
            raise Wrong(
                "after two steps the tied weights of the two ranks differ in their last digits: both must add up the "
                "same two gradients"
            )

    def _require_gradients(self, outcome: Outcome, rank: int, step: int) -> None:
        when = " in a second step" * step
        found: Gradients = {}
        for name, gradient in zip(outcome.names, outcome.gradients[step], strict=True):
            if gradient is None:
                raise Wrong(f"rank {rank}'s {name} has no gradient{when}: was its backward done?")
            found[name] = gradient
        right = self.gradients[step]
        own = [name for name in outcome.names if name != _TIED]
        rows = [("row of gradients", flat(found[name] for name in own), flat(right[name] for name in own))]
        if _TIED in found:
            rows.append(("gradient of the tied weight", found[_TIED], right[_TIED]))
        for what, mine, whole in rows:
            if mine.shape == whole.shape and torch.allclose(mine, whole, rtol=_TOLERANCE, atol=_TOLERANCE):
                continue
            suspects = self._suspects_of_tied(whole) if whole is right.get(_TIED) else self._suspects(own)
            require_equal(mine, whole, f"rank {rank}'s {what}{when}", [] if step else suspects, _TOLERANCE)

    def _suspects(self, names: Sequence[str]) -> list[Suspect]:
        """What typical mistakes with micro-batches would leave."""
        many = self.case.microbatches
        if many == 1:
            return []
        inputs, targets = _batch(self.case, 0)
        sizes = [len(part) for part in self.case.parts]
        each = [
            flat(found[name] for name in names)
            for part in self.case.parts
            for _, found in [_of(self._first, inputs[part], targets[part])]
        ]
        weighted = [row * size / self.case.samples for row, size in zip(each, sizes, strict=True)]
        added = (
            f"the losses of the {many} micro-batches were added up and not divided: what is wanted is the mean over "
            "the whole batch"
        )
        alike = (
            f"every micro-batch counts the same, but they have {listed(sizes)} samples: weight each by its share of "
            "the batch"
        )
        last = f"only the last of {many} micro-batches is in the gradients: those of all add up"
        return [
            Suspect(torch.stack(each).sum(0), added),
            *([Suspect(torch.stack(each).mean(0), alike)] if len({*sizes}) > 1 else []),
            Suspect(torch.stack(weighted).sum(0) / many, f"the loss was divided by the {many} micro-batches twice"),
            *(Suspect(row, last) for row in (each[-1], weighted[-1], each[-1] / many)),
        ]

    def _suspects_of_tied(self, right: torch.Tensor) -> list[Suspect]:
        apart = _model(self.case, tied=False)
        _, found = _of(apart, *_batch(self.case, 0))
        embedding, head = found[_TIED], found[f"layers.{self.case.layers - 1}.linear.weight"]
        alone = "the tied weight has only {}'s part of its gradient: the two ranks that have it must add up theirs"
        return [
            Suspect(embedding, alone.format("the embedding")),
            Suspect(head, alone.format("the head")),
            Suspect(right / 2, "the two parts of the tied weight's gradient were averaged: they add up"),
            Suspect(
                2 * embedding, "the tied weight has the embedding's part of its gradient twice, and not the head's"
            ),
            Suspect(2 * head, "the tied weight has the head's part of its gradient twice, and not the embedding's"),
            *(
                Suspect(
                    one + 2 * other,
                    "one part of the tied weight's gradient is in it twice: was a sum added that had it already? Send "
                    "a copy of your own part before you add the other's",
                )
                for one, other in ((embedding, head), (head, embedding))
            ),
        ]

    def _require_losses(self, outcomes: Sequence[Outcome], step: int) -> None:
        known = [(rank, outcome.losses[step]) for rank, outcome in enumerate(outcomes)]
        if all(loss is None for _, loss in known):
            raise Wrong("no rank returns a loss: the one that has the head knows it")
        added = Suspect(
            self.losses[step] * self.case.microbatches,
            "the losses of the micro-batches are added up and not divided by their number",
        )
        for rank, loss in known:
            if loss is not None:
                none = Suspect(torch.zeros(()), "a rank that does not know the loss returns None")
                what = f"the loss that rank {rank} returns"
                require_equal(loss, self.losses[step], what, [added, none], _TOLERANCE)


def _of(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
    """The loss of these samples, and the gradients by name."""
    loss = cross_entropy(model(inputs), targets)
    names = [name for name, _ in model.named_parameters()]
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
