"""The course's pipeline steps: each gives what one process gives, also when they are mixed."""

import copy
import pickle

import torch
from tests.pipeline.oracle import batch, far, wrong_gradients

import microparallel as mp
from microparallel.models import FullMLP, ShardedMLP, cross_entropy

SIZES = {"dim": 6, "depth": 7, "in_features": 5, "out_features": 3}


def every_step(comms):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    full = FullMLP(**SIZES).double()
    torch.manual_seed(0)
    mine = ShardedMLP(**SIZES, rank=comms.rank, world_size=comms.world_size).double()
    first, last = comms.rank == 0, comms.rank == comms.world_size - 1
    steps = [
        lambda *given: mp.course.naive_pipeline_step(mine, comms, *given),
        lambda *given: mp.course.gpipe_pipeline_step(mine, comms, *given, 3),
        lambda *given: mp.course.onef_oneb_pipeline_step(mine, comms, *given, chunks=4),
        lambda *given: mp.course.onef_oneb_pipeline_step(mine, comms, *given, 4, cross_entropy),
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (full, mine)]
    wrong = []
    for number in range(8):
        inputs, targets = batch("mlp", 8, seed=number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = full(inputs, targets)
        loss.backward()
        found = steps[number % 4](inputs if first else None, targets if last else None)
        if far(found, loss, 1e-12):
            wrong.append(f"loss of step {number}")
        gradients = {name: parameter.grad for name, parameter in full.named_parameters()}
        wrong += [f"{what} in step {number}" for what in wrong_gradients(mine.named_parameters(), gradients)]
        for optimizer in optimizers:
            optimizer.step()
    for twin in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        if not all(torch.equal(one, twin.state_dict()[name]) for name, one in mine.state_dict().items()):
            wrong.append("a copy is different")
        inputs, targets = batch("mlp", 8)
        losses = [mp.course.gpipe_pipeline_step(model, comms, inputs, targets, 2) for model in (mine, twin)]
        if not torch.equal(*losses):
            wrong.append("a copy has another loss")
    return wrong


def test_steps_give_what_one_process_gives(pool):
    for ranks in (1, 2, 3):
        assert pool.run(every_step, ranks, transport="shm", timeout=30) == [[]] * ranks
    assert pool.run(every_step, 2, timeout=30) == [[]] * 2


def modes(comms):
    model = ShardedMLP(**SIZES, rank=comms.rank, world_size=comms.world_size).double().eval()
    mp.course.gpipe_pipeline_step(model, comms, *batch("mlp", 4), 2)
    return model.training


def test_a_step_leaves_the_models_mode_alone(pool):
    assert pool.run(modes, 2, transport="shm") == [False] * 2
