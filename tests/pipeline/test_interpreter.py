"""The interpreter alone, with all ranks in one process: every schedule, over messages that wait, and that do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pairwise import every
from tests.pipeline.oracle import batch, far, gpt, mlp, step_in_process, whole_batch, wrong_gradients

import microparallel as mp
from microparallel.errors import ProgramError
from microparallel.pipeline.interpreter import runs
from microparallel.pipeline.programs import Schedule
from microparallel.program import from_text, parse_op, peak_activations
from microparallel.schedules import PIPELINES
from microparallel.transport.in_process import in_process_transports
from microparallel.transport.nccl_rules import nccl_rules_transports


@pytest.fixture(scope="module")
def subjects():
    """A model, a batch that few numbers divide, and what one process makes of it."""
    found = {}
    for kind, model in (("mlp", mlp()), ("gpt", gpt())):
        inputs, targets = batch(kind, 11)
        found[kind] = model, inputs, targets, *whole_batch(model, inputs, targets)
    return found


def failures(schedule, subject, transports, **how):
    model, inputs, targets, loss, gradients = subject
    model.zero_grad()
    found, workers = step_in_process(schedule, model, inputs, targets, transports, **how)
    wrong = wrong_gradients(model.named_parameters(), gradients)
    program = schedule.program(schedule.microbatches)
    if far(found, loss, 1e-12):
        wrong.append("loss")
    if [worker.most_kept for worker in workers] != [peak_activations(ops) for ops in program.ranks]:
        wrong.append("activations held at once")
    if any(worker.values for worker in workers):
        wrong.append("something is still held")
    return wrong


@pytest.mark.parametrize("name", every(2, reversed(PIPELINES)))
def test_every_schedule_under_nccls_rules(name, subjects):
    for ranks in range(1, 5):
        for microbatches in range(1, 9):
            schedule = Schedule(name, ranks, microbatches)
            wrong = failures(schedule, subjects["mlp"], nccl_rules_transports(ranks), in_order=True)
            assert not wrong, f"{ranks} ranks, {microbatches} micro-batches: {wrong}"


@pytest.mark.parametrize("name", PIPELINES)
def test_tied_weights_under_nccls_rules(name, subjects):
    schedule = Schedule(name, 3, 7)
    assert not failures(schedule, subjects["gpt"], nccl_rules_transports(3), in_order=True)


@given(
    name=st.sampled_from(list(PIPELINES)),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 8),
    ahead=st.integers(0, 4),
)
def test_receives_may_be_posted_early_where_messages_do_not_wait(subjects, name, ranks, microbatches, ahead):
    schedule = Schedule(name, ranks, microbatches)
    assert not failures(schedule, subjects["mlp"], in_process_transports(ranks), ahead=ahead)


def test_without_a_common_order_nccls_rules_stop_some_schedules(subjects):
    """Why there is `message_order`: messages that stand together are not enough."""
    with pytest.raises(ProgramError, match=r"stands still: rank 0 is in exchange 4 .*; rank 1 is in exchange"):
        failures(Schedule("zb-h2", 2, 4), subjects["mlp"], nccl_rules_transports(2))


# ── what stands together ────────────────────────────────────────────────────────────────────────────────────────────


def cut_into_runs(text):
    ops = [parse_op(word) for word in text.split()]
    return " | ".join(" ".join(map(str, run)) if isinstance(run, tuple) else str(run) for run in runs(ops))


def test_messages_that_stand_together_leave_together():
    program = "F0.1 >A0.1@1 <G0.0@1 B0.0 !A0.0 !G0.0 F0.2"
    assert cut_into_runs(program) == "F0.1 | >A0.1@1 <G0.0@1 | B0.0 | !A0.0 !G0.0 | F0.2"
    assert cut_into_runs("<A0.0@0 >A0.0@2 <A0.1@0") == "<A0.0@0 | >A0.0@2 <A0.1@0"


@pytest.mark.parametrize("word", ["S", "C0:4+=P1", "^:w@dp/0"])
def test_what_a_pipeline_cannot_run_is_refused(word):
    with pytest.raises(ProgramError, match=r"cannot be run in a pipeline: it runs F, B, I, W"):
        cut_into_runs(f"F0.0 {word}")


def test_a_rank_may_pass_on_what_it_does_not_use(subjects):
    """Rank 1 of three hands rank 0's output to rank 2, and rank 2's gradient to rank 0."""
    program = from_text(
        """program relay
        goal: training step of 2 stages, 2 micro-batches
        rank 0: F0.0 >A0.0@1 F0.1 >A0.1@1 <G0.0@1 B0.0 <G0.1@1 B0.1
        rank 1: <A0.0@0 >A0.0@2 <A0.1@0 >A0.1@2 <G0.0@2 >G0.0@0 <G0.1@2 >G0.1@0
        rank 2: <A0.0@1 F1.0 B1.0 >G0.0@1 <A0.1@1 F1.1 B1.1 >G0.1@1"""
    )
    mp.verify(program)
    schedule = Schedule(program, 3, 2)
    model, inputs, targets, loss, gradients = subjects["mlp"]
    for transports, in_order in ((in_process_transports(3), False), (nccl_rules_transports(3), True)):
        model.zero_grad()
        found, _ = step_in_process(schedule, model, inputs, targets, transports, in_order=in_order)
        assert not far(found, loss, 1e-12)
        assert not wrong_gradients(model.named_parameters(), gradients)
