"""Buckets: filled from the back, gone as soon as they are full, few messages, and empty for each step."""

from __future__ import annotations

from typing import Any

import torch

from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders import _during_backward as during
from microparallel.learn.graders._common import same, small_model
from microparallel.learn.graders._during_backward import Averages, Groups, Pass
from microparallel.learn.requirements import flat, require_equal, shown, suspects
from microparallel.learn.verdict import Wrong
from microparallel.program import AllReduce, Bucket, Delta
from microparallel.text import count
from microparallel.verifier import Missing, verify

_ALLOWED = ("all_reduce",)
_NUMBERS = 12  # in a bucket: three of them for the small model, of different sizes
_MORE = 30


def check(exam: Exam) -> None:
    """What goes into which bucket; one step; when buckets leave; two steps; parameters that are not used."""
    with exam.step("parameters share buckets, the last layer's first"):
        for numbers in (_NUMBERS, _MORE, 1, 1000):
            _require_groups(exam.run(_share, 1, numbers, allowed=_ALLOWED)[0], numbers)
    with exam.step("a bucket leaves when it is full, while backward goes on") as notes:
        watched = exam.run(_watch, 2, "plain", 2, _NUMBERS, allowed=_ALLOWED)
        first = watched[0][0]
        _require_order([mine[0] for mine in watched])
        notes.append(f"{during.achieved(first)}; {len(first.reduces)} messages for {len(first.came())} gradients")
    with exam.step("every gradient is the average"):
        _require_step(watched, "plain", 1)
    with exam.step("the second step is as good as the first"):
        for rank, mine in enumerate(watched):
            _require_as_before(mine[1], rank, _right_groups(_NUMBERS))
        _require_order([mine[1] for mine in watched])
        _require_step(watched, "plain", 2)
    with exam.step("three ranks, and a layer that is used in the first step and not in the second"):
        for numbers in (_MORE, 1):  # the layer shares a bucket with others, or has two of them to itself
            more = exam.run(_watch, 3, "spare", 2, numbers, allowed=_ALLOWED)
            _require_step(more, "spare", 1)
            _require_step(more, "spare", 2)


# ── which parameters share a bucket ─────────────────────────────────────────────────────────────────────────────────


def _share(learner: Any, _comms: Any, numbers: int) -> Any:
    named = during.trainable(small_model())
    name_of = {parameter: name for name, parameter in named.items()}
    groups = learner.in_buckets(list(named.values()), numbers)
    try:
        return [[name_of[parameter] for parameter in group] for group in groups]
    except (TypeError, KeyError, RuntimeError):  # the last one where a parameter itself is taken for a group
        raise Wrong(f"in_buckets should return a list of lists of parameters, and returned {shown(groups)}") from None


def _right_groups(numbers: int) -> Groups:
    groups: Groups = []
    size = numbers
    for name, parameter in reversed(during.trainable(small_model()).items()):
        if size >= numbers:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += parameter.numel()
    return groups


def _require_groups(found: Groups, numbers: int) -> None:
    right = _right_groups(numbers)
    if found == right:
        return
    sizes = {name: parameter.numel() for name, parameter in during.trainable(small_model()).items()}
    flat_found, flat_right = ([name for group in groups for name in group] for groups in (found, right))
    missing = [name for name in flat_right if name not in flat_found]
    case = f"buckets of {numbers} numbers: "
    if not all(found):
        raise Wrong(f"{case}bucket {found.index([])} is empty: begin a new one only when a parameter goes into it")
    if missing:
        raise Wrong(f"{case}no bucket has {', '.join(missing)}: the last bucket leaves too, even if it is not full")
    if flat_found == flat_right[::-1]:
        raise Wrong(
            f"{case}the first one has {found[0][0]}, whose gradient comes last: backward makes the last layer's "
            "gradients first, so fill the buckets from the last parameter to the first"
        )
    if flat_found != flat_right:
        raise Wrong(f"{case}the order is {', '.join(flat_found)}, and should be {', '.join(flat_right)}")
    place = next(place for place, (one, other) in enumerate(zip(found, right, strict=False)) if one != other)
    mine, wanted = (sum(sizes[name] for name in groups[place]) for groups in (found, right))
    advice = (
        "it takes parameters until it has that many, and the one that fills it still belongs to it"
        if mine < wanted
        else "when it has that many, it takes no more"
    )
    raise Wrong(
        f"{case}bucket {place} has {', '.join(found[place])}, {mine} numbers, and should have {wanted}: {advice}"
    )


# ── when they leave ─────────────────────────────────────────────────────────────────────────────────────────────────


def _watch(learner: Any, comms: Any, kind: str, steps: int, numbers: int) -> list[Pass]:
    def explain(one: Pass, error: Exception) -> None:
        if kind == "plain" and len(one.reduces) <= len(_right_groups(numbers)):
            _require_full([one], _right_groups(numbers))
        if isinstance(error, AttributeError) and error.name == "wait" and error.obj is None:
            raise Wrong(
                "finish() waits for a bucket that never left: it was not full, since one of its parameters had no "
                "gradient in this step; let it leave in finish()"
            )

    return during.watch(comms, kind, steps, lambda model: learner.BucketHooks(model, comms, numbers), explain)


def _require_order(passes: list[Pass]) -> None:
    groups = _right_groups(_NUMBERS)
    for rank, one in enumerate(passes):
        _require_overlap(one, rank, groups)
    _require_full(passes, groups)
    for one in passes:
        _require_at_once(one, groups)


def _require_overlap(one: Pass, rank: int, groups: Groups) -> None:
    """From the order of operations: buckets leave during backward, as one message each, and are waited for after it."""
    during.require_hooks_fit(one)
    if not one.reduces:
        raise Wrong(f"rank {rank}: no bucket has left, so nothing was averaged: all-reduce the buffer of each bucket")
    if one.begun[0] >= one.over:
        raise Wrong(
            "the first bucket leaves after backward is over: then nothing travels while it computes; let a bucket "
            "leave in the hook, when its last gradient has come"
        )
    during.require_asynchronous(one)
    if len(one.reduces) != len(groups):
        _require_few_messages(one, rank, groups)
    during.require_waited(one, rank)


def _require_full(passes: list[Pass], groups: Groups) -> None:
    """Refuse a bucket that leaves before all its gradients have come, and one that is full and does not leave."""
    try:
        verify(during.program_of(passes, groups), completed=False)
    except Missing as error:
        if isinstance(error.op, AllReduce) and isinstance(error.op.value, Bucket) and isinstance(error.value, Delta):
            one, number = passes[error.rank], error.op.value.index
            missing = one.names[error.value.stage]
            now = count(len(one.came(one.begun[number])), "gradient")
            raise Wrong(f"bucket {number} leaves after {now}, before {missing} has come: count what is in it") from None
    except ProgramError:
        pass  # a pass that broke off; what it lacks is said elsewhere


def _require_at_once(one: Pass, groups: Groups) -> None:
    for number, group in enumerate(groups):
        complete = max(one.came().index(name) for name in group) + 1
        now = len(one.came(one.begun[number]))
        if now > complete:
            raise Wrong(
                f"bucket {number} is full after {complete} gradients, and leaves only after {now}: let it leave at "
                "once, so that it travels while the next ones are computed"
            )


def _require_few_messages(one: Pass, rank: int, groups: Groups) -> None:
    readies = len(one.came())
    why = (
        "a bucket leaves when its *last* gradient has come, not with each of them"
        if len(one.reduces) == readies
        else "one for each bucket"
    )
    raise Wrong(
        f"rank {rank} sent {len(one.reduces)} messages for {len(groups)} buckets ({readies} gradients), and "
        f"{len(groups)} are enough: {why}"
    )


def _require_as_before(one: Pass, rank: int, groups: Groups) -> None:
    """The second step, when the first was right: what differs was not reset."""
    begun = sum(place < one.over for place in one.begun)
    if begun < len(groups):
        raise Wrong(
            f"in step 2 rank {rank} lets {begun} of {len(groups)} buckets leave during backward, and in step 1 all of "
            "them: something of step 1 is still in the bucket (ready? request?); finish() must set it back"
        )
    during.require_old_requests_gone(one, 2)


# ── what comes back ─────────────────────────────────────────────────────────────────────────────────────────────────


def _require_step(watched: list[list[Pass]], kind: str, step: int) -> None:
    every = during.averages(kind, len(watched), step)
    right, before = every[-1], every[-2].mean if step > 1 else None
    for rank, mine in enumerate(watched):
        one = mine[step - 1]
        during.require_waited(one, rank)
        during.require_old_requests_gone(one, step)
        found = list(one.gradients.values())
        wrong = [
            place
            for place, gradient in enumerate(found)
            if (right.mean[place].any() if gradient is None else not same([gradient], [right.mean[place]]))
        ]
        if wrong:
            _explain(one, wrong, right, before, rank, step)


_ZEROS = "zeros: the gradient was never put into its bucket"
_ZEROS_IN_VIEWS = (
    "zeros: the gradient is a view of the bucket's buffer, and the buffer was emptied after it had been handed out; "
    "hand out a clone"
)


def _explain(
    one: Pass, wrong: list[int], right: Averages, before: list[torch.Tensor] | None, rank: int, step: int
) -> None:
    """Refuse the gradients in these places, and name what they are instead of the average."""
    names = [one.names[place] for place in wrong]
    found = [one.gradients[name] for name in names]
    where = f"step {step}, rank {rank}: {', '.join(names)}"
    if any(gradient is None for gradient in found):
        raise Wrong(f"{where}: no gradient any more; finish() is to give every parameter its average")
    not_left = "its bucket did not leave; one whose parameters were not all used must leave in finish()"
    nothing = "nothing came back from the buckets: copy the averages out of them, after the wait"
    mistakes = {
        f"still rank {rank}'s own gradient; {nothing if len(names) == len(one.names) else not_left}": right.own[rank],
        'this is the sum: divide by the world size, or use op="mean"': right.sum,
        'divided twice by the world size: op="mean" has done it already': right.divided_twice,
        _ZEROS_IN_VIEWS if one.views else _ZEROS: [torch.zeros_like(gradient) for gradient in right.mean],
        "these are the weights: it is parameter.grad that goes into the bucket": right.weights,
    }
    if before is not None:
        mistakes["this is the average of the step before: the bucket was not emptied, or did not leave again"] = before
    known = {f"{where}: {words}": [value[place] for place in wrong] for words, value in mistakes.items()}
    expected = [right.mean[place] for place in wrong]
    require_equal(flat(found), flat(expected), f"{where}: the gradient", suspects(known))
