"""All-reduces of compressed gradients: what each rank sends is small, and the sum is only close to the true one.

An algorithm's name says how n float32 numbers are compressed, and so how many bytes their payload has:

| name                   | payload of a rank, in bytes               | what the ranks do with it                      |
|------------------------|-------------------------------------------|------------------------------------------------|
| `bf16`, `fp16`         | 2n                                        | sum, in float32                                |
| `randomk-0.01`         | 4k, where k = 0.01 n                      | sum: all ranks choose the same places          |
| `powersgd-2`           | 8√n and 8√n, of a square matrix           | sum, twice: the second needs the first's result |
| `topk-0.01`            | 8k: numbers and places                    | gather: each rank decodes all, and adds them   |
| `int8-256`             | n + 4 for each block of 256               | gather                                         |
| `sign`                 | n/8 + 4                                   | gather                                         |
| `topk-0.01+bf16`       | 6k: the second compresses the numbers     | gather                                         |
| `mine-sum-80-gather-4` | 80, then 4: of an object of a user's own  | sum, then gather                               |

**sum** is the program `direct`, which moves as many bytes as a ring and makes each sum on one rank: 16-bit numbers are
added in float32 and rounded once. **gather** is the messages of `gather-add`: each rank's payload goes to every other
rank, and all are added in rank order, so all ranks have the same bits. That is p−1 payloads a rank: it grows with p,
where a sum does not. A ring would move as many bytes in as many messages, and no sooner. Where ranks share memory
inside of hosts, a payload crosses to each other host once (`gather_add_between`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from microparallel.collectives.direct import direct_all_reduce
from microparallel.collectives.gather_add import gather_add_all_reduce
from microparallel.errors import UsageError
from microparallel.program import Collective, Op, Program, Recv, Send, Slices
from microparallel.text import did_you_mean
from microparallel.topology.hosts import hosts_of

RoundKind = Literal["sum", "gather"]
Shape = tuple[int, ...]
# The methods, and what stands behind each name unless something else is said.
METHODS: dict[str, str] = {
    "bf16": "",
    "fp16": "",
    "topk": "0.01",
    "randomk": "0.01",
    "int8": "256",
    "sign": "",
    "powersgd": "2",
}
SPARSE = ("topk", "randomk")  # those that keep a fraction of the numbers
_SUMMED = ("bf16", "fp16", "randomk", "powersgd")
_OWN = re.compile(r"([a-z][a-z0-9.+-]*?)((?:-(?:sum|gather)-[0-9]+)+)")
_OWN_ROUND = re.compile(r"-(sum|gather)-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Round:
    """What the ranks do once with a payload of so many bytes a rank."""

    kind: RoundKind
    bytes: float


@dataclass(frozen=True, slots=True)
class Method:
    """A method and its number: `topk-0.01`."""

    name: str
    number: float = 0

    def __str__(self) -> str:
        number = f"{self.number!r}" if self.name in SPARSE else f"{self.number:.0f}"
        return f"{self.name}-{number}" if METHODS[self.name] else self.name


def program_of_round(kind: RoundKind, transport: str) -> str:
    """The all-reduce whose program a round runs.

    A sum is made on one rank, so that it is rounded once. What is gathered crosses to each other host once, where the
    transport knows hosts.
    """
    if kind == "sum":
        return "direct"
    hosts = hosts_of(transport)
    return "gather-add" if hosts is None else f"gather-add-{hosts}"


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_compressed(name: str) -> bool:
    """Whether a name is that of a compressed all-reduce, right or nearly so: `topk-0.01`, and `topk-7`, too."""
    return _OWN.fullmatch(name) is not None or re.split(r"[-+]", name)[0] in METHODS


def parse_methods(name: str, given: str | None = None) -> tuple[Method, ...]:
    """The methods in a name such as `topk-0.01+bf16`; without a number, a method has its usual one.

    Args:
        name: of the algorithm.
        given: what the user wrote, for errors; None: the name.

    Raises:
        UsageError: if there is no such method, or not with this number, or not with the other.
    """
    methods = tuple(_parse_method(part, given or name) for part in name.split("+"))
    require_chain([method.name for method in methods], given or name)
    return methods


def _parse_method(text: str, name: str) -> Method:
    method, dash, number = text.partition("-")
    if method not in METHODS:
        raise UsageError(f"there is no compression {name!r}; {did_you_mean(method, METHODS)}")
    usual = METHODS[method]
    if dash and not usual:
        raise UsageError(f"compression {name!r}: {method} takes no number")
    try:
        value = float(number if dash else usual or 0)
    except ValueError:
        value = math.nan
    return checked(method, value, repr(name))


def checked(method: str, number: float, given: str) -> Method:
    """A method with its number, if it can have that number."""
    if method in SPARSE and not 0 < number <= 1:
        raise UsageError(f"compression {given}: {method} keeps a fraction of the numbers: above 0, and at most 1")
    if METHODS[method] and method not in SPARSE and not (number >= 1 and number == int(number)):
        what = "numbers in a block" if method == "int8" else "columns"
        raise UsageError(f"compression {given}: {method} needs a whole number of {what}, at least 1")
    return Method(method, number)


def require_chain(names: Sequence[str], given: str) -> None:
    """Raise `UsageError` unless the second of two methods can compress the numbers that the first one sends."""
    if len(names) == 1:
        return
    if len(names) > 2 or names[0] not in (*SPARSE, "powersgd") or names[1] not in ("bf16", "fp16", "int8", "sign"):
        raise UsageError(
            f"compression {given}: a chain is topk, randomk or powersgd, and then what compresses their numbers: "
            "bf16, fp16, int8 or sign"
        )
    if names[0] == "powersgd" and names[1] not in ("bf16", "fp16"):
        raise UsageError(f"compression {given}: powersgd sums its numbers, so they can be bf16 or fp16 only")


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def payload(name: str, size: float, shapes: Iterable[Shape] | None = None) -> tuple[Round, ...]:
    """The rounds of a compressed all-reduce, and how many bytes of payload a rank has in each.

    Args:
        name: of the algorithm.
        size: how many bytes of float32 numbers are compressed.
        shapes: of the tensors among them, which PowerSGD needs to know; without, they count as one square matrix.
    """
    if match := _OWN.fullmatch(name):
        found = _OWN_ROUND.findall(match[2])
        return tuple(Round("sum" if kind == "sum" else "gather", float(size)) for kind, size in found)
    first, *then = parse_methods(name)
    numbers = size / 4
    kind: RoundKind = "sum" if all(method.name in _SUMMED for method in (first, *then)) else "gather"
    if first.name == "powersgd":
        counts = _powersgd(int(first.number), numbers, shapes)
        return tuple(Round(kind, _bytes(then[0] if then else None, count)) for count in counts)
    if first.name not in SPARSE:
        return (Round(kind, _bytes(first, numbers)),)
    sent = kept(first.number, numbers)
    places = 4 * sent if first.name == "topk" else 0
    return (Round(kind, _bytes(then[0] if then else None, sent) + places),)


def kept(fraction: float, numbers: float) -> float:
    """How many of so many numbers are kept: at least one; of less than one number, as in small examples, its part."""
    return max(1, round(fraction * numbers)) if numbers >= 1 else fraction * numbers


def _bytes(method: Method | None, numbers: float) -> float:
    """How many bytes so many numbers have, with their scales; less than one number, as in small examples, its part."""
    if method is None:
        return 4 * numbers
    if method.name == "int8":
        return numbers + 4 * (math.ceil(numbers / method.number) if numbers >= 1 else numbers / method.number)
    if method.name == "sign":
        return math.ceil(numbers / 8) + 4 if numbers >= 1 else numbers / 8
    return 2 * numbers


def _powersgd(rank: int, numbers: float, shapes: Iterable[Shape] | None) -> tuple[float, float]:
    if shapes is not None:
        return factor_sizes(rank, shapes)
    side = math.sqrt(numbers)
    return (min(rank * side, numbers / 2),) * 2


def factor_sizes(rank: int, shapes: Iterable[Shape]) -> tuple[int, int]:
    """How many numbers PowerSGD sums in its two rounds; what is no matrix, or too small a one, is in the second."""
    first = second = 0
    for shape in shapes:
        rows, columns = matrix(shape)
        if is_factored(rank, shape):
            first += rank * rows
            second += rank * columns
        else:
            second += rows * columns
    return first, second


def matrix(shape: Shape) -> tuple[int, int]:
    """A tensor's shape as that of a matrix: its first dimension, and all others."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape), 1)


def is_factored(rank: int, shape: Shape) -> bool:
    """Whether two factors of this rank are smaller than the tensor."""
    rows, columns = matrix(shape)
    return len(shape) > 1 and rank * (rows + columns) < rows * columns


# ── programs ────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def compressed_all_reduce(name: str, ranks: int) -> Program:
    """The messages of a compressed all-reduce, on the payload.

    ```
    topk-0.01     rank 0: >C0@1 <P1@1 C0+=P1                              to add P1, it is decoded
    powersgd-2    rank 0: >C1@1 <+C0@1 >C0@1 <C1@1 >C3@1 <+C2@1 >C2@1 <C3@1     C0 and C1 first, then C2 and C3
    ```

    Two rounds are drawn as halves of one value.
    """
    rounds = payload(name, 4 * 2**20)
    label = name if _OWN.fullmatch(name) else "+".join(map(str, parse_methods(name)))
    programs = [_ROUND_PROGRAMS[one.kind](ranks) for one in rounds]
    if len(programs) == 1:
        return replace(programs[0], name=label)
    if any(one.kind == "gather" for one in rounds):
        raise UsageError(f"{name}: rounds of which some gather cannot be drawn as one program; they can be simulated")
    ops = [
        tuple(_moved(op, number * ranks) for number, program in enumerate(programs) for op in program.ranks[rank])
        for rank in range(ranks)
    ]
    return Program(label, Collective("all-reduce", ranks * len(programs)), tuple(ops))


_ROUND_PROGRAMS = {"sum": direct_all_reduce, "gather": gather_add_all_reduce}


def _moved(op: Op, slices: int) -> Op:
    if isinstance(op, Send | Recv) and isinstance(op.value, Slices):
        return replace(op, value=Slices(op.value.start + slices, op.value.stop + slices))
    return op
