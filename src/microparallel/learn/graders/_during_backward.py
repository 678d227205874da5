"""What happens during backward: when gradients are ready, when all-reduces begin, and when they are waited for.

Everything is taken from the order of operations and nothing from clocks, so that a slow machine is judged like a fast
one. In a pass's program every parameter is a stage, and a rank's own samples are a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.errors import Mismatch
from microparallel.learn.graders._common import LEARNING_RATE, batch, combined, in_one_process, small_model
from microparallel.learn.log import Called, Row
from microparallel.learn.ranks import NoTensor
from microparallel.learn.verdict import NotAllowed, Wrong
from microparallel.observe import Activity
from microparallel.program import Bucket, Program, TrainingStep
from microparallel.program import ops as o

Groups = list[list[str]]  # the parameters of each bucket
_SKIPS = {0: 1, 2: 0}  # by step, the rank that skips the spare layer


class Spared(nn.Module):
    """A model with a layer beside its first one, which is left out at times, or is computed before that one."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(small_model())
        self.first = nn.Sequential(*layers[:2])
        self.spare = nn.Linear(3, 7).double()
        self.last = nn.Sequential(*layers[2:])
        self.used, self.is_first = True, False
        for parameter in self.spare.parameters():
            nn.init.constant_(parameter, 0.1)

    def begin(self, kind: str, rank: int, step: int) -> None:
        """What a rank does in a step. Backward goes the other way, so the order of two layers is seen there."""
        self.used = step == 0 if kind == "spare" else kind != "skipped" or rank != _SKIPS.get(step)
        self.is_first = kind == "turned" and rank == 1

    def forward(self, inputs: torch.Tensor) -> Any:
        """With the spare layer, or without."""
        if not self.used:
            return self.last(self.first(inputs))
        if self.is_first:
            beside = self.spare(inputs)
            return self.last(self.first(inputs) + beside)
        return self.last(self.first(inputs) + self.spare(inputs))


def make_model(kind: str) -> nn.Module:
    """A plain one, one with a "frozen" bias, or one with a spare layer.

    All ranks use the layer, but only in the first step ("spare"); or one rank skips it in some steps ("skipped"); or
    one rank computes it before the other layer, so that its gradients come in another order ("turned").
    """
    if kind in ("spare", "skipped", "turned"):
        return Spared()
    model = small_model()
    if kind == "frozen":
        model[2].bias.requires_grad_(False)
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def watch(
    comms: Any,
    kind: str,
    steps: int,
    attach: Callable[[nn.Module], Any],
    explain: Callable[[Pass, Exception], None] = lambda _, __: None,
    removes: bool = True,
) -> list[Pass]:
    """Train, on one rank, with the hooks that the learner attaches to the model; remove them, and do one more backward.

    Where hooks are not removed (`removes`), the rank ends after its steps. When a pass fails, `explain` is called with
    what has happened until then and the error, and may raise a better one.
    """
    model = make_model(kind)
    observed = _Observed(comms, kind, model, explain)
    attached = attach(model)
    for name in ("finish", "remove"):
        if not callable(getattr(attached, name, None)):
            raise Wrong(f"the hooks have no {name}(): was it renamed or removed?")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    passes = []
    for step in range(steps):
        optimizer.zero_grad()
        passes.append(observed.backward(step, attached.finish))
        optimizer.step()
    if not removes:
        return passes
    attached.remove()
    optimizer.zero_grad()
    return [*passes, observed.backward(steps, lambda: None)]


_NOT_IN_STEP = (
    "rank {}'s all-reduces are not those of the other ranks: the first that one rank begins meets the first of every "
    "other one, whatever is in it. Let gradients (or buckets) leave in the same order on every rank"
)


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's own samples in a step."""
    return batch(4, 100 * step + rank)


@dataclass
class Averages:
    """What is right in a step: every rank's own gradients, and their mean, in the order of `trainable`."""

    own: list[list[torch.Tensor]]
    mean: list[torch.Tensor]
    weights: list[torch.Tensor]  # with which the step began

    @property
    def sum(self) -> list[torch.Tensor]:
        """The gradients where nothing was divided by the world size."""
        return combined(self.own, [1.0] * len(self.own))

    @property
    def divided_twice(self) -> list[torch.Tensor]:
        """The gradients where the mean was divided by the world size once more."""
        return combined([self.mean], [1 / len(self.own)])

    @property
    def of_users(self) -> list[torch.Tensor]:
        """The gradients where each was divided by the number of ranks that had one."""
        users = [sum(bool(one.any()) for one in same) for same in zip(*self.own, strict=True)]
        return [total / max(1, number) for total, number in zip(self.sum, users, strict=True)]


def averages(kind: str, ranks: int, steps: int) -> list[Averages]:
    """What is right in each step: one process takes the mean over all ranks' samples."""
    model = make_model(kind)
    found = []
    for step in range(steps):
        trained = [parameter.requires_grad for parameter in model.parameters()]
        all_own = []
        for rank in range(ranks):
            if isinstance(model, Spared):
                model.begin(kind, rank, step)
            all_own.append(in_one_process(model, *_batch(rank, step))[1])
        own = [[one for one, needed in zip(mine, trained, strict=True) if needed] for mine in all_own]
        weights = [parameter.detach().clone() for parameter in trainable(model).values()]
        found.append(Averages(own, combined(own, [1 / ranks] * ranks), weights))
        with torch.no_grad():
            for parameter, gradient in zip(trainable(model).values(), found[-1].mean, strict=True):
                parameter.sub_(LEARNING_RATE * gradient)
    return found


# ── one backward pass ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Reduce:
    """An all-reduce that was begun."""

    call: Called
    gradient_of: str  # whose gradient it was given, where it is one; else ""
    parameter: str  # which parameter it was given instead of a gradient; else ""


@dataclass
class Pass:
    """One backward pass of one rank, and what came after it.

    Attributes:
        names: the parameters that get gradients; a parameter's place is its stage.
        ops: a Backward for each gradient that came, an AllReduce where one began (with the number of those before it
            in the place of a bucket's), a Join where one was waited for.
        over: how many of them came before backward was over.
        old: how many requests of an earlier pass were waited for.
        views: whether gradients lie in what was all-reduced.
    """

    names: list[str]
    ops: list[o.Op]
    over: int
    old: int
    reduces: list[Reduce]
    gradients: dict[str, torch.Tensor | None]
    views: bool

    def came(self, until: int | None = None) -> list[str]:
        """The parameters whose gradients had come after so many operations, in that order."""
        return [self.names[op.stage] for op in self.ops[:until] if isinstance(op, o.Backward)]

    @property
    def begun(self) -> list[int]:
        """The places where all-reduces began."""
        return [place for place, op in enumerate(self.ops) if isinstance(op, o.AllReduce)]


def program_of(passes: Sequence[Pass], groups: Groups, bucket: Callable[[Pass, int], int] = lambda _, n: n) -> Program:
    """The step in which every rank did its pass; `bucket` says which one an all-reduce took, by default its number."""
    names = passes[0].names
    stages = [sorted(names.index(name) for name in group) for group in groups]
    goal = TrainingStep(len(names), len(passes), tuple((mine[0], mine[-1] + 1) for mine in stages))

    def named(op: o.Op, one: Pass, rank: int) -> o.Op:
        if isinstance(op, o.AllReduce) and isinstance(op.value, Bucket):
            return o.AllReduce(Bucket(bucket(one, op.value.index)), "dp")
        return o.Backward(op.stage, rank) if isinstance(op, o.Backward) else op

    ranks = [
        (*(o.Forward(stage, rank) for stage in range(len(names))), *(named(op, one, rank) for op in one.ops))
        for rank, one in enumerate(passes)
    ]
    return Program("your step", goal, tuple(ranks))


class _Observed:
    """A model with the grader's own hooks, which torch calls before the learner's; they tell the log of gradients."""

    def __init__(self, comms: Any, kind: str, model: nn.Module, more: Callable[[Pass, Exception], None]) -> None:
        self._comms, self._kind, self._model, self._more = comms, kind, model, more
        self._places: dict[int, str] = {}  # where each gradient lies
        self._stages = {parameter: stage for stage, parameter in enumerate(trainable(model).values())}
        for parameter in self._stages:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _ready(self, parameter: torch.Tensor) -> None:
        stage = self._stages[parameter]  # type: ignore[index]
        if parameter.grad is not None:
            self._places[parameter.grad.data_ptr()] = list(trainable(self._model))[stage]
        self._comms.log.begins(Activity(o.Backward(stage, self._comms.rank)))

    def backward(self, step: int, finish: Callable[[], None]) -> Pass:
        """Do one backward pass, and what the learner does after it."""
        if isinstance(self._model, Spared):
            self._model.begin(self._kind, self._comms.rank, step)
        inputs, targets = _batch(self._comms.rank, step)
        row, begin, over = self._comms.row, len(self._comms.row), None
        self._places.clear()
        loss = nn.functional.mse_loss(self._model(inputs), targets)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            over = len(row)
            finish()
        except NotAllowed:
            raise
        except Mismatch:
            raise Wrong(_NOT_IN_STEP.format(self._comms.rank)) from None
        except (Wrong, AttributeError) as error:  # perhaps what happened before explains it better
            one = self._pass(row[begin:over], row[over:] if over else [])
            if isinstance(error, NoTensor) and error.value is None:
                raise Wrong(_no_gradient(one, in_finish=over is not None)) from None
            require_hooks_fit(one)
            require_asynchronous(one)
            self._more(one, error)
            raise
        return self._pass(row[begin:over], row[over:])

    def _pass(self, during: Row, after: Row) -> Pass:
        parameters = {parameter.data_ptr(): name for name, parameter in self._model.named_parameters()}
        gradients = {name: parameter.grad for name, parameter in trainable(self._model).items()}
        made = {gradient.data_ptr(): name for name, gradient in gradients.items() if gradient is not None}
        places = made | self._places  # also of a gradient that the learner's code has made, since none came
        one = Pass(list(gradients), [], 0, 0, [], {}, False)
        for number, moment in enumerate([*during, *after]):
            call = moment.op
            if not isinstance(call, Called):
                one.ops.append(call)
            elif moment.phase == "begins":
                gradient_of, parameter = places.get(call.address, ""), parameters.get(call.address, "")
                one.ops.append(o.AllReduce(Bucket(len(one.reduces)), "dp"))
                one.reduces.append(Reduce(call, gradient_of, parameter))
            elif moment.phase == "waits" and any(reduce.call is call for reduce in one.reduces):
                one.ops.append(o.Join())
            elif moment.phase == "waits":
                one.old += 1
            if number < len(during):
                one.over = len(one.ops)
        ranges = [(reduce.call.address, reduce.call.address + reduce.call.bytes) for reduce in one.reduces]
        present = [gradient for gradient in gradients.values() if gradient is not None]
        one.views = any(start <= gradient.data_ptr() < end for gradient in present for start, end in ranges)
        one.gradients = {name: None if own is None else own.detach().clone() for name, own in gradients.items()}
        return one


def _no_gradient(one: Pass, *, in_finish: bool) -> str:
    """What to say of an all-reduce that was given None instead of a gradient."""
    if in_finish:
        return (
            "finish() all-reduces None: a parameter that was skipped on this rank has no gradient. It counts as zero: "
            "give the all-reduce zeros in the parameter's shape"
        )
    if not one.came():
        return _TOO_EARLY
    late = "wants another parameter's gradient, which is not there yet"
    return f"{_OTHER.format(one.came()[-1], late)}, and let nothing of the step before count as ready"


# ── the words about it that hooks and buckets share ─────────────────────────────────────────────────────────────────


def achieved(one: Pass) -> str:
    """How much of the communication overlaps with backward."""
    last = max(place for place, op in enumerate(one.ops) if isinstance(op, o.Backward))
    early = sum(place < last for place in one.begun)
    return f"{early} of {len(one.reduces)} all-reduces begin before the last gradient is ready"


def require_hooks_fit(one: Pass) -> None:
    """Refuse hooks that average something else than the gradient for which they were called."""
    for reduce in one.reduces:
        if reduce.parameter:
            raise Wrong(
                f"line {reduce.call.line} all-reduces {reduce.parameter} itself: the hook is handed the parameter, and "
                "it is the gradient that is averaged, parameter.grad"
            )
    if any(place < one.over and not one.came(place) for place in one.begun):
        raise Wrong(_TOO_EARLY)
    averaged = [reduce.gradient_of for reduce in one.reduces if reduce.gradient_of]
    twice = next((name for name in averaged if averaged.count(name) > 1), "")
    if twice and set(averaged) == {twice}:
        raise Wrong(_OTHER.format(one.came()[-1], f"averages the gradient of {twice}"))
    if twice:
        raise Wrong(f"the gradient of {twice} is averaged {averaged.count(twice)} times in one step: once is enough")


def require_own_parameter(parameter: Any, model: nn.Module, row: Row) -> None:
    """Refuse a hook that is handed another parameter than the one whose gradient has just come."""
    names = list(trainable(model))
    came = [names[moment.op.stage] for moment in row if isinstance(moment.op, o.Backward)]
    handed = next((name for name, one in trainable(model).items() if one is parameter), "")
    if not came:
        raise Wrong(_TOO_EARLY)
    if handed and handed != came[-1]:
        raise Wrong(_OTHER.format(came[-1], f"is handed {handed}"))


_TOO_EARLY = (
    "the hook is called before the gradient is in parameter.grad: register_hook fires before it is accumulated; use "
    "register_post_accumulate_grad_hook"
)
_OTHER = (
    "the hook that was called for {} {}: a function made in a loop sees the loop's *last* parameter, since it looks "
    "the name up when it is called. Use the parameter that the hook is handed"
)


def require_early(one: Pass) -> None:
    """Refuse all-reduces none of which begins before the last gradient is there."""
    last = max(place for place, op in enumerate(one.ops) if isinstance(op, o.Backward))
    if all(place > last for place in one.begun):
        raise Wrong(
            f"none of the {len(one.begun)} all-reduces begins before the last gradient has come: then nothing travels "
            "while backward computes. The order should begin with the gradients that backward makes first, those of "
            "the last layer"
        )


def require_asynchronous(one: Pass) -> None:
    """Refuse all-reduces that backward waits for."""
    for reduce in one.reduces:
        if not reduce.call.asynchronous:
            raise Wrong(
                f"line {reduce.call.line} waits for its all-reduce, and backward waits with it: nothing travels "
                "meanwhile. Start it with async_op=True, and wait in finish()"
            )
    if o.Join() in one.ops[: one.over]:
        ready, total = len(one.came(one.ops.index(o.Join()))), len(one.came())
        raise Wrong(
            f"a request is waited for during backward, after {ready} of {total} gradients: backward stops there, and "
            "nothing overlaps; wait in finish()"
        )


def require_waited(one: Pass, rank: int) -> None:
    """Refuse all-reduces that a rank never waited for."""
    left = [reduce.call for reduce in one.reduces if not reduce.call.ended]
    if left:
        raise Wrong(
            f"rank {rank}: finish() returned while {len(left)} of {len(one.reduces)} all-reduces were under way "
            f"(begun in line {left[0].line}): keep every request, and wait for each of them"
        )


def require_old_requests_gone(one: Pass, number: int) -> None:
    """Refuse requests of an earlier step that are waited for again."""
    if one.old:
        raise Wrong(
            f"step {number}: finish() waited for requests of the step before, which are long over ({one.old} of them): "
            "drop each request when it has been waited for"
        )
