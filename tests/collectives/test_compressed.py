"""Compressed all-reduces: their names, bytes and programs; in a training step, simulated."""

import math

import pytest

import microparallel as mp
from microparallel.collectives import payload, program_of, require_algorithm, resolve, traffic
from microparallel.errors import ProgramError, UsageError
from microparallel.program import AllReduce, Bucket, from_text, to_text
from microparallel.schedules import data_parallel_step

NAMES = ["topk-0.01", "randomk-0.01", "int8-256", "sign", "powersgd-2", "bf16", "fp16", "topk-0.01+bf16"]
NAMES += ["mine-sum-80-sum-4", "mine-gather-17"]
N = 10_000  # numbers


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("bf16", [("sum", 2 * N)]),
        ("topk-0.01", [("gather", 8 * 100)]),
        ("randomk-0.01", [("sum", 4 * 100)]),
        ("int8-256", [("gather", N + 4 * math.ceil(N / 256))]),
        ("sign", [("gather", N / 8 + 4)]),
        ("powersgd-2", [("sum", 4 * 2 * 100)] * 2),  # of a square matrix
        ("topk-0.01+bf16", [("gather", 6 * 100)]),
        ("topk-0.01+int8-256", [("gather", 4 * 100 + 100 + 4)]),
        ("mine-sum-80-gather-4", [("sum", 80), ("gather", 4)]),
    ],
)
def test_payload(name, rounds):
    assert [(one.kind, one.bytes) for one in payload(name, 4 * N)] == rounds


def test_powersgd_of_known_shapes():
    """a × b matrices have 4ra and 4rb; what is no matrix is sent as it is, with the second."""
    shapes = [(50, 20), (7,), (30, 3, 4), (2, 2)]
    found = payload("powersgd-2", 4, shapes)
    assert [one.bytes for one in found] == [4 * 2 * (50 + 30), 4 * (2 * (20 + 12) + 7 + 4)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_programs_are_right_and_what_they_send_is_counted(name, ranks):
    program = program_of("all-reduce", name, ranks)
    mp.verify(program)
    assert mp.draw(program)
    sent = traffic(AllReduce(Bucket(0), "dp", name), range(ranks), 4 * N, "gloo")
    expected = sum(
        one.bytes * ((ranks - 1) if one.kind == "gather" else 2 * (ranks - 1) / ranks) for one in payload(name, 4 * N)
    )
    assert [round(size, 6) for _, size in sent] == [pytest.approx(expected)] * ranks
    assert [messages for messages, _ in sent] == program.messages_sent()


def test_names():
    assert mp.collectives.build("topk", 2).name == "topk-0.01"
    assert resolve("all-reduce", "topk-0.01", 4, 1e6, "shm") == "topk-0.01"
    with pytest.raises(UsageError, match="did you mean 'topk'"):
        require_algorithm("all-reduce", "topkk")
    with pytest.raises(UsageError, match="above 0, and at most 1"):
        require_algorithm("all-reduce", "topk-2")
    with pytest.raises(UsageError, match="there is no all-gather algorithm"):
        require_algorithm("all-gather", "topk-0.01")
    with pytest.raises(UsageError, match="does not take root"):
        mp.collectives.build("topk-0.01", 4, root=1)


def test_in_a_training_step():
    program = data_parallel_step(2, 2, algorithms=("topk-0.01+bf16", "auto"))
    assert [str(op) for op in program.ranks[0]] == [
        *("F0:2.0", "B1.0", "*U0@dp:topk-0.01+bf16", "B0.0", "*U1@dp", "*:presence0@dp", "=", "S")
    ]
    mp.verify(program)
    assert from_text(to_text(program)) == program
    assert mp.draw(program)
    wrong = from_text(to_text(program).replace("topk-0.01", "topk-7"))
    with pytest.raises(ProgramError, match=r"\*U0@dp:topk-7\+bf16: .*above 0, and at most 1"):
        mp.verify(wrong)
    with pytest.raises(UsageError, match="a name for each of 2 buckets"):
        data_parallel_step(2, 2, algorithms=("sign",))
    with pytest.raises(UsageError, match="level 0"):
        data_parallel_step(2, 2, level=1, algorithms="sign")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_simulated_time_is_that_of_the_payload(name, ranks):
    """Alone on the wire: each message holds its sender's port for α + its bytes · β; nothing is added here."""
    latency, per_byte = 0.5, 1e-3
    program = mp.schedules.ddp(1, 1, ranks, algorithm=name)
    nothing = dict.fromkeys(("forward", "backward_input", "backward_weight"), 0)
    costs = mp.Costs(**nothing, latency=latency, seconds_per_byte=per_byte, bytes_per_value=4 * N)
    trace = mp.simulate(program, costs)
    seconds = sent = 0.0
    for one in payload(name, 4 * N):
        messages = (ranks - 1) * (1 if one.kind == "gather" else 2)
        each = one.bytes if one.kind == "gather" else one.bytes / ranks
        seconds += messages * (latency + each * per_byte)
        sent += messages * each
    assert trace.makespan == pytest.approx(seconds)
    assert trace.bytes_sent == [pytest.approx(sent)] * ranks
