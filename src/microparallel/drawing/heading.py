"""The words around a drawing: what it shows, what is measured on it, and what it leaves out."""

from __future__ import annotations

from collections import Counter

from microparallel.drawing.kinds import kind_of
from microparallel.drawing.rows import Rows
from microparallel.program import AllReduce, Collective, Forward, ForwardStages, Program, Shard, TrainingStep
from microparallel.program.rules import halves
from microparallel.text import count, short, show_percent
from microparallel.trace import Trace

_FEW = 12  # ranks that are listed one by one


def title_of(program: Program) -> str:
    """What a program is: `1f1b · 4 ranks · 8 micro-batches`."""
    goal, ranks = program.goal, count(program.world_size, "rank")
    if isinstance(goal, Collective):
        return f"{program.name} · {goal} · {ranks}"
    if goal.buckets and _whole_model_on_every_rank(program):
        # Where one forward goes through all stages, these are the buckets themselves, as in `DataParallel`.
        layers = f" · {count(goal.stages, 'layer')}" if _one_by_one(program) else ""
        return f"{program.name} · {ranks}{layers} · {count(len(goal.buckets), 'bucket')}"
    stages = f" · {goal.stages} stages" if goal.stages != program.world_size else ""
    return f"{program.name} · {ranks}{stages} · {count(goal.microbatches, 'micro-batch', 'es')}"


def _whole_model_on_every_rank(program: Program) -> bool:
    """Whether this is data parallelism alone: with pipelines, a rank has some of the stages. One may have no data."""
    computing = next((ops for ops in program.ranks if any(map(halves, ops))), ())
    stages = {half.stage for op in computing for half in halves(op) if isinstance(half, Forward)}
    return len(stages) == program.goal.stages if isinstance(program.goal, TrainingStep) else False


def _one_by_one(program: Program) -> bool:
    return not any(isinstance(op, ForwardStages) for ops in program.ranks for op in ops)


def metrics_of(trace: Trace) -> dict[str, str]:
    """What is measured on a trace, by name, ready to be read."""
    metrics = {"makespan": short(trace.makespan)}
    if isinstance(trace.followed.goal, TrainingStep):
        if not trace.followed.goal.buckets:  # in data parallelism, gaps are communication
            metrics["bubble"] = show_percent(trace.bubble_fraction)
        if any(trace.exposed_communication):
            metrics["exposed communication"] = short(max(trace.exposed_communication))
        metrics["peak activations"] = per_rank(trace.peak_activations)
    else:
        metrics["messages sent"] = per_rank(trace.messages_sent)
    return metrics


def head_of(trace: Trace) -> str:
    """The first line of a drawing."""
    return " · ".join([title_of(trace.followed), *(f"{name} {value}" for name, value in metrics_of(trace).items())])


def per_rank(numbers: list[int]) -> str:
    """A number for each rank; for many ranks, from the least to the most."""
    if len(numbers) <= _FEW:
        return " ".join(map(str, numbers))
    return f"{min(numbers)} to {max(numbers)}" if min(numbers) != max(numbers) else f"{numbers[0]} on every rank"


def notes_of(rows: Rows) -> list[str]:
    """What a drawing of these rows leaves out, and what its names do not say, in words."""
    notes = [] if rows.trace.events else ["nothing happens: no rank has anything to do"]
    notes += _note_on_parts(rows)
    if rows.instant:
        kinds = Counter(kind_of(event.operation).word for event in rows.instant)
        notes.append("takes no time here: " + ", ".join(f"{count} × {word}" for word, count in kinds.items()))
    if rows.missing:
        rank, op = rows.missing[0]
        others = f", and {len(rows.missing) - 1} others" if len(rows.missing) > 1 else ""
        notes.append(f"never happens: {op} of rank {rank}{others}; mp.verify says why")
    return notes


def _note_on_parts(rows: Rows) -> list[str]:
    """What a name with a slash is, by the first one that is summed."""
    for cell in rows.cells:
        if isinstance(cell.op, AllReduce) and isinstance(cell.op.value, Shard):
            return [f"{cell.op.value} is a rank's part of {cell.op.value.of}, summed along {cell.op.axis}"]
    return []


def notes_on_colour(rows: Rows) -> list[str]:
    """What the legend does not say about the colours of a figure."""
    return ["paler: the later stages of a rank"] if any(cell.shade for cell in rows.cells) else []
