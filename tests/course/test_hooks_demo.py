"""What the demonstrations show is what happened: traces of made-up notes, and of real steps."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import microparallel as mp
from microparallel.course.hook_tracker import Cargo, Notes, layers_of, trace_of
from microparallel.program import AllReduce, Backward, Forward, Lane

# ── from notes to a trace ───────────────────────────────────────────────────────────────────────────────────────────

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
BUCKETS = Cargo(NAMES, (("1.bias", "1.weight"), ("0.bias", "0.weight")), (80, 40))
SINGLY = Cargo(NAMES, tuple((name,) for name in reversed(NAMES)), (8, 72, 8, 32))


def shown(trace, rank):
    return [(str(event.op), event.start, event.end) for event in trace.by_rank[rank]]


def test_an_all_reduce_begins_when_the_last_rank_has_handed_it_over_and_the_one_before_is_back():
    notes = [
        Notes(called=(0, 0, 2, 2), forward_end=3, ready=(10, 10, 6, 5), left=(6.5, 10), back=(9, 13)),
        Notes(called=(0, 0, 1, 1), forward_end=2, ready=(8, 7, 4, 4), left=(4, 8), back=(11, 14)),
    ]
    trace = trace_of("made up", BUCKETS, notes)
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
    assert [(layer.stage, layer.module, layer.members, layer.flight) for layer in layers] == [
        (0, "0", (0,), 3),
        (1, "0", (1,), 2),
        (2, "1", (2,), 1),
        (3, "1", (3,), 0),
    ]
    notes = [Notes((0, 0, 1, 1), 2, ready=(6.1, 6.0, 4.1, 4.0), left=(4, 4.1, 6, 6.1), back=(5, 6, 7, 8))]
    trace = trace_of("made up", SINGLY, notes)
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
    notes = [
        Notes((0, 0, 1, 1), 2, ready=(nan, nan, 4, 4), left=(4, 5), back=(5, 6)),  # module 0 made no gradient
        Notes((nan,) * 4, 0, ready=(nan,) * 4, left=(0, 0), back=(5, 6)),  # this rank had no samples
        Notes((nan, nan, 1, 1), 2, ready=(6, 6, 4, 4), left=(4, 6), back=(5, 7)),  # module 0 was used without a call
    ]
    trace = trace_of("made up", BUCKETS, notes)
    assert [name for name, *_ in shown(trace, 0)] == ["F0.0", "F1.0", "B1.0", "*U0@dp", "*U1@dp"]
    assert shown(trace, 1) == [("*U0@dp", 4, 5), ("*U1@dp", 6, 6)]
    assert [name for name, *_ in shown(trace, 2)] == ["F1.2", "F0.2", "B1.2", "*U0@dp", "B0.2", "*U1@dp"]
    assert mp.course.draw_overlap(trace).count("\n  gradient ") == 6


# ── real steps ──────────────────────────────────────────────────────────────────────────────────────────────────────

LINK = 0.004


def everything_shown(comms):
    torch.manual_seed(0)
    model = mp.models.FullMLP(96, depth=4)
    before = copy.deepcopy(model.state_dict())
    inputs = torch.randn(64, 96)
    order = mp.course.demonstrate_hook_order(model, comms, show=comms.rank == 1)
    options = {"bucket_size_mb": 0.05, "link_seconds": LINK, "show": False}
    traces = mp.course.demonstrate_overlap(model, comms, inputs, **options, steps=1)
    seconds = mp.course.compare_hook_timing(model, comms, **options, steps=3)
    untouched = all(map(torch.equal, model.state_dict().values(), before.values()))
    untouched = untouched and all(parameter.grad is None for parameter in model.parameters())
    return order, traces, seconds, untouched


@pytest.fixture(scope="module")
def shown_by_ranks(pool):
    return pool.run(everything_shown, 2, timeout=40)


def test_hooks_run_from_the_last_layer_to_the_first(shown_by_ranks):
    for order, *_ in shown_by_ranks:
        assert order == [f"layers.{layer}.{kind}" for layer in (3, 2, 1, 0) for kind in ("bias", "weight")]


def test_all_ranks_have_the_same_traces_of_whole_steps(shown_by_ranks):
    (_, traces, seconds, _), (_, others, other_seconds, _) = shown_by_ranks
    assert traces == others and seconds == other_seconds
    assert {way: len(trace.program.all_reduces()) for way, trace in traces.items()} == {
        "manual": 8,
        "hooks": 8,
        "buckets": 2,  # 0.05 MiB: the last two layers have 38 KB, and with the one before 75 KB
    }
    for trace in traces.values():
        mp.verify(trace.program)
        for as_ in ("text", "svg"):
            assert trace.program.name in mp.draw(trace, as_)
            assert trace.program.name in mp.course.draw_overlap(trace, as_, seconds=True)


def test_no_all_reduce_begins_before_its_gradients_are_there_on_every_rank(shown_by_ranks):
    for trace in shown_by_ranks[0][1].values():
        buckets = trace.program.goal.buckets
        ready = {(e.op.stage, e.rank): e.end for e in trace.events if isinstance(e.op, Backward)}
        for event in trace.events:
            if isinstance(event.op, AllReduce):
                needed = [ready[stage, rank] for stage in range(*buckets[event.op.value.index]) for rank in (0, 1)]
                assert event.start >= max(needed)


def test_computation_and_communication_do_not_overlap_themselves(shown_by_ranks):
    for trace in shown_by_ranks[0][1].values():
        for events in trace.by_rank:
            for lane in Lane:
                mine = [event for event in events if event.lane is lane]
                assert all(first.end <= second.start for first, second in itertools.pairwise(mine))
            assert {type(event.op) for event in events} == {Forward, Backward, AllReduce}


def test_by_hand_nothing_is_hidden_and_every_journey_costs_its_link(shown_by_ranks):
    traces = shown_by_ranks[0][1]
    assert traces["manual"].hidden_share == 0
    assert min(traces["manual"].exposed_communication) >= 8 * LINK
    for trace in traces.values():
        # An all-reduce is seen by a rank only once it has begun on the slowest, so a bar may be shorter than the link.
        back = sorted(event.end for event in trace.by_rank[0] if isinstance(event.op, AllReduce))
        assert all(second - first >= LINK for first, second in itertools.pairwise(back))


def test_timing_shows_what_the_slow_link_costs(shown_by_ranks):
    seconds = shown_by_ranks[0][2]
    assert list(seconds) == ["none", "manual", "hooks", "buckets"]
    assert seconds["manual"] >= 8 * LINK
    assert seconds["hooks"] >= 8 * LINK  # a gradient at a time over one link
    assert seconds["buckets"] >= 2 * LINK


def test_the_model_stays_as_it_was(shown_by_ranks):
    assert all(untouched for *_, untouched in shown_by_ranks)


# ── in one process ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def comms():
    with mp.connect("gloo", device="cpu") as alone:
        yield alone


def test_rank_0_prints_what_it_saw(comms, capsys):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 300))
    order = mp.course.demonstrate_hook_order(model, comms)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gradients of rank 0 in the order in which they are ready"
    assert [line.split()[3] for line in lines[1:]] == order == ["1.bias", "1.weight", "0.bias", "0.weight"]
    assert [line.split(maxsplit=4)[4] for line in lines[1:]] == ["1.2 KB", "4.8 KB", "16 B", "64 B"]
    mp.course.demonstrate_overlap(model, comms, steps=1)
    assert capsys.readouterr().out.count("% of it hidden") == 3
    mp.course.compare_hook_timing(model, comms, steps=1)
    assert "no synchronisation" in capsys.readouterr().out


def test_many_gradients_are_cut_short(comms, capsys):
    mp.course.demonstrate_hook_order(nn.Sequential(*(nn.Linear(2, 2) for _ in range(30))), comms)
    assert "    …  20 more" in capsys.readouterr().out.splitlines()


def test_a_model_of_one_s_own_needs_inputs(comms):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    with pytest.raises(mp.errors.UsageError, match="begins with Embedding; pass them"):
        mp.course.demonstrate_hook_order(model, comms)
    inputs, targets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0])
    order = mp.course.demonstrate_hook_order(model, comms, inputs, targets, nn.functional.cross_entropy, show=False)
    assert order == ["1.bias", "1.weight", "0.weight"]


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
    model = nn.Linear(2, 2)
    with pytest.raises(mp.errors.UsageError, match="no trainable parameters"):
        mp.course.HookTracker(copy.deepcopy(model).requires_grad_(False), comms)
    with pytest.raises(mp.errors.UsageError, match=r"weight is not on the CPU.*model.cpu\(\)"):
        mp.course.HookTracker(copy.deepcopy(model).to("meta"), comms)
    for link in (-1.0, math.nan, math.inf):
        with pytest.raises(mp.errors.UsageError, match="link_seconds="):
            mp.course.HookTracker(model, comms, link)
    with pytest.raises(mp.errors.UsageError, match="steps=0"):
        mp.course.demonstrate_overlap(model, comms, steps=0)
    hooks = mp.course.register_ddp_hooks(model, comms)
    with pytest.raises(mp.errors.UsageError, match="has hooks already"):
        mp.course.HookTracker(model, comms)
    hooks.remove()
