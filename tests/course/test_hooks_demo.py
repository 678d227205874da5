"""What the demonstrations show is what happened: on several ranks, and in one process."""

import copy
import itertools

import pytest
import torch
from torch import nn

import microparallel as mp
from microparallel.program import AllReduce, Backward, Forward, Lane

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
        # An all-reduce is seen by a rank only once it has begun on the slowest, so a bar may be shorter than the link;
        # and a rank that has to wait for a core sees its end later than it was. So journeys count from the first asked.
        mine = [event for event in trace.by_rank[0] if isinstance(event.op, AllReduce)]
        begun = min(event.asked for event in mine)
        ends = sorted(event.end for event in mine)
        assert all(end - begun >= number * LINK for number, end in enumerate(ends, start=1))


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


def test_at_least_one_step_is_measured(comms):
    with pytest.raises(mp.errors.UsageError, match="steps=0"):
        mp.course.demonstrate_overlap(nn.Linear(2, 2), comms, steps=0)


def test_a_model_of_one_s_own_needs_inputs(comms):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    with pytest.raises(mp.errors.UsageError, match="begins with Linear, not Embedding; pass them"):
        mp.course.demonstrate_hook_order(model, comms)
    inputs, targets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0])
    order = mp.course.demonstrate_hook_order(model, comms, inputs, targets, nn.functional.cross_entropy, show=False)
    assert order == ["1.bias", "1.weight", "0.weight"]
