"""Every rank its own layers: are they all there, once, in one run, with the whole model's weights and names?"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import layers_of
from microparallel.learn.requirements import listed, require_equal, require_like, require_type
from microparallel.learn.verdict import Wrong
from microparallel.text import count

_WIDTH = 4
_SEED = 7


def check(exam: Exam) -> None:
    """The division; names; weights; memory; the outputs of all ranks in a row."""
    with exam.step("every layer is on one rank, and every rank has one run of layers"):
        exam.run(_division, 1, allowed=())
    with exam.step("a rank has its own layers, under the whole model's names"):
        exam.run(_names, 1, allowed=())
    with exam.step("its weights are those of the whole model"):
        exam.run(_weights, 1, allowed=())
    with exam.step("no rank ever holds the whole model") as notes:
        [most] = exam.run(_memory, 1, allowed=())
        notes.append(f"at most {most} layers at once, of 12")
    with exam.step("three ranks in a row compute what the whole model computes"):
        exam.run(_in_a_row, 1, allowed=())


def _division(learner: Any, _: Any) -> None:
    for depth, ranks in ((4, 2), (7, 4), (7, 3), (5, 5), (3, 1), (2, 4)):
        case = f"{depth} layers on {count(ranks, 'rank')}"
        shares = [learner.my_layers(depth, rank, ranks) for rank in range(ranks)]
        for rank, share in enumerate(shares):
            require_type(share, range, f"my_layers({depth}, {rank}, {ranks})", "a range")
            _require_run(case, rank, share)
        _require_each_once(case, depth, shares)
        _require_even(case, depth, ranks, shares)


def _require_run(case: str, rank: int, share: range) -> None:
    if len(share) > 1 and share.step != 1:
        raise Wrong(
            f"{case}: rank {rank} has layers {listed(share)}, which is not one run: a batch would have to come back to "
            "this rank again and again, with a message after every layer"
        )


def _require_each_once(case: str, depth: int, shares: list[range]) -> None:
    for layer in range(depth):
        owners = [rank for rank, share in enumerate(shares) if layer in share]
        if not owners:
            raise Wrong(
                f"{case}: layer {layer} is on no rank. What happens to those that are left over? You gave "
                f"{_shares(shares)}"
            )
        if len(owners) > 1:
            raise Wrong(
                f"{case}: layer {layer} is on rank {listed(owners)}. Behind ranks with one layer more, each rank "
                f"begins later; you gave {_shares(shares)}"
            )
    outside = [rank for rank, share in enumerate(shares) if share and (share[0] < 0 or share[-1] >= depth)]
    if outside:
        raise Wrong(f"{case}: rank {outside[0]} has layers {listed(shares[outside[0]])}, and they end with {depth - 1}")


def _require_even(case: str, depth: int, ranks: int, shares: list[range]) -> None:
    sizes = [len(share) for share in shares]
    if max(sizes) - min(sizes) > 1:
        raise Wrong(
            f"{case}: rank {sizes.index(max(sizes))} has {max(sizes)} layers and rank {sizes.index(min(sizes))} has "
            f"{min(sizes)}: give the layers that are left over to different ranks, or all wait for the slowest"
        )
    size, left_over = divmod(depth, ranks)
    if sizes != [size + (rank < left_over) for rank in range(ranks)]:
        raise Wrong(f"{case}: the first ranks take the layers that are left over; you gave {_shares(shares)}")
    starts = [share.start for share in shares if share]  # with fewer layers than ranks, the last have none
    if starts != sorted(starts):
        raise Wrong(f"{case}: the ranks are in the wrong order; you gave {_shares(shares)}")


def _build(learner: Any, depth: int, rank: int, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters of a shard, and those of the whole model."""
    torch.manual_seed(_SEED)
    shard = learner.ShardedModel(_WIDTH, depth, rank, ranks)
    torch.manual_seed(_SEED)
    whole = learner.WholeModel(_WIDTH, depth)
    return dict(shard.named_parameters()), dict(whole.named_parameters())


def _names(learner: Any, _: Any) -> None:
    for depth, ranks in ((4, 2), (7, 3)):
        for rank in range(ranks):
            found = list(_build(learner, depth, rank, ranks)[0])
            own = layers_of(rank, depth, ranks)
            expected = [f"layers.{number}.{kind}" for number in own for kind in ("weight", "bias")]
            if found != expected:
                raise Wrong(f"{depth} layers on {ranks} ranks: {_name_mistake(rank, own, depth, found, expected)}")


def _name_mistake(rank: int, own: range, depth: int, found: list[str], expected: list[str]) -> str:
    numbers = list(dict.fromkeys(name.split(".")[1] for name in found if name.startswith("layers.")))
    if not found:
        return f"rank {rank} has no parameters at all: keep its layers in self.layers"
    if len(numbers) == depth > len(own):
        return f"rank {rank} keeps all {depth} layers: only {listed(own)} are its own"
    if numbers == [str(number) for number in range(len(own))]:
        return (
            f"rank {rank} counts its layers from 0 and calls its first one {found[0]}; in the whole model that is "
            f"{expected[0]}, and a layer keeps its name wherever it is"
        )
    if numbers[::-1] == [str(number) for number in own]:
        return f"rank {rank} has its layers in the wrong order: {', '.join(numbers)}"
    if len(numbers) != len(own):
        return f"rank {rank} has layers {', '.join(numbers)}, and its own are {listed(own)}"
    return f"rank {rank}'s parameters are called {', '.join(found)}; in the whole model {', '.join(expected)}"


def _weights(learner: Any, _: Any) -> None:
    for depth, ranks in ((4, 2), (7, 3)):
        for rank in range(ranks):
            shard, whole = _build(learner, depth, rank, ranks)
            for name, parameter in shard.items():
                if not torch.equal(parameter, whole[name]):
                    raise Wrong(f"{depth} layers on {ranks} ranks: {_weight_mistake(rank, name, parameter, whole)}")


def _weight_mistake(rank: int, name: str, parameter: torch.Tensor, whole: dict[str, torch.Tensor]) -> str:
    for other, weights in whole.items():
        if weights.shape == parameter.shape and parameter.dim() == 2 and torch.equal(parameter, weights):
            return (
                f"rank {rank}'s {name} has the numbers of the whole model's {other}: the rank drew random numbers for "
                "its own layers only, and so from another place of the row. Draw for every layer, and keep your own"
            )
    torch.manual_seed(rank)
    if torch.equal(parameter, nn.Linear(_WIDTH, _WIDTH).weight):
        return (
            f"rank {rank}'s {name} was drawn after torch.manual_seed({rank}): with a seed of its own on every rank, "
            "the shards are not parts of one model. The caller sets the seed, the same on all ranks"
        )
    return f"rank {rank}'s {name} has not the whole model's weights, bit for bit"


def _memory(learner: Any, _: Any) -> int:
    """The most layers that were there at once."""
    depth, ranks, rank = 12, 4, 2
    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    most = 0
    original = learner.Layer.__init__

    @functools.wraps(original)
    def counted(self: nn.Module, *arguments: Any, **named: Any) -> None:
        nonlocal most
        original(self, *arguments, **named)
        alive.add(self)
        most = max(most, len(alive))

    learner.Layer.__init__ = counted
    try:
        learner.ShardedModel(_WIDTH, depth, rank, ranks)
    finally:
        learner.Layer.__init__ = original
    own = len(layers_of(rank, depth, ranks))
    if most > own + 2:
        raise Wrong(
            f"rank {rank} held {most} of the {depth} layers at once, and {own} are its own: what is too large for a "
            "rank does not fit while the model is made either. Let go of a layer before you make the next"
        )
    return most


def _in_a_row(learner: Any, _: Any) -> None:
    """Let a batch through the shards of three ranks, one after another."""
    torch.manual_seed(_SEED)
    whole = learner.WholeModel(_WIDTH, 7)
    inputs = torch.ones(2, _WIDTH)
    with torch.no_grad():
        outputs = inputs
        for rank in range(3):
            torch.manual_seed(_SEED)
            shard = learner.ShardedModel(_WIDTH, 7, rank, 3)
            outputs = require_like(shard(outputs), inputs, f"what rank {rank} returns")
        require_equal(outputs, whole(inputs), "what the last rank returns", tolerance=1e-6)


def _shares(shares: list[range]) -> str:
    return ", ".join(f"rank {rank} [{listed(share)}]" for rank, share in enumerate(shares))
