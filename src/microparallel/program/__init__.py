"""The language: values, operations, programs, and their text form."""

from microparallel.program.ops import (
    Add,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardBackward,
    Free,
    Lane,
    Op,
    OptimizerStep,
    Recv,
    Send,
    lane,
)
from microparallel.program.program import Collective, Goal, Program, TrainingStep
from microparallel.program.text import from_text, to_text
from microparallel.program.values import Act, Bucket, Chunk, Grad, Part, Value, parse_value, touch

__all__ = [
    "Act",
    "Add",
    "AllReduce",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Bucket",
    "Chunk",
    "Collective",
    "Forward",
    "ForwardBackward",
    "Free",
    "Goal",
    "Grad",
    "Lane",
    "Op",
    "OptimizerStep",
    "Part",
    "Program",
    "Recv",
    "Send",
    "TrainingStep",
    "Value",
    "from_text",
    "lane",
    "parse_value",
    "to_text",
    "touch",
]
