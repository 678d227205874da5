"""Checkpoints of several ranks: each writes its part, and any layout reads what any other has written, bit for bit."""

import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pairwise import pairwise
from torch import nn

import microparallel as mp
from microparallel.data_parallel.layout import Part
from microparallel.errors import CheckpointError, RankFailed
from microparallel.files import tensor_file
from microparallel.files.tensor_file import TensorFile, checksum
from microparallel.train import checkpoint
from microparallel.train.build import build
from microparallel.train.checkpoint_folder import manifest
from microparallel.train.checkpoint_reader import StateReader, StoredTensor
from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank

FIXTURES = Path(__file__).parent / "format_1"


def same_bits(one, other):
    """Whether two nested values hold the same, to the bit; keys may be in any order."""
    if isinstance(one, torch.Tensor):
        raw = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)] if one.numel() else [one] * 2
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*raw)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same_bits, one, other))
    return repr(one) == repr(other)


def parts(path):
    return sorted(file.name for file in path.glob("part-*"))


# ── any layout reads any other's ────────────────────────────────────────────────────────────────────────────────────


LAYOUTS = {
    "one process": {"ranks": 1},
    "dp 2": {"ranks": 2},
    "dp 3": {"ranks": 3},
    "pp 2": {"pp": 2},
    "pp 2, stages 0 and 2 together": {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2},
    "dp 2, pp 2": {"dp": 2, "pp": 2},
    "zero 3": {"ranks": 3},
    "zero 2": {"ranks": 2},
    "parameters 1": {"ranks": 1, "shard": "parameters", "strategy": "ddp"},
    "parameters 2": {"ranks": 2, "shard": "parameters"},
    "parameters 3": {"ranks": 3, "shard": "parameters"},
    "parameters 2, twice": {"ranks": 4, "shard": "parameters", "replicas": 2},
}
SUBJECTS = {
    "batch norm, momentum": {"model": f"{__name__}:with_batch_norm", "optimizer": "sgd", "momentum": 0.9},
    "tied, adamw": {"model": f"{__name__}:tied", "data": "text", "context": 8, "batch": 8, "optimizer": "adamw"},
}


def with_batch_norm():
    layers = [nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 9), nn.Linear(9, 10)]
    return nn.Sequential(*layers)


def tied():
    return mp.models.GPT(context=8, dim=8, heads=2, depth=2, tied=True)


def of_layout(comms, name, subject):
    """The training of a layout on the first of these ranks, and None on the others."""
    settings = {"data": "digits", "loss": "cross-entropy", "batch": 60, "steps": 9} | SUBJECTS[subject] | LAYOUTS[name]
    config = TrainConfig(**settings).resolved()
    group = comms.group(range(config.ranks))
    if group is None:
        return None
    training = build(config, group)
    if name.startswith("zero"):
        training.optimizer = training.held.optimizer = ShardedDouble(training.optimizer, group)
    return training


def written_by_one_read_by_others(comms, folder, first, others, subject):
    if training := of_layout(comms, first, subject):
        for _ in range(2):
            training.step()
        training.save(folder / "written", keep=3)
        training.close()
    for second in others:
        comms.barrier()
        if training := of_layout(comms, second, subject):
            found, warnings = checkpoint.latest(folder / "written", training.comms)
            assert not warnings
            training.load(found)
            training.save(folder / second, keep=3)
            training.close()


def readers():
    """Every layout reads every other's, with both subjects; in the quick run each reads a third of them, with one."""
    places = {name: number for number, name in enumerate(LAYOUTS)}
    rows = pairwise(SUBJECTS, LAYOUTS, LAYOUTS)
    for subject, first in itertools.product(SUBJECTS, LAYOUTS):
        some = [
            second
            for one, other, second in rows
            if (one, other) == (subject, first) and (places[first] + places[second]) % 5 == 0
        ]
        if some:
            yield pytest.param(subject, first, some, id=f"{subject}-{first}-pairs")
        yield pytest.param(subject, first, [*LAYOUTS], id=f"{subject}-{first}-whole", marks=pytest.mark.slow)


@pytest.mark.parametrize(("subject", "first", "others"), list(readers()))
def test_any_layout_reads_any_others_bit_for_bit(pool, tmp_path, subject, first, others):
    """What was read is saved again at once, and both checkpoints hold the same."""
    pool.run(written_by_one_read_by_others, 4, tmp_path, first, others, subject, timeout=55)
    written = checkpoint.latest(tmp_path / "written")[0]
    [group] = written.optimizer_state["param_groups"]
    assert sorted(written.optimizer_state["state"]) == group["params"]
    for second in others:
        again = checkpoint.latest(tmp_path / second)[0]
        assert same_bits(written.model, again.model), second
        assert same_bits(written.optimizer_state, again.optimizer_state), second
        assert written.state["sampler"] == again.state["sampler"]
        assert (written.step, written.state["loss"]) == (again.step, again.state["loss"])


class ShardedDouble(torch.optim.Optimizer):
    """An optimizer of which every rank holds the state of a part of each parameter: rank r the elements of part r."""

    def __init__(self, whole, comms):
        self.comms = comms
        self.parameters = [parameter for group in whole.param_groups for parameter in group["params"]]
        self.starts = [
            [parameter.numel() * rank // comms.world_size for rank in range(comms.world_size + 1)]
            for parameter in self.parameters
        ]
        self.pieces = [nn.Parameter(self.own(index, one)) for index, one in enumerate(self.parameters)]
        options = {name: value for name, value in whole.param_groups[0].items() if name != "params"}
        super().__init__(self.parameters, options)
        self.inner = type(whole)(self.pieces, **{name: options[name] for name in ("lr", "momentum") if name in options})
        self.inner.param_groups[0].update(options)

    def own(self, index, tensor):
        start, stop = self.starts[index][self.comms.rank : self.comms.rank + 2]
        return tensor.detach().flatten()[start:stop].clone()

    def step(self):
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for index, (piece, parameter) in enumerate(zip(self.pieces, self.parameters, strict=True)):
            piece.grad = None if parameter.grad is None else self.own(index, parameter.grad)
        self.inner.step()
        for index, (piece, parameter) in enumerate(zip(self.pieces, self.parameters, strict=True)):
            longest = max(stop - start for start, stop in itertools.pairwise(self.starts[index]))
            padded = torch.zeros(longest, dtype=piece.dtype)
            padded[: piece.numel()] = piece.detach()
            lengths = [stop - start for start, stop in itertools.pairwise(self.starts[index])]
            gathered = [part[:length] for part, length in zip(self.comms.all_gather(padded), lengths, strict=True)]
            parameter.data.copy_(torch.cat(gathered).view_as(parameter))

    def state_parts(self):
        def part(index, value):
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                return value
            return Part(value, self.starts[index][self.comms.rank], tuple(self.parameters[index].shape))

        whole = self.inner.state_dict()
        state = {
            index: {key: part(index, value) for key, value in values.items()}
            for index, values in whole["state"].items()
            if self.pieces[index].numel()
        }
        return {"state": state, "param_groups": whole["param_groups"]}

    def load_state_parts(self, groups, read):
        state = {}
        for index, parameter in enumerate(self.parameters):
            start, stop = self.starts[index][self.comms.rank : self.comms.rank + 2]
            self.pieces[index].data.copy_(self.own(index, parameter))
            for key, shape in read.shapes(index).items():
                own = read(index, key, start, stop) if shape == tuple(parameter.shape) else read(index, key).view(())
                state.setdefault(index, {})[key] = own
        self.inner.load_state_dict({"state": state, "param_groups": groups})


def train_and_save(comms, folder, name, subject):
    if training := of_layout(comms, name, subject):
        for _ in range(3):
            training.step()
        training.save(folder, keep=3)
        training.close()
        return training.last_loss


def test_a_sharded_optimizer_saves_the_state_of_a_whole_one(pool, tmp_path):
    """AdamW works on each element alone: the parts of all ranks are what one optimizer of everything has."""
    for name in ("dp 3", "zero 3"):
        pool.run(train_and_save, 3, tmp_path / name, name, "tied, adamw", timeout=50)
    whole, sharded = (checkpoint.latest(tmp_path / name)[0] for name in ("dp 3", "zero 3"))
    for key, state in whole.optimizer_state["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(sharded.optimizer_state["state"][key][name], value)


# ── who writes what ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["dp 2", "dp 3", "dp 2, pp 2", "zero 3", "parameters 3", "parameters 2, twice"])
def test_writing_is_shared_out_evenly(pool, tmp_path, name):
    pool.run(train_and_save, 4, tmp_path, name, "tied, adamw", timeout=50)
    found, _ = checkpoint.latest(tmp_path)
    ranks = TrainConfig(**LAYOUTS[name]).resolved().ranks
    assert sorted(found.files) == [*(f"part-{rank:05d}.safetensors" for rank in range(ranks)), "state.json"]
    stored = {
        file: sum(tensor.nbytes for tensor in safetensors.torch.load_file(tmp_path / "step-00000003" / file).values())
        for file in parts(tmp_path / "step-00000003")
    }
    different = {id(tensor): tensor for tensor in found.model.values()}
    assert len(different) == len(found.model) - 1  # embedding and head are one tensor, also where stages share it
    every = sum(tensor.nbytes for tensor in different.values())
    every += sum(one.nbytes for state in found.optimizer_state["state"].values() for one in state.values())
    assert sum(stored.values()) == every  # each element once, tied weights too
    if "pp" not in name:  # stages differ in size
        uneven = 0.03 if "parameters" in name else 0.02  # of each unit, parts of whole cache lines
        assert max(stored.values()) - min(stored.values()) < uneven * every
    for column in ([0, 2], [1, 3]) if "pp" in name else []:
        one, other = (stored[f"part-{rank:05d}.safetensors"] for rank in column)
        assert abs(one - other) < 0.05 * (one + other)


ends_of_a_range = st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(st.lists(st.lists(ends_of_a_range, min_size=3, max_size=3), min_size=1, max_size=4))
def test_every_element_is_written_once_by_a_rank_that_holds_it(ends):
    """Four ranks hold ranges of three tensors; what no rank holds is an error, and everything else is written."""
    dtypes = ["float32", "bfloat16", "float64"]
    offers = [
        {
            "tensors": {
                f"t{index}": [dtypes[index], [3, 3], min(*pair), max(*pair)]
                for index, pair in enumerate(ranges)
                if pair[0] != pair[1]
            }
        }
        for ranges in ends
    ]
    names = sorted({name for offer in offers for name in offer["tensors"]})
    held = {name: checkpoint._holders(name, offers) for name in names}
    covered = {name: {one for *_, a, b in holders.values() for one in range(a, b)} for name, holders in held.items()}
    if any(elements != set(range(9)) for elements in covered.values()):
        with pytest.raises(CheckpointError, match="no rank holds those from"):
            checkpoint._index(held)
        return
    for name, about in checkpoint._index(held).items():
        position = 0
        for file, _, start, stop in about["parts"]:
            *_, first, last = held[name][int(file[5:10])]
            assert (start, first <= start < stop <= last) == (position, True)
            position = stop
        assert position == 9


MISFITS = [
    "model.w has 6 elements, and no rank holds those from 3 to 6",
    "model.w is float32 of shape [2] on rank 0 and float32 of shape [3] on rank 1; all ranks must have the same tensor",
    "optimizer.state.0.hook is a builtin_function_or_method, which a checkpoint cannot hold; "
    "use numbers, text, None, and lists, tuples or dicts of them",
    "model.w has 6 elements, and rank 1 holds those from 6 to 8",
]


def test_parts_that_do_not_fit_together_are_named(pool, tmp_path):
    assert pool.run(save_misfits, 2, tmp_path, timeout=50) == [MISFITS] * 2
    assert list(tmp_path.iterdir()) == []


def save_misfits(comms, folder):
    def messages():
        half = Part(torch.zeros(3), 0, (6,))
        beyond = Part(torch.zeros(6 + 2 * comms.rank), 0, (6,))
        for model, optimizer in (
            ({"w": half}, {}),
            ({"w": torch.zeros(2 + comms.rank)}, {}),
            ({}, {"state": {0: {"hook": print if comms.rank else 1}}}),
            ({"w": beyond}, {}),
        ):
            try:
                checkpoint.save(folder, 1, model, optimizer, {}, comms=comms)
            except CheckpointError as error:
                yield str(error)

    return list(messages())


@pytest.mark.parametrize("name", ["dp 3", "dp 2, pp 2", "parameters 3"])
def test_buffers_are_those_of_the_first_replica(pool, tmp_path, name):
    """Between two validations every rank has batch statistics of its own samples."""
    pool.run(save_with_own_buffers, 4, tmp_path, name, timeout=50)
    saved = checkpoint.latest(tmp_path)[0].model
    assert saved["1.running_mean"].tolist() == [0.0] * 12 and saved["1.num_batches_tracked"] == 0


def save_with_own_buffers(comms, folder, name):
    if training := of_layout(comms, name, "batch norm, momentum"):
        replica = comms.rank // 2 if "pp" in name else comms.rank
        for buffer in training.model.buffers():
            buffer.fill_(replica)
        training.save(folder, keep=3)
        training.close()


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def of_three(pool, tmp_path_factory):
    """Two checkpoints that three ranks wrote."""
    folder = tmp_path_factory.mktemp("three")
    pool.run(save_simple, 3, folder, [1, 2], timeout=50)
    return folder


def save_simple(comms, folder, steps, value=0.0, keep=3):
    for step in steps:
        optimizer = {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.arange(20.0).view(4, 5)}}}
        model = {"weight": torch.arange(101, dtype=torch.float64) + value, "bias": torch.full((3,), float(step))}
        checkpoint.save(folder, step, model, optimizer, {"loss": 0.5}, comms=comms, keep=keep)


def latest_of(comms, folder):
    found, warnings = checkpoint.latest(folder, comms)
    return found.step, float(found.model["weight"][1]), warnings


def test_a_range_is_all_that_is_read(of_three, monkeypatch):
    read, real = [], TensorFile.read

    def watched(file, name, start, out):
        read.append(out.numel())
        real(file, name, start, out)

    monkeypatch.setattr(TensorFile, "read", watched)
    found, _ = checkpoint.latest(of_three)
    assert read == []
    stored = found.stored_model["weight"]
    assert stored.read(30, 80).tolist() == list(range(30, 80)) and sum(read) == 50 and len(read) > 1
    reader = StateReader(found.stored_optimizer["state"])
    assert reader(0, "exp_avg", 7, 9).tolist() == [7, 8] and sum(read) == 52
    assert reader.shapes(0) == {"step": (), "exp_avg": (4, 5)} and reader.shapes(1) == {}
    assert stored.read(101, 101).shape == (0,)
    for start, stop in ((-1, 5), (5, 102), (9, 8)):
        with pytest.raises(CheckpointError, match=f"has 101 elements in the checkpoint, not {start} to {stop}"):
            stored.read(start, stop)


def load_and_watch(comms, folder, name):
    """How many elements a rank reads; the most at once; what it keeps of parameters and optimizer, and the largest."""
    read, real = [], TensorFile.read

    def watched(file, name, start, out):
        read.append(out.numel())
        real(file, name, start, out)

    training = of_layout(comms, name, "tied, adamw")
    TensorFile.read = watched
    try:
        training.load(checkpoint.latest(folder, comms)[0])
    finally:
        TensorFile.read = real
    shards = [one.numel() for one in training.model.parameters()]
    optimizer = [one.numel() for state in training.optimizer.state.values() for one in state.values()]
    return sum(read), max(read), sum(shards) + sum(optimizer), max(shards)


@pytest.mark.parametrize("writer", ["one process", "parameters 2"])
def test_a_rank_with_a_part_of_the_parameters_reads_no_more_than_that(pool, tmp_path, writer):
    pool.run(train_and_save, 2, tmp_path, writer, "tied, adamw", timeout=50)
    results = pool.run(load_and_watch, 3, tmp_path, "parameters 3", timeout=50)
    tied = max(largest for *_, largest in results)  # embedding and head are read under both names
    for read, most, kept, largest in results:
        assert kept <= read <= kept + tied and most <= largest


def load_another_model(comms, folder):
    training = of_layout(comms, "parameters 2", "batch norm, momentum")
    with pytest.raises(CheckpointError) as caught:
        training.load(checkpoint.latest(folder, comms)[0])
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_by_name(pool, tmp_path):
    pool.run(train_and_save, 2, tmp_path, "parameters 2", "tied, adamw", timeout=50)
    for words in pool.run(load_another_model, 2, tmp_path, timeout=50):
        assert words.startswith("the checkpoint does not fit the model: it has no 0.weight, ") and "\n" not in words


def test_damage_of_any_file_is_found_by_all_ranks(pool, of_three, tmp_path):
    files = sorted(path.name for path in (of_three / "step-00000002").iterdir())
    assert len(files) == 5
    folders = []
    for name, kind in itertools.product(files, ["flip", "cut", "gone"]):
        folders.append(tmp_path / f"{name}-{kind}")
        shutil.copytree(of_three, folders[-1])
        file = folders[-1] / "step-00000002" / name
        data = file.read_bytes()
        file.write_bytes({"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-1], "gone": data}[kind])
        if kind == "gone":
            file.unlink()
    for found in pool.run(find_damage, 2, folders, timeout=50):
        for folder, (step, _, [warning]) in zip(folders, found, strict=True):
            assert step == 1
            assert f"{folder}/step-00000002 is damaged: " in warning and "\n" not in warning
            assert folder.name.rpartition("-")[0] in warning


def find_damage(comms, folders):
    return [latest_of(comms, folder) for folder in folders]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ranges: ranges.pop(), "weight has 101 elements, and"),
        (lambda ranges: ranges.pop(0), "where 0 is next"),
        (lambda ranges: ranges.append(ranges[-1]), "where 101 is next"),
        (lambda ranges: ranges.reverse(), "where 0 is next"),
        (lambda ranges: ranges[0].__setitem__(3, ranges[0][3] - 1), "is not what part-00000"),
        (lambda ranges: ranges[-1].__setitem__(3, 102), "is not what part-0000"),
        (lambda ranges: ranges[0].__setitem__(1, "model.bias"), "is not what part-0000|KeyError"),
        (lambda ranges: ranges[0].__setitem__(0, "part-00009.safetensors"), "No such file"),
        (lambda ranges: ranges[0].__setitem__(0, "../../other.safetensors"), r"KeyError\('\.\./"),
        (lambda ranges: ranges.__setitem__(0, 3), "TypeError"),
    ],
)
def test_ranges_that_do_not_make_up_a_tensor_are_refused(of_three, tmp_path, change, message):
    path = tmp_path / "step-00000002"
    shutil.copytree(of_three / "step-00000002", path)
    record = json.loads((path / "state.json").read_text())
    change(record["tensors"]["model.weight"]["parts"])
    (path / "state.json").write_text(json.dumps(record))
    sums = {name: checksum(path / name) for name in [*parts(path), "state.json"]}
    (path / "manifest.json").write_bytes(manifest(sums))
    with pytest.raises(CheckpointError, match=f"is whole, but not a checkpoint .*({message})") as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value)


# ── ranks that fail ─────────────────────────────────────────────────────────────────────────────────────────────────


def full_disk(comms, folder, full):
    real = tensor_file.write

    def write(path, pieces):
        if comms.rank == full:
            path.write_bytes(b"some of it")
            raise OSError(28, "No space left on device")
        return real(path, pieces)

    tensor_file.write = write
    try:
        save_simple(comms, folder, [3])
    except CheckpointError as error:
        return str(error)
    finally:
        tensor_file.write = real


@pytest.mark.parametrize("full", [0, 1, 2])
def test_a_disk_that_is_full_on_one_rank_is_the_same_error_on_all(pool, of_three, tmp_path, full):
    folder = tmp_path / "checkpoints"
    shutil.copytree(of_three, folder)
    [message] = set(pool.run(full_disk, 3, folder, full, timeout=50))
    expected = f"cannot write the checkpoint {folder}/step-00000003: rank {full}: No space left on device; make room"
    assert message.startswith(expected)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
    pool.run(save_simple, 3, folder, [3], timeout=50)
    assert checkpoint.latest(folder)[0].step == 3


def elsewhere(comms, folder):
    try:
        save_simple(comms, folder / str(comms.rank), [1])
    except CheckpointError as error:
        return str(error)


def test_ranks_that_do_not_see_the_same_folder_are_told_so(pool, tmp_path):
    [message] = set(pool.run(elsewhere, 2, tmp_path, timeout=50))
    assert "rank 1 on " in message and " cannot find " in message
    assert "choose an --out on a disk that all of them see" in message
    assert list((tmp_path / "0").iterdir()) == []


CALLS = ["fsync", "rename", "mkdir", "rmdir", "unlink"]


def killed(comms, folder, victim, at, step):
    """Save a step, and kill one rank at its `at`-th call that changes the disk; returns how many there were."""
    count = itertools.count(1)
    real = {name: getattr(os, name) for name in CALLS}
    calls = 0

    def wrap(name):
        def call(*arguments, **options):
            nonlocal calls
            if comms.rank == victim:
                calls = next(count)
                if calls == at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*arguments, **options)

        return call

    try:
        for name in CALLS:
            setattr(os, name, wrap(name))
        save_simple(comms, folder, [step], 9.0, keep=1)
    finally:
        for name in CALLS:
            setattr(os, name, real[name])
    return calls


# Rank 0: in the first ones it makes the folder, and in the last ones it removes what is old; rank 1 has one.
MOMENTS = [(0, at) for at in range(1, 22)] + [(1, 1)]
CHOSEN = [(0, 4), (0, 9), (0, 12), (1, 1)]  # a part is written; between two names; the new one has its name
SAMPLED = [pytest.param(*one, marks=[] if one in CHOSEN else pytest.mark.slow) for one in MOMENTS]


@pytest.mark.in_turn
@pytest.mark.parametrize("step", [2, 3], ids=["same step", "new step"])
@pytest.mark.parametrize(("victim", "at"), SAMPLED)
def test_a_rank_that_is_killed_at_any_moment_loses_nothing(pool, tmp_path, victim, at, step):
    pool.run(save_simple, 2, tmp_path, [1, 2], timeout=50)
    try:
        assert pool.run(killed, 2, tmp_path, victim, at, step, timeout=50)[victim] < at
    except RankFailed as failed:
        assert failed.rank == victim
    found, warnings = checkpoint.latest(tmp_path)
    assert (found.step, float(found.model["weight"][0])) in [(2, 0.0), (step, 9.0)]
    assert warnings == []
    pool.run(save_simple, 2, tmp_path, [4], timeout=50)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert checkpoint.latest(tmp_path)[0].step == 4


@pytest.mark.parametrize("step", [2, 3], ids=["same step", "new step"])
def test_those_are_all_moments(pool, tmp_path, step):
    for victim in (0, 1):
        pool.run(save_simple, 2, tmp_path / str(victim), [1, 2], timeout=50)
        calls = pool.run(killed, 2, tmp_path / str(victim), victim, None, step, timeout=50)[victim]
        assert max(at for rank, at in CHOSEN if rank == victim) <= calls
        assert calls <= max(at for rank, at in MOMENTS if rank == victim)


# ── format 1 ────────────────────────────────────────────────────────────────────────────────────────────────────────


def moments(weight, scale):
    state = {"step": torch.tensor(2.0), "exp_avg": weight * scale, "exp_avg_sq": weight.square()}
    group = {"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "foreach": None, "params": [0]}
    return {"state": {0: state}, "param_groups": [group]}


def test_format_1_is_read():
    """These were written by the version before."""
    weight = torch.arange(6, dtype=torch.float32).view(2, 3) / 4
    loaded = checkpoint.load(FIXTURES / "step-00000002")
    batch_norm = {
        "norm.running_mean": torch.tensor([0.5, -0.0], dtype=torch.bfloat16),
        "norm.batches": torch.tensor(7),
    }
    assert same_bits(loaded.model, {"embed.weight": weight, "head.weight": weight, **batch_norm})
    assert loaded.model["embed.weight"] is loaded.model["head.weight"]
    assert same_bits(loaded.optimizer_state, moments(weight, 2))
    assert loaded.state == {"loss": 0.25, "sampler": {"epoch": 1, "batch": 7}, "random": [{"torch": "AAAA"}]}
    assert isinstance(loaded.stored_optimizer["state"][0]["exp_avg"], StoredTensor)
    assert StateReader(loaded.stored_optimizer["state"])(0, "exp_avg", 2, 5).tolist() == [1.0, 1.5, 2.0]
    by_rank = checkpoint.load(FIXTURES / "step-00000004").optimizer_state
    assert same_bits(by_rank, {"by_rank": [moments(weight, 2), moments(weight, 3)]})


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_damage_to_format_1_is_found(tmp_path, name):
    path = tmp_path / "step-00000002"
    shutil.copytree(FIXTURES / "step-00000002", path)
    data = (path / name).read_bytes()
    for position in range(0, len(data), 7):
        (path / name).write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(CheckpointError, match=r"is damaged: .*\.(json|safetensors)|has format"):
            checkpoint.load(path)


def as_format_1(path):
    """Write a checkpoint again as the version before did."""
    record = json.loads((path / "state.json").read_text())
    tensors = {name: whole(path, about) for name, about in record.pop("tensors").items()}
    shutil.rmtree(path)
    path.mkdir()
    for kind in ("model", "optimizer"):
        own = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith(kind)}
        safetensors.torch.save_file(own, path / f"{kind}.safetensors")
    record["model"] = {name: stored.removeprefix("model.") for name, stored in record["model"].items()}
    if "by_rank" in record["optimizer"]:
        record["optimizer"]["by_rank"] = list(record["optimizer"]["by_rank"].values())
    (path / "state.json").write_text(json.dumps(record))
    names = ("model.safetensors", "optimizer.safetensors", "state.json")
    (path / "manifest.json").write_bytes(manifest({name: checksum(path / name) for name in names}, format=1))


def whole(path, about):
    flat = [safetensors.torch.load_file(path / file)[stored].flatten() for file, stored, *_ in about["parts"]]
    return torch.cat(flat).view(about["shape"])


BEFORE = {"dp": {"ranks": 2}, "pp": {"pp": 2}, "averaging": {"ranks": 2, "average_every": 2}}


@pytest.mark.parametrize("layout", BEFORE.values(), ids=BEFORE)
def test_a_run_goes_on_from_format_1_bit_for_bit(pool, tmp_path, layout):
    settings = {"dim": 8, "depth": 4, "batch": 100, "steps": 6, "save_every": 4, "optimizer": "adamw", **layout}
    config = TrainConfig(out=str(tmp_path / "run"), **settings).resolved()
    whole = pool.run(train_on_rank, config.ranks, config, None, True, timeout=50)[0]
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000006")
    as_format_1(checkpoints / "step-00000004")
    resumed = pool.run(train_on_rank, config.ranks, config, tmp_path / "run", True, timeout=50)[0]
    assert resumed["loss"] == whole["loss"]
