"""`mp.Checkpointer`: whatever happens to a script's ranks, its weights are those of a run that was left alone."""

import os
import random
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tests.pairwise import every
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import microparallel as mp
from microparallel.errors import RankFailed
from microparallel.files.lock import FolderLock
from microparallel.train import checkpoint
from microparallel.train.checkpoint_folder import is_finite

SAMPLES, BATCH, STEPS = 50, 12, 10
INPUTS = torch.arange(SAMPLES * 8.0).reshape(SAMPLES, 8).sin()


class Backwards(nn.Module):
    """Uses its layers in another order than it registers them."""

    def __init__(self, dropout):
        super().__init__()
        self.last = nn.Linear(24, 3)
        self.middle = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Dropout(dropout))
        self.first = nn.Linear(8, 24)

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.first(x))))


def layers(dropout):
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 24), nn.Linear(24, 3))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def built(kind, comms, dropout):
    """The model as a script wraps it, its optimizer, and what does forward and backward of some samples."""
    torch.manual_seed(5)
    name, *options = kind.split()
    in_layers = name in ("pipeline", "replicas") or "layers" in options
    plain = (layers if in_layers else Backwards)(dropout).double()
    if name in ("pipeline", "replicas"):
        replicas = 2 if name == "replicas" else 1
        pipe = mp.Pipeline(plain, comms, microbatches=3, loss_fn=lambda x, _: x.pow(2).mean(), replicas=replicas)
        return pipe, adamw(pipe)
    if name == "whole":
        return plain, adamw(plain)
    if name == "fsdp":
        model = mp.FullyShardedDataParallel(plain, comms)
        return model, adamw(model)
    if name == "topk":
        model = mp.DataParallel(plain, comms, compress=mp.compression.TopK(0.1, smallest=0))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "zero":
        model = mp.DataParallel(plain, comms, shard=options[0])
        return model, mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms, lr=0.01)
    model = mp.DataParallel(plain, comms, bucket_cap_mb=0.002)  # several buckets
    if name == "sgd":  # which does not hide the last bits of gradients
        return model, torch.optim.SGD(model.parameters(), lr=0.3)
    return model, adamw(model)


def backward(model, comms, indices, whole):
    if isinstance(model, mp.Pipeline):
        mine = mp.ShardedSampler(len(whole), len(whole), rank=model.replica, world_size=model.mesh.dp, shuffle=False)
        mine = [whole[index] for index in next(iter(mine))]
        model.step(INPUTS[mine].double(), INPUTS[mine].double(), samples=len(whole), allow_fewer=True)
        return
    inputs = INPUTS[indices].double()
    if isinstance(model, mp.DataParallel):
        with model.weighted(len(indices), len(whole)):
            model(inputs).pow(2).mean().backward()
    else:
        (model(inputs).pow(2).sum() / (3 * len(whole))).backward()


def weights(model):
    if isinstance(model, mp.Pipeline):
        return model.whole_state_dict()
    return model.full_state_dict() if isinstance(model, mp.FullyShardedDataParallel) else model.state_dict()


def trains(comms, folder, kind, kills=(), steps=STEPS, dropout=0.3, every=1):
    """A script with a loop of its own. `kills` are ranks and the steps in which they are killed, once each."""
    model, optimizer = built(kind, comms, dropout)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
    sampler = mp.ShardedSampler(SAMPLES, BATCH, comms=comms)
    everyones = mp.ShardedSampler(SAMPLES, BATCH)
    torch.manual_seed(100 + comms.rank)
    begun = []
    things = {"sampler": sampler, "everyones": everyones, "scheduler": scheduler}
    with mp.Checkpointer(folder, comms, model, optimizer, **things) as checkpointer:
        step = checkpointer.restore()
        begun.append(step)
        while step < steps:
            for indices, whole in zip(sampler, everyones, strict=True):
                optimizer.zero_grad()
                backward(model, comms, indices, whole)
                for rank, number in kills:
                    marker = Path(f"{folder}-{number}")
                    if comms.rank == rank and step == number and not marker.exists():
                        marker.touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                scheduler.step()
                step += 1
                if step % every == 0:
                    checkpointer.save(step)
                if step == steps:
                    break
    return weights(model), begun[0], torch.rand(1).item()


def run(pool, ranks, folder, kind, *arguments, restarts=0, **named):
    launch = {"restarts": restarts, "on_restart": lambda *_: None, "device": "cpu", "timeout": 50}
    return pool.run(trains, ranks, folder, kind, *arguments, **launch, **named)


def assert_same(one, other, **close):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, **{"atol": 0, **close})


KINDS = ["ddp", "zero optimizer", "zero gradients", "fsdp", "pipeline", "topk"]


@pytest.mark.parametrize("kind", every(2, KINDS))
def test_killed_ranks_are_started_again_and_nothing_is_lost(warm_ranks, tmp_path, kind):
    """From the copy in memory: the step that failed is the only one that is done again."""
    rank, step = random.Random(kind).randrange(2), random.Random(kind + "!").randrange(1, STEPS)
    whole = run(warm_ranks, 2, tmp_path / "whole", kind)
    again = run(warm_ranks, 2, tmp_path / "killed", kind, [(rank, step)], restarts=1)
    assert [begun for _, begun, _ in again] == [step, step]
    assert [number for _, _, number in again] == [number for _, _, number in whole]
    assert_same(again[0][0], whole[0][0])
    (tmp_path / "killed" / "lock").touch()  # removed when it was released
    checkpoint.load(tmp_path / "killed" / f"step-{STEPS:08d}")


@pytest.mark.parametrize(("kind", "transport"), [("sgd", "shm"), ("sgd", "gloo"), ("replicas", "gloo")])
def test_more_ranks_go_on_bit_for_bit_from_the_disk(warm_ranks, tmp_path, kind, transport):
    """Three ranks and more add up in another order if their gradients lie in other places of a bucket."""
    ranks = 4 if kind == "replicas" else 3
    whole = run(warm_ranks, ranks, tmp_path / "whole", kind, transport=transport)
    run(warm_ranks, ranks, tmp_path / "parts", kind, steps=3, transport=transport)
    again = run(warm_ranks, ranks, tmp_path / "parts", kind, transport=transport)
    assert {begun for _, begun, _ in again} == {3}
    assert_same(again[0][0], whole[0][0])


@pytest.mark.parametrize(
    ("first", "then"),
    every(
        2,
        [
            (("ddp", 3), ("zero gradients", 2)),
            (("ddp", 2), ("ddp", 3)),
            (("fsdp", 2), ("pipeline", 2)),
            (("zero optimizer", 2), ("whole", 1)),
            (("replicas", 4), ("fsdp", 3)),
        ],
    ),
)
def test_any_number_of_ranks_and_any_layout_goes_on(pool, tmp_path, first, then):
    of_layers = " layers" if {"pipeline", "replicas"} & {first[0], then[0]} else ""
    [reference] = run(pool, 1, tmp_path / "one", f"whole{of_layers}", dropout=0)
    for steps, (kind, ranks) in ((4, first), (STEPS, then)):
        results = run(pool, ranks, tmp_path / "run", kind + of_layers, steps=steps, dropout=0)
    assert results[0][1] == 4
    assert_same(results[0][0], reference[0], atol=1e-12)


# ── what is wrong ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def one_rank(pool):
    """Run a function on one rank; returns what it returned, and the warnings that it gave."""

    def call(function, *arguments, ranks=1, **options):
        return pool.run(with_warnings, ranks, function, *arguments, device="cpu", timeout=50, **options)[0]

    return call


def with_warnings(comms, function, *arguments, **options):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = function(comms, *arguments, **options)
    return result, [str(one.message) for one in told if one.category is RuntimeWarning]


def small(comms, folder, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, mp.Checkpointer(folder, comms, model, optimizer, **options)


def saves(comms, folder, values, **options):
    """Save a step for each value, which all weights have then."""
    model, checkpointer = small(comms, folder, **options)
    with checkpointer, torch.no_grad():
        for step, value in enumerate(values, start=checkpointer.restore() + 1):
            model.weight.fill_(value)
            checkpointer.save(step, wait=True)


def restores(comms, folder):
    model, checkpointer = small(comms, folder)
    with checkpointer:
        return checkpointer.restore(), model.weight[0, 0].item()


def saved(folder):
    return sorted(path.name for path in folder.glob("step-*"))


def test_a_damaged_checkpoint_is_skipped(one_rank, tmp_path):
    one_rank(saves, tmp_path, [1.0, 2.0, 3.0])
    part = tmp_path / "step-00000003" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    restored, told = one_rank(restores, tmp_path)
    assert restored == (2, 2.0)
    [warning] = told
    assert warning.endswith("its sha256 differs); going on from step-00000002 instead")
    for name in ("step-00000001", "step-00000002"):
        (tmp_path / name / "manifest.json").unlink()
    with pytest.raises(RankFailed, match=rf"no checkpoint in {tmp_path} can be used; remove them to begin anew"):
        one_rank(restores, tmp_path)


def test_weights_that_are_not_finite_neither_count_nor_are_gone_on_from(one_rank, tmp_path):
    nan = float("nan")
    _, told = one_rank(saves, tmp_path, [1.0, 2.0, nan, nan, nan], keep=2)
    assert saved(tmp_path) == ["step-00000001", "step-00000002", "step-00000005"]
    assert len(told) == 1 and told[0].startswith("after step 3 weights are not finite (weight on rank 0)")
    restored, [warning] = one_rank(restores, tmp_path)
    assert restored == (2, 2.0) and "step-00000005 has weights that are not finite; going on from" in warning


def test_which_checkpoints_are_left(one_rank, tmp_path):
    one_rank(saves, tmp_path, [1.0] * 9, keep=2, keep_every=3)
    assert saved(tmp_path) == [f"step-0000000{step}" for step in (3, 6, 8, 9)]


def cannot_write(comms, folder, mended):
    """The folder is a file from the first save on, until it is mended."""
    _, checkpointer = small(comms, folder)
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.touch()
    checkpointer.save(1, wait=True)
    checkpointer.save(2, wait=True)
    if mended:
        folder.unlink()
        aside.rename(folder)
    checkpointer.close()


def test_a_save_that_fails_is_a_warning_and_the_last_must_work(one_rank, tmp_path):
    _, told = one_rank(cannot_write, tmp_path / "mended", True)
    assert len(told) == 1 and told[0].endswith("training goes on, and the next save is another try")
    assert saved(tmp_path / "mended") == ["step-00000002"]
    with pytest.raises(RankFailed, match=r"CheckpointError: cannot write the checkpoint .*broken/step-00000002"):
        one_rank(cannot_write, tmp_path / "broken", False)


class Strange:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def makes_one(comms, folder, others, parameters=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)
    with mp.Checkpointer(folder, comms, model, optimizer, **others):
        pass


def test_what_cannot_be_stored_is_refused_by_name_at_once(one_rank, tmp_path):
    with pytest.raises(RankFailed, match=r"things\.a is a set, which a checkpoint cannot hold"):
        one_rank(makes_one, tmp_path, {"things": Strange({"a": {1, 2}})}, ranks=2)
    with pytest.raises(RankFailed, match=r"things=7: a int has no state_dict\(\) and load_state_dict\(\)"):
        one_rank(makes_one, tmp_path, {"things": 7})
    elsewhere = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(RankFailed, match=r"updates a parameter of shape \[3\] that is none of the model's"):
        one_rank(makes_one, tmp_path, {}, elsewhere)
    assert saved(tmp_path) == []


def differs(comms, folder):
    model = nn.Linear(4, 2)
    torch.nn.init.constant_(model.weight, comms.rank)
    with mp.Checkpointer(folder, comms, model):
        pass


def test_a_plain_model_that_is_not_the_same_on_all_ranks_is_refused(one_rank, tmp_path):
    with pytest.raises(RankFailed, match=r"the weights of ranks 0, 1 \(no majority\) in .*weight.* are not those of"):
        one_rank(differs, tmp_path, ranks=2)


def fits(comms, folder, change):
    model = nn.Sequential(nn.Linear(4, 8 if change == "shape" else 2))
    if change == "layers":
        model.append(nn.Linear(2, 2))
    parameters = [*model.parameters()]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}] if change == "groups" else parameters
    kind = torch.optim.Adam if change == "optimizer" else torch.optim.SGD
    with mp.Checkpointer(folder, comms, model, kind(groups, lr=0.1)) as checkpointer:
        checkpointer.restore()
        if not change:
            checkpointer.save(1)


def test_what_does_not_fit_is_refused_in_one_line(one_rank, tmp_path):
    one_rank(fits, tmp_path, None)
    words = {
        "shape": r"does not fit the model: 0.weight is of shape \[2, 4\] there, and \[8, 4\] here",
        "layers": "does not fit the model: it has no 1.bias, 1.weight",
        "groups": "does not fit the optimizer: group 0 had 2 parameters, and has 1 now; the difference is 0.bias",
        "optimizer": "has the state of SGD, and this is Adam",
    }
    for change, text in words.items():
        with pytest.raises(RankFailed, match=rf"^rank 0 raised CheckpointError: step 1 in {tmp_path} .*{text}\n*$"):
            one_rank(fits, tmp_path, change)


def reordered(comms, folder, backwards):
    """Adam's state, by the names of the parameters; they are given to it in one order or the other."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    parameters = [*model.parameters()][:: -1 if backwards else 1]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    with mp.Checkpointer(folder, comms, model, optimizer) as checkpointer:
        step = checkpointer.restore()
        if not step:
            model(torch.ones(3, 4)).pow(2).sum().backward()
            optimizer.step()
            checkpointer.save(1)
    return step, {name: optimizer.state[one]["exp_avg"] for name, one in model.named_parameters()}


def test_an_optimizers_state_goes_by_names_in_whatever_order(one_rank, tmp_path):
    (_, before), _ = one_rank(reordered, tmp_path, False)
    (step, after), _ = one_rank(reordered, tmp_path, True)
    assert step == 1
    assert_same(after, before)


def test_a_folder_in_use_names_its_holder(one_rank, tmp_path):
    lock = FolderLock(tmp_path / "lock", "it")
    with pytest.raises(RankFailed, match=rf"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()} "):
        one_rank(restores, tmp_path)
    lock.release()
    assert one_rank(restores, tmp_path)[0][0] == 0
    (tmp_path / "file").touch()
    with pytest.raises(RankFailed, match=r"file/x cannot be used: Not a directory; choose a folder that"):
        one_rank(restores, tmp_path / "file" / "x")


# ── what is held, and when ──────────────────────────────────────────────────────────────────────────────────────────


def does_not_wait(comms, folder):
    """The writer is stopped: saves go on, and the last one is written when it is let go."""
    model, checkpointer = small(comms, folder)
    with checkpointer, torch.no_grad():
        checkpointer.save(0, wait=True)
        writer = checkpointer._copies.writer.pid
        os.kill(writer, signal.SIGSTOP)
        for step in range(1, 6):
            model.weight.fill_(step)
            checkpointer.save(step)
        names = saved(folder)
        os.kill(writer, signal.SIGCONT)
    return names


def test_saves_do_not_wait_for_the_disk_and_the_last_is_written(one_rank, tmp_path):
    assert one_rank(does_not_wait, tmp_path)[0] == ["step-00000000"]
    assert saved(tmp_path)[-1] == "step-00000005"
    assert one_rank(restores, tmp_path)[0] == (5, 5.0)


def leaves_without_closing(comms, folder, step):
    _, checkpointer = small(comms, folder)
    checkpointer.restore()
    checkpointer.save(step)
    if step == 2:
        raise ValueError("at step 2")


def test_what_was_saved_is_written_whoever_forgets_to_close(one_rank, tmp_path):
    one_rank(leaves_without_closing, tmp_path, 1)
    with pytest.raises(RankFailed, match="at step 2"):
        one_rank(leaves_without_closing, tmp_path, 2)
    assert saved(tmp_path) == ["step-00000001", "step-00000002"]


def dies_after(comms, folder, steps):
    model, checkpointer = small(comms, folder)
    checkpointer.save(0, wait=True)
    os.kill(checkpointer._copies.writer.pid, signal.SIGSTOP)
    for step in range(1, steps + 1):
        torch.nn.init.constant_(model.weight, step)
        checkpointer.save(step)
    os.kill(os.getpid(), signal.SIGKILL)


def test_without_a_restart_left_the_launcher_saves_what_is_in_memory(pool, one_rank, tmp_path, capfd):
    with pytest.raises(RankFailed, match="rank 0 was killed by SIGKILL"):
        pool.run(dies_after, 1, tmp_path, 3, device="cpu", timeout=50)
    assert "step 3, which was in memory, is saved; go on with: the same script" in capfd.readouterr().err
    assert one_rank(restores, tmp_path)[0] == (3, 3.0)


def without_room(comms, folder):
    checkpoint.available_memory, before = lambda: 0, checkpoint.available_memory
    try:
        saves(comms, folder, [1.0, 2.0])
    finally:
        checkpoint.available_memory = before


def test_without_memory_for_copies_saves_hold_up_the_loop(one_rank, tmp_path):
    _, told = one_rank(without_room, tmp_path)
    assert len(told) == 1 and told[0].endswith("saves hold up the loop from now on until they are on the disk")
    assert one_rank(restores, tmp_path)[0] == (2, 2.0)


def in_two_parts(comms, folder, dies):
    """One Checkpointer after another; ranks that are started again have the second one only."""
    if not (folder / "one" / "step-00000007").exists():
        model, checkpointer = small(comms, folder / "one")
        torch.nn.init.constant_(model.weight, 1.0)
        checkpointer.save(7, wait=True)
        checkpointer.close()
        model, checkpointer = small(comms, folder / "two")
        os.kill(os.getpid(), signal.SIGKILL)
    return restores(comms, folder / "two")[0]


def test_what_is_in_memory_belongs_to_its_folder(warm_ranks, tmp_path):
    options = {"restarts": 1, "on_restart": lambda *_: None, "device": "cpu", "timeout": 50}
    assert warm_ranks.run(in_two_parts, 1, tmp_path, True, **options) == [0]


# ── what ranks have each for itself ─────────────────────────────────────────────────────────────────────────────────


def keeps(comms, folder, save):
    """What comes back of things that are the same on all ranks, or not; and of random numbers."""
    torch.manual_seed(comms.rank)
    random.seed(4)
    same, own = Strange({"t": torch.tensor([1, 2])}), Strange([torch.tensor(comms.rank), comms.rank, (None, 1.5)])
    if not save:
        same.state, own.state = None, "as built"
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(comms.rank if save else 7)
    names = {"same": same, "own": own} if save is not None else {"other": own}
    with mp.Checkpointer(folder, comms, model, **names) as checkpointer:
        checkpointer.restore()
        if save:
            checkpointer.save(1)
        drawn = torch.rand(1).item(), random.random()
    return same.state, own.state, drawn, model.running_mean[0].item()


def told_by_all(comms, *arguments):
    return with_warnings(comms, keeps, *arguments)


def test_what_ranks_have_each_for_itself(pool, tmp_path):
    before = pool.run(told_by_all, 2, tmp_path, True, device="cpu", timeout=50)
    after = pool.run(told_by_all, 2, tmp_path, False, device="cpu", timeout=50)
    for rank, ((one, warned), (other, _)) in enumerate(zip(after, before, strict=True)):
        assert warned == [] and torch.equal(one[0]["t"], torch.tensor([1, 2]))
        assert one[1] == [torch.tensor(rank), rank, (None, 1.5)]
        assert one[2] == other[2] and one[3] == rank
    stored = checkpoint.load(tmp_path / "step-00000001").stored_by_rank["others"]
    assert {name: sorted(one) for name, one in stored.items() if " " not in name} == {
        "same": ["all"],
        "own": ["rank_0", "rank_1"],
    }


def test_with_other_ranks_what_was_one_ranks_own_is_left_and_named(pool, tmp_path):
    before = pool.run(told_by_all, 2, tmp_path, True, device="cpu", timeout=50)
    after = pool.run(told_by_all, 3, tmp_path, False, device="cpu", timeout=50)
    drawn = [one[2] for one, _ in after]
    assert drawn[:2] == [one[2] for one, _ in before] and len({one for one, _ in drawn}) == 3
    assert len({python for _, python in drawn}) == 1  # the same on all ranks then, and on all ranks now
    assert [one[1] for one, _ in after] == ["as built"] * 3
    own, buffers = after[0][1]
    assert own == "own was not the same on all of 2 ranks, and there are 3 now: it stays as it was built"
    assert buffers.startswith("the model's buffers was not the same")
    _, told = pool.run(told_by_all, 1, tmp_path, None, device="cpu", timeout=50)[0]
    assert sorted(line.partition(",")[0].partition(" is ")[0] for line in told)[:3] == ["other", "own", "same"]


def residuals(comms, folder, steps):
    """What all ranks together have not sent, before the first step and after the last."""
    model, optimizer = built("topk", comms, 0.0)
    sampler, everyones = mp.ShardedSampler(SAMPLES, BATCH, comms=comms), mp.ShardedSampler(SAMPLES, BATCH)

    def total():
        return {name: comms.all_reduce(one) for name, one in model.compression_state()["residuals"].items()}

    with mp.Checkpointer(folder, comms, model, optimizer, sampler=sampler, everyones=everyones) as checkpointer:
        step, before = checkpointer.restore(), total()
        for indices, whole in zip(sampler, everyones, strict=True):
            if step == steps:
                break
            optimizer.zero_grad()
            backward(model, comms, indices, whole)
            optimizer.step()
            step += 1
        checkpointer.save(step)
        return before, total()


def test_what_lost_ranks_have_not_sent_goes_to_others(pool, tmp_path):
    _, kept = pool.run(residuals, 3, tmp_path, 2, device="cpu", timeout=50)[0]
    assert all(one.any() for one in kept.values())
    found, later = pool.run(residuals, 2, tmp_path, 4, device="cpu", timeout=50)[0]
    assert_same(found, kept, atol=1e-15)
    assert_same(pool.run(residuals, 3, tmp_path, 4, device="cpu", timeout=50)[0][0], later, atol=1e-15)


def in_float16(comms, folder, overflows):
    torch.manual_seed(0)
    model = mp.DataParallel(nn.Linear(4, 1), comms, precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mp.Checkpointer(folder, comms, model, optimizer) as checkpointer:
        begun = checkpointer.restore()
        before = model.loss_scale.state_dict()
        for step in range(begun, begun + 3):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).mean() * (float("inf") if overflows and step == 1 else 1.0)).backward()
            optimizer.step()
        checkpointer.save(begun + 3)
    return before, model.loss_scale.state_dict()


def test_the_scale_of_the_loss(pool, tmp_path):
    _, scale = pool.run(in_float16, 2, tmp_path, True, device="cpu", timeout=50)[0]
    assert scale["value"] < 2.0**16 and scale["skipped"] > 0
    assert pool.run(in_float16, 2, tmp_path, False, device="cpu", timeout=50)[0][0] == scale


def spoils_a_part(comms, folder):
    model = mp.FullyShardedDataParallel(nn.Linear(4, 4), comms)
    with mp.Checkpointer(folder, comms, model) as checkpointer:
        if comms.rank == 1:
            for part in model.parameters():  # of the weight it has nothing
                part.data.fill_(float("nan"))
        checkpointer.save(1)


def test_a_part_of_the_weights_that_is_not_finite(one_rank, tmp_path):
    _, [told] = one_rank(spoils_a_part, tmp_path, ranks=2)
    assert "after step 1 weights are not finite (bias on rank 1)" in told
    assert not is_finite(tmp_path / "step-00000001")


# ── data ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def loads(comms, folder, steps, workers, own_generator=True):
    """A DataLoader draws a seed for its workers whenever an epoch begins, or goes on: from a generator of its own."""
    torch.manual_seed(1)
    model = mp.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1)), comms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = mp.ShardedSampler(SAMPLES, BATCH, comms=comms, drop_last=True)
    generator = torch.Generator() if own_generator else None
    loader = DataLoader(TensorDataset(INPUTS), batch_sampler=sampler, num_workers=workers, generator=generator)
    with mp.Checkpointer(folder, comms, model, optimizer) as checkpointer:
        step = checkpointer.restore()
        epoch, batch = divmod(step, len(sampler))  # workers ask the sampler ahead of time, so it does not know
        while step < steps:
            sampler.load_state_dict({"epoch": epoch, "batch": batch})
            for [inputs] in loader:
                optimizer.zero_grad()
                model(inputs).pow(2).mean().backward()
                optimizer.step()
                step += 1
                if step == steps:
                    break
            epoch, batch = epoch + 1, 0
        checkpointer.save(step)
    return {name: one.clone() for name, one in model.state_dict().items()}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_data_loader_with_a_generator_of_its_own_goes_on_exactly(pool, tmp_path, workers):
    whole = pool.run(loads, 2, tmp_path / "whole", 9, workers, device="cpu", timeout=50)[0]
    for steps in (5, 9):
        parts = pool.run(loads, 2, tmp_path / "parts", steps, workers, device="cpu", timeout=50)[0]
    assert_same(parts, whole)
    for steps in (5, 9):  # and without one it does not: what the documentation says of it is true
        drawn = pool.run(loads, 2, tmp_path / "drawn", steps, workers, False, device="cpu", timeout=50)[0]
    assert any(not torch.equal(drawn[name], whole[name]) for name in whole)


# ── torchrun ────────────────────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import sys
import torch
import microparallel as mp
from tests.train.test_checkpointer import trains

with mp.connect(device="cpu") as comms:
    weights, begun, _ = trains(comms, "run", "ddp", [(1, 3), (0, 7)])
    if comms.rank == 0:
        torch.save(weights, "weights.pt")
"""


@pytest.mark.slow
def test_torchrun_starts_it_again_and_it_goes_on(warm_ranks, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [*agent, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=55, check=False
    )
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in tmp_path.glob("run-*")) == ["run-3", "run-7"]
    assert_same(torch.load(tmp_path / "weights.pt"), run(warm_ranks, 2, tmp_path / "whole", "ddp")[0][0])
