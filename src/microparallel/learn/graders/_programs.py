"""Orders of operations in text: where two of them part, and the program of those that a learner has written.

The exercises on schedules ask for an order only, such as `F0.0 F0.1 B0.0 B0.1` for each rank. The grader adds the
messages, verifies the program, and runs it on real ranks.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import (
    combined,
    gradients,
    in_one_process,
    make_layers,
    mean_loss,
    pipeline_batch,
    require_gradients,
)
from microparallel.learn.requirements import Suspect, flat, require_equal, shown
from microparallel.learn.verdict import Wrong
from microparallel.program import Act, Grad, Program, TrainingStep, halves, parse_op
from microparallel.program.walk import Wait
from microparallel.schedules import lower
from microparallel.verifier import Deadlock, Missing, verify

_SAMPLES = 8
_AROUND = 4  # operations that are shown on either side of a place
_WORD = re.compile(r"([FBIW])(\d+)\.(\d+)")
Orders = list[list[str]]  # a rank's operations, for all ranks


# ── where two orders part ───────────────────────────────────────────────────────────────────────────────────────────


def tokens(program: Program, rank: int) -> list[str]:
    """What a rank computes, in text."""
    return [str(op) for op in program.ranks[rank] if halves(op)]


def compare(found: Sequence[str], expected: Sequence[str], name: str) -> str:
    """Two lines that show where the orders part; nothing if they do not."""
    pairs = enumerate(itertools.zip_longest(found, expected))
    place = next((place for place, (mine, wanted) in pairs if mine != wanted), None)
    if place is None:
        return ""
    width = max(len("yours"), len(name))
    return f"\n  {'yours':<{width}}  {_show(found, place)}\n  {name:<{width}}  {_show(expected, place)}"


def _show(order: Sequence[str], place: int) -> str:
    """A few operations around a place, with that one in brackets."""
    first, last = max(0, place - _AROUND), place + _AROUND + 1
    words = [f"[{word}]" if first + at == place else word for at, word in enumerate(order[first:last])]
    if place >= len(order):
        words.append("[nothing more]")
    return f"{'… ' * (first > 0)}{' '.join(words)}{' …' * (last < len(order))}"


# ── the learner's order ─────────────────────────────────────────────────────────────────────────────────────────────


def ask_for_orders(exam: Exam, cases: Sequence[tuple[int, ...]], kinds: str) -> list[Orders]:
    """The learner's `order(rank, *case)` for every rank of each case, whose first number is that of the ranks."""
    [answers] = exam.run(_ask, 1, cases, kinds, allowed=())
    return list(answers)


def _ask(learner: Any, _: Any, cases: Sequence[tuple[int, ...]], kinds: str) -> list[Orders]:
    answers = []
    for case in cases:
        orders = [learner.order(rank, *case) for rank in range(case[0])]
        for rank, order in enumerate(orders):
            _require_words(order, f"order({', '.join(map(str, (rank, *case)))})", kinds)
        answers.append([list(map(str, order)) for order in orders])
    return answers


def _require_words(order: Any, call: str, kinds: str) -> None:
    if not isinstance(order, list | tuple) or not order:
        raise Wrong(f"{call} should be a list of words such as {kinds[0]}0.1, and is {shown(order)}")
    for word in order:
        if isinstance(word, str) and ".-" in word:
            raise Wrong(
                f"{call} has {word} in it, and micro-batches are counted from 0: where does a range begin when there "
                "are only a few of them? max(0, …)"
            )
        match = _WORD.fullmatch(word) if isinstance(word, str) else None
        if match is None or match[1] not in kinds:
            raise Wrong(
                f"{call} has {shown(word)} in it, which is no operation of this schedule: {kinds[0]}2.1 is one, of "
                f"stage 2 on micro-batch 1; the letters are {', '.join(kinds)}"
            )


def split(word: str) -> tuple[str, int, int]:
    """The letter, the stage and the micro-batch of a word."""
    return word[0], *(int(number) for number in word[1:].split("."))  # type: ignore[return-value]


def require_complete(orders: Orders, rank: int, expected: Sequence[str]) -> None:
    """Refuse a rank that leaves something out or does it twice."""
    counts = Counter(orders[rank])
    twice = [f"does {word} {count} times" for word, count in counts.items() if count > 1]
    missing = [word for word in expected if word not in counts]
    strange = [word for word in counts if word not in set(expected)]
    if strange:
        raise Wrong(f"rank {rank} does {strange[0]}, and there is no such stage or micro-batch on it")
    if twice:
        never = f" and {missing[0]} never" if missing else ""
        raise Wrong(f"rank {rank} {twice[0]}{never}: every micro-batch once, on every stage of the rank")
    if missing:
        raise Wrong(f"rank {rank} never does {missing[0]}: every micro-batch needs all its operations on every stage")


# ── its program ─────────────────────────────────────────────────────────────────────────────────────────────────────


def make_program(name: str, orders: Orders, stages: int, microbatches: int) -> Program:
    """The program, with its messages; refused in words if an operation lacks what it needs, or ranks wait for ever."""
    ranks = tuple(tuple(parse_op(word) for word in order) for order in orders)
    program = Program(name, TrainingStep(stages, microbatches), ranks)
    try:
        program = lower(program)
        verify(program, completed=False)
    except Deadlock as error:
        waits = "".join(f"\n  {_waiting(program, wait)}" for wait in error.waits)
        raise Wrong(
            f"in this order the ranks wait for each other for ever (the verifier says so, nothing was run){waits}"
        ) from None
    except Missing as error:
        maker = str(error.value).replace("A", "F").replace("R", "I")
        done = " ".join(str(op) for op in program.ranks[error.rank][: error.place] if halves(op))
        words = f"rank {error.rank} does {error.op} before {maker}, which makes what it needs"
        raise Wrong(f"{words}\n  yours  {done} [{error.op}] …") from None
    except ProgramError as error:
        raise Wrong(f"the verifier refuses this program: {error}") from None
    return program


def _waiting(program: Program, wait: Wait) -> str:
    """What a rank waits for, and where in its order. The messages are left out: the learner has written none."""
    ops, value = program.ranks[wait.rank], getattr(program.ranks[wait.rank][wait.place], "value", None)
    done, to_do = ([str(op) for op in some if halves(op)] for some in (ops[: wait.place], ops[wait.place :]))
    what = ""
    if isinstance(value, Act | Grad):
        what = f"{'the gradient of ' * isinstance(value, Grad)}what stage {value.stage} returns for micro-batch "
        what += f"{value.microbatch}, from "
    return f"rank {wait.rank}: {' '.join([*done[-3:], '[waits]', *to_do[:3]])}, for {what}rank {wait.on}"


def run_program(exam: Exam, program: Program) -> None:
    """Run a program on real ranks, two steps of it, and compare with one process."""
    assert isinstance(program.goal, TrainingStep)
    results = exam.run_on_processes(_run, program.world_size, program)
    expected = [
        in_one_process(make_layers(program.goal.stages), *pipeline_batch(_SAMPLES, seed=step)) for step in (0, 1)
    ]
    both = combined([alone for _, alone in expected], [1.0, 1.0])
    for rank, (losses, by_stage) in enumerate(results):
        for step, loss in enumerate(losses):
            require_equal(loss, expected[step][0], f"the loss of step {step} on rank {rank}")
        for stage, found in by_stage.items():
            own = slice(2 * stage, 2 * stage + 2)
            suspects = [Suspect(flat(expected[1][1][own]), "only the second step is in the gradients")]
            require_gradients(found, both[own], f"stage {stage}, on rank {rank},", "no gradients", suspects)


def _run(comms: Comms, program: Program) -> tuple[list[torch.Tensor], dict[int, list[torch.Tensor | None]]]:
    from microparallel.pipeline import Pipeline

    stages = program.goal.stages  # type: ignore[union-attr]
    pipe = Pipeline(make_layers(stages), comms, program, loss_fn=mean_loss, balance=[1] * stages)
    losses = [pipe.step(*pipeline_batch(_SAMPLES, seed=step)) for step in (0, 1)]
    return losses, {index: gradients(nn.ModuleList(stage.modules)) for index, stage in pipe.stages.items()}
