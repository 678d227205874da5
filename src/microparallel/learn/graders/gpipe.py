"""Fill, then drain: the gradients of the whole batch, in GPipe's order, and nothing kept for too long."""

from __future__ import annotations

import functools

from microparallel.learn.exam import Exam
from microparallel.learn.graders._pipeline_steps import microbatch_suspects, require_freed, take_steps
from microparallel.learn.graders._programs import compare, tokens
from microparallel.learn.verdict import Wrong
from microparallel.program import Program, peak_activations
from microparallel.schedules import gpipe

_require_steps = functools.partial(take_steps, function="gpipe_step", suspects=microbatch_suspects)


def check(exam: Exam) -> None:
    """Gradients and order; uneven micro-batches; a second step; memory; other shapes."""
    with exam.step("two ranks and four micro-batches: the gradients of the whole batch"):
        outcomes, programs = _require_steps(exam, 2, 8, 4, steps=1)
    with exam.step("all forwards, then all backwards"):
        _require_order(programs, 4)
    with exam.step("micro-batches that are not equally large"):
        _require_steps(exam, 2, 7, 3, steps=1)
    with exam.step("what is no longer needed is freed") as notes:
        for rank, outcome in enumerate(outcomes):
            require_freed(rank, outcome.most_kept)
        held = peak_activations(programs[0].ranks[0])
        notes.append(f"at most {held} activations, all of them before the first backward")
    with exam.step("three and four ranks, two steps, fewer micro-batches than ranks, and one rank alone"):
        for ranks, samples, microbatches in ((3, 8, 4), (4, 6, 2), (2, 4, 1), (1, 5, 3)):
            _require_order(_require_steps(exam, ranks, samples, microbatches, steps=2)[1], microbatches)


def _require_order(programs: list[Program], microbatches: int) -> None:
    """All forwards first; the backwards may come in any order that all ranks keep."""
    for program in programs:
        for rank in range(program.world_size):
            order, expected = tokens(program, rank), tokens(gpipe(program.world_size, microbatches), rank)
            if [word[0] for word in order] != [word[0] for word in expected]:
                raise Wrong(
                    f"the gradients are right, but rank {rank} does not work in GPipe's order, which fills the "
                    f"pipeline with all forwards before the first backward{compare(order, expected, 'GPipe')}"
                )
