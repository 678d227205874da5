"""A linear layer in parts: the numbers of one process, a weight that is whole only while it is used, few calls."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders import _sharding as sharding
from microparallel.learn.graders._common import LEARNING_RATE, mean_loss, require_all_waited, same
from microparallel.learn.graders._memory import MemoryWatch, collect_garbage
from microparallel.learn.log import Called, Row, calls
from microparallel.learn.requirements import Suspect, flat, require_equal, require_like, require_tensor
from microparallel.learn.verdict import Wrong
from microparallel.observe import Activity
from microparallel.program import Bucket, Parameters, Program, TrainingStep
from microparallel.program import ops as o
from microparallel.verifier import verify

_SAMPLES = 2  # few, so that nothing but a whole weight or its gradient is as large as a whole weight
_STEPS = 2
_SQUARE = [(6, 6)]  # rows and features of each layer; here a transposed weight has the right shape
_THREE = [(6, 5), (7, 6), (4, 7)]
_UNEVEN = ((3, 7), (4, 3), (5, 7))  # ranks and rows; in the last two a rank has nothing but zeros
Shapes = list[tuple[int, int]]


def check(exam: Exam) -> None:
    """What is kept; the numbers; what is let go; the calls; rows that do not divide; several layers; special cases."""
    with exam.step("each rank keeps its rows of the weight, in memory of their own"):
        for ranks, some in ((2, 6), *_UNEVEN):
            exam.run(_keep, ranks, some, 6, allowed=sharding.ALLOWED)
    with exam.step("two ranks: outputs and gradients are those of one process"):
        passes = exam.run(_once, 2, _SQUARE, allowed=sharding.ALLOWED)
        rows = exam.rows
        _require_numbers(passes, _SQUARE)
    with exam.step("the whole weight is gone between forward and backward") as notes:
        _require_let_go(passes, rows)
        numbers = _SQUARE[0][0] * _SQUARE[0][1]
        notes.append(f"between them a rank keeps {numbers // 2} of {numbers} numbers of the weight")
    with exam.step("one gather in forward; one gather and one reduce-scatter in backward"):
        _require_calls(passes, rows)
    with exam.step("also where the rows do not divide by the ranks"):
        for ranks, some in _UNEVEN:
            _require_all(exam, ranks, [(some, 6)])
    with exam.step("three layers in a row: one weight is whole at a time; steps as in one process"):
        passes = _require_all(exam, 2, _THREE)
        _require_program(passes, exam.rows)
        for ranks in (2, 3):
            _require_steps(exam.run(_train, ranks, allowed=sharding.ALLOWED))
    with exam.step("inputs that need no gradient; a world of one"):
        _require_first_layer(exam.run(_first, 2, allowed=sharding.ALLOWED), exam.rows)
        _require_numbers(exam.run(_once, 1, _THREE, allowed=sharding.ALLOWED), _THREE)
        _require_steps(exam.run(_train, 1, allowed=sharding.ALLOWED))


# ── what a rank is given ────────────────────────────────────────────────────────────────────────────────────────────


def _weights(shapes: Shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _samples(rank: int, shapes: Shapes, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's inputs, and the gradient of what the last layer makes of them (or its targets)."""
    generator = torch.Generator().manual_seed(50 + 10 * step + rank)
    sizes = (shapes[0][1], shapes[-1][0])
    inputs, others = (torch.randn(_SAMPLES, size, generator=generator, dtype=torch.float64) for size in sizes)
    return inputs, others


def _in_parts(weight: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    filled = torch.cat([weight, weight.new_zeros(-len(weight) % ranks, *weight.shape[1:])])
    return list(filled.view(ranks, -1, *weight.shape[1:]).unbind())


def _rows_of_others(weight: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The numbers of a weight that the rank does not keep."""
    size = -(-len(weight) // ranks)
    return torch.cat([weight[: rank * size], weight[(rank + 1) * size :]]).reshape(-1)


def _layer(learner: Any, weight: torch.Tensor, comms: Any) -> tuple[nn.Module, torch.Tensor]:
    layer = learner.ShardedLinear(weight, comms)
    if not isinstance(layer, nn.Module):
        raise Wrong("ShardedLinear should be a module (nn.Module), as it was at first")
    part = getattr(layer, "part", None)
    if not isinstance(part, nn.Parameter):
        raise Wrong("ShardedLinear has no parameter `part`: that is this rank's part of the weight")
    return layer, part


# ── what is kept of a weight ────────────────────────────────────────────────────────────────────────────────────────


def _keep(learner: Any, comms: Any, rows: int, features: int) -> None:
    rank, ranks = comms.rank, comms.world_size
    [weight] = _weights([(rows, features)])
    parts, storage = _in_parts(weight, ranks), weakref.ref(weight.untyped_storage())
    with sharding.about_parts():
        layer, part = _layer(learner, weight, comms)
    mistakes = [
        Suspect(theirs, f"rank {rank} keeps part {other}, which is rank {other}'s: part r belongs to rank r")
        for other, theirs in enumerate(parts)
        if other != rank
    ]
    if part.shape[0] != len(parts[rank]):
        raise Wrong(
            f"{ranks} ranks, a weight of {rows} rows: rank {rank} keeps {part.shape[0]} rows, and should keep "
            f"{len(parts[rank])}: the rows divided by the ranks, rounded up, and zeros where there are no more, "
            "as in_parts cuts it; all_gather needs parts of the same size"
        )
    require_equal(part.detach(), parts[rank], f"{ranks} ranks, {rows} rows: rank {rank}'s part", mistakes)
    if part.untyped_storage().nbytes() > part.nbytes:
        raise Wrong(
            f"rank {rank}'s part is a view: it has {part.numel()} numbers, and keeps the memory of "
            f"{part.untyped_storage().nbytes() // part.element_size()}. Nothing is saved as long as the whole weight "
            "cannot be freed; take a clone()"
        )
    del weight
    if storage() is not None:
        collect_garbage()
    if storage() is not None:
        raise Wrong(f"rank {rank} still holds the whole weight when its layer is made: keep only your part")
    del layer


# ── one forward and backward ────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Pass:
    """What came of one forward and backward on one rank."""

    outputs: torch.Tensor
    of_inputs: torch.Tensor | None
    parts: list[torch.Tensor]
    of_parts: list[torch.Tensor | None]
    saved: bool  # whether autograd has saved a whole weight
    held: dict[int, list[int]] = field(default_factory=dict)
    forward_ends: int = 0  # the place in the rank's row where all forwards have ended
    left: bool = False  # whether something as large as a whole weight is in memory in the end


def _once(learner: Any, comms: Any, shapes: Shapes, needs_gradient: bool = True) -> Pass:
    """Forward and backward through some layers, one after another, with a function between them."""
    weights = _weights(shapes)
    with sharding.about_parts():
        made = [_layer(learner, weight.clone(), comms) for weight in weights]
        inputs, gradient = _samples(comms.rank, shapes)
        inputs.requires_grad_(needs_gradient)
        others = [_rows_of_others(weight, comms.rank, comms.world_size) for weight in weights]
        with MemoryWatch(comms, sharding.ALLOWED, others) as watch:
            outputs: Any = inputs
            for number, (layer, _) in enumerate(made):
                outputs = torch.tanh(outputs) if number else outputs
                outputs = layer(outputs)
                _require_outputs(outputs, shapes[number], comms)
                watch.look()
                comms.log.begins(Activity(o.Forward(number, comms.rank)))
            ends, saved = len(comms.row), watch.saved(outputs)
            values = outputs.detach().clone()
            watch.backward(outputs, gradient)
            del outputs
            watch.look()
            left = watch.holds(min(rows * features for rows, features in shapes))
    require_all_waited(comms)
    parts = [part for _, part in made]
    return Pass(
        values,
        inputs.grad,
        [part.detach() for part in parts],
        [part.grad for part in parts],
        saved,
        watch.held,
        ends,
        left,
    )


def _require_outputs(outputs: object, shape: tuple[int, int], comms: Any) -> None:
    """Refuse outputs that cannot be right, before anything is computed with them."""
    found = require_tensor(outputs, "what the layer returns")
    rows, ranks = shape[0], comms.world_size
    filled = -(-rows // ranks) * ranks
    if found.shape != (_SAMPLES, rows) and found.shape == (_SAMPLES, filled):
        raise Wrong(
            f"{ranks} ranks, a weight of {rows} rows: the outputs have {filled} columns. The rows of zeros that fill "
            "the parts up are still in the weight: cut them off when all parts are gathered, [:rows]"
        )
    require_like(found, found.new_empty(_SAMPLES, rows), f"{ranks} ranks, rank {comms.rank}: what the layer returns")
    if not found.requires_grad:
        raise Wrong("what the layer returns has no backward: it is not connected to its part (GatheredLinear.apply)")


@dataclass
class Right:
    """What one process finds for a rank's samples."""

    outputs: torch.Tensor
    of_inputs: torch.Tensor
    of_weights: list[torch.Tensor]  # of this rank's samples alone
    into: list[tuple[torch.Tensor, torch.Tensor]]  # for each layer, its inputs and the gradient of its outputs


def _alone(rank: int, shapes: Shapes) -> Right:
    weights = [weight.requires_grad_() for weight in _weights(shapes)]
    inputs, gradient = _samples(rank, shapes)
    into, made, outputs = [], [], inputs.requires_grad_()
    for number, weight in enumerate(weights):
        outputs = torch.tanh(outputs) if number else outputs
        outputs.retain_grad()
        into.append(outputs)
        outputs = outputs @ weight.T
        outputs.retain_grad()
        made.append(outputs)
    outputs.backward(gradient)  # type: ignore[no-untyped-call]
    pairs = [(given.detach(), out.grad) for given, out in zip(into, made, strict=True) if out.grad is not None]
    return Right(outputs.detach(), flat([inputs.grad]), [flat([w.grad]).view_as(w) for w in weights], pairs)


def _require_numbers(passes: Sequence[Pass], shapes: Shapes) -> None:
    ranks, alone = len(passes), [_alone(rank, shapes) for rank in range(len(passes))]
    for rank, (one, right) in enumerate(zip(passes, alone, strict=True)):
        who = f"{ranks} ranks: rank {rank}'s"
        inputs, gradient = _samples(rank, shapes)
        square = [weight for weight in _weights(shapes) if len(shapes) == 1 and weight.shape[0] == weight.shape[1]]
        words = "inputs · weight instead of inputs · weightᵀ: a row of the weight belongs to one output"
        mistakes = [Suspect(inputs @ weight, words) for weight in square]
        require_equal(one.outputs, right.outputs, f"{who} outputs", mistakes)
        if one.of_inputs is None:
            raise Wrong(
                f"{who} inputs have no gradient: the first thing that backward returns is the gradient of the inputs, "
                "for the layer before"
            )
        words = "gradient · weightᵀ instead of gradient · weight"
        mistakes = [Suspect((gradient @ weight.T).reshape(-1), words) for weight in square]
        require_equal(one.of_inputs.reshape(-1), right.of_inputs, f"{who} gradient of the inputs", mistakes)
    for layer in range(len(shapes)):
        _require_of_parts(passes, alone, layer)


def _require_of_parts(passes: Sequence[Pass], alone: Sequence[Right], layer: int) -> None:
    ranks = len(passes)
    own = torch.stack([right.of_weights[layer] for right in alone])
    rows = own.shape[1]
    for rank, one in enumerate(passes):
        gradient = one.of_parts[layer]
        what = f"{ranks} ranks, {rows} rows: the gradient of rank {rank}'s part"
        if gradient is None:
            raise Wrong(f"{what} is missing: the second thing that backward returns is the gradient of the part")
        begins = rank * len(gradient)
        kept = max(0, min(rows - begins, len(gradient)))  # what is found for rows of zeros does not matter

        def mine(whole: torch.Tensor, other: int = rank, kept: int = kept) -> torch.Tensor:
            return _in_parts(whole, ranks)[other][:kept]

        given, of_outputs = alone[rank].into[layer]
        square = (given.T @ of_outputs).shape == own[rank].shape
        mistakes = [Suspect(mine(given.T @ of_outputs), _TRANSPOSED)] if square else []
        if ranks > 1:
            mistakes += [
                Suspect(mine(own.sum(0)), 'the gradients are added up over ranks and not averaged: op="mean"'),
                Suspect(mine(own[rank]), _OWN),
                Suspect(
                    mine(own.mean(0) / ranks), 'divided twice by the number of ranks: op="mean" has done it already'
                ),
                *(Suspect(mine(own.mean(0), other), _OTHERS) for other in range(ranks) if other != rank),
            ]
            averaged = torch.stack([right.into[layer][0].T @ right.into[layer][1] for right in alone]).mean(0)
            mistakes += [Suspect(mine(averaged), _TRANSPOSED)] if square else []
        require_equal(gradient[:kept], mine(own.mean(0)), what, mistakes)


_TRANSPOSED = "inputsᵀ · gradient instead of gradientᵀ · inputs: this is the weight's gradient, transposed"
_OWN = (
    "this is what the rank's own samples say: every rank has other samples, and the weight's gradient is the mean over "
    "all ranks (reduce_scatter)"
)
_OTHERS = "this is the part of another rank's rows: rank r gets part r"


# ── what is let go ──────────────────────────────────────────────────────────────────────────────────────────────────


def _require_let_go(passes: Sequence[Pass], rows: Sequence[Row]) -> None:
    if len(passes) == 1:
        return  # its part is the whole weight
    for rank, one in enumerate(passes):
        for place, held in sorted(one.held.items()):
            _require_one_at_a_time(rank, one, rows[rank], place, held)
        if one.left:
            in_its_memory = any(
                gradient is not None and gradient.untyped_storage().nbytes() > gradient.nbytes
                for gradient in one.of_parts
            )
            why = (
                "the gradient of its part is a view of it, which keeps all of its memory"
                if in_its_memory
                else "once it is reduce-scattered, no rank needs it; keep only your part"
            )
            raise Wrong(f"rank {rank} still holds the whole gradient of the weight after backward: {why}")


def _require_one_at_a_time(rank: int, one: Pass, row: Row, place: int, held: Sequence[int]) -> None:
    """Look at one moment: the calls of comms, the end of each forward, the end of everything."""
    next_op = row[place].op if place < len(row) else None
    if held and isinstance(next_op, o.Forward):
        how = (
            "autograd has saved it (save_for_backward): save your part, and gather again in backward"
            if one.saved
            else "something keeps it: an attribute of ctx or of the layer, a list. Gather again in backward"
        )
        raise Wrong(
            f"rank {rank} holds the whole weight between forward and backward: {how}. With many layers all weights "
            "would be whole at once"
        )
    if held and isinstance(next_op, Called) and next_op.call == "all_gather":
        raise Wrong(f"rank {rank} gathers in line {next_op.line} while a whole weight is still there: free it first")
    if held and next_op is None:
        raise Wrong(f"rank {rank} still holds the whole weight after backward: it is not needed until the next forward")


# ── the calls ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _require_calls(passes: Sequence[Pass], rows: Sequence[Row]) -> None:
    """Refuse more calls than are needed, and others; for one layer."""
    for rank, (one, row) in enumerate(zip(passes, rows, strict=True)):
        forward, backward = calls(row[: one.forward_ends]), calls(row[one.forward_ends :])
        for call in (*forward, *backward):
            if call.call == "all_gather" and not (call.content is not None and same([call.content], one.parts)):
                numbers = 0 if call.content is None else call.content.numel()
                raise Wrong(
                    f"rank {rank} gathers {numbers} numbers in line {call.line}, which are not its part of the weight "
                    f"({one.parts[0].numel()} numbers). Gradients are reduce-scattered: each rank needs its part of "
                    "their mean only, and gathering all of them would send p times as much"
                )
        _require_kinds(rank, "forward", [call.call for call in forward], ["all_gather"])
        _require_kinds(rank, "backward", [call.call for call in backward], ["all_gather", "reduce_scatter"])


def _require_kinds(rank: int, where: str, found: list[str], wanted: list[str]) -> None:
    words = {"all_gather": "gathers", "reduce_scatter": "reduce-scatters"}
    for kind, does in words.items():
        if found.count(kind) == wanted.count(kind):
            continue
        needed = "once is enough" if kind in wanted else "there is no gradient yet"
        if not found.count(kind):
            raise Wrong(
                f"in {where} rank {rank} never {does}: the weight is gathered for forward and again for "
                "backward, and its gradient is reduce-scattered"
            )
        raise Wrong(f"in {where} rank {rank} {does} {found.count(kind)} times: {needed}")


def _require_all(exam: Exam, ranks: int, shapes: Shapes) -> list[Pass]:
    passes = exam.run(_once, ranks, shapes, allowed=sharding.ALLOWED)
    _require_numbers(passes, shapes)
    _require_let_go(passes, exam.rows)
    if len(shapes) == 1:
        _require_calls(passes, exam.rows)
    return passes


def _require_first_layer(passes: Sequence[Pass], rows: Sequence[Row]) -> None:
    """Where inputs need no gradient, backward need not gather: the weight's gradient takes the inputs alone."""
    own = [_alone(rank, _SQUARE) for rank in range(len(passes))]
    _require_of_parts(passes, own, 0)
    for rank, (one, row) in enumerate(zip(passes, rows, strict=True)):
        backward = [call.call for call in calls(row[one.forward_ends :])]
        if "all_gather" in backward:
            _require_kinds(rank, "backward", backward, ["all_gather", "reduce_scatter"])


def _first(learner: Any, comms: Any) -> Pass:
    return _once(learner, comms, _SQUARE, needs_gradient=False)


# ── several layers ──────────────────────────────────────────────────────────────────────────────────────────────────


def _require_program(passes: Sequence[Pass], rows: Sequence[Row]) -> None:
    """Verify what the ranks did as a program in which every layer is a unit."""
    layers, ranks = len(passes[0].parts), len(rows)
    goal = TrainingStep(layers, ranks, tuple((s, s + 1) for s in reversed(range(layers))), sharded=True)
    ops = [tuple(_operations(rank, ranks, one, row)) for rank, (one, row) in enumerate(zip(passes, rows, strict=True))]
    try:
        verify(Program("your step", goal, tuple(ops)), completed=False)
    except ProgramError as error:
        raise Wrong(f"three layers: {error}") from None


def _operations(rank: int, ranks: int, one: Pass, row: Row) -> list[o.Op]:
    """What a rank did: a weight is freed where it is seen to be gone; a backward ends when both its calls are begun."""
    ops: list[o.Op] = []
    whole: list[int] = []  # the layers that are gathered, and were not seen to be gone
    waiting: list[int] = []  # the layers whose gradient was reduce-scattered before the weight was gathered
    parts = [part.numel() for part in one.parts]
    for place in range(len(row) + 1):
        op = row[place].op if place < len(row) else None
        call = op.call if isinstance(op, Called) and row[place].phase == "begins" and op.content is not None else ""
        frees = [layer for layer in whole if place in one.held and layer not in one.held[place]]
        freed = [o.Free(Parameters(len(parts) - 1 - layer)) for layer in frees]
        if isinstance(op, Called) and call == "reduce_scatter":
            layer = [size * ranks for size in parts].index(op.content.numel())  # type: ignore[union-attr]
            if layer in whole:
                ops += _backward(layer, rank, len(parts))
            else:
                waiting.append(layer)
        elif isinstance(op, Called) and call == "all_gather":
            layer = parts.index(op.content.numel())  # type: ignore[union-attr]
            ops += [*freed, o.AllGather(Parameters(len(parts) - 1 - layer), "dp")]
            whole, freed = [*whole, layer], []
            if layer in waiting:
                ops += _backward(layer, rank, len(parts))
                waiting.remove(layer)
        elif isinstance(op, o.Forward):
            ops.append(op)
        ops += freed
        whole = [layer for layer in whole if layer not in frees]
    return ops


def _backward(layer: int, rank: int, layers: int) -> list[o.Op]:
    return [o.Backward(layer, rank), o.ReduceScatter(Bucket(layers - 1 - layer, 0), "dp")]


def _train(learner: Any, comms: Any) -> list[list[torch.Tensor]]:
    """A few steps with an optimizer of torch's own on the parts; returns the parts after each step."""
    found: list[list[torch.Tensor]] = []
    with sharding.about_parts():
        made = [_layer(learner, weight, comms) for weight in _weights(_THREE)]
        optimizer = torch.optim.SGD([part for _, part in made], lr=LEARNING_RATE, momentum=0.9)
        for step in range(_STEPS):
            optimizer.zero_grad()
            outputs, targets = _samples(comms.rank, _THREE, step)
            for number, (layer, _) in enumerate(made):
                outputs = layer(torch.tanh(outputs) if number else outputs)
            mean_loss(outputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append([part.detach().clone() for _, part in made])
    return found


def _require_steps(results: Sequence[Sequence[Sequence[torch.Tensor]]]) -> None:
    """Compare each rank's parts after each step with the weights of one process that has all samples."""
    ranks, weights = len(results), [weight.requires_grad_() for weight in _weights(_THREE)]
    optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=0.9)
    for step in range(_STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            outputs, targets = _samples(rank, _THREE, step)
            for number, weight in enumerate(weights):
                outputs = (torch.tanh(outputs) if number else outputs) @ weight.T
            (mean_loss(outputs, targets) / ranks).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for number, weight in enumerate(weights):
            together = torch.cat([results[rank][step][number] for rank in range(ranks)])[: len(weight)]
            what = f"{ranks} ranks, three layers, step {step + 1}: the weight of layer {number}, gathered,"
            require_equal(together, weight.detach(), what)
