"""The verifier agrees with the brute-force judge on 10,000 programs, each a right one with something spoilt at random.

`mutant(4711)` is always the same program, so a disagreement can be looked at again. A quarter of them is judged every
time, all of them by `make test-full`.
"""

import collections
import dataclasses
import functools
import importlib.util
import pathlib
import random
import re

import pytest

import microparallel as mp
from microparallel.collectives import ALL_REDUCES, OTHERS
from microparallel.program import (
    Add,
    Collective,
    Free,
    Join,
    OptimizerStep,
    Part,
    Program,
    Recv,
    Send,
    Shard,
    Slices,
    from_text,
    to_text,
    values,
)
from microparallel.program import ops as o
from microparallel.schedules import PIPELINES

MUTANTS = 10_000
BATCHES = 8
ALIKE = [
    (o.Forward, o.Backward, o.BackwardInput, o.BackwardWeight),
    (values.Act, values.Grad, values.Rest, values.Delta),
]


def brute_force():
    spec = importlib.util.spec_from_file_location("brute_force", pathlib.Path(__file__).with_name("brute_force.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


judge = brute_force().judge


# ── right programs ──────────────────────────────────────────────────────────────────────────────────────────────────


def variants(program):
    """A training step with and without what it need not have: frees, optimizer steps, a rank that does nothing."""
    orders = program.ranks
    has_steps = any(OptimizerStep() in ops for ops in orders)
    without_steps = [[op for op in ops if op != OptimizerStep()] for ops in orders]
    with_steps = [[*ops, OptimizerStep()] for ops in orders]
    return [
        program,
        edited(program, *enumerate([op for op in ops if not isinstance(op, Free)] for ops in orders)),
        edited(program, *enumerate(without_steps if has_steps else with_steps)),
        dataclasses.replace(program, ranks=(*orders, ())),
    ]


def chatter(seed):
    """Messages between ranks 2 to 5, of whom the goal asks nothing: small changes make them wait in circles."""
    chance = random.Random(seed)
    pieces = lower, upper, everything = Slices(0, 1), Slices(1, 2), Slices(0, 2)
    ranks = [[Send(upper, 1)], [Recv(upper, 0)], [], [], [], []]
    for _ in range(chance.randint(20, 30)):
        sender, receiver = chance.sample((2, 3, 4, 5), 2)
        piece, part = chance.choice(pieces), Part(sender)
        sent, receives = chance.choice(
            (
                (piece, [Recv(piece, sender)]),
                (piece, [Recv(piece, sender, reduce=True)]),
                (lower, [Recv(lower, sender), Add(lower, upper)]),
                (everything, [Recv(part, sender), Join(), Add(part, everything)]),
            )
        )
        ranks[sender].append(Send(sent, receiver))
        ranks[receiver] += receives
    return Program("chatter", Collective("scatter", 2, root=0), tuple(map(tuple, ranks)))


@functools.cache
def right_programs():
    """All of them, in one list for each algorithm; some lists stand there more than once, to be chosen more often."""
    build, up_to_four, up_to_five = mp.schedules.build, range(1, 5), range(1, 6)
    collectives = [[mp.collectives.build(name, ranks) for ranks in range(2, 6)] for name in ALL_REDUCES | OTHERS]
    chatters = [chatter(seed) for seed in range(100)]
    pipelines = [[build(name, p, m) for p in up_to_four for m in up_to_five] for name in PIPELINES]
    ddp = [build("ddp", p, layers=n, buckets=b) for p in up_to_four for n in up_to_four for b in range(1, n + 1)]
    ddp_naive = [build("ddp-naive", p, layers=n) for p in up_to_four for n in up_to_four]
    steps = [
        [variant for program in programs for variant in variants(program)] for programs in [*pipelines, ddp, ddp_naive]
    ]
    return [*collectives, *[chatters] * 3, *steps, *steps[-2:], *[zeros()] * 4, *[hybrids()] * 4]


def zeros():
    """Steps of ZeRO, with and without frees, and with a rank that does nothing."""
    raw = [
        mp.schedules.zero(level, layers, p, m, buckets=b, gather=gather)
        for level in (1, 2)
        for gather in ("after", "before")
        for p in (1, 2, 3)
        for m in (1, 2)
        for layers, b in ((1, 1), (2, 1), (3, 2))
    ]
    freed = [mp.schedules.free_dead_values(program) for program in raw]
    kept = [edited(one, *enumerate([op for op in ops if not isinstance(op, Free)] for ops in one.ranks)) for one in raw]
    return [*raw, *freed, *kept, *(dataclasses.replace(one, ranks=(*one.ranks, ())) for one in raw)]


def hybrids():
    """Steps on two axes: ranks keep parts along one, and sum them along the other."""
    raw = [
        mp.schedules.zero(3, layers, p, m, buckets=b, replicas=replicas, reshard_after_forward=reshard)
        for p, replicas in ((2, 1), (2, 2), (4, 2), (6, 2), (6, 3))
        for m in (1, 2)
        for layers, b in ((1, 1), (2, 1), (3, 2))
        for reshard in (True, False)
    ]
    swapped = [
        from_text(to_text(one).replace("replica", "x").replace("dp", "replica").replace("x", "dp")) for one in raw
    ]
    return [*raw, *map(mp.schedules.free_dead_values, raw), *swapped]


# ── mutations ───────────────────────────────────────────────────────────────────────────────────────────────────────


def mutant(number):
    """A right program with one or two mutations."""
    chance = random.Random(number)
    original = program = chance.choice(chance.choice(right_programs()))
    while program == original:
        for _ in range(chance.choice((1, 1, 1, 2))):
            program = chance.choice(MUTATIONS)(program, chance)
    return program


def edited(program, *edits):
    """The program with some ranks' operations replaced: pairs of a rank and its new list."""
    ranks = list(program.ranks)
    for rank, ops in edits:
        ranks[rank] = tuple(ops)
    return dataclasses.replace(program, ranks=tuple(ranks))


def of_one_operation(mutate):
    """Turn `mutate(ops, index, program, chance)`, which gives a rank's new list, into a mutation of a program."""

    def mutation(program, chance):
        places = [(rank, index) for rank, ops in enumerate(program.ranks) for index in range(len(ops))]
        if not places:
            return program
        rank, index = chance.choice(places)
        return edited(program, (rank, mutate(list(program.ranks[rank]), index, program, chance)))

    return mutation


@of_one_operation
def drop(ops, index, program, chance):
    return ops[:index] + ops[index + 1 :]


@of_one_operation
def duplicate(ops, index, program, chance):
    place = chance.choice((index, chance.randint(0, len(ops))))
    return [*ops[:place], ops[index], *ops[place:]]


@of_one_operation
def swap_neighbours(ops, index, program, chance):
    return [*ops[:index], *reversed(ops[index : index + 2]), *ops[index + 2 :]]


@of_one_operation
def swap_any(ops, index, program, chance):
    other = chance.randrange(len(ops))
    ops[index], ops[other] = ops[other], ops[index]
    return ops


@of_one_operation
def pair(ops, index, program, chance):
    """Let a forward and the next backward run as one, or split such a pair."""
    op = ops[index]
    if isinstance(op, o.ForwardBackward):
        return [*ops[:index], op.forward, op.backward, *ops[index + 1 :]]
    later = [place for place in range(index, len(ops)) if isinstance(ops[place], o.Backward)]
    if not isinstance(op, o.Forward) or not later:
        return ops
    both = o.ForwardBackward(op, ops[later[0]])
    now, then = chance.choice((([both], []), ([], [both])))
    return [*ops[:index], *now, *ops[index + 1 : later[0]], *then, *ops[later[0] + 1 :]]


@of_one_operation
def redirect(ops, index, program, chance):
    return [*ops[:index], redirected(ops[index], program, chance), *ops[index + 1 :]]


def change_message(program, chance):
    """Drop, duplicate or redirect a message at both ends, so that sends and receives still match."""
    pairs = messages(program)
    if not pairs:
        return program
    (sender, sent), (receiver, received) = chance.choice(pairs)
    mine, theirs = program.ranks[sender], program.ranks[receiver]
    value = redirected(mine[sent].value, program, chance)
    times = chance.choice((0, 1, 2))
    sends = [mine[sent] if times == 2 else Send(value, receiver)] * times
    receives = [theirs[received] if times == 2 else Recv(value, sender, theirs[received].reduce)] * times
    return edited(
        program,
        (sender, (*mine[:sent], *sends, *mine[sent + 1 :])),
        (receiver, (*theirs[:received], *receives, *theirs[received + 1 :])),
    )


def change_meeting(program, chance):
    """Drop, double, redirect or move what ranks do together, on all of them, so that they still meet."""
    together = [op for ops in program.ranks for op in ops if isinstance(op, o.GroupOp)]
    if not together:
        return program
    one = chance.choice(together)
    how = chance.choice(("drop", "double", "redirect", "redirect", "move"))
    instead = {"drop": [], "double": [one, one]}.get(how, [redirected(one, program, chance)])
    ranks = [list(ops) for ops in program.ranks]
    for ops in ranks:
        for place in reversed([place for place, op in enumerate(ops) if op == one]):
            if how == "move":
                ops[place : place + 2] = reversed(ops[place : place + 2])
            else:
                ops[place : place + 1] = instead
    return edited(program, *enumerate(ranks))


def messages(program):
    """The sends and their receives, each as rank and place."""
    waiting = collections.defaultdict(list)
    for rank, ops in enumerate(program.ranks):
        for index, op in enumerate(ops):
            if isinstance(op, Recv):
                waiting[op.source, rank].append((rank, index))
    return [
        ((rank, index), waiting[rank, op.to].pop(0))
        for rank, ops in enumerate(program.ranks)
        for index, op in enumerate(ops)
        if isinstance(op, Send) and op.to != rank and waiting[rank, op.to]
    ]


def drop_many(program, chance):
    """Drop what all ranks do of one kind, or of one micro-batch."""
    alike = alike_to_one(program, chance)
    return edited(program, *enumerate([op for op in ops if not alike(op)] for ops in program.ranks))


def hand_over(program, chance):
    """Let one rank do what another should: one operation, all of a kind or all of a micro-batch."""
    alike = alike_to_one(program, chance)
    giver, taker = chance.randrange(program.world_size), chance.randrange(program.world_size)
    given = [op for op in program.ranks[giver] if alike(op)]
    rest = edited(program, (giver, [op for op in program.ranks[giver] if not alike(op)]))
    ops = rest.ranks[taker]
    place = chance.choice((0, chance.randint(0, len(ops))))
    return edited(rest, (taker, (*ops[:place], *given, *ops[place:])))


def alike_to_one(program, chance):
    """A question to ask of operations: are you like that one, chosen at random?"""
    one = chance.choice([op for ops in program.ranks for op in ops] or [None])
    trait = chance.choice((str, type, lambda op: re.findall(r"[.]\d+", str(op))))
    return lambda op: trait(op) == trait(one)


def redirected(thing, program, chance):
    """An operation or a value, changed into one like it, or in one of its fields; perhaps to what does not exist."""
    if isinstance(thing, Slices | Part):
        start = chance.randint(0, program.goal.slices)
        slices = Slices(start, chance.randint(start + 1, program.goal.slices + 1))
        return chance.choice((slices, slices, Part(chance.randint(0, program.world_size))))
    if isinstance(thing, values.Bucket | values.Parameters | Shard) and chance.random() < 0.2:
        return thing.of if isinstance(thing, Shard) else Shard(thing)
    kinds = [kind for alike in ALIKE if isinstance(thing, alike) for kind in alike]
    if kinds and chance.random() < 0.3:
        return chance.choice(kinds)(thing.stage, thing.microbatch)
    return with_another_field(thing, program, chance)


def with_another_field(thing, program, chance):
    fields = [field.name for field in dataclasses.fields(thing)]
    if not fields:
        return thing
    field = chance.choice(fields)
    old = getattr(thing, field)
    if field in ("to", "source"):
        new = chance.randint(0, program.world_size)
    elif field == "stage":
        new = chance.randint(0, program.goal.stages)
    elif field == "microbatch":
        new = chance.randint(0, program.goal.microbatches)
    elif field == "index":
        new = chance.randint(0, len(program.goal.buckets))
    elif field in ("forward", "backward"):
        new = with_another_field(old, program, chance)
    elif field in ("value", "into", "of"):
        new = redirected(old, program, chance)
    else:
        axis = chance.choice(["other", "world", *(axis for axis, _ in program.mesh)])
        new = {"reduce": not old, "axis": axis, "algorithm": "tree", "turn": chance.choice((None, 0, 1))}[field]
    return dataclasses.replace(thing, **{field: new})


MUTATIONS = [drop, duplicate, swap_neighbours, swap_neighbours, swap_any, redirect, redirect]
MUTATIONS += [pair, change_message, change_meeting, drop_many, hand_over]


# ── both judge ──────────────────────────────────────────────────────────────────────────────────────────────────────


def complaint(program):
    """What the verifier finds wrong: nothing, `""`, when it is satisfied."""
    try:
        mp.verify(program)
    except mp.errors.ProgramError as error:
        return str(error) or "an error without words"
    return ""


@pytest.mark.parametrize("batch", [0, 1, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(2, BATCHES))])
def test_the_verifier_agrees_with_brute_force_on_every_mutant(batch):
    verdicts = collections.Counter()
    for number in range(batch, MUTANTS, BATCHES):
        program = mutant(number)
        found, said = judge(program, seed=number), complaint(program)
        assert bool(found) == bool(said), (
            f"mutant {number}\n{to_text(program)}brute force: {found or 'right'}\nverify: {said or 'right'}"
        )
        verdicts["wrong" if found else "right"] += 1
    # A mutation may change nothing that matters. Only a mixture shows that both judges look.
    assert verdicts["right"] >= 500 / BATCHES
    assert verdicts["wrong"] >= 5000 / BATCHES


def test_both_accept_what_was_not_spoilt():
    for program in dict.fromkeys(program for programs in right_programs() for program in programs):
        assert (judge(program), complaint(program)) == ("", ""), to_text(program)


def written(goal, *ranks):
    rows = [f"rank {rank}: {ops}" for rank, ops in enumerate(ranks)]
    return from_text("\n".join(["program written", f"goal: {goal}", *rows]))


def hybrid(ops, others=None):
    """Two replicas of two ranks that do the same; or ranks 2 and 3 something else."""
    goal = "training step of 1 stage, 4 micro-batches, buckets 0:1, sharded\nmesh: replica 2, dp 2"
    return written(goal, *((others or ops if rank > 1 else ops).replace(".m", f".{rank}") for rank in range(4)))


ONE_SLICE = "all-reduce of 1 slice"
TWO_SLICES = "all-reduce of 2 slices"
TWO_STAGES = "training step of 2 stages, 1 micro-batch"
REPLICAS = "training step of 1 stage, 2 micro-batches, buckets 0:1"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (written(ONE_SLICE, ">C0@1", ""), "never received"),
        (written(ONE_SLICE, ">C0@0"), "no such peer"),
        (written(ONE_SLICE, "<+C0@1 >C0@1", "<+C0@0 >C0@0"), "nobody can go on, with buffered sends"),
        (
            written("scatter of 1 slice, root 0", "", ">C0@2 <C0@3 >C0@3", "<C0@3 <C0@1", ">C0@1 <C0@1 >C0@2"),
            "nobody can go on, with rendezvous sends",
        ),
        (written(TWO_SLICES, ">C0@1", "<C1@0"), "C0 arrives"),
        (  # a part is a whole tensor
            written(TWO_SLICES, ">C0@1 <P1@1 C0+=P1 >C1@1 <+C1@1", ">C0@0 <P0@0 C0+=P0 >C1@0 <+C1@0"),
            "C0 arrives",
        ),
        (written(ONE_SLICE, ">C0@1 <+C0@1", "<+C0@0 >C0@0"), "wrong sum"),  # counts rank 0 twice
        (written("broadcast of 2 slices, root 0", ">C0@1", "<C0@0 C1+=C0"), "wrong sum"),  # slice 0 is not slice 1
        (written(ONE_SLICE, ">C0@1 C0+=P1", "<+C0@0"), "never came"),
        (written(ONE_SLICE, ">C1@1", "<+C1@0"), "not in the tensor"),
        (written(TWO_SLICES, "C0:2+=C1"), "different length"),
        (written(ONE_SLICE, "F0.0"), "not for a collective"),
        (written("reduce of 1 slice, root 7", "", ""), "root does not exist"),
        (written(TWO_STAGES, "F1.0 F0.0 B1.0 B0.0"), "needs A0.0"),
        (written(TWO_STAGES, "F0.0 F1.0 B0.0 B1.0"), "needs G0.0"),
        (written(TWO_STAGES, "F0.0 F1.0 I1.0 B0.0"), "had"),
        (written(TWO_STAGES, "F0.0 F1.0 W1.0 I1.0 B0.0"), "needs R1.0"),
        (written(TWO_STAGES, "F0.0 F1.0&B1.0 B0.0"), "needs A1.0"),
        (written(TWO_STAGES, "F0.0 F1.0 !A0.0 B1.0 B0.0"), "needs A0.0"),
        (written(TWO_STAGES, "F0.0 F1.0 B1.0 B0.0 !A0.0"), "never frees"),
        (written(TWO_STAGES, "F0.0 F1.0 B1.0 B1.0 B0.0"), "makes G0.0 a second time"),
        (written(TWO_STAGES, "F0.0 F1.0 B1.0 B0.0 I0.0"), "had"),
        (written(TWO_STAGES, "F0.0 F1.0 B1.0"), "had"),
        (written(TWO_STAGES, "F0.0 B0.0"), "needs G0.0"),
        (written(TWO_STAGES, "F0.0 F1.0 F0.1 B1.0 B0.0"), "one too many"),
        (written(TWO_STAGES, "F0.0 F1.0 B1.0 S B0.0"), "needs D0.0"),
        (written(TWO_STAGES, "F0.0 F1.0 B1.0 B0.0 S S"), "twice"),
        (written(TWO_STAGES, "F0.0 F1.0 B1.0 B0.0 *U0@dp"), "no bucket of the goal"),
        (written(TWO_STAGES, "F0.0 F1.0 B1.0 B0.0 >A0.0@1", "<+A0.0@0"), "not for a training step"),
        (written(TWO_STAGES, "F0.0 F1.0 >A1.0@1 >A0.0@1 B1.0 B0.0", "<A1.0@0 <A0.0@0 B1.0 B0.0"), "had"),
        (written(TWO_STAGES, "F0.0 F1.0 >A1.0@1 >A0.0@1 <G0.0@1 B0.0", "<A1.0@0 <A0.0@0 B1.0 >G0.0@0"), "had"),
        (written("training step of 1 stage, 2 micro-batches", "F0.0 B0.0", "F0.1 B0.1"), "has replicas"),
        (written(REPLICAS, "F0.0 B0.0 *U0@dp", "F0.1 B0.1"), "does not sum"),
        (written(REPLICAS, "F0.0 B0.0 *U0@dp", "F0.1 B0.1 *U0@tp"), "different axes"),
        (written(REPLICAS, "F0.0 *U0@dp B0.0", "F0.1 B0.1 *U0@dp"), "needs D0.0"),
        (written(REPLICAS, "F0.0 B0.0 S *U0@dp", "F0.1 B0.1 *U0@dp S"), "needs U0"),
        (written(REPLICAS, "F0.0 B0.0 *U0@dp <A0.1@1", "F0.1 B0.1 *U0@dp *U0@dp >A0.1@0"), "nobody can go on"),
        (hybrid("~T0@dp F0.m B0.m %U0@dp S"), "other gradients in U0 than all of them once"),
        (hybrid("~T0@dp F0.m B0.m %U0@dp *U0/@replica *U0/@replica S"), "other gradients in U0 than all of them once"),
        (hybrid("~T0@dp F0.m B0.m %U0@dp S *U0/@replica"), "does not update its part of T0"),
        (hybrid("~T0@dp F0.m B0.m *U0/@replica %U0@dp S"), "has no such part"),
        (hybrid("~T0@dp F0.m B0.m %U0@dp *U0/@dp S"), "adds different parts"),
        (hybrid("~T0@dp F0.m B0.m %U0@dp *U0/@node S"), "there is no such axis"),
        (hybrid("~T0@replica F0.m B0.m %U0@dp *U0/@replica S"), "gathers what is not T0"),
        (hybrid("~T0@world F0.m B0.m %U0@dp *U0/@replica S"), "gathers what is not T0"),
        (hybrid("~T0@dp F0.m B0.m %U0@dp *U0/@replica !U0/ S"), "lost its gradients"),
        (hybrid("~T0@dp F0.m B0.m %U0@dp *U0/@replica !T0/ S"), "no other rank keeps that"),
        (
            hybrid("~T0@dp F0.m B0.m %U0@dp *U0/@replica S", "~T0@dp F0.m B0.m %U0@dp *U0/@world S"),
            "adds different parts",  # those of ranks 2 and 3
        ),
    ],
)
def test_both_reject_what_is_wrong(program, reason):
    assert reason in judge(program)
    assert complaint(program)
