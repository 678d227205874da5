"""One backward pass, as it was watched, and the words about it that hooks and buckets share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from microparallel.learn.verdict import Wrong

OVER = "backward is over"


@dataclass
class Reduce:
    """An all-reduce that was begun."""

    line: int
    numbers: int
    asynchronous: bool
    waited: bool
    gradient_of: str  # whose gradient it was given, where it is one; else ""
    parameter: str  # which parameter it was given instead of a gradient; else ""


@dataclass
class Pass:
    """One backward pass of one rank, and what came after it."""

    events: list[str] = field(default_factory=list)  # "ready NAME", "all_reduce", "wait", OVER, …
    reduces: list[Reduce] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    views: bool = False  # whether gradients lie in what was all-reduced

    @property
    def during(self) -> list[str]:
        """What happened before backward was over."""
        return self.events[: self.events.index(OVER)] if OVER in self.events else self.events


def achieved(one: Pass) -> str:
    """How much of the communication overlaps with backward."""
    last = max(place for place, event in enumerate(one.events) if event.startswith("ready"))
    early = one.events[:last].count("all_reduce")
    return f"{early} of {len(one.reduces)} all-reduces begin before the last gradient is ready"


def require_hooks_fit(one: Pass) -> None:
    """Refuse hooks that average something else than the gradient for which they were called."""
    for reduce in one.reduces:
        if reduce.parameter:
            raise Wrong(
                f"line {reduce.line} all-reduces {reduce.parameter} itself: the hook is handed the parameter, and it "
                "is the gradient that is averaged, parameter.grad"
            )
    ready, begun = "", 0
    for event in one.during:
        if event.startswith("ready "):
            ready = event.removeprefix("ready ")
        elif event == "all_reduce":
            reduced, begun = one.reduces[begun].gradient_of, begun + 1
            if not ready:
                raise Wrong(_TOO_EARLY)
            if reduced and reduced != ready:
                always = all(reduce.gradient_of == reduced for reduce in one.reduces)
                which = f"averages the gradient of {reduced}"
                raise Wrong(_OTHER.format(ready, which) if always else f"the hook that was called for {ready} {which}")


_TOO_EARLY = (
    "the hook is called before the gradient is in parameter.grad: register_hook fires before it is accumulated; use "
    "register_post_accumulate_grad_hook"
)
_OTHER = (
    "the hook that was called for {} {}: a function made in a loop sees the loop's *last* parameter, since it looks "
    "the name up when it is called. Use the parameter that the hook is handed"
)


def no_gradient(happened: list[str]) -> str:
    """Why a hook found None where a gradient should be."""
    if not happened:
        return _TOO_EARLY
    return _OTHER.format(
        happened[-1].removeprefix("ready "), "wants another parameter's gradient, which is not there yet"
    )


def require_asynchronous(one: Pass) -> None:
    """Refuse all-reduces that backward waits for."""
    for reduce in one.reduces:
        if not reduce.asynchronous:
            raise Wrong(
                f"line {reduce.line} waits for its all-reduce, and so does backward: nothing travels meanwhile. "
                "Start it with async_op=True, and wait in finish()"
            )
    if "wait" in one.during:
        ready = sum(event.startswith("ready") for event in one.during[: one.during.index("wait")])
        total = sum(event.startswith("ready") for event in one.events)
        raise Wrong(
            f"a request is waited for during backward, after {ready} of {total} gradients: backward stops there, and "
            "nothing overlaps; wait in finish()"
        )


def require_waited(one: Pass, rank: int) -> None:
    """Refuse all-reduces that nobody has waited for."""
    left = [reduce for reduce in one.reduces if not reduce.waited]
    if left:
        raise Wrong(
            f"rank {rank}: finish() came back while {len(left)} of {len(one.reduces)} all-reduces were under way "
            f"(begun in line {left[0].line}): keep every request, and wait for each of them"
        )


def require_old_requests_gone(one: Pass, number: int) -> None:
    """Refuse requests of an earlier step that are waited for again."""
    old = one.events.count("wait for an old request")
    if old:
        raise Wrong(
            f"step {number}: finish() waited for requests of the step before, which are long over ({old} of them): "
            "forget each request when it has been waited for"
        )


def require_removed(one: Pass) -> None:
    """Refuse hooks that are called after remove()."""
    if one.reduces:
        raise Wrong(
            f"after remove() a backward still began {len(one.reduces)} all-reduces: keep the handle of every hook, and "
            "remove each of them"
        )
