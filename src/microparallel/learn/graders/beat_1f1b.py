"""Beat 1F1B: schedules for machines that the learner has not seen, verified, simulated, and held against 1F1B.

The learner's function runs apart, and gives a text. Its program is read here, so that what is judged is the program
alone, and by our own costs: whoever wrote it could not have changed them.
"""

from __future__ import annotations

from typing import Any

from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders._machines import MACHINES, Machine
from microparallel.learn.requirements import require_type
from microparallel.learn.verdict import Wrong
from microparallel.program import Free, Program, Recv, Send, TrainingStep, from_text, halves, to_text
from microparallel.simulator import simulate
from microparallel.text import count
from microparallel.verifier import verify

_SECONDS = 6.0  # for a machine
_SHOWN = Machine("the machine of the lesson", 6, (1, 2, 1), (1, 2, 1), (1, 2, 1), (4, 3, 2), latency=0.5)
_STARS = ((1.01, "★★★"), (1.05, "★★☆"))  # how much longer than the best known a step may be, at most
_LEAST = 1e-9  # of the makespan: what counts as shorter


def check(exam: Exam) -> None:
    """The machine that is shown; then each of the others; then how near the best known all of them are."""
    with exam.step("the machine of the lesson: right, within its limit, shorter than 1F1B") as notes:
        notes.append(_note(_SHOWN, _judged(exam, _SHOWN)))
    over = {}
    for machine in MACHINES:
        with exam.step(
            f"{machine.name}: {count(machine.ranks, 'rank')}, {machine.microbatches} micro-batches"
        ) as notes:
            makespan = _judged(exam, machine)
            over[machine.name] = makespan / machine.best_known
            notes.append(f"{_note(machine, makespan)}, best known {machine.best_known:g}")
    worst = max(over, key=lambda name: over[name])
    stars = next((stars for most, stars in _STARS if over[worst] <= most + _LEAST), "★☆☆")
    with exam.step(f"{stars} shorter than 1F1B on every machine") as notes:
        notes.append(f"furthest from the best known: {worst}, {100 * (over[worst] - 1):.1f} % more")


def _note(machine: Machine, makespan: float) -> str:
    return f"{makespan:g}, 1F1B {machine.of_1f1b:g}"


def _judged(exam: Exam, machine: Machine) -> float:
    """How long the learner's step takes on a machine; refused unless it beats 1F1B."""
    try:
        [text] = exam.run(_written, 1, machine, timeout=_SECONDS)
        program = _read(text)
        _require_its_goal(program, machine)
        _verify(program)
        trace = simulate(program, machine.costs)
        _require_room(trace.peak_activations, machine)
        if trace.makespan > machine.of_1f1b * (1 - _LEAST):
            longer = "as long as" if trace.makespan < machine.of_1f1b * (1 + _LEAST) else "longer than"
            raise Wrong(
                f"the program is right, and takes {longer} 1F1B: {trace.makespan:g}, and 1F1B takes "
                f"{machine.of_1f1b:g}. Where does the slowest rank wait, and for what? mp.draw(mp.simulate(…)) shows it"
            )
    except Wrong as wrong:
        hidden = machine is not _SHOWN  # then the learner is told how to see it, too
        raise Wrong(f"{wrong}\n  {machine.call}" if hidden else str(wrong)) from None
    return trace.makespan


def _written(learner: Any, _: Any, machine: Machine) -> str:
    """Ask for the program, on a rank; as text."""
    found = learner.schedule(machine.ranks, machine.microbatches, machine.costs, [*machine.most])
    if isinstance(found, Program):
        return to_text(found)
    return require_type(found, str, "what schedule returns", "a program, or its text")


def _read(text: str) -> Program:
    try:
        return from_text(text)
    except ProgramError as error:
        raise Wrong(f"what schedule returns cannot be read as a program: {error}") from None


def _require_its_goal(program: Program, machine: Machine) -> None:
    """Refuse a program for another machine, or with something else in it than this step."""
    if program.world_size != machine.ranks:
        raise Wrong(
            f"the program is for {count(program.world_size, 'rank')}, and this machine has {machine.ranks}: make it "
            "from what the function is given"
        )
    wanted = TrainingStep(machine.ranks, machine.microbatches)
    if program.goal != wanted:
        raise Wrong(f"the program's goal is a {program.goal}, and should be a {wanted}")
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if not halves(op) and not isinstance(op, Send | Recv | Free):
                raise Wrong(f"rank {rank} does {op}, which is not for this step: forwards, backwards and messages are")
            for half in halves(op):
                if half.stage != rank:
                    raise Wrong(f"rank {rank} computes {half}: stage {half.stage} is on rank {half.stage}")


def _verify(program: Program) -> None:
    try:
        verify(program)
    except ProgramError as error:
        raise Wrong(str(error)) from None


def _require_room(peaks: Any, machine: Machine) -> None:
    for rank, (held, most) in enumerate(zip(peaks, machine.most, strict=True)):
        if held > most:
            raise Wrong(
                f"rank {rank} holds {held} activations at once, and has room for {most}. A forward takes room, and a "
                "backward, or the weight half of it, gives it back"
            )
