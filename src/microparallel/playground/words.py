"""How the puzzles name things to a reader: words first, and behind them how it is written on the board.

The text of a program says `~T0@dp`. In a puzzle all ranks are on one axis, so the board shows `~T0`, and a sentence
says "the all-gather of bucket 0's parameters (~T0)". Slices are `C0`, or `C0 to C2` where several travel together.
"""

from __future__ import annotations

from microparallel.drawing.kinds import kind_of
from microparallel.playground.levels import Level
from microparallel.program import (
    Act,
    Bucket,
    Delta,
    Free,
    Grad,
    Op,
    OptimizerStep,
    Parameters,
    Rest,
    Shard,
    Slices,
    Value,
    halves,
)

_AXIS = "@dp"


def sentence(words: str) -> str:
    """These words as a sentence: with a capital and a full stop."""
    words = words.strip().replace(_AXIS, "")
    if not words:
        return words
    first = words.partition(" ")[0]
    begun = words[0].upper() + words[1:] if first.isalpha() else words
    return begun if begun[-1] in ".?!:" else f"{begun}."


def named(op: Op) -> str:
    """An operation as the board shows it: `~T0`."""
    return str(op).removesuffix(_AXIS)


def slices_named(slices: Slices) -> str:
    """Slices as the board names them: `C0`, or `C0 to C2`."""
    last = slices.stop - 1
    return f"C{slices.start}" if slices.start == last else f"C{slices.start} to C{last}"


def kind_words(op: Op) -> str:
    """What kind of operation it is: "forward", "all-gather"; "freeing" for what takes something away."""
    words = {"input half": "input half of the backward", "weight half": "weight half of the backward"}
    return "freeing" if isinstance(op, Free) else words.get(kind_of(op).word, kind_of(op).word)


def object_words(level: Level, op: Op) -> str:
    """What an operation works on, with the "of" before it; nothing for an optimizer step."""
    if halves(op):
        (half,) = halves(op)
        if level.kind == "pipeline":
            return f"of stage {half.stage}, micro-batch {half.microbatch}"
        return f"of layer {half.stage}" + (f", micro-batch {half.microbatch}" if level.per_rank > 1 else "")
    if isinstance(op, OptimizerStep):
        return ""
    value: Value = op.value  # type: ignore[union-attr]
    match value:
        case Bucket(index, turn):
            batch = f", micro-batch {turn}" if turn is not None and level.per_rank > 1 else ""
            return f"of bucket {index}'s gradients{batch}"
        case Parameters(index):
            return f"of bucket {index}'s parameters"
        case Delta(stage, microbatch):
            return f"of layer {stage}'s gradients" + (f", micro-batch {microbatch}" if level.per_rank > 1 else "")
    return f"of {value}"


def in_words(level: Level, op: Op) -> str:
    """An operation in a sentence: "the all-gather of bucket 0's parameters (~T0)"."""
    return f"the {f'{kind_words(op)} {object_words(level, op)}'.strip()} ({named(op)})"


def value_words(level: Level, value: Value) -> str:
    """A value in a sentence: "the output of stage 0 for micro-batch 0 (A0.0)"."""
    stage, microbatch = getattr(value, "stage", 0), getattr(value, "microbatch", 0)
    of = f"of stage {stage} for micro-batch {microbatch}" if level.kind == "pipeline" else f"of layer {stage}"
    match value:
        case Act():
            words = f"the output {of}"
        case Grad():
            words = f"the gradient of the output {of}"
        case Rest():
            words = f"what I{stage}.{microbatch} leaves for W{stage}.{microbatch}"
        case Delta():
            words = f"the weights' gradients {of}"
        case Parameters():
            words = f"the whole parameters of bucket {value.index}"
        case Bucket():
            words = f"the sum of bucket {value.index}"
        case Shard(Bucket(index)):
            words = f"this rank's part of the sum of bucket {index}"
        case Shard():
            words = f"this rank's part of {value.of}"
        case _:
            words = "a value"
    return f"{words} ({value})"
