"""ZeRO-3 as a program: is it right, are few units whole, are the gathers hidden, and does it run?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from microparallel.comms import Comms
from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders._programs import compare
from microparallel.learn.requirements import require_equal, shown
from microparallel.learn.verdict import Wrong
from microparallel.program import Act, Bucket, Delta, Grad, Op, Parameters, Program, TrainingStep, Value, parse_op
from microparallel.program import ops as o
from microparallel.schedules import zero
from microparallel.simulator import Costs, simulate
from microparallel.text import count
from microparallel.verifier import Deadlock, GatheredAgain, Missing, NeverReduced, verify

Case = tuple[int, int, int, int]  # ranks, layers, micro-batches of a rank, prefetch
_CASES: list[Case] = [
    (2, 3, 1, 0),
    (2, 3, 1, 1),
    (2, 4, 2, 1),
    (2, 5, 1, 2),
    (3, 2, 3, 1),
    (4, 6, 2, 2),
    (2, 1, 2, 1),
    (1, 3, 2, 1),
    (2, 4, 1, 9),
]
_RUN = (1, 5)  # the cases that are run
_ON_ITS_WAY = 1  # whole gradient that may be there beside the one that backward has just made
_WIDTH, _SAMPLES, _RATE = 5, 3, 0.1
_WORDS = "F2.5, B2.5, ~T0@dp, !T0, %U0.1@dp, !D2.5 and S"


def check(exam: Exam) -> None:
    """Complete; verified; how much is whole; how much is sent; how long it takes; run."""
    with exam.step("every micro-batch goes forward and back, and one update comes at the end"):
        [programs] = exam.run(_ask, 1, _CASES, allowed=())
        for case, program in zip(_CASES, programs, strict=True):
            _require_complete(case, program)
    with exam.step("a unit is whole when it is used; every gradient is reduce-scattered once") as notes:
        for case, program in zip(_CASES, programs, strict=True):
            _require_right(case, program)
        notes.append(f"{len(programs)} programs verified")
    with exam.step("at most prefetch + 1 units are whole; whole gradients are freed") as notes:
        most = [_require_few(case, program) for case, program in zip(_CASES, programs, strict=True)]
        notes.append(f"prefetch {', '.join(str(case[3]) for case in _CASES[:4])}: {' '.join(map(str, most[:4]))}")
    with exam.step("each unit is gathered at most twice in a micro-batch"):
        for case, program in zip(_CASES, programs, strict=True):
            _require_few_gathers(case, program)
    with exam.step("gathers hide behind what is computed: no step takes longer than it must") as notes:
        for case, program in zip(_CASES, programs, strict=True):
            _require_hidden(case, program)
        notes.append(_gained(programs))
    with exam.step("on real ranks it finds the weights of one process"):
        for number in _RUN:
            _require_weights(_CASES[number], exam.run_on_processes(_run, _CASES[number][0], programs[number]))


def _named(case: Case) -> str:
    ranks, layers, microbatches, prefetch = case
    return (
        f"{count(ranks, 'rank')}, {count(layers, 'layer')}, {count(microbatches, 'micro-batch', 'es')} a rank, "
        f"prefetch {prefetch}"
    )


# ── the learner's order ─────────────────────────────────────────────────────────────────────────────────────────────


def _ask(learner: Any, _: Any, cases: Sequence[Case]) -> list[Program]:
    return [_program(case, [learner.order(rank, *case) for rank in range(case[0])]) for case in cases]


def _program(case: Case, orders: Sequence[Any]) -> Program:
    ranks, layers, microbatches, _ = case
    units = tuple((layer, layer + 1) for layer in reversed(range(layers)))
    ops = [
        tuple(_op(word, f"order({rank}, {', '.join(map(str, case))})") for word in _words(rank, order, case))
        for rank, order in enumerate(orders)
    ]
    return Program("your step", TrainingStep(layers, ranks * microbatches, units, sharded=True), tuple(ops))


def _words(rank: int, order: Any, case: Case) -> Sequence[Any]:
    if not isinstance(order, list | tuple) or not order:
        call = f"order({rank}, {', '.join(map(str, case))})"
        raise Wrong(f"{call} should be a list of words such as F0.1, and is {shown(order)}")
    return order


def _op(word: Any, call: str) -> Op:
    if isinstance(word, str):
        try:
            op = parse_op(word)
        except ProgramError:
            op = o.Join()  # no word of this exercise either
        plain = isinstance(op, o.Forward | o.Backward | o.AllGather | o.ReduceScatter | o.OptimizerStep)
        if plain or (isinstance(op, o.Free) and isinstance(op.value, Parameters | Delta)):
            return op
    raise Wrong(f"{call} has {shown(word)} in it, which is no word of this exercise; it has {_WORDS}")


# ── is it right? ────────────────────────────────────────────────────────────────────────────────────────────────────


def _require_complete(case: Case, program: Program) -> None:
    ranks, layers, microbatches, _ = case
    for rank, ops in enumerate(program.ranks):
        mine = [turn * ranks + rank for turn in range(microbatches)]
        counts = Counter(op for op in ops if isinstance(op, o.Forward | o.Backward))
        wanted = [kind(layer, m) for m in mine for kind in (o.Forward, o.Backward) for layer in range(layers)]
        who = f"{_named(case)}: rank {rank}"
        for op in counts:
            if op not in wanted:
                raise Wrong(
                    f"{who} does {op}, and has micro-batches {', '.join(map(str, mine))} and layers 0 to {layers - 1}: "
                    "in each turn micro-batch turn × ranks + rank"
                )
        for op in wanted:
            if counts[op] != 1:
                times = f"{counts[op]} times" if counts[op] else "never"
                raise Wrong(f"{who} does {op} {times}: every micro-batch once through every layer, forward and back")
        updates = [place for place, op in enumerate(ops) if isinstance(op, o.OptimizerStep)]
        if len(updates) != 1:
            raise Wrong(f"{who} updates {len(updates)} times (S): once, when all gradients are summed up")
        last = max(place for place, op in enumerate(ops) if isinstance(op, o.Backward))
        if updates[0] < last:
            raise Wrong(f"{who} updates before {ops[last]}: the update comes after the last micro-batch's backward")


def _require_right(case: Case, program: Program) -> None:
    try:
        verify(program, completed=False)
    except Missing as error:
        raise Wrong(f"{_named(case)}: {_missing(program, error)}{_beside(case, program, error.rank)}") from None
    except NeverReduced as error:
        raise Wrong(f"{_named(case)}: {_never_reduced(error.rank, error.stage)}") from None
    except Deadlock as error:
        raise Wrong(
            f"{_named(case)}: all ranks gather and reduce-scatter in the same order, or they wait for each "
            f"other for ever\n{error}"
        ) from None
    except GatheredAgain as error:
        raise Wrong(
            f"{_named(case)}: {error}\n  it is still whole: to gather it again costs a message and brings nothing"
        ) from None
    except ProgramError as error:
        raise Wrong(f"{_named(case)}: {error}") from None


def _never_reduced(rank: int, layer: int) -> str:
    return (
        f"rank {rank} never reduce-scatters a gradient of layer {layer}: every rank has other samples, and the parts "
        "are updated with the sum of all ranks' gradients, of every micro-batch"
    )


def _missing(program: Program, error: Missing) -> str:
    """What a rank lacks, in the lesson's words."""
    rank, op, value = error.rank, error.op, error.value
    done = program.ranks[rank][: error.place]
    had = any(isinstance(one, o.Free) and one.value == value for one in done)
    if isinstance(value, Parameters) and isinstance(op, o.Free):
        return f"rank {rank} frees {value}, which is not whole: it was never gathered, or has been freed already"
    if isinstance(value, Parameters) and had and isinstance(op, o.Backward):
        return (
            f"rank {rank} does {op} with unit {value.index}, which it has freed after its forward: gather it again "
            f"for the backward (~{value}@dp)"
        )
    if isinstance(value, Parameters):
        before = "which it has freed" if had else "which it has not gathered"
        return f"rank {rank} does {op} with unit {value.index}, {before}: ~{value}@dp stands before it"
    if isinstance(op, o.OptimizerStep) and isinstance(value, Bucket):
        layers = program.goal.stages  # type: ignore[union-attr]
        return _never_reduced(rank, layers - 1 - value.index)
    if isinstance(value, Delta) and isinstance(op, o.ReduceScatter) and op in done:
        return (
            f"rank {rank} does {op} twice: the number after the dot is the turn, and each micro-batch's gradients are "
            "reduce-scattered in their own"
        )
    if isinstance(value, Delta) and had:
        return (
            f"rank {rank} does {op} when {value} is gone: the whole gradient of a layer is freed after its "
            "reduce-scatter, and once"
        )
    if isinstance(value, Grad):
        before = f"B{value.stage + 1}.{value.microbatch}"
        return f"rank {rank} does {op} before {before}: backward goes from the last layer to the first"
    if isinstance(value, Act):
        return f"rank {rank} does {op} before F{value.stage}.{value.microbatch}, whose outputs it needs"
    if isinstance(value, Delta):
        return f"rank {rank} does {op} before B{value.stage}.{value.microbatch}, which makes that gradient"
    return str(error).splitlines()[0]


def _beside(case: Case, program: Program, rank: int) -> str:
    return compare([str(op) for op in program.ranks[rank]], [str(op) for op in _ours(case).ranks[rank]], "ZeRO-3")


def _ours(case: Case) -> Program:
    ranks, layers, microbatches, prefetch = case
    return zero(3, layers, ranks, microbatches, prefetch=prefetch)


# ── how much is whole ───────────────────────────────────────────────────────────────────────────────────────────────


def _require_few(case: Case, program: Program) -> int:
    """Go through each rank's operations and count; returns how many units are whole at most."""
    most = 0
    for rank, ops in enumerate(program.ranks):
        units: list[Value] = []
        gradients: list[Value] = []
        for op in ops:
            if isinstance(op, o.AllGather):
                units.append(op.value)
            elif isinstance(op, o.Backward):
                gradients.append(Delta(op.stage, op.microbatch))
            elif isinstance(op, o.Free):
                (units if isinstance(op.value, Parameters) else gradients).remove(op.value)
            most = max(most, len(units))
            if len(units) > case[3] + 1:
                raise Wrong(_too_many(case, program, rank, op, units))
            if len(gradients) > 1 + _ON_ITS_WAY:
                held = ", ".join(map(str, gradients))
                raise Wrong(
                    f"{_named(case)}: after {op} rank {rank} holds {len(gradients)} whole gradients ({held}): free "
                    f"each when it is reduce-scattered{_beside(case, program, rank)}"
                )
        for kept, what in ((units, "unit"), (gradients, "gradient")):
            if kept:
                raise Wrong(
                    f"{_named(case)}: at the end of the step rank {rank} still holds {kept[0]} whole: every {what} is "
                    f"freed after its use; a rank keeps its part{_beside(case, program, rank)}"
                )
    return most


def _too_many(case: Case, program: Program, rank: int, op: Op, units: Sequence[Value]) -> str:
    held, limit = ", ".join(map(str, units)), case[3] + 1
    words = f"{_named(case)}: after {op} rank {rank} has {len(units)} units whole ({held}), and {limit} are allowed"
    ops = program.ranks[rank]
    first = next(place for place, one in enumerate(ops) if isinstance(one, o.Backward))
    if not any(isinstance(one, o.Free) and isinstance(one.value, Parameters) for one in ops[:first]):
        words += ". No unit is freed in forward: what is kept until backward is whole all the time"
    return words + _beside(case, program, rank)


def _require_few_gathers(case: Case, program: Program) -> None:
    _, layers, microbatches, _ = case
    for rank, ops in enumerate(program.ranks):
        found = sum(isinstance(op, o.AllGather) for op in ops)
        enough = 2 * layers * microbatches
        if found > enough:
            raise Wrong(
                f"{_named(case)}: rank {rank} gathers {found} times, and {enough} are enough: each of {layers} units "
                f"for forward and for backward{_beside(case, program, rank)}"
            )


# ── how long it takes ───────────────────────────────────────────────────────────────────────────────────────────────


def _all_costs(layers: int) -> list[Costs]:
    """Gathers that are shorter than a forward; some that cost by the message; long ones beside layers that differ."""
    times = [2.0 if layer % 3 == 0 else 0.25 for layer in range(layers)]
    return [
        Costs(seconds_per_byte=1),
        Costs(latency=0.1, seconds_per_byte=0.5),
        Costs(forward=times, backward_input=times, backward_weight=times, seconds_per_byte=2),
    ]


def _require_hidden(case: Case, program: Program) -> None:
    for costs in _all_costs(case[1]):
        best, found = (simulate(one, costs).makespan for one in (_ours(case), program))
        if found > best + 1e-9:
            raise Wrong(
                f"{_named(case)}: the step takes {found:g}, and {best:g} are enough. {_late(case, program)}"
                f"{_beside(case, program, 0)}"
            )


def _late(case: Case, program: Program) -> str:
    """Which gather stands too close to the use of its unit."""
    ahead = {name: _ahead(one.ranks[0]) for name, one in (("ours", _ours(case)), ("yours", program))}
    for use, distance in ahead["ours"].items():
        if ahead["yours"].get(use, distance) < distance:
            found = ahead["yours"][use]
            between = count(found, "unit") if found else "no unit"
            return (
                f"{use} waits for its unit: {between} is computed with between the gather and {use}, where prefetch "
                f"{case[3]} allows {distance}; begin the gather earlier"
            )
    return "Something waits for a gather or a reduce-scatter that could have begun earlier"


def _ahead(ops: Sequence[Op]) -> dict[str, int]:
    """For each forward and backward: how many others stand between the gather of its unit and itself."""
    found: dict[str, int] = {}
    layers = 1 + max(op.stage for op in ops if isinstance(op, o.Forward))
    computed = 0
    gathered: dict[int, int] = {}  # by unit: how much was computed before its gather
    for op in ops:
        if isinstance(op, o.AllGather) and isinstance(op.value, Parameters):
            gathered[op.value.index] = computed
        elif isinstance(op, o.Forward | o.Backward):
            found[str(op)] = computed - gathered[layers - 1 - op.stage]
            computed += 1
    return found


def _gained(programs: Sequence[Program]) -> str:
    """What prefetching gains in the first two cases, which differ in that alone."""
    none, one = (max(simulate(program, Costs(seconds_per_byte=1)).exposed_communication) for program in programs[:2])
    return f"three layers: {none:g} of communication is exposed without prefetching, {one:g} with it"


# ── on real ranks ───────────────────────────────────────────────────────────────────────────────────────────────────


def _weights(layers: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [0.5 * torch.randn(_WIDTH, _WIDTH, generator=generator, dtype=torch.float64) for _ in range(layers)]


def _inputs(microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + microbatch)
    return torch.randn(_SAMPLES, _WIDTH, generator=generator, dtype=torch.float64)


def _in_parts(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    row = tensor.reshape(-1)
    return list(torch.cat([row, row.new_zeros(-len(row) % ranks)]).view(ranks, -1).unbind())


def _run(comms: Comms, program: Program) -> list[torch.Tensor]:
    """Do what the program says, with layers tanh(x · weight), and the sum of the last outputs' squares as the loss."""
    layers = program.goal.stages  # type: ignore[union-attr]
    part = {
        Parameters(layers - 1 - n): _in_parts(w, comms.world_size)[comms.rank].clone()
        for n, w in enumerate(_weights(layers))
    }
    total = {unit: torch.zeros_like(one) for unit, one in part.items()}
    held: dict[Any, torch.Tensor] = {}  # whole units and gradients
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    gradients: dict[int, torch.Tensor] = {}  # by micro-batch: of the outputs of the layer that backward comes to next

    def weight(layer: int) -> torch.Tensor:
        return held[Parameters(layers - 1 - layer)]

    for op in program.ranks[comms.rank]:
        match op:
            case o.AllGather(value):
                held[value] = torch.cat(comms.all_gather(part[value]))[: _WIDTH**2].view(_WIDTH, _WIDTH)  # type: ignore[index]
            case o.Forward(layer, m):
                given = outputs[layer - 1, m] if layer else _inputs(m)
                outputs[layer, m] = torch.tanh(given @ weight(layer))
            case o.Backward(layer, m):
                made = outputs.pop((layer, m))
                gradient = gradients.pop(m) if layer < layers - 1 else 2 * made
                inside = gradient * (1 - made**2)
                given = outputs[layer - 1, m] if layer else _inputs(m)
                held[Delta(layer, m)] = given.T @ inside
                gradients[m] = inside @ weight(layer).T
            case o.ReduceScatter(Bucket(index, turn)):
                layer, m = layers - 1 - index, (turn or 0) * comms.world_size + comms.rank
                total[Parameters(index)] += comms.reduce_scatter(_in_parts(held[Delta(layer, m)], comms.world_size))
            case o.Free(value):
                del held[value]
            case o.OptimizerStep():
                part = {unit: one - _RATE * total[unit] for unit, one in part.items()}
    return [part[Parameters(layers - 1 - layer)] for layer in range(layers)]


def _require_weights(case: Case, results: Sequence[Sequence[torch.Tensor]]) -> None:
    ranks, layers, microbatches, _ = case
    weights = [weight.requires_grad_() for weight in _weights(layers)]
    for m in range(ranks * microbatches):
        outputs = _inputs(m)
        for weight in weights:
            outputs = torch.tanh(outputs @ weight)
        outputs.square().sum().backward()  # type: ignore[no-untyped-call]
    for layer, weight in enumerate(weights):
        assert weight.grad is not None
        expected = (weight - _RATE * weight.grad).detach().reshape(-1)
        found = torch.cat([mine[layer] for mine in results])[: len(expected)]
        require_equal(found, expected, f"{_named(case)}: the new weight of layer {layer}")
