"""Let ranks do pipeline steps with a learner's function, and compare what they find with one process.

`take_steps` is what the graders call. Of what the ranks did it makes the program of each step, which is verified; of
what they found it compares losses and gradients with `Truth`, which is one process that has the whole batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.errors import Mismatch, ProgramError
from microparallel.learn.exam import Exam, Stuck
from microparallel.learn.graders._common import (
    WIDTH,
    descend,
    gradients,
    in_one_process,
    layers_of,
    make_layers,
    mean_loss,
    pipeline_batch,
    require_all_waited,
    require_gradients,
)
from microparallel.learn.graders._programs import compare, tokens
from microparallel.learn.graders._stages import CountedStage, NoFirstGradient, SecondBackward, TypedBackwards
from microparallel.learn.log import RECEIVES, SENDS, Called, Row, calls, computed
from microparallel.learn.requirements import Suspect, flat, listed, require_equal, require_number, shown
from microparallel.learn.verdict import Wrong
from microparallel.observe import Activity
from microparallel.program import Act, Grad, Program, TrainingStep, halves
from microparallel.program import ops as o
from microparallel.text import count
from microparallel.verifier import Missing, Unmatched, verify

_STEPS = 2
_RATE = 0.5


@dataclass
class Outcome:
    """What one rank found in each step."""

    losses: list[Any]
    gradients: list[list[torch.Tensor | None]]
    most_kept: int  # the most micro-batches at once that were kept although their backward was done


def do_steps(learner: Any, comms: Any, steps: int, function: str, samples: int, *options: Any) -> Outcome:
    """Do a rank's steps, in its thread; gradients are added up over all steps, and the weights change in between."""
    comms.line_of_ranks = True
    ranks, rank = comms.world_size, comms.rank
    own = layers_of(rank, ranks + 1, ranks)
    stage = CountedStage(make_layers(ranks + 1)[own.start : own.stop], rank, comms.log)
    outcome = Outcome([], [], 0)
    for step in range(steps):
        inputs, targets = pipeline_batch(samples, seed=step)
        inputs = inputs if rank == 0 else torch.full_like(inputs, torch.nan)
        targets = targets if rank == ranks - 1 else torch.full_like(targets, torch.nan)
        stage.begin()
        loss_function = _loss_of_the_last(rank, ranks)
        try:
            with TypedBackwards():
                loss = getattr(learner, function)(stage, comms, inputs, targets, loss_function, *options)
        except Mismatch:
            raise Wrong(
                f"rank {rank}, line {calls(comms.row)[-1].line}: what one rank sends is not what the other asks for. "
                "Both must mean the same shape and dtype (recv_tensor expects float32 unless it is told)"
            ) from None
        except (NoFirstGradient, SecondBackward) as error:
            raise Wrong(_in_words(error, rank, ranks)) from None
        comms.log.begins(Activity(o.OptimizerStep()))
        require_all_waited(comms)
        _require_proper_loss(loss, rank, ranks)
        outcome.losses.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)
        outcome.gradients.append(gradients(stage))
        outcome.most_kept = max(outcome.most_kept, stage.most_kept)
        descend(stage, outcome.gradients[-1], _RATE)
    return outcome


def take_steps(
    exam: Exam,
    ranks: int,
    samples: int,
    *options: int,
    steps: int,
    function: str,
    suspects: Callable[[Truth, int], list[Suspect]],
    body: Callable[..., Outcome] = do_steps,
) -> tuple[list[Outcome], list[Program]]:
    """Let ranks do some steps with the learner's `function`; returns what each found, and the program of every step.

    Both are right when this returns: the programs are verified, and what the ranks found is what one process finds.

    Args:
        exam: the learner's file.
        ranks: how many ranks, with a stage each.
        samples: in a batch.
        options: what else the learner's function takes: the number of micro-batches, or nothing.
        steps: how many steps, at most two.
        function: the learner's function.
        suspects: what certain mistakes would leave in a rank's gradients.
        body: does a rank's steps, where `do_steps` will not do.
    """
    microbatches = options[0] if options else 1
    try:
        outcomes = exam.run(body, ranks, steps, function, samples, *options)
    except Stuck as stuck:
        for rank in stuck.finished:  # these ranks may have left out what the others wait for
            _require_each_once(operations(exam.rows[rank]), rank, microbatches)
        raise
    rows = [in_steps(row) for row in exam.rows]
    programs = [_verified([mine[step] for mine in rows], samples, microbatches) for step in range(steps)]
    truth = Truth(ranks, samples, microbatches)
    truth.require(outcomes, lambda rank: suspects(truth, rank))
    return outcomes, programs


def _require_proper_loss(loss: Any, rank: int, ranks: int) -> None:
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        raise Wrong(
            f"the loss that rank {rank} returns still hangs on its graph, and with it everything that was computed: "
            "add up losses without their graphs (detach)"
        )
    if rank < ranks - 1 and loss is not None:
        raise Wrong(f"rank {rank} returns {shown(loss)} as the loss: only the last rank knows it")
    if rank == ranks - 1 and loss is not None and not isinstance(loss, torch.Tensor):
        require_number(loss, f"the loss that rank {rank} returns")


def _in_words(error: NoFirstGradient | SecondBackward, rank: int, ranks: int) -> str:
    if isinstance(error, SecondBackward):
        return (
            f"rank {rank} goes back through the same graph twice: every micro-batch has one backward, through what its "
            "own forward left (or was that overwritten by the next one's?)"
        )
    if rank == ranks - 1:
        return (
            f"rank {rank} is the last, and starts its backward from its outputs: it begins with the loss, which is "
            "loss_function(outputs, targets)"
        )
    return (
        f"rank {rank} starts its backward without a gradient: what its stage returns is no loss. The gradient of "
        f"it comes from rank {rank + 1}"
    )


def _loss_of_the_last(rank: int, ranks: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if rank < ranks - 1:
            raise Wrong(
                f"rank {rank} computes a loss: only the last rank, {ranks - 1}, has the model's outputs. Every "
                "other rank begins the backward with the gradient that comes from the next rank"
            )
        return mean_loss(outputs, targets)

    return loss_function


def require_freed(rank: int, most_kept: int) -> None:
    """Refuse outputs that are held after their backward; one or two may still have a name in some function."""
    if most_kept > 2:
        raise Wrong(
            f"rank {rank} still holds what {most_kept} micro-batches left although their backward is done: take it out "
            "where you keep it (pop); memory is what a pipeline is for"
        )


# ── the program of a step ───────────────────────────────────────────────────────────────────────────────────────────


def in_steps(row: Row) -> list[Row]:
    """A rank's row, cut behind every optimizer step."""
    ends = [place + 1 for place, moment in enumerate(row) if moment.op == o.OptimizerStep()]
    return [row[start:end] for start, end in itertools.pairwise([0, *ends, None])]


def operations(row: Row) -> list[str]:
    """The forwards and backwards of a rank, in text: those of its last step, or of the one it is in."""
    last = next(filter(None, reversed(in_steps(row))), [])
    return [str(op) for op in computed(last) if halves(op)]


def _verified(rows: Sequence[Row], samples: int, microbatches: int) -> Program:
    """The program of one step, refused in words where it is not right."""
    for rank, row in enumerate(rows):
        _require_each_once(operations(row), rank, microbatches)
    sizes = {len(part) * WIDTH for part in torch.arange(samples).tensor_split(microbatches)}
    program = Program("your step", TrainingStep(len(rows), microbatches), tuple(_named(row, sizes) for row in rows))
    try:
        verify(program, completed=False)
    except Missing as error:
        _require_messages(error, rows[error.rank], microbatches)
    except ProgramError as error:
        if isinstance(error, Unmatched):
            _require_pairs(program)
        raise Wrong(str(error)) from None
    return program


def _named(row: Row, sizes: set[int]) -> tuple[o.Op, ...]:
    """A rank's operations, where the n-th message belongs to the n-th forward or backward.

    A message that is not as large as a micro-batch is left out: a learner may send a header before each.
    """
    done = computed(row)
    forwards, backwards = ([op.microbatch for op in done if isinstance(op, kind)] for kind in (o.Forward, o.Backward))
    counts: Counter[tuple[bool, int]] = Counter()  # messages so far, by direction and peer
    ops: list[o.Op] = []
    for moment in row:
        call = moment.op
        if not isinstance(call, Called):
            ops.append(call)
            continue
        is_send = call.call in SENDS
        if moment.phase != ("begins" if is_send else "ends") or call.content is None:
            continue
        if call.content.numel() not in sizes or not call.content.is_floating_point():
            continue
        kind, order = (Act, forwards) if is_send == (call.peer > call.rank) else (Grad, backwards)
        number = counts[is_send, call.peer]
        counts[is_send, call.peer] += 1
        value = kind(min(call.rank, call.peer), order[number] if number < len(order) else number)
        ops.append(o.Send(value, call.peer) if is_send else o.Recv(value, call.peer))
    return tuple(ops)


def _require_each_once(order: Sequence[str], rank: int, microbatches: int) -> None:
    forwards, backwards = (sum(word[0] == kind for word in order) for kind in "FB")
    if forwards != microbatches:
        raise Wrong(f"rank {rank} does {count(forwards, 'forward')}, and there {_are(microbatches)}: one for each")
    if backwards != microbatches:
        missing = [number for number in range(microbatches) if f"B{rank}.{number}" not in order]
        raise Wrong(
            f"rank {rank} does {count(backwards, 'backward')}, and there {_are(microbatches)}: one for each"
            f"{_which_are_missing(missing, microbatches)}"
        )


def _require_messages(error: Missing, row: Row, microbatches: int) -> None:
    """Refuse a rank that received too few messages; if it received as many in another form, its gradients decide."""
    value, rank = error.value, error.rank
    if not isinstance(value, Act | Grad) or value == Act(rank, value.microbatch):
        raise Wrong(str(error))
    peer, what = (rank - 1, "activation") if isinstance(value, Act) else (rank + 1, "gradient")
    received = sum(call.peer == peer for call in calls(row, *RECEIVES))
    if received < microbatches:
        raise Wrong(
            f"rank {rank} receives {count(received, 'message')} from rank {peer} in a step, and there "
            f"{_are(microbatches)}: one {what} for each"
        )


def _require_pairs(program: Program) -> None:
    """Refuse a backward that began with another micro-batch's gradient; gradients begin at the last rank, so do we."""
    for rank in reversed(range(program.world_size - 1)):
        came = [op.value for op in program.ranks[rank] if isinstance(op, o.Recv) and isinstance(op.value, Grad)]
        sent = [op.value for op in program.ranks[rank + 1] if isinstance(op, o.Send) and isinstance(op.value, Grad)]
        for mine, theirs in zip(came, sent, strict=False):
            if mine != theirs:
                order, following = tokens(program, rank), (f"B{rank}.{value.microbatch}" for value in sent)
                like = [next(following, "B?") if word[0] == "B" else word for word in order]
                raise Wrong(
                    f"rank {rank} does the backward of micro-batch {mine.microbatch} with the gradient of micro-batch "
                    f"{theirs.microbatch}: gradients come in the order in which rank {rank + 1} sends them, so take "
                    f"the activations in that order too{compare(order, like, f'rank {rank + 1}')}"
                )


def _which_are_missing(missing: Sequence[int], microbatches: int) -> str:
    if microbatches == 1 or not missing:
        return ""
    if 0 < missing[0] == microbatches - len(missing):
        return ". Those of the last ones are still to be done when no forward is left"
    return f". Micro-batch {listed(missing)} has none"


def _are(microbatches: int) -> str:
    return f"are {microbatches} micro-batches" if microbatches > 1 else "is 1 batch"


# ── what one process finds ──────────────────────────────────────────────────────────────────────────────────────────


class Truth:
    """What one process that has the whole batch finds in the same steps."""

    def __init__(self, ranks: int, samples: int, microbatches: int = 1) -> None:
        self.ranks, self.samples, self.microbatches = ranks, samples, microbatches
        model = nn.Sequential(*make_layers(ranks + 1))
        self.losses: list[torch.Tensor] = []
        self.gradients: list[list[torch.Tensor]] = []  # after each step, added up over the steps so far
        self.alone: list[list[torch.Tensor]] = []  # of each step alone
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for step in range(_STEPS):
            loss, alone = in_one_process(model, *pipeline_batch(samples, seed=step))
            total = [before + new for before, new in zip(total, alone, strict=True)]
            self.losses.append(loss)
            self.gradients.append(total)
            self.alone.append(alone)
            descend(model, total, _RATE)

    def of(self, all_gradients: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """A rank's part of the gradients; every layer has two parameters."""
        own = layers_of(rank, self.ranks + 1, self.ranks)
        return all_gradients[2 * own.start : 2 * own.stop]

    def of_microbatch(self, number: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One micro-batch's own mean loss in the first step, and all gradients of it."""
        batch = pipeline_batch(self.samples, seed=0)
        inputs, targets = (tensor.tensor_split(self.microbatches)[number] for tensor in batch)
        return in_one_process(make_layers(self.ranks + 1), inputs, targets)

    def require(self, outcomes: list[Outcome], suspects: Callable[[int], list[Suspect]]) -> None:
        """Refuse losses and gradients that are not these, step by step, from the last rank to the first."""
        for step in range(len(outcomes[0].losses)):
            for rank in reversed(range(self.ranks)):
                self._require_gradients(outcomes[rank], step, rank, suspects(rank) if step == 0 else [])
            self._require_loss(outcomes, step)

    def _require_gradients(self, outcome: Outcome, step: int, rank: int, suspects: list[Suspect]) -> None:
        only_last = Suspect(
            flat(self.of(self.alone[step], rank)),
            "gradients of the step before are gone: a step adds to them, and the caller decides when to begin anew",
        )
        require_gradients(
            outcome.gradients[step],
            self.of(self.gradients[step], rank),
            f"rank {rank}" + " after a second step" * step,
            f"rank {rank} has no gradients: its backward was not done",
            [*suspects, *([only_last] if step else [])],
        )

    def _require_loss(self, outcomes: list[Outcome], step: int) -> None:
        found = outcomes[-1].losses[step]
        if found is None:
            raise Wrong(f"rank {self.ranks - 1} is the last and returns no loss")
        found = found if isinstance(found, torch.Tensor) else torch.tensor(found, dtype=torch.float64)
        suspects = [
            Suspect(
                torch.stack(self.losses[: step + 1]).sum(),
                "the loss of the step before is in it: begin with 0 in every step",
            ),
            Suspect(
                self.losses[step] * self.microbatches,
                "the losses of the micro-batches are added up and not divided by their number",
            ),
        ]
        if step == 0:
            last, _ = self.of_microbatch(self.microbatches - 1)
            suspects.append(Suspect(last, "that is the loss of the last micro-batch alone"))
        require_equal(found, self.losses[step], f"the loss that rank {self.ranks - 1} returns", suspects)


# ── what mistakes leave in the gradients ────────────────────────────────────────────────────────────────────────────


def microbatch_suspects(truth: Truth, rank: int) -> list[Suspect]:
    """What typical mistakes with micro-batches would leave in a rank's gradients."""
    each = [flat(truth.of(truth.of_microbatch(number)[1], rank)) for number in range(truth.microbatches)]
    sizes = [len(piece) for piece in torch.arange(truth.samples).tensor_split(truth.microbatches)]
    weighted = [gradient * size / truth.samples for gradient, size in zip(each, sizes, strict=True)]
    count = truth.microbatches
    if count == 1:
        return []
    found = [
        Suspect(
            torch.stack(each).sum(0),
            f"the losses of the {count} micro-batches were added up and not divided: the gradients are those of a loss "
            f"about {count} times too large. What is wanted is the mean over the whole batch",
        ),
        Suspect(
            torch.stack(each).mean(0),
            f"every micro-batch counts the same, but they have {', '.join(map(str, sizes))} samples: weight each by "
            "its share of the samples, or the gradients are not those of the whole batch",
        ),
        Suspect(
            torch.stack(weighted).sum(0) / count,
            f"the loss was divided by the {count} micro-batches one time too many",
        ),
    ]
    for number in (count - 1, 0):
        words = f"only micro-batch {number} of {count} is in the gradients of rank {rank}: those of all add up"
        found += [Suspect(value, words) for value in (each[number], weighted[number], each[number] / count)]
    if rank < truth.ranks - 1:
        words = f"rank {rank} began its backwards with ones: they begin with what rank {rank + 1} sends back"
        found.append(Suspect(begun_with(truth, rank, "ones"), words))
    return found


def begun_with(truth: Truth, rank: int, what: str) -> torch.Tensor:
    """A rank's gradients in the first step if its backward had begun with ones, or with the activation itself."""
    own = layers_of(rank, truth.ranks + 1, truth.ranks)
    model = nn.Sequential(*make_layers(truth.ranks + 1))
    outputs = model[: own.stop](pipeline_batch(truth.samples, seed=0)[0])
    outputs.backward(torch.ones_like(outputs) if what == "ones" else outputs.detach())
    return flat(gradients(model[own.start : own.stop]))
