"""An all-reduce program of the caller's own: verified first, then run as every other algorithm is."""

import random

import pytest
import torch

import microparallel as mp
from microparallel.collectives import all_reduce_program
from microparallel.comms.message_group import count_messages
from microparallel.comms.own_program import verified_all_reduce
from microparallel.program import Collective, Program, Recv, Send, Slices
from microparallel.verifier import Deadlock, Unreached

# Rank 1 adds up; it keeps the contributions of the others apart, and sends the sum back in two pieces.
STAR = """
program star
goal: all-reduce of 2 slices
rank 0: >C0:2@1 <C1@1 <C0@1
rank 1: <P2@2 <P0@0 C0:2+=P0 C0:2+=P2 >C1@0 >C1@2 >C0@0 >C0@2
rank 2: >C0:2@1 <C1@1 <C0@1
"""
FORGETFUL = STAR.replace(" C0:2+=P2", "")
STUCK = """
program stuck
goal: all-reduce of 1 slice
rank 0: <P1@1 >C0@1 C0+=P1
rank 1: <P0@0 >C0@0 C0+=P0
"""
SWAPPED = """
program star
goal: all-reduce of 2 slices
rank 0: >C0:2@1 <C0@1 <C1@1
rank 1: <P2@2 <P0@0 C0:2+=P0 C0:2+=P2 >C0@0 >C0@2 >C1@0 >C1@2
rank 2: >C0:2@1 <C0@1 <C1@1
"""


def own_sums(comms):
    star = mp.program.from_text(STAR)
    large = torch.arange(3_000_017, dtype=torch.float32)  # more than a block of shared memory, and odd
    found = {
        "several dtypes": [
            comms.all_reduce(torch.arange(7).to(dtype) + comms.rank, algorithm=star).tolist()
            for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex64)
        ],
        "fewer elements than slices": comms.all_reduce(torch.tensor(1.0 + comms.rank), algorithm=star).item(),
        "empty": comms.all_reduce(torch.zeros(0, 3), algorithm=star).shape,
        "max": comms.all_reduce(torch.tensor([1, -1, 3]) * comms.rank, op="max", algorithm=star).tolist(),
        "mean": comms.all_reduce(torch.ones(5) * comms.rank, op="mean", algorithm=star).tolist(),
        "asynchronous": comms.all_reduce(torch.ones(5), algorithm=star, async_op=True).wait().tolist(),
        "large": torch.equal(comms.all_reduce(large.clone(), algorithm=star), large * 3),
        "not contiguous": comms.all_reduce(torch.ones(4, 3).t(), algorithm=star).sum().item(),
    }
    counting, counts = count_messages(comms)
    found["messages"] = counting.all_reduce(torch.ones(6), algorithm=star).tolist(), counts.messages_sent
    return found


def test_a_program_of_ones_own_runs_between_ranks(any_pool):
    for rank, found in enumerate(any_pool.run(own_sums, 3, timeout=50)):
        sums = [3.0 * index + 3 for index in range(7)]
        assert found["several dtypes"] == [sums] * 4
        assert found["fewer elements than slices"] == 6.0
        assert found["empty"] == (0, 3)
        assert found["max"] == [2, 0, 6]
        assert found["mean"] == [1.0] * 5
        assert found["asynchronous"] == [3.0] * 5
        assert found["large"]
        assert found["not contiguous"] == 36.0
        sent = sum(isinstance(op, Send) for op in mp.program.from_text(STAR).ranks[rank])
        assert found["messages"] == ([3.0] * 6, sent)


def test_a_program_of_ones_own_runs_in_one_process():
    tensors = [torch.tensor([1.0, 2.0, 3.0]) * rank for rank in range(3)]
    mp.all_reduce_in_process(mp.program.from_text(STAR), tensors)
    assert [tensor.tolist() for tensor in tensors] == [[3.0, 6.0, 9.0]] * 3
    with pytest.raises(mp.errors.UsageError):
        mp.all_reduce_in_process(mp.program.from_text(STAR), tensors[:2])
    with pytest.raises(mp.errors.UsageError, match=r"root=1: .* 'star' .* options"):
        mp.all_reduce_in_process(mp.program.from_text(STAR), tensors, root=1)


def refusals(comms):
    attempts = {
        "wrong": mp.program.from_text(FORGETFUL),
        "broadcast": mp.collectives.build("broadcast", 3),
        "schedule": mp.schedules.build("1f1b", 3, 4),
        "five ranks": mp.collectives.build("ring", 5),
        "builder": mp.collectives.build,
    }
    errors = {}
    tensor = torch.ones(4)
    for name, program in attempts.items():
        try:
            comms.all_reduce(tensor, algorithm=program)
        except mp.errors.UsageError as error:
            errors[name] = type(error).__name__, str(error)
    return errors, tensor.tolist(), comms.all_reduce(tensor).tolist()


def test_what_is_no_all_reduce_of_these_ranks_is_refused_on_every_rank(any_pool):
    for errors, untouched, after in any_pool.run(refusals, 3, timeout=30):
        kind, words = errors["wrong"]
        assert kind == "Unreached"
        assert words.startswith("all_reduce: program 'star' is not run, because it is wrong: rank 0 ends with rank 0's")
        assert "is a broadcast of 1 slice, root 0; all_reduce runs an all-reduce" in errors["broadcast"][1]
        assert "'1f1b' is a training step of 3 stages" in errors["schedule"][1]
        assert "'ring' is for 5 ranks, and there are 3 here" in errors["five ranks"][1]
        assert "give a name such as 'ring', or a Program" in errors["builder"][1]
        assert (untouched, after) == ([1.0] * 4, [3.0] * 4)


def test_the_verifier_s_error_keeps_its_type_and_fields():
    with pytest.raises(Deadlock) as stuck:
        verified_all_reduce(mp.program.from_text(STUCK), 2)
    assert [wait.rank for wait in stuck.value.waits] == [0, 1]
    with pytest.raises(Unreached) as unreached:
        verified_all_reduce(mp.program.from_text(FORGETFUL), 3)
    assert (unreached.value.rank, unreached.value.index) == (0, 0)


def test_a_program_is_verified_once(monkeypatch):
    verified = []
    monkeypatch.setattr("microparallel.comms.own_program.verify", verified.append)
    star, again = mp.program.from_text(STAR), mp.program.from_text(STAR)
    ready = [verified_all_reduce(program, 3) for program in (star, star, again)]
    assert verified == [star, again]
    assert ready[0] is ready[1] and ready[0].words == ready[2].words
    assert ready[0].of_rank(1) is ready[1].of_rank(1)


def different_programs(comms):
    text = SWAPPED if comms.rank == 1 else STAR
    try:
        comms.all_reduce(torch.ones(4), algorithm=mp.program.from_text(text))
    except mp.errors.Mismatch as error:
        return str(error)


def test_ranks_that_pass_different_programs_are_told_in_checked_mode(any_pool):
    for text in any_pool.run(different_programs, 3, check=True, timeout=30):
        assert "ranks 0, 2: all_reduce(float32[4], op='sum', algorithm='star' #" in text
        assert "rank 1: all_reduce(float32[4], op='sum', algorithm='star' #" in text


def test_shared_memory_always_compares_programs(pool):
    texts = pool.run(different_programs, 3, transport="shm", timeout=30)
    assert any("algorithm='star' #" in (text or "") for text in texts)


def recorded(comms):
    with mp.record(comms) as recorder:
        comms.all_reduce(torch.ones(4), algorithm=mp.program.from_text(STAR))
        comms.all_reduce(torch.ones(4), algorithm="ring")
    own, ring = ([event for event in recorder.trace.events if name in str(event.op)] for name in ("'star'", "'ring'"))
    return [[(event.rank, event.kind, event.bytes, event.group) for event in events] for events in (own, ring)]


def test_it_is_recorded_as_other_algorithms_are(any_pool):
    own, ring = any_pool.run(recorded, 3, timeout=30)[0]
    assert own == ring == [(rank, "collective", 16, (0, 1, 2)) for rank in range(3)]


def test_every_algorithm_that_has_a_name_can_be_given_as_its_program():
    for ranks in range(1, 6):
        for name in mp.collectives.ALL_REDUCES:
            program = all_reduce_program(name, ranks)
            tensors, named = ([torch.arange(5.0) * (rank + 1) for rank in range(ranks)] for _ in range(2))
            mp.all_reduce_in_process(program, tensors)
            mp.all_reduce_in_process(name, named)
            assert all(map(torch.equal, tensors, named)), (name, ranks)


def random_programs(seed, ranks, wanted):
    """All-reduces that nobody would write: each slice goes up and down a random tree, in any order that is right."""
    chance = random.Random(seed)
    found = []
    while len(found) < wanted:
        moves = []  # of each slice in order: (sender, receiver, slice, whether it is added)
        for index in range(slices := chance.randint(1, 4)):
            order = chance.sample(range(ranks), ranks)
            parents = {rank: chance.choice(order[:place]) for place, rank in enumerate(order) if place}
            up = [(rank, parents[rank], index, True) for rank in reversed(order[1:])]
            moves.append(up + [(parents[rank], rank, index, False) for rank in order[1:]])
        ops = [[] for _ in range(ranks)]
        while any(moves):
            sender, receiver, index, adds = chance.choice([rest for rest in moves if rest]).pop(0)
            ops[sender].append(Send(Slices(index, index + 1), receiver))
            ops[receiver].append(Recv(Slices(index, index + 1), sender, reduce=adds))
        found.append(Program(f"random {len(found)}", Collective("all-reduce", slices), tuple(map(tuple, ops))))
    return found


def sums_by_random_programs(comms, seed):
    return [
        comms.all_reduce(torch.arange(11) * 10**comms.rank, algorithm=program).tolist()
        for program in random_programs(seed, comms.world_size, 12)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_whatever_the_verifier_accepts_runs(any_pool, ranks):
    wanted = [index * int("1" * ranks) for index in range(11)]
    for found in any_pool.run(sums_by_random_programs, ranks, ranks, timeout=50):
        assert found == [wanted] * 12
