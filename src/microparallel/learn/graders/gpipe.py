"""Fill, then drain: the gradients of the whole batch, in GPipe's order, and nothing kept for too long."""

from __future__ import annotations

from microparallel.learn.exam import Exam
from microparallel.learn.graders._microbatches import suspects
from microparallel.learn.graders._orders import compare, require_freed, require_pairs, tokens
from microparallel.learn.graders._pipeline_steps import Outcome, Truth, do_steps
from microparallel.learn.verdict import Wrong
from microparallel.schedules import gpipe


def check(exam: Exam) -> None:
    """Gradients and order; uneven micro-batches; a second step; memory; other shapes."""
    with exam.step("two ranks and four micro-batches: the gradients of the whole batch"):
        outcomes = _require_steps(exam, 2, 8, 4, steps=1)
    with exam.step("all forwards, then all backwards"):
        _require_order(outcomes, 4)
    with exam.step("micro-batches that are not equally large"):
        _require_steps(exam, 2, 7, 3, steps=1)
    with exam.step("what is no longer needed is let go") as notes:
        for rank, outcome in enumerate(outcomes):
            require_freed(rank, outcome.most_kept)
        notes.append(f"at most {outcomes[0].most_held} activations, all of them before the first backward")
    with exam.step("three and four ranks, two steps, fewer micro-batches than ranks, and one rank alone"):
        for ranks, samples, microbatches in ((3, 8, 4), (4, 6, 2), (2, 4, 1), (1, 5, 3)):
            _require_order(_require_steps(exam, ranks, samples, microbatches, steps=2), microbatches)


def _require_steps(exam: Exam, ranks: int, samples: int, microbatches: int, steps: int) -> list[Outcome]:
    outcomes: list[Outcome] = exam.run(do_steps, ranks, steps, "gpipe_step", samples, microbatches)
    truth = Truth(ranks, samples, microbatches)
    require_pairs([outcome.orders[0] for outcome in outcomes])
    truth.require(outcomes, lambda rank: suspects(truth, rank))
    return outcomes


def _require_order(outcomes: list[Outcome], microbatches: int) -> None:
    """All forwards first; the backwards may come in any order that all ranks keep."""
    program = gpipe(len(outcomes), microbatches)
    for rank, outcome in enumerate(outcomes):
        for order in outcome.orders:
            expected = tokens(program, rank)
            if [word[0] for word in order] != [word[0] for word in expected]:
                raise Wrong(
                    f"the gradients are right, but rank {rank} does not work in GPipe's order, which fills the "
                    f"pipeline with all forwards before the first backward{compare(order, expected, 'GPipe')}"
                )
