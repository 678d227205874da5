"""Operations: the table in the module's docstring is true, and each runs on its lane."""

import re

import pytest

import microparallel as mp
from microparallel.program import (
    Act,
    AllReduce,
    Backward,
    Forward,
    ForwardStages,
    Free,
    Join,
    Lane,
    Named,
    Observed,
    OptimizerStep,
    Part,
    Recv,
    Send,
    Slices,
    is_meeting,
    lane,
    ops,
    parse_op,
)
from microparallel.program.text import word

ROWS = re.findall(r"^\| `(\w+\(.*?\))` *\| `(\S+?)` *\|", ops.__doc__, re.MULTILINE)
# What the table leaves open: the values, and the two halves of a pair.
MEANT = {
    "Send": {"value": Act(0, 3)},
    "Recv": {"value": Act(0, 3)},
    "Free": {"value": Act(0, 3)},
    "Add": {"value": Part(1), "into": Slices(0, 4)},
    "AllReduce": {"value": mp.program.Bucket(0)},
    "Broadcast": {"value": Named("w")},
    "ReduceScatter": {"value": mp.program.Bucket(0)},
    "AllGather": {"value": mp.program.Parameters(0)},
    "ForwardBackward": {"f": Forward(0, 3), "b": Backward(1, 2)},
    "Observed": {"kind": "backward"},
}


@pytest.mark.parametrize(("operation", "text"), ROWS)
def test_the_table_is_true(operation, text):
    meant = MEANT.get(operation.partition("(")[0], {})
    if "reduce=True" in operation:
        meant = {"value": Slices(2, 3)}
    op = eval(operation, vars(ops), meant)
    assert word(op) == text and parse_op(text) == op


def test_every_operation_stands_in_the_table():
    assert {name.partition("(")[0] for name, _ in ROWS} == {kind.__name__ for kind in ops.Op.__args__}


def test_lanes():
    communicates = [Send(Act(0, 0), 1), Recv(Act(0, 0), 1), AllReduce(Named("loss"), "dp"), Observed("x", "collective")]
    computes = [Forward(0, 0), Free(Act(0, 0)), Join(), OptimizerStep(), Observed("x", "forward")]
    assert {lane(op) for op in communicates} == {Lane.COMM} and {lane(op) for op in computes} == {Lane.COMPUTE}


def test_what_several_ranks_do_together():
    assert is_meeting(AllReduce(Named("loss"), "dp")) and is_meeting(Observed("x", "collective"))
    assert not is_meeting(Observed("x", "send")) and not is_meeting(Send(Act(0, 0), 1))


def test_no_stages_have_no_forward():
    with pytest.raises(mp.errors.ProgramError, match=r"F2:2\.0 has no stages"):
        ForwardStages(2, 2, 0)
