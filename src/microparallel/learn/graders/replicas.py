"""Replicas in one process: are they copies, is every sample used once, and do all replicas get the average?"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import (
    LEARNING_RATE,
    batch,
    combined,
    gradients,
    in_one_process,
    mean_loss,
    require_no_gradient_lost,
    same,
    small_model,
    steps_of_one_process,
    weights,
)
from microparallel.learn.graders._common import names as names_of
from microparallel.learn.requirements import flat, listed, require_equal, require_number, require_tensor, suspects
from microparallel.learn.verdict import Wrong

_PRETEND = ["cpu", "cpu", "meta"]  # the last one keeps shapes and no numbers
_CPUS = ["cpu"] * 3
_BATCHES = (7, 7, 2)  # of the training; the last one is too small for three replicas


def check(exam: Exam) -> None:
    """The four functions one after another, and what they do together."""
    with exam.step("replicate: every device has a copy of its own"):
        exam.run(_replicate, 1, allowed=())
    with exam.step("share_out: every sample is in one part, and on its device"):
        exam.run(_share_out, 1, allowed=())
    with exam.step("forward_and_backward: every replica has the gradients of its part") as notes:
        exam.run(_compute, 1, allowed=())
        notes.append("nothing waits for a device in between")
    with exam.step("average_gradients: all replicas have the average, each on its device"):
        exam.run(_average, 1, allowed=())
    with exam.step("three steps of training are those of one network with the whole batch") as notes:
        _require_training(exam.run(_train, 1, allowed=())[0], notes)


# ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _replicate(learner: Any, _: Any) -> None:
    model = small_model()
    replicas = learner.replicate(model, _PRETEND)
    if not isinstance(replicas, list | tuple) or [one for one in replicas if not isinstance(one, nn.Module)]:
        raise Wrong("replicate shall return a list of modules, one for each device")
    if len(replicas) != len(_PRETEND):
        raise Wrong(f"replicate returned {len(replicas)} modules for {len(_PRETEND)} devices")
    owned = [{id(parameter) for parameter in one.parameters()} for one in (model, *replicas)]
    if sum(map(len, owned)) > len(set.union(*owned)):
        raise Wrong(
            "the replicas share their parameters with the model, or with each other: module.to(device) moves the "
            "module itself and copies nothing that is there already. Copy the module first (copy.deepcopy)"
        )
    for number, (replica, device) in enumerate(zip(replicas, _PRETEND, strict=True)):
        places = {parameter.device.type for parameter in replica.parameters()}
        if places != {device}:
            raise Wrong(f"replica {number} is on {listed(sorted(places))}, and was to be on {device}: .to(device)")
        if device == "cpu" and not same(weights(replica), weights(model)):
            raise Wrong(f"replica {number} has other weights than the model: a copy begins with the same ones")


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _share_out(learner: Any, _: Any) -> None:
    for samples, devices in ((6, ["cpu"] * 4), (7, _CPUS), (4, _CPUS), (2, _CPUS), (7, _PRETEND)):
        inputs = torch.arange(3.0 * samples).reshape(samples, 3)
        parts = learner.share_out(inputs, -inputs[:, :1], devices)
        _require_parts(parts, inputs, devices)


def _require_parts(parts: Any, inputs: torch.Tensor, devices: Sequence[str]) -> None:
    samples, what = len(inputs), f"{len(inputs)} samples for {len(devices)} devices"
    if not isinstance(parts, list | tuple) or [one for one in parts if not isinstance(one, list | tuple)]:
        raise Wrong("share_out shall return a list with a pair (inputs, targets) for each device")
    if len(parts) != len(devices):
        raise Wrong(
            f"{what}: {len(parts)} parts; every device needs one, even if it is empty (chunk(n) gives n parts at most, "
            "tensor_split(n) exactly n)"
        )
    for number, (pair, device) in enumerate(zip(parts, devices, strict=True)):
        for one, name in zip(pair, ("inputs", "targets"), strict=True):
            if (place := require_tensor(one, f"part {number}'s {name}").device.type) != device:
                raise Wrong(f"{what}: part {number}'s {name} are on {place}, and its replica is on {device}")
    sizes = [len(targets) for _, targets in parts]
    if sum(sizes) != samples:
        more = "some are lost" if sum(sizes) < samples else "some are there twice"
        raise Wrong(f"{what}: the parts have {listed(sizes)} samples, {sum(sizes)} in all: {more}")
    if max(sizes) - min(sizes) > 1:
        raise Wrong(f"{what}: the parts have {listed(sizes)} samples; sizes shall differ by at most one")
    if devices == _PRETEND:
        return  # what is on "meta" has no numbers to look at
    mine, theirs = (torch.cat([pair[place] for pair in parts]) for place in (0, 1))
    if not torch.equal(mine.sort(dim=0).values, inputs):
        raise Wrong(f"{what}: not every sample is in one part: some are there twice, and others nowhere")
    if not torch.equal(theirs, -mine[:, :1]):
        raise Wrong(f"{what}: inputs and targets were cut differently, and no longer belong together")


# ── forward and backward ────────────────────────────────────────────────────────────────────────────────────────────


class _Waits(TorchFunctionMode):
    """Sees where the rank asks for a number, which on a GPU waits until that GPU has computed it."""

    _ASKS = frozenset({"item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__format__"})

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._ASKS:
            self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _compute(learner: Any, _: Any) -> None:
    replicas = [small_model(seed) for seed in range(3)]
    inputs, targets = batch(5)
    parts = [(inputs[rows], targets[rows]) for rows in (slice(0, 3), slice(3, 5), slice(5, 5))]
    begun: list[int] = []  # how often the rank had waited when each replica began
    with _Waits() as waits:
        for replica in replicas:
            replica.register_forward_pre_hook(lambda *_: begun.append(len(waits.calls)))
        losses = learner.forward_and_backward(replicas, parts, mean_loss)
    if begun[-1] > begun[0]:
        raise Wrong(
            f"between two replicas the code asks for a number ({waits.calls[begun[0]]}): on GPUs it then waits until "
            "the first has computed, and they compute one after another. Return the losses as tensors"
        )
    for number, (replica, part) in enumerate(zip(replicas[:2], parts, strict=False)):
        loss, expected = in_one_process(replica, *part)
        found = gradients(replica)
        if all(gradient is None for gradient in found):
            raise Wrong(f"replica {number} has no gradients: its backward was not done")
        whole = in_one_process(replica, inputs, targets)[1]
        known = suspects(
            {
                f"replica {number} has the gradients of the whole batch: its part is parts[{number}]": whole,
                f"replica {number}'s loss was not the mean over its part: the weights come later, when the gradients "
                "are averaged": combined([expected], [len(part[1])]),
            }
        )
        require_equal(flat(found), flat(expected), f"replica {number}'s gradient", known)
        require_equal(require_tensor(losses[number], f"loss {number}").detach(), loss, f"loss {number}")


# ── the average ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _average(learner: Any, _: Any) -> None:
    """Two replicas with numbers, of other weights, and one that saw no sample, on a device without numbers."""
    samples, labels = [3, 1, 0], names_of(small_model())
    replicas = [small_model(seed).to(device) for seed, device in enumerate(_PRETEND)]
    before = [weights(replica) for replica in replicas[:2]]
    inputs, targets = batch(4)
    for replica, rows in zip(replicas, (slice(0, 3), slice(3, 4)), strict=False):
        mean_loss(replica(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
    own = [[gradient for gradient in gradients(replica) if gradient is not None] for replica in replicas[:2]]
    learner.average_gradients(replicas, samples)

    if not all(same(weights(replica), was) for replica, was in zip(replicas, before, strict=False)):
        raise Wrong("the replicas' parameters were changed: average parameter.grad, and leave the rest to optimizers")
    if any(gradient is None for gradient in gradients(replicas[2])):
        raise Wrong(
            "replica 2, which saw no sample, was given no gradient: its optimizer would not step, and its weights "
            "would no longer be those of the others"
        )
    expected = combined(own, [3 / 4, 1 / 4])
    for number, replica in enumerate(replicas[:2]):
        require_no_gradient_lost(gradients(replica), labels, f"replica {number}")
        known = suspects(
            {
                f"replica {number} still holds its own gradient: write the average back to every replica": own[number],
                "each replica counts alike, but one saw more samples than the other: weight each gradient by its "
                "samples": combined(own, [1 / 2, 1 / 2]),
                "the gradients were divided by the number of replicas, also of the one that saw nothing: weight each "
                "by its samples, and divide by all samples": combined(own, [1 / 3, 1 / 3]),
                "this is the sum over all samples: divide it by how many there are": combined(own, [3.0, 1.0]),
                "the sum over all samples was divided by the number of replicas: divide it by the number of samples": (
                    combined(own, [1.0, 1 / 3])
                ),
                "this is the sum of the gradients: weight each by its samples, and divide by all": combined(
                    own, [1, 1]
                ),
            }
        )
        require_equal(flat(gradients(replica)), flat(expected), f"replica {number}'s gradient", known)
    for pair in zip(*(replica.parameters() for replica in replicas[:2]), strict=True):
        if len({parameter.grad.data_ptr() for parameter in pair if parameter.grad is not None}) < len(pair):
            raise Wrong(
                "two replicas have one and the same tensor as their gradient: `.to(device)` copies nothing that is "
                "there already. What one replica does to its gradient (clip it, add to it) would happen to the "
                "other's; give each a tensor of its own"
            )


# ── together ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _train(learner: Any, _: Any) -> list[tuple[float, list[list[torch.Tensor]]]]:
    replicas = [copy.deepcopy(small_model()) for _ in _CPUS]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=LEARNING_RATE) for replica in replicas]
    after = []
    for step, size in enumerate(_BATCHES):
        loss = learner.train_step(replicas, optimizers, _CPUS, batch(size, step), mean_loss)
        after.append((require_number(loss, "train_step's loss"), [weights(replica) for replica in replicas]))
    return after


def _require_training(found: list[tuple[float, list[list[torch.Tensor]]]], notes: list[str]) -> None:
    expected = steps_of_one_process(small_model(), [batch(size, step) for step, size in enumerate(_BATCHES)])
    for step, ((loss, replicas), whole) in enumerate(zip(found, expected, strict=True), 1):
        for number, mine in enumerate(replicas):
            require_equal(flat(mine), flat(whole.weights), f"replica {number}'s weights after step {step}")
        if any(not torch.equal(flat(mine), flat(replicas[0])) for mine in replicas):
            raise Wrong(
                f"after step {step} the replicas' weights differ in their last digits: compute each average once, and "
                "give all of them the same numbers"
            )
        right = torch.tensor(whole.of(range(whole.samples))[0], dtype=torch.float64)
        require_equal(torch.tensor(loss, dtype=torch.float64), right, f"the loss of step {step}")
    notes.append(f"batches of {listed(_BATCHES)} samples on {len(_CPUS)} replicas")
