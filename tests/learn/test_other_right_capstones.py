"""Capstones that are solved in another way than ours: no grader may refuse them."""

import pytest
from answers import Answer

from microparallel.learn.catalogue import find_exercise

OVERLAPPED = """
import os
from collections import defaultdict

import torch


def train(comms, job):
    parameters = list(job.model.parameters())
    for parameter in parameters:
        comms.broadcast(parameter.data, 0)
    shuffle = torch.Generator().manual_seed(5)
    begun, place, order = 0, job.samples, []
    files = defaultdict(set)
    for path in job.folder.glob("[0-9]*-*.whole"):
        files[int(path.stem.split("-")[0])].add(path)
    whole = [step for step, mine in files.items() if len(mine) == comms.world_size]
    comms.barrier()
    if whole:
        state = torch.load(job.folder / f"{max(whole):05}-{comms.rank}.whole")
        job.model.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])
        shuffle.set_state(state["shuffle"])
        begun, place, order = max(whole), state["place"], state["order"]
    requests, weight = [], [0.0]

    def when_ready(parameter):
        parameter.grad *= weight[0]
        requests.append(comms.all_reduce(parameter.grad, async_op=True))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(when_ready)
    for step in range(begun + 1, job.steps + 1):
        if place >= job.samples:
            place, order = 0, torch.randperm(job.samples, generator=shuffle).tolist()
        batch = order[place : place + job.batch]
        place += job.batch
        mine = torch.tensor(batch).tensor_split(comms.world_size)[comms.rank].tolist()
        weight[0] = len(mine) / len(batch)
        inputs, targets = job.data(mine)
        job.optimizer.zero_grad()
        requests.clear()
        loss = job.loss(job.model(inputs), targets)
        loss.backward()
        total = comms.all_reduce((loss.detach() * weight[0]).reshape(1))
        for request in requests:
            request.wait()
        job.optimizer.step()
        if step % job.save_every == 0:
            state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
            state |= {"shuffle": shuffle.get_state(), "place": place, "order": order}
            aside = job.folder / f"aside-{comms.rank}"
            with open(aside, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file)
            os.rename(aside, job.folder / f"{step:05}-{comms.rank}.whole")
            comms.barrier()
            for old in sorted(job.folder.glob(f"*-{comms.rank}.whole"))[:-2]:
                old.unlink()
        job.report(step, total.item())
"""
GATHERED = """
import os
import random

import torch


def train(comms, job):
    names = [job.folder / "even.pt", job.folder / "odd.pt"]
    found = []
    for name in names:
        try:
            found.append(torch.load(name))
        except Exception:
            pass
    comms.barrier()
    for parameter in job.model.parameters():
        comms.broadcast(parameter.data, 0)
    done = 0
    if found:
        newest = max(found, key=lambda one: one["done"])
        job.model.load_state_dict(newest["model"])
        job.optimizer.load_state_dict(newest["optimizer"])
        done = newest["done"]
    steps = -(-job.samples // job.batch)
    while done < job.steps:
        order = list(range(job.samples))
        random.Random(f"epoch {done // steps}").shuffle(order)
        batch = order[done % steps * job.batch :][: job.batch]
        mine = batch[comms.rank :: comms.world_size]
        inputs, targets = job.data(mine)
        job.model.zero_grad()
        sum_of_losses = 0
        for one, wanted in zip(inputs.split(1), targets.split(1)):  # one sample after another
            loss = job.loss(job.model(one), wanted) / len(batch)
            loss.backward()
            sum_of_losses += loss.item()
        first = torch.tensor([sum_of_losses], dtype=torch.float64)
        row = torch.cat([first, *(parameter.grad.flatten() for parameter in job.model.parameters())])
        total = torch.stack(comms.all_gather(row)).sum(0)
        at = 1
        for parameter in job.model.parameters():
            parameter.grad = total[at : at + parameter.numel()].reshape(parameter.shape).clone()
            at += parameter.numel()
        job.optimizer.step()
        done += 1
        job.report(done, total[0])
        if done % job.save_every == 0:
            if comms.rank == comms.world_size - 1:  # two files in turn: the other one stays whole
                state = {"done": done, "model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
                torch.save(state, names[done // job.save_every % 2])
                os.sync()
            comms.barrier()
"""
COMPUTED_AGAIN = '''
import torch
from torch import nn

import microparallel as mp


class Stage(nn.Module):
    def __init__(self, model, rank, ranks):
        super().__init__()
        layers = list(model.pipeline_layers())
        each = -(-len(layers) // ranks)
        first = max(0, min(rank * each, len(layers) - (ranks - rank)))
        self.layers = nn.ModuleList(layers[first : min(first + each, len(layers) - (ranks - 1 - rank))])
        self.dim = model.layers[0].token.embedding_dim

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def cut(model, rank, ranks):
    return Stage(model, rank, ranks)


def train_step(stage, comms, inputs, targets, microbatches):
    """GPipe's order; only what comes in is kept, and each forward is done once more before its backward."""
    rank, ranks = comms.rank, comms.world_size
    tokens, wanted = inputs.tensor_split(microbatches), targets.tensor_split(microbatches)
    kept, open_sends, total = [], [], 0.0
    for m in range(microbatches):
        came = tokens[m] if rank == 0 else comms.recv_tensor([*tokens[m].shape, stage.dim], rank - 1, torch.float64)
        kept.append(came)
        if rank < ranks - 1:
            with torch.no_grad():
                open_sends.append(comms.isend(stage(came), rank + 1))
    for m in reversed(range(microbatches)):
        came = kept.pop()
        if rank > 0:
            came.requires_grad_()
        outputs = stage(came)
        if rank == ranks - 1:
            loss = nn.functional.cross_entropy(outputs.flatten(0, 1), wanted[m].flatten())
            loss = loss * tokens[m].shape[0] / inputs.shape[0]
            total += loss.item()
            loss.backward()
        else:
            outputs.backward(comms.recv_tensor(outputs.shape, rank + 1, torch.float64))
        if rank > 0:
            open_sends.append(comms.isend(came.grad, rank - 1))
        del outputs, came
    for request in open_sends:
        request.wait()
    if ranks > 1 and rank == ranks - 1:
        weight = stage.layers[-1].linear.weight
        comms.send_tensor(weight.grad, 0)
        weight.grad = comms.recv_tensor(weight.shape, 0, torch.float64)
    elif ranks > 1 and rank == 0:
        weight = stage.layers[0].token.weight
        weight.grad += comms.recv_tensor(weight.shape, ranks - 1, torch.float64)
        comms.send_tensor(weight.grad, ranks - 1)
    return total if rank == ranks - 1 else None
'''
HALVES = '''
def schedule(ranks, microbatches, costs, most):
    """1F1B with its backward cut in two: the gradient goes on before the weight half; as a text."""
    lines = ["program halves", f"goal: training step of {ranks} stages, {microbatches} micro-batches"]
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        words = [f"F{rank}.{m}" for m in range(ahead)]
        for m in range(microbatches):
            words += [f"F{rank}.{ahead + m}"] * (ahead + m < microbatches) + [f"I{rank}.{m}", f"W{rank}.{m}"]
        lines.append(f"rank {rank}: {' '.join(words)}")
    return "\\n".join(lines) + "\\n"
'''
MOVES = '''
import random

import microparallel as mp
from microparallel.program import BackwardInput, BackwardWeight, Forward, Program, TrainingStep, peak_activations


def schedule(ranks, microbatches, costs, most):
    """Begin with 1F1B in halves, and move operations of one rank about for as long as there is time."""
    dice = random.Random(1)
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        row = [Forward(rank, m) for m in range(ahead)]
        for m in range(microbatches):
            row += [Forward(rank, ahead + m)] * (ahead + m < microbatches)
            row += [BackwardInput(rank, m), BackwardWeight(rank, m)]
        rows.append(row)

    def program(rows):
        return Program("moved", TrainingStep(ranks, microbatches), tuple(map(tuple, rows)))

    best = mp.simulate(program(rows), costs).makespan
    for _ in range(150):
        rank = dice.randrange(ranks)
        tried = list(rows[rank])
        tried.insert(dice.randrange(len(tried)), tried.pop(dice.randrange(len(tried))))
        if peak_activations(tried) > most[rank]:
            continue
        new = program([*rows[:rank], tried, *rows[rank + 1 :]])
        try:
            mp.verify(new)
        except mp.errors.ProgramError:
            continue
        if mp.simulate(new, costs).makespan <= best:
            best, rows[rank] = mp.simulate(new, costs).makespan, tried
    return program(rows)
'''

CUT = "    return nn.Sequential(*(layers[number] for number in mine.tolist()))\n"
ONE_OPEN = "        self._open: mp.Request | None = None\n"
SEND = "        self.wait()\n        self._open = self._comms.isend(tensor, self._rank)\n"
WAIT = "        if self._open is not None:\n            self._open.wait()\n            self._open = None\n"
COPIED = {
    "from collections import deque\n": "import copy\nfrom collections import deque\n",
    CUT: "    return copy.deepcopy(nn.Sequential(*layers[mine[0] : mine[-1] + 1]))\n",
    ONE_OPEN: "        self._open = []\n",
    SEND: "        self._open.append(self._comms.isend(tensor, self._rank))\n",
    WAIT: "        while self._open:\n            self._open.pop(0).wait()\n",
    "self._comms.recv(shape, self._rank, torch.float64)": "self._comms.irecv(shape, self._rank, torch.float64).wait()",
}

RIGHT = {
    "trainer": {
        "gradients travel during backward, and every rank has a file of its own": OVERLAPPED,
        "rows are gathered and added in order, and two files are written in turn": GATHERED,
    },
    "gpt-pipeline": {
        "GPipe's order with forwards that are done again": COMPUTED_AGAIN,
        "copies of the layers, and sends that are waited for at the end": COPIED,
    },
    "beat-1f1b": {
        "1F1B in halves, as a text": HALVES,
        "operations are moved about at random": MOVES,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in RIGHT.items() for form in forms])
def test_another_form_passes(judge, name, form):
    exercise, right = find_exercise(name), RIGHT[name][form]
    verdict = judge(exercise, right if isinstance(right, str) else Answer(form, right, "").of(exercise))
    assert verdict.passed, verdict.message
