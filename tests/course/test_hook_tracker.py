"""A trace of what ranks wrote down is what happened: from made-up times, and from a step in one process."""

import math

import pytest
import torch
from torch import nn

import microparallel as mp
from microparallel.course.hook_tracker import RankTimes, TrackedStep, layers_of, trace_of

# ── from times to a trace ───────────────────────────────────────────────────────────────────────────────────────────

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
BUCKETS = TrackedStep(NAMES, (("1.bias", "1.weight"), ("0.bias", "0.weight")), (80, 40))
SINGLY = TrackedStep(NAMES, tuple((name,) for name in reversed(NAMES)), (8, 72, 8, 32))


def shown(trace, rank):
    return [(str(event.op), event.start, event.end) for event in trace.by_rank[rank]]


def test_an_all_reduce_begins_when_the_last_rank_has_handed_it_over_and_the_one_before_is_back():
    times = [
        RankTimes(called=(0, 0, 2, 2), forward_end=3, ready=(10, 10, 6, 5), starts=(6.5, 10), ends=(9, 13)),
        RankTimes(called=(0, 0, 1, 1), forward_end=2, ready=(8, 7, 4, 4), starts=(4, 8), ends=(11, 14)),
    ]
    trace = trace_of("made up", BUCKETS, times)
    assert shown(trace, 0) == [
        ("F0.0", 0, 2),
        ("F1.0", 2, 3),
        ("B1.0", 3, 6),
        ("B0.0", 6, 10),
        ("*U0@dp", 6.5, 9),  # ready at 6, handed over a little later
        ("*U1@dp", 10, 13),
    ]
    assert shown(trace, 1) == [
        ("F0.1", 0, 1),
        ("F1.1", 1, 2),
        ("B1.1", 2, 4),
        ("B0.1", 4, 8),
        ("*U0@dp", 6.5, 11),  # waited for rank 0 until then
        ("*U1@dp", 11, 14),  # and for the first until 11
    ]
    assert trace.exposed_communication == [3, 6]
    assert trace.hidden_share == pytest.approx(1 - 9 / 13)
    assert trace.bytes_sent == [120, 120] and trace.messages_sent == [4, 4]  # a ring of 2 sends all of it
    assert trace.program.goal.buckets == ((1, 2), (0, 1))
    mp.verify(trace.program)


def test_gradients_that_travel_singly_are_stages_of_their_own():
    layers = layers_of(SINGLY)
    assert [(layer.stage, layer.module, layer.members, layer.bucket) for layer in layers] == [
        (0, "0", (0,), 3),
        (1, "0", (1,), 2),
        (2, "1", (2,), 1),
        (3, "1", (3,), 0),
    ]
    times = [RankTimes((0, 0, 1, 1), 2, ready=(6.1, 6.0, 4.1, 4.0), starts=(4, 4.1, 6, 6.1), ends=(5, 6, 7, 8))]
    trace = trace_of("made up", SINGLY, times)
    assert shown(trace, 0) == [
        ("F0.0", 0, 0),
        ("F1.0", 0, 1),
        ("F2.0", 1, 1),
        ("F3.0", 1, 2),
        ("B3.0", 2, 4.1),  # both gradients of a module are made together
        ("B2.0", 4.1, 4.1),
        ("*U0@dp", 4.1, 5),
        ("B1.0", 4.1, 6.1),
        ("*U1@dp", 5, 6),
        ("B0.0", 6.1, 6.1),
        ("*U2@dp", 6.1, 7),
        ("*U3@dp", 7, 8),
    ]
    mp.verify(trace.program)


def test_what_never_happened_is_not_in_the_trace():
    nan = math.nan
    times = [
        RankTimes((0, 0, 1, 1), 2, ready=(nan, nan, 4, 4), starts=(4, 5), ends=(5, 6)),  # module 0 made no gradient
        RankTimes((nan,) * 4, 0, ready=(nan,) * 4, starts=(0, 0), ends=(5, 6)),  # this rank had no samples
        RankTimes(
            (nan, nan, 1, 1), 2, ready=(6, 6, 4, 4), starts=(4, 6), ends=(5, 7)
        ),  # module 0 was used without a call
    ]
    trace = trace_of("made up", BUCKETS, times)
    assert [name for name, *_ in shown(trace, 0)] == ["F0.0", "F1.0", "B1.0", "*U0@dp", "*U1@dp"]
    assert shown(trace, 1) == [("*U0@dp", 4, 5), ("*U1@dp", 6, 6)]
    assert [name for name, *_ in shown(trace, 2)] == ["F1.2", "F0.2", "B1.2", "*U0@dp", "B0.2", "*U1@dp"]
    assert mp.course.draw_overlap(trace).count("\n  gradient ") == 6


# ── in one process ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def comms():
    with mp.connect("gloo", device="cpu") as alone:
        yield alone


def test_a_tracker_forgets_the_step_before(comms):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tracker = mp.course.HookTracker(model, comms)
    hooks = mp.course.register_ddp_hooks(model, tracker.comms)
    for used in (model, model[0]):
        model.zero_grad()
        with tracker.step():
            used(torch.ones(1, 3)).sum().backward()
            hooks.finish()
    assert tracker.order == ["0.bias", "0.weight"]
    assert list(tracker.seconds) == tracker.order
    assert len(tracker.trace().program.all_reduces()) == 1
    hooks.remove()
    tracker.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert tracker.order == ["0.bias", "0.weight"]


def test_what_cannot_be_tracked_is_refused(comms):
    hooked = nn.Linear(2, 2)
    mp.course.register_ddp_hooks(hooked, comms)
    refused = [
        (nn.Linear(2, 2).requires_grad_(False), 0.0, "no trainable parameters"),
        (nn.Linear(2, 2).to("meta"), 0.0, r"weight is not on the CPU.*model.cpu\(\)"),
        *((nn.Linear(2, 2), link, f"link_seconds={link}") for link in (-1.0, math.nan, math.inf)),
        (hooked, 0.0, "has hooks already"),
    ]
    for model, link_seconds, words in refused:
        with pytest.raises(mp.errors.UsageError, match=words):
            mp.course.HookTracker(model, comms, link_seconds)
