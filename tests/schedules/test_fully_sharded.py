"""The step that FullyShardedDataParallel follows: right for all small shapes, within its memory and its bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import microparallel as mp
from microparallel.errors import UsageError
from microparallel.program import AllGather, Backward, Forward, Free, Parameters, from_text, to_text
from microparallel.schedules import fully_sharded_step, zero


@st.composite
def steps(draw):
    units, replicas = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    ranks = replicas * draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks).filter(any))
    last = [draw(st.integers(unit, units - 1)) for unit in range(units)]
    flags = ("overlap", "buffers", "weights", "order", "samples", "loss", "at_once", "norm", "reshard_after_forward")
    options = {name: draw(st.booleans()) for name in (*flags, "overflow")}
    options["algorithm"] = draw(st.sampled_from(["auto", "direct"]))
    options |= {"last": last, "prefetch": draw(st.integers(0, 3)), "replicas": replicas}
    return fully_sharded_step(units, ranks, counts, **options), options


@given(steps())
def test_every_step_is_right(step):
    program, _ = step
    mp.verify(program)
    assert from_text(to_text(program)) == program


@given(steps())
def test_no_more_units_are_whole_than_are_needed(step):
    """Those of the stage that computes, of the next ones, and those that a later stage uses again."""
    program, options = step
    if not options["reshard_after_forward"]:
        return
    units = program.goal.stages
    for ops in program.ranks:
        whole = set()
        for op in ops:
            match op:
                case AllGather(Parameters(index)):
                    whole.add(units - 1 - index)
                case Free(Parameters(index)):
                    whole.remove(units - 1 - index)
                case Forward(stage) | Backward(stage):
                    needed = {unit for unit in range(stage + 1) if options["last"][unit] >= stage}
                    assert needed <= whole
                    assert len(whole - needed) <= sum(
                        options["last"][unit] >= stage - options["prefetch"] for unit in range(units)
                    )
        assert not whole


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("reshard", [True, False])
def test_without_anything_of_its_own_it_is_zero_3(prefetch, reshard):
    """But for the message that says which gradients there are."""
    mine = fully_sharded_step(4, 3, 2, prefetch=prefetch, reshard_after_forward=reshard)
    taught = zero(3, 4, 3, 2, prefetch=prefetch, reshard_after_forward=reshard)
    for one, other in zip(mine.ranks, taught.ranks, strict=True):
        assert [str(op) for op in one if "presence" not in str(op) and str(op) != "="] == list(map(str, other))


@pytest.mark.parametrize(("reshard", "rounds"), [(True, 3), (False, 2)])
def test_the_bytes_are_those_of_the_formula(reshard, rounds):
    program = fully_sharded_step(4, 3, 2, reshard_after_forward=reshard)
    sent = mp.simulate(program, mp.Costs(bytes_per_value=3)).bytes_sent
    assert sent == pytest.approx([2 * rounds * 4 * 3 * 2 / 3] * 3)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((0, 2), {}, "units=0"),
        ((2, 2, (1,)), {}, "microbatches="),
        ((2, 2, 0), {}, "microbatches="),
        ((2, 2), {"last": (1, 0)}, "last="),
        ((2, 2), {"prefetch": -1}, "prefetch=-1"),
        ((2, 3), {"replicas": 2}, "replicas=2"),
    ],
)
def test_what_makes_no_step_is_refused(arguments, options, words):
    with pytest.raises(UsageError, match=words):
        fully_sharded_step(*arguments, **options)
