"""What would a step take if its gradients were compressed? Each method is simulated on the recorded step.

```
recorded    backward ▒▒▒▒▒ │ *U0 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ │ optimizer ▒▒
compressed  backward ▒▒▒▒▒ │ *U0:topk-0.01 ▒▒▓ *:presence0 ▓ │ optimizer ▒▒      ▒▒ encoding and decoding
```

What a message costs follows from the step's own sums: how many messages and bytes each sent, and how long it took. What
encoding and decoding cost was measured on this machine (`codecs.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from microparallel.bench.messages import fit_link
from microparallel.collectives import Round, is_compressed
from microparallel.program import AllReduce, Bucket, Join, Named, Op, presence
from microparallel.simulator.fitted import Fitted
from microparallel.simulator.over_links import link_seconds
from microparallel.topology import Link

_PRESENCE, _LEFT_ALONE = AllReduce(presence(0), "dp"), AllReduce(Named("left-alone"), "dp")
_SMALL = 8  # bytes of the first: how many ranks have gradients


@dataclass(frozen=True)
class Codec:
    """What a method makes of gradients, and how long that takes on this machine.

    Attributes:
        method: as `--compress` has it: "topk:0.01".
        name: of the algorithm in a program: "topk-0.01".
        rounds: what the ranks do with the payload, and how large it is.
        bytes: of the gradients of which all of this was measured.
        seconds: to encode and decode them, with error feedback.
        left_alone: the share of a step's gradients that is not compressed, since those tensors are small.
    """

    method: str
    name: str
    rounds: tuple[Round, ...]
    bytes: float
    seconds: float
    left_alone: float = 0.0

    def algorithm(self, size: float) -> str:
        """The algorithm that sums so many bytes of gradients; its name says how many are sent in each round."""
        return self.name + "".join(f"-{one.kind}-{round(one.bytes * self.scale(size))}" for one in self.rounds)

    def scale(self, size: float) -> float:
        """How many times as much as was measured it takes for so many bytes of gradients."""
        return size * (1 - self.left_alone) / self.bytes


def gradient_sums(step: Fitted) -> dict[AllReduce, float]:
    """The sums of gradients, each with its bytes; none where some are compressed: then others are left alone."""
    sums = {
        op: size
        for op, (_, size) in step.collectives.items()
        if isinstance(op, AllReduce) and isinstance(op.value, Bucket) and size
    }
    return {} if any(is_compressed(op.algorithm) for op in sums) else sums


def compressed_steps(step: Fitted, codecs: Sequence[Codec], link: Link | None = None) -> Iterator[tuple[Codec, Fitted]]:
    """The step with each method; none where no gradients are summed, or where they are compressed already.

    Args:
        step: as it was recorded.
        codecs: of the methods.
        link: what a message costs, for a step whose own sums are all alike, and so cannot tell.
    """
    sums = gradient_sums(step)
    if sums:
        link = link_of(step) or link or _by_bandwidth_alone(step)
        yield from ((codec, _compressed(step, codec, sums, link)) for codec in codecs)


def link_of(step: Fitted) -> Link | None:
    """What a message costs, by the step's own sums; None where their sizes do not tell latency and bandwidth apart."""
    return fit_link(_observations(step))


def _observations(step: Fitted) -> list[tuple[float, float, float]]:
    """Of each sum: how many messages and bytes a rank sent, at most; and how long it took."""
    found: list[tuple[float, float, float]] = []
    for op, (seconds, _) in step.collectives.items():
        counts = [sent for (_, other), sent in step.costs.counts.items() if other == op]
        if counts and seconds > 0 and max(counts)[0]:
            found.append((max(messages for messages, _ in counts), max(size for _, size in counts), seconds))
    return found


def _by_bandwidth_alone(step: Fitted) -> Link:
    observations = _observations(step)
    sent, took = sum(size for _, size, _ in observations), sum(seconds for _, _, seconds in observations)
    return Link(0.0, took / sent if sent else 0.0)


def _compressed(step: Fitted, codec: Codec, sums: Mapping[AllReduce, float], link: Link) -> Fitted:
    """The step whose sums are compressed, as DataParallel does it: with small sums behind them."""
    renamed: dict[Op, Op] = {op: replace(op, algorithm=codec.algorithm(size)) for op, size in sums.items()}
    left = codec.left_alone * max(sum(size for op, size in sums.items() if op in ops) for ops in step.program.ranks)
    behind: dict[Op, tuple[float, float]] = {_PRESENCE: (0.0, _SMALL)}
    if left:
        behind[_LEFT_ALONE] = 0.0, left
    new = {renamed[op]: (codec.seconds * codec.scale(size), size) for op, size in sums.items()} | behind
    ranks = [tuple(_renamed(ops, renamed, behind)) for ops in step.program.ranks]
    each = [((rank, op), *new[op]) for rank, ops in enumerate(ranks) for op in ops if op in new]
    seconds = dict(step.costs.seconds) | {key: took for key, took, _ in each}
    exchanged = dict(step.costs.exchanged) | {key: size for key, _, size in each}
    costs = replace(step.costs, seconds=seconds, exchanged=exchanged, counts={})
    encoded = Fitted(replace(step.program, ranks=tuple(ranks)), costs)
    sent = link_seconds(encoded, link)
    together = seconds | {key: took + sent[key] for key, took, _ in each}
    return replace(encoded, costs=replace(costs, seconds=together))


def _renamed(ops: Sequence[Op], names: Mapping[Op, Op], behind: Iterable[Op]) -> Iterator[Op]:
    """A rank's operations under their new names; behind the last sum of gradients, others that are waited for."""
    last = max((place for place, op in enumerate(ops) if op in names), default=None)
    for place, op in enumerate(ops):
        yield names.get(op, op)
        if place == last:
            yield from (*behind, Join())
