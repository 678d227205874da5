"""Three ways to learn with fewer bytes, or all of them: same seeds, same batches."""

import pytest

from microparallel.cli.compare import explain_compression
from microparallel.train.config import TrainConfig
from microparallel.train.fewer_bytes import WAYS, WHOLE, WITH, WITHOUT, CompressedCurve, compare_compression

JOB = TrainConfig(
    model="mlp", depth=2, dim=64, steps=12, batch=16, optimizer="sgd", lr=0.1, ranks=2, schedule_lr="constant"
).resolved()


def job(method):
    return TrainConfig(**{**vars(JOB), "compress": method})


def test_top_k_loses_less_with_feedback_and_sends_a_part_of_the_bytes(pool):
    whole, kept, lost = compare_compression(job("topk:0.05"), [0, 1], pool)
    assert [whole.way, kept.way, lost.way] == list(WAYS)
    assert whole.losses[0] == kept.losses[0] == lost.losses[0]  # the same weights, the same batch
    assert whole.final_loss < lost.final_loss and kept.final_loss < lost.final_loss
    assert kept.bytes_a_step == lost.bytes_a_step < 0.3 * whole.bytes_a_step
    assert all(len(curve.losses) == 12 and len(curve.final) == len(curve.accuracy) == 2 for curve in (whole, kept))


def test_what_only_rounds_has_two_ways(pool):
    whole, rounded = compare_compression(job("bf16"), [0], pool)
    assert [whole.way, rounded.way] == [WHOLE, WITHOUT]
    assert rounded.final_loss == pytest.approx(whole.final_loss, rel=0.02)
    assert rounded.bytes_a_step < 0.6 * whole.bytes_a_step
    assert "needs no error feedback" in explain_compression([whole, rounded], job("bf16"))


@pytest.mark.parametrize(
    ("kept", "without", "words"),
    [
        (0.1, 0.9, "without error feedback the loss ends 0.8 higher"),
        (0.1, 0.11, "no difference here"),
        (0.11, 0.1, "no difference here"),
        (0.9, 0.1, "with error feedback the loss ends 0.8 higher"),
    ],
)
def test_what_was_seen_is_said(kept, without, words):
    ends = {WHOLE: 0.1, WITH: kept, WITHOUT: without}
    curves = [CompressedCurve(way, [1.0, end], [end, end + 0.02], [None] * 2, 1.0) for way, end in ends.items()]
    assert words in explain_compression(curves, job("topk:0.01"))
