"""What the pipeline's tests share: models, batches, and one process that sees the whole batch."""

import copy
from itertools import pairwise

import torch
from torch import nn

import microparallel as mp
from microparallel.comms.in_process import take_turns
from microparallel.models import cross_entropy
from microparallel.pipeline.cut import cut
from microparallel.pipeline.interpreter import Interpreter, Microbatch, Worker
from microparallel.pipeline.microbatches import sizes, split_batch
from microparallel.pipeline.stage import Boundary, DryRun, Stage

RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5}


def mlp(dtype=torch.float64, depth=9):
    torch.manual_seed(0)
    return mp.models.FullMLP(6, depth=depth, in_features=5, out_features=3).to(dtype)


def gpt(dtype=torch.float64, depth=9):
    torch.manual_seed(0)
    return mp.models.GPT(vocabulary=11, context=5, dim=8, heads=2, depth=depth - 2, tied=True).to(dtype)


MODELS = {"mlp": mlp, "gpt": gpt}


def batch(kind, samples, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "mlp":
        inputs = torch.randn(samples, 5, generator=generator, dtype=torch.float64).to(dtype)
        return inputs, torch.randint(3, (samples,), generator=generator)
    return tuple(torch.randint(11, (samples, 5), generator=generator) for _ in range(2))


def whole_batch(model, inputs, targets, loss_fn=cross_entropy):
    """The loss and all gradients of one process; a tied parameter's under each of its names."""
    model = copy.deepcopy(model)
    model.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters(remove_duplicate=False)}


def far(found, wanted, relative):
    """Whether two tensors differ by more than rounding, measured on the whole tensor."""
    if found is None:
        return wanted is not None
    if wanted is None:  # what another stage does not use comes back as zeros
        return bool(found.any())
    found, wanted = found.detach().double(), wanted.detach().double()
    # A gradient that is zero but for rounding has no size to compare with.
    return bool((found - wanted).norm() > relative * wanted.norm() + relative * 1e-3)


def wrong_gradients(parameters, gradients, relative=1e-12):
    return [f"gradient of {name}" for name, one in parameters if far(one.grad, gradients[name], relative)]


def layers_of_its_own(*widths):
    """Linear and Tanh layers, as an nn.Sequential."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(one, other), nn.Tanh()) for one, other in pairwise(widths)]
    return nn.Sequential(*layers).double()


# ── all ranks in this process ───────────────────────────────────────────────────────────────────────────────────────


def workers_of(schedule, model, inputs, targets, loss_fn=cross_entropy):
    """Each rank's Worker; all stages are those of this one model."""
    pieces = cut(model, schedule.stages)
    stages = [Stage(index, piece, loss_fn) for index, piece in enumerate(pieces)]
    dry_runs = [DryRun(index, stage.modules) for index, stage in enumerate(stages[:-1])]
    count, samples = schedule.microbatches, len(targets)
    microbatches = []
    parts = zip(split_batch(inputs, count), split_batch(targets, count), sizes(samples, count), strict=True)
    for part, answers, length in parts:
        boundaries = {-1: Boundary.of(part, "inputs")}
        for index, dry_run in enumerate(dry_runs):
            boundaries[index] = dry_run.outputs(boundaries[index - 1], training=True)
        microbatches.append(Microbatch(boundaries, part, answers, length / samples))
    places = range(max(schedule.homes) + 1)
    mine = [{index: stages[index] for index, home in enumerate(schedule.homes) if home == place} for place in places]
    device = torch.device("cpu")
    return [Worker(place, mine[place], schedule.stages - 1, microbatches, device) for place in places]


def step_in_process(schedule, model, inputs, targets, transports, *, in_order=False, ahead=0):
    """One step of a pipeline whose ranks take turns; gradients are left in the model. Returns the loss, and workers."""
    program = schedule.program(schedule.microbatches)
    workers = workers_of(schedule, model, inputs, targets)
    orders = schedule.message_orders(schedule.microbatches, True) if in_order else [None] * program.world_size
    ranks = zip(program.ranks, workers, transports, orders, strict=True)
    take_turns(
        [Interpreter(ops, *rest, ahead=ahead, message_order=order).run() for ops, *rest, order in ranks], program.name
    )
    return sum(worker.loss for worker in workers), workers
