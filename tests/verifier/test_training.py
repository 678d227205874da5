"""The verifier names what is wrong with a training step."""

import pytest

import microparallel as mp
from microparallel.program import from_text
from microparallel.schedules import build
from microparallel.verifier import Deadlock, LacksGradients


def step(*ranks, goal="training step of 2 stages, 1 micro-batch"):
    rows = [f"rank {rank}: {ops}" for rank, ops in enumerate(ranks)]
    return from_text("\n".join(["program step", f"goal: {goal}", *rows]))


REPLICAS = "training step of 1 stage, 2 micro-batches, buckets 0:1"
FROM_1 = "training step of 1 stage, 2 micro-batches skipping 0, buckets 0:1"


def test_right_steps():
    mp.verify(step("F0.0 F1.0 B1.0 B0.0 S"))
    mp.verify(step("F0.0 F1.0 I1.0 I0.0 W0.0 W1.0"))
    mp.verify(step("F0.0 >A0.0@1 <G0.0@1 B0.0", "<A0.0@0 F1.0 B1.0 >G0.0@0"))
    mp.verify(step("F0.0 B0.0 *U0@dp S", "F0.1 B0.1 *U0@dp S", goal=REPLICAS))
    mp.verify(step("F0.0 B0.0 *U0@dp:ring S", "F0.1 B0.1 *U0@dp:ring S", goal=REPLICAS))


def test_a_rank_without_micro_batches_takes_part_in_the_sums():
    fewer = "training step of 1 stage, 2 micro-batches skipping 1 2, buckets 0:1"
    mp.verify(step("F0.0 B0.0 F0.3 B0.3 *U0@dp S", "*U0@dp S", goal=fewer))
    mp.verify(step("F0.0 B0.0 F0.3 B0.3 *U0@dp S", "*U0@dp", goal=fewer))  # it has run out of data


SHARDS = "training step of 1 stage, 2 micro-batches, buckets 0:1, sharded"
FOUR = "training step of 1 stage, 4 micro-batches, buckets 0:1"


def both(ops, goal=REPLICAS):
    """Two ranks that do the same, each on its own micro-batches: `m` is the first, `n` the second."""
    return step(*(ops.replace("m", str(rank)).replace("n", str(rank + 2)) for rank in (0, 1)), goal=goal)


def test_right_steps_in_parts():
    mp.verify(both("F0.m B0.m %U0@dp S ~T0@dp"))
    mp.verify(both("F0.m B0.m %U0@dp:direct"))  # gradients alone, without an update
    mp.verify(both("~T0@dp F0.m B0.m %U0@dp S", goal=SHARDS))
    mp.verify(both("~T0@dp F0.m !T0 ~T0@dp B0.m %U0@dp !T0 S", goal=SHARDS))
    mp.verify(both("F0.m B0.m %U0.0@dp F0.n B0.n %U0.1@dp S ~T0@dp", goal=FOUR))
    fewer = "training step of 1 stage, 3 micro-batches, buckets 0:1"
    one_more = ["F0.0 B0.0 %U0.0@dp F0.2 B0.2 %U0.1@dp S ~T0@dp", "F0.1 B0.1 %U0.0@dp %U0.1@dp S ~T0@dp"]
    mp.verify(step(*one_more, goal=fewer))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (both("F0.m B0.m %U0@dp S"), "left with different weights: rank 0 has updated its own part of T0"),
        (both("F0.m B0.m S ~T0@dp"), "rank 0 does S, which needs U0"),
        (both("F0.m B0.m %U0@dp ~T0@dp S"), "does ~T0@dp, which needs T0/, and does not have it; an optimizer step"),
        (
            both("F0.m B0.m %U0@dp S S ~T0@dp"),
            "its second in one training step: it would update the same weights twice",
        ),
        (both("F0.m B0.m %U0@dp S ~T0@dp ~T0@dp"), "and has gathered T0 already"),
        (
            both("F0.m ~T0@dp B0.m %U0@dp S", goal=SHARDS),
            "does F0.0, which needs T0, and does not have it; ~T0@dp gathers",
        ),
        (both("~T0@dp F0.m !T0 B0.m %U0@dp S", goal=SHARDS), "does B0.1, which needs T0, and has freed it; ~T0@dp"),
        (both("~T0@dp ~T0@dp F0.m B0.m %U0@dp S", goal=SHARDS), "and has gathered T0 already; it frees T0 first"),
        (both("F0.m B0.m !D0.m %U0@dp S ~T0@dp"), "does %U0@dp, which needs D0.1, and has freed it"),
        (both("~T0@dp F0.m B0.m *U0@dp S", goal=SHARDS), "in a sharded step each rank keeps its part of the sum alone"),
        (both("F0.m B0.m %U0@dp S ~T0@world"), "rank 0 sums U0 along dp, and rank 0 gathers T0 along world"),
        (
            step("F0.0 B0.0 %U0@dp S", "F0.1 B0.1 %U0@dp", goal=SHARDS.replace(", sharded", "")),
            "rank 1 keeps its part of T0 and never updates",
        ),
        (
            step("F0.0 B0.0 %U0@dp S ~T0@dp", "F0.1 B0.1 *U0@dp S", goal=REPLICAS),
            "rank 0 reduces bucket 0 by %U0@dp, and rank 1 by \\*U0@dp; they would not meet",
        ),
        (both("F0.m B0.m %U0@dp %U0@dp S ~T0@dp"), "does %U0@dp twice: its gradients would count twice"),
        (both("F0.m B0.m %U0.0@dp F0.n B0.n S ~T0@dp", goal=FOUR), "makes D0.2 and never reduce-scatters it with U0"),
        (
            both("F0.m B0.m %U0.0@dp F0.n B0.n %U0@dp S ~T0@dp", goal=FOUR),
            "reduces D0.0 twice: by %U0.0@dp and by %U0@dp",
        ),
        (both("F0.m B0.m *U0.0@dp S"), "only a reduce-scatter takes the gradients of one micro-batch"),
        (both("F0.m B0.m %U1@dp S"), "the goal names 1 buckets"),
        (both("F0.m B0.m %U0@dp S ~U0@dp"), "only parameters of buckets are gathered"),
        (both("F0.m B0.m %:loss@dp S"), "the goal names 1 buckets"),
        (both("F0.m B0.m %U0@dp:tree S ~T0@dp"), "there is no reduce-scatter algorithm 'tree'"),
    ],
)
def test_what_is_wrong_with_a_step_in_parts(program, words):
    with pytest.raises(mp.errors.ProgramError, match=words):
        mp.verify(program)


# ── parts along one axis of the mesh, and replicas of them along another ────────────────────────────────────────────

FOUR_RANKS = "training step of 1 stage, 4 micro-batches, buckets 0:1"
EIGHT = "training step of 1 stage, 8 micro-batches, buckets 0:1, sharded"
HYBRID = "~T0@dp F0.m B0.m %U0@dp *U0/@replica S"
IN_TURNS = "~T0@dp F0.m B0.m %U0.0@dp *U0.0/@replica F0.n B0.n %U0.1@dp *U0.1/@replica S"


def four(ops, goal=f"{FOUR_RANKS}, sharded", **others):
    """Two replicas of two ranks that do the same, each on its own micro-batches; `rank2=` is what rank 2 does."""
    rows = [others.get(f"rank{rank}", ops).replace(".m", f".{rank}").replace(".n", f".{rank + 4}") for rank in range(4)]
    return step(*rows, goal=f"{goal}\nmesh: replica 2, dp 2")


def test_right_steps_in_parts_that_replicas_sum():
    mp.verify(four(HYBRID))
    mp.verify(four(IN_TURNS, goal=EIGHT))
    mp.verify(four("~T0@dp F0.m B0.m %U0@dp *U0/@replica", goal=f"{FOUR_RANKS}, sharded"))  # gradients alone
    mp.verify(four("F0.m B0.m %U0@dp *U0/@replica S ~T0@dp", goal=FOUR_RANKS))  # ZeRO-1 inside of each replica
    mp.verify(four(HYBRID.replace("@dp", "@x").replace("@replica", "@dp").replace("@x", "@replica")))
    mp.verify(four("~T0@world F0.m B0.m %U0@world S"))  # one copy, in four parts
    mp.verify(four("F0.m B0.m *U0@world S", goal=FOUR_RANKS))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (  # forgotten
            four(HYBRID.replace("*U0/@replica ", "")),
            "rank 0 does S, and its part of U0 lacks the gradients of ranks 2, 3; *U0/@replica sums over ranks that "
            "keep the same part\n  rank 0: … F0.0 B0.0 %U0@dp [S]",
        ),
        (
            four(IN_TURNS.replace("*U0.1/@replica ", ""), goal=EIGHT),
            "rank 3 does S, and its part of U0.1 lacks the gradients of ranks 0, 1; *U0.1/@replica sums",
        ),
        (
            four("~T0@dp F0.m B0.m %U0@dp"),
            "rank 0 ends, and its part of U0 lacks the gradients of ranks 2, 3; *U0/@replica sums",
        ),
        (  # too late
            four("~T0@dp F0.m B0.m %U0@dp S *U0/@replica"),
            "does S, and its part of U0 lacks the gradients of ranks 2, 3; *U0/@replica sums",
        ),
        (  # twice
            four(HYBRID.replace("*U0/@replica", "*U0/@replica *U0/@replica")),
            "rank 0 does *U0/@replica twice: its gradients would count twice; once is enough",
        ),
        (  # twice, by another name
            step(
                *(f"~T0@dp F0.{rank} B0.{rank} %U0@dp *U0/@replica *U0/@world S" for rank in (0, 1)),
                goal=f"{SHARDS}\nmesh: replica 2, dp 1",
            ),
            "does *U0/@world, which would count the gradients of ranks 0, 1 twice: they are in its parts already; "
            "leave it out",
        ),
        (  # too early
            four("~T0@dp F0.m B0.m *U0/@replica %U0@dp S"),
            "does *U0/@replica, which needs U0/, and does not have it; %U0@dp makes it, before *U0/@replica",
        ),
        (  # along the wrong axis
            four(HYBRID.replace("@replica", "@dp")),
            "rank 1 does *U0/@dp, which adds up different parts: rank 1 keeps part 1 of 2, and rank 0 part 0 of 2; "
            "*U0/@replica sums over ranks that keep the same part",
        ),
        (four(HYBRID.replace("@replica", "@world")), "does *U0/@world, which adds up different parts"),
        (four(HYBRID.replace("@replica", "@node")), "rank 0 does *U0/@node, and the mesh has the axes replica, dp"),
        (  # on some ranks only
            four(HYBRID, rank3=HYBRID.replace("*U0/@replica ", "")),
            "rank 0 reduces bucket 0 by %U0@dp *U0/@replica, and rank 3 by %U0@dp; they would not meet: all ranks",
        ),
        (
            four(HYBRID, rank1=HYBRID.replace("*U0/@replica ", ""), rank3=HYBRID.replace("*U0/@replica ", "")),
            "rank 0 reduces bucket 0 by %U0@dp *U0/@replica, and rank 1 by %U0@dp; they would not meet: all ranks",
        ),
        (
            four(HYBRID, rank2=HYBRID.replace("@replica", "@world")),
            "rank 0 reduces bucket 0 by %U0@dp *U0/@replica, and rank 2 by %U0@dp *U0/@world; they would not meet",
        ),
        (  # gathered along the wrong axis
            four(HYBRID.replace("~T0@dp", "~T0@replica")),
            "rank 0 sums U0 along dp, and rank 0 gathers T0 along replica; a bucket is summed and gathered along one "
            "axis",
        ),
        (four(HYBRID.replace("~T0@dp", "~T0@world")), "rank 0 sums U0 along dp, and rank 0 gathers T0 along world"),
        (four(HYBRID.replace("%U0@dp", "%U0@replica")), "rank 0 sums U0 along replica, and rank 0 gathers T0 along dp"),
        (
            four(HYBRID.replace("*U0/", "*T0/")),
            "does *T0/@replica, and only buckets (U0), and parts of them (U0/), are",
        ),
        (
            four(HYBRID.replace("*U0/", "*U1/")),
            "does *U1/@replica, and only buckets (U0), and parts of them (U0/), are",
        ),
        (
            four(HYBRID.replace("%U0@", "%U0/@")),
            "rank 0 does %U0/@dp, and only whole buckets (U0) are reduce-scattered",
        ),
        (four(HYBRID.replace("*U0/", "*U0")), "in a sharded step each rank keeps its part of the sum alone"),
        (four(HYBRID.replace(" S", " !U0/ S")), "does S, which needs U0/, and has freed it; %U0@dp makes it, before S"),
        (four(HYBRID.replace(" S", " !T0/ S")), "does !T0/, and a rank keeps its parts of parameters and state"),
        (  # sums that leave replicas out need no parts to be wrong
            four("F0.m B0.m *U0@dp S", goal=FOUR_RANKS),
            "does S, and U0 lacks the gradients of ranks 2, 3; *U0@world sums over all ranks that have its stages",
        ),
        (  # one of the ranks that gather keeps no part
            step("~T0@dp F0.0 B0.0 F0.1 B0.1 %U0@dp S", "~T0@dp", goal=SHARDS),
            "rank 1 does ~T0@dp, which gathers T0 from ranks 0, 1, and this rank keeps no part of it; T0 is gathered "
            "by the ranks that reduce-scatter U0",
        ),
    ],
)
def test_what_is_wrong_with_parts_that_replicas_sum(program, words):
    with pytest.raises(mp.errors.ProgramError) as refused:
        mp.verify(program)
    assert words in str(refused.value)


def test_a_sum_that_lacks_gradients_says_whose():
    with pytest.raises(LacksGradients) as refused:
        mp.verify(four("~T0@dp F0.m B0.m %U0@dp"))
    assert (refused.value.rank, str(refused.value.bucket), refused.value.lacking) == (0, "U0", (2, 3))


def test_what_ranks_share_besides_gradients():
    begin, middle, end = "^:w@dp/1 ^:buffers@dp/0:direct", "*U0@dp", "*:norm@dp ^:buffers@dp/0:direct = S *:loss@dp"
    mp.verify(step(*(f"{begin} F0.{rank} B0.{rank} {middle} {end}" for rank in (0, 1)), goal=REPLICAS))


def test_ranks_that_share_something_meet():
    late = step("F0.0 B0.0 *U0@dp *:loss@dp", "F0.1 *:loss@dp B0.1 *U0@dp", goal=REPLICAS)
    with pytest.raises(Deadlock) as circle:
        mp.verify(late)
    assert [(wait.rank, wait.on) for wait in circle.value.waits] == [(0, 1), (1, 0)]
    twice = step("F0.0 B0.0 *U0@dp *:loss@dp *:loss@dp", "F0.1 B0.1 *U0@dp *:loss@dp", goal=REPLICAS)
    with pytest.raises(Deadlock) as finished:
        mp.verify(twice)
    assert "rank 0 waits for rank 1 at *:loss@dp, and rank 1 has finished" in str(finished.value)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (step("F0.0 F1.0 B1.0"), "B0.0 never, I0.0 never, W0.0 never; every forward needs one backward"),
        (step("F0.0 F1.0 I1.0 I0.0 W1.0"), "I0.0 once, W0.0 never"),
        (step("F0.0 B0.0"), "rank 0 does B0.0, which needs G0.0, and no rank makes that"),
        (
            step("F1.0 F0.0 B1.0 B0.0"),
            r"rank 0 does F1.0, which needs A0.0, and does not have it\n  rank 0: \[F1.0\] F0",
        ),
        (step("F0.0 F1.0 W1.0 I1.0 I0.0 W0.0"), "W1.0, which needs R1.0"),
        (step("F0.0 F0.0 F1.0 B1.0 B0.0"), "rank 0 does F0.0, and has had A0.0 before"),
        (step("F0.0 F1.0 B1.0 I1.0 B0.0"), "I1.0, and has had G0.0 before"),
        (step("F0.0 F1.0 !A0.0 B1.0 B0.0"), "B1.0, which needs A0.0, and has freed it"),
        (step("F0.0 F1.0 B1.0 B0.0 !A0.0"), "rank 0 never frees A1.0"),
        (step("F0.0 F1.0 S B1.0 B0.0"), "rank 0 does S, which needs D1.0"),
        (step("F0.0 F1.0 B1.0 B0.0 S S"), "rank 0 does S, its second in one training step"),
        (step("F0.0 F1.0 F2.0 B1.0 B0.0"), "rank 0 does F2.0, and the goal is a training step of 2 stages"),
        (step("F0.0 F1.0 F0.1 B1.0 B0.0"), "rank 0 does F0.1, and the goal is"),
        (step("F0.0 F1.0 C0+=P1 B1.0 B0.0"), "adds only by all-reduce"),
        (step("F0.0 >C0@1", "<C0@0"), "no value of a training step"),
        (step("F0.0 F1.0 B1.0 B0.0 *U0@dp"), "the goal names no buckets"),
        (step("F0.0 >A0.0@1", "<A0.0@0 F1.0 B1.0 F0.0"), "rank 1 does F0.0, and has had A0.0 before"),
        (
            step("F0.0 >A0.0@1 <G0.0@1 <A1.0@1", "<A0.0@0 F1.0 B1.0 >G0.0@0 >A1.0@0 B0.0"),
            "B0.0 runs on rank 1, and F0.0 ran on rank 0, which has the weights",
        ),
        (step("F0.0 F1.0&B1.0 B0.0"), "rank 0 does F1.0&B1.0, which needs A1.0"),
        (step("F0.0 B0.0 *U0@dp", "F0.1 B0.1", goal=REPLICAS), "rank 1 runs stage 0 and never all-reduces U0"),
        (step("F0.0 *U0@dp B0.0", "F0.1 B0.1 *U0@dp", goal=REPLICAS), r"rank 0 does \*U0@dp, which needs D0.0"),
        (step("F0.0 B0.0 S *U0@dp", "F0.1 B0.1 *U0@dp S", goal=REPLICAS), "rank 0 does S, which needs U0"),
        (step("F0.0 B0.0 F0.1 B0.1 *U0@dp S", "S *U0@dp", goal=REPLICAS), "rank 1 does S, which needs U0"),
        (step("F0.0 B0.0 F0.1 B0.1 *U0@dp", "", goal=FROM_1), "rank 0 does F0.0"),
        (step("F0.1 B0.1 *U0@dp", "*U0@dp", goal=FROM_1), "F0.2 happens never"),
        (step("F0.0 B0.0 *U0@dp", "F0.1 B0.1 *U0@tp", goal=REPLICAS), "rank 0 sums U0 along dp, and rank 1 along tp"),
        (
            step("F0.0 B0.0 *U0@dp:ring", "F0.1 B0.1 *U0@dp", goal=REPLICAS),
            r"rank 0 does \*U0@dp:ring, and rank 1 does \*U0@dp; they would not meet",
        ),
        (step("F0.0 F1.0 B1.0 B0.0 *:x@dp:rng"), r"rank 0 does \*:x@dp:rng: .* did you mean 'ring'"),
        (step("F0.0 F1.0 B1.0 B0.0 ^:x@dp/0:ring"), "there is no broadcast algorithm 'ring'; choose one of auto, tree"),
        (step("F0.0 F1.0 B1.0 B0.0 ^:x@dp/1"), "and rank 1 does not take part in it"),
        (step("F0.0 F1.0 B1.0 B0.0 ^U0@dp/0"), "only a named value, such as :weights, is broadcast"),
        (
            step("^:x@dp/0 F0.0 F1.0 B1.0 B0.0", "^:x@dp/1"),
            "and rank 1 does .*/1; they would not meet",
        ),
        (
            step("F0.0 B0.0 *U0@dp S", "F0.1 B0.1 *U0@dp", goal=REPLICAS),
            "rank 0 updates its weights .S., and rank 1",
        ),
        (
            step(
                "F0.0 >A0.0@1 <G0.0@1 B0.0 *U0@dp",
                "<A0.0@0 F1.0 B1.0 >G0.0@0 *U0@dp",
                goal="training step of 2 stages, 1 micro-batch, buckets 0:2",
            ),
            r"U0 holds stages \[0\] on rank 0 and stages \[1\] on rank 1",
        ),
        (step("F0.0 F1.0 B1.0 B0.0 >D0.0@1", "<D0.0@0"), "only activations .A. and their gradients .G. travel"),
        (
            step("F0.0 B0.0", "F0.1 B0.1", goal="training step of 1 stage, 2 micro-batches"),
            r"stage 0 runs on ranks \[0, 1\], and the goal names no bucket",
        ),
        (
            step(
                "F0.0 F1.0 B1.0 B0.0 *U0@dp *U1@dp",
                "F0.1 F1.1 B1.1 B0.1 *U1@dp *U0@dp",
                goal="training step of 2 stages, 2 micro-batches, buckets 0:1 1:2",
            ),
            r"deadlock under buffered sends: rank 0 waits for rank 1 at \*U0@dp, rank 1 waits for rank 0 at \*U1@dp",
        ),
    ],
)
def test_what_is_wrong_is_named(program, words):
    with pytest.raises(mp.errors.ProgramError, match=words):
        mp.verify(program)


def test_1f1b_deadlocks_when_sends_block():
    with pytest.raises(mp.errors.ProgramError) as caught:
        mp.verify(build("1f1b", 4, 8), sends="blocking")
    assert str(caught.value) == (
        "deadlock under blocking sends: rank 2 sends A2.1 to rank 3, rank 3 sends G2.0 to rank 2\n"
        "  rank 2: … >A2.0@3 <A1.1@1 F2.1 [>A2.1@3] <G2.0@3 B2.0 !A1.0 …\n"
        "  rank 3: … B3.0 !A2.0 !A3.0 [>G2.0@2] !G2.0 <A2.1@2 F3.1 …"
    )


def test_gpipe_survives_blocking_sends():
    mp.verify(build("gpipe", 4, 8), sends="blocking")


def test_activations_can_be_limited():
    mp.verify(build("1f1b", 4, 8), max_activations=4)
    with pytest.raises(mp.errors.ProgramError, match="rank 0 holds 8 activations at once, and 4 are allowed"):
        mp.verify(build("gpipe", 4, 8), max_activations=4)


def test_a_meaning_of_send_that_does_not_exist():
    with pytest.raises(mp.errors.UsageError, match="sends='eager': choose buffered, rendezvous or blocking"):
        mp.verify(build("gpipe", 2, 2), sends="eager")
