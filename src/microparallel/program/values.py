"""Values: the names of tensors, not the tensors.

| name              | text   | what it is                                                                       |
|-------------------|--------|----------------------------------------------------------------------------------|
| `Act(0, 3)`       | `A0.3` | the output of stage 0 for micro-batch 3                                          |
| `Grad(0, 3)`      | `G0.3` | the gradient of that output                                                      |
| `Rest(0, 3)`      | `R0.3` | what the input half of a backward leaves for the weight half                     |
| `Delta(0, 3)`     | `D0.3` | the gradients of stage 0's weights that micro-batch 3 gave                       |
| `Slices(2, 3)`    | `C2`   | one of the equal slices a collective's tensor is cut into                        |
| `Slices(2, 5)`    | `C2:5` | slices 2, 3 and 4; two such values touch where their ranges overlap             |
| `Part(1)`         | `P1`   | the whole contribution of rank 1, kept apart from this rank's own                |
| `Bucket(4)`       | `U4`   | the gradients of some layers                                                     |
| `Bucket(4, 1)`    | `U4.1` | of these, what the second micro-batch of each rank gave                          |
| `Parameters(4)`   | `T4`   | the parameters of these layers, whole                                            |
| `State(4)`        | `O4`   | the optimizer's state for these parameters (momentum, say)                       |
| `Shard(Parameters(4))` | `T4/` | this rank's part of one of the three: rank r of p has the r-th of p equal parts  |
| `Named("loss")`   | `:loss`| anything else that ranks share: the loss, buffers, weights, a norm, …            |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from microparallel.errors import ProgramError


@dataclass(frozen=True, slots=True)
class Act:
    """The output of a stage for one micro-batch."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"A{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Grad:
    """The gradient of a stage's output for one micro-batch."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"G{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Rest:
    """What the input half of a stage's backward leaves behind for its weight half."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"R{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Delta:
    """The gradients of a stage's weights, as one micro-batch gave them."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"D{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Slices:
    """Some neighbouring slices of a collective's tensor: from `start` up to, not including, `stop`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ProgramError(f"Slices({self.start}, {self.stop}) has no slices; start must be below stop")

    def __str__(self) -> str:
        return f"C{self.start}" if self.stop == self.start + 1 else f"C{self.start}:{self.stop}"

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slices(self) -> range:
        """The numbers of the slices."""
        return range(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Part:
    """Another rank's whole contribution, kept apart until it is added."""

    rank: int

    def __str__(self) -> str:
        return f"P{self.rank}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """The gradients of some layers, reduced together: of all micro-batches, or of each rank's micro-batch `turn`."""

    index: int
    turn: int | None = None

    def __str__(self) -> str:
        return f"U{self.index}" if self.turn is None else f"U{self.index}.{self.turn}"


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of the layers of a bucket, whole."""

    index: int

    def __str__(self) -> str:
        return f"T{self.index}"


@dataclass(frozen=True, slots=True)
class State:
    """What the optimizer keeps for the parameters of a bucket, from one step to the next."""

    index: int

    def __str__(self) -> str:
        return f"O{self.index}"


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's own part of a value: of p ranks that share it, the r-th has the r-th of p equal parts.

    The ranks that share a value are those of one axis of the mesh: they reduce-scatter it, or gather it, together.
    """

    of: Bucket | Parameters | State

    def __str__(self) -> str:
        return f"{self.of}/"


@dataclass(frozen=True, slots=True)
class Named:
    """Something that ranks share and that no other name covers: the loss, buffers, weights, the norm of gradients."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ProgramError(f"{self.name!r} is no name of a value; it begins with a letter, then letters, 0-9 . _ -")

    def __str__(self) -> str:
        return f":{self.name}"


Value = Act | Grad | Rest | Delta | Slices | Part | Bucket | Parameters | State | Shard | Named

_OF_A_STAGE: dict[str, type[Act | Grad | Rest | Delta]] = {"A": Act, "G": Grad, "R": Rest, "D": Delta}
_N = "[0-9]{1,9}"
_NAME = re.compile("[A-Za-z][A-Za-z0-9._-]*")
_VALUE = re.compile(rf"([AGRD])({_N})\.({_N})|C({_N})(?::({_N}))?|P({_N})|U({_N})(?:\.({_N}))?|T({_N})|O({_N})")

# The named values of our own programs. Builders and interpreters use these constants, so both mean the same value.
BATCH = Named("batch")  # what comes into a pipeline: how many samples, of which shapes
SAMPLES = Named("samples")  # how many samples all ranks have together
BUFFERS = Named("buffers")  # such as BatchNorm's running statistics
WEIGHTS = Named("weights")  # which ranks take part, and how much the gradients of each count
ORDER = Named("order")  # the order in which gradients came in the first backward
LOSS = Named("loss")  # the mean loss over all samples
NORM = Named("norm")  # the norm of all gradients together, where no rank has all of them


def tied(index: int) -> Named:
    """The gradients of the parameter with this number, among those that stages on different ranks share."""
    return Named(f"tied{index}")


def presence(turn: int = 0) -> Named:
    """For each gradient, how many ranks have one, in the pass of this number since gradients were last removed."""
    return Named(f"presence{turn}")


def announced(number: int = 0) -> Named:
    """In a first forward whose order no rank knows: who has samples (0); then what these gather, one after another."""
    return Named(f"announced{number}")


def overflow(turn: int = 0) -> Named:
    """How many ranks found gradients in their parts that are not finite, after the pass of this number."""
    return Named(f"overflow{turn}")


def moments(layer: int) -> Named:
    """How many samples all ranks have together, with their mean and variance, in the SyncBatchNorm of this number."""
    return Named(f"moments{layer}")


def moments_gradient(layer: int) -> Named:
    """What all ranks' losses say about that mean and variance."""
    return Named(f"moments{layer}.gradient")


def touch(one: Value, other: Value) -> bool:
    """Whether two names share memory: the same name, or slices that overlap."""
    if isinstance(one, Slices) and isinstance(other, Slices):
        return one.start < other.stop and other.start < one.stop
    return one == other


def parse_value(text: str) -> Value:
    """Read a value's text form back."""
    if text.startswith(":"):
        return Named(text[1:])
    if text.endswith("/"):
        whole = parse_value(text[:-1])
        if not isinstance(whole, Bucket | Parameters | State):
            raise ProgramError(f"{text!r}: {whole} has no shards; U0/, U0.1/, T0/ and O0/ are shards")
        return Shard(whole)
    match = _VALUE.fullmatch(text)
    if match is None:
        raise ProgramError(f"{text!r} names no value; it looks like A0.3, G0.3, C2, C2:5, P1, U0, T0, T0/ or :loss")
    letter, stage, microbatch, start, stop, rank, bucket, turn, parameters, state = match.groups()
    if letter is not None:
        return _OF_A_STAGE[letter](int(stage), int(microbatch))
    if start is not None:
        return Slices(int(start), int(stop) if stop is not None else int(start) + 1)
    if bucket is not None:
        return Bucket(int(bucket), None if turn is None else int(turn))
    if rank is not None:
        return Part(int(rank))
    return Parameters(int(parameters)) if parameters is not None else State(int(state))
