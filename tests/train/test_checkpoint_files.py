"""One plain file from a checkpoint, and a checkpoint from one plain file."""

import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.train.test_checkpoint_parts import of_layout, same_bits, tied, written_by_one_read_by_others

from microparallel.errors import CheckpointError, ConfigError, DataError
from microparallel.files.lock import FolderLock
from microparallel.files.tensor_file import TensorFile
from microparallel.train import checkpoint
from microparallel.train.checkpoint_files import export, import_file
from microparallel.train.checkpoint_folder import best_of, mark_best
from microparallel.train.checkpoint_listing import Place, find, list_checkpoints, open_newest
from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank

FORMAT_1 = Path(__file__).parent / "format_1"


def export_newest(folder, path, **options):
    _, found, _ = open_newest(Place(folder))
    return export(found, path, **options)


def read(place):
    """All of the newest checkpoint, in memory."""
    found = open_newest(place)[1]
    return found.model, found.optimizer_state, found.state, found.step


def save(folder, *steps, value=0.0, **options):
    """Two tensors, one of them tied, one infinite as a mask is, one empty."""
    weight = torch.arange(12.0).view(3, 4) + value
    for step in steps:
        model = {"in.weight": weight, "out.weight": weight, "mask": torch.tensor([0.0, -torch.inf]).bfloat16()}
        model |= {"none": torch.zeros(0, 3), "count": torch.tensor(step)}
        optimizer = {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": weight * 2}}, "param_groups": []}
        checkpoint.save(folder, step, model, optimizer, {"loss": 0.5}, keep=9, **options)


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "checkpoints", 1, 2)
    return tmp_path / "checkpoints"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ── out ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


READERS = ["one process", "pp 2, stages 0 and 2 together", "dp 2, pp 2", "zero 3", "parameters 3"]


def test_the_same_weights_are_the_same_bytes_whatever_the_layout(pool, tmp_path):
    pool.run(written_by_one_read_by_others, 4, tmp_path, "dp 2", READERS, "tied, adamw", timeout=55)
    files = []
    for name in ("written", *READERS):
        files.append(tmp_path / f"{name}.safetensors")
        done = export_newest(tmp_path / name, files[-1])
    assert len(done.tied) == 1
    assert len({file.read_bytes() for file in files}) == 1, files
    loaded = safetensors.torch.load_file(files[0])
    model = tied()
    model.load_state_dict(loaded)
    assert same_bits(dict(model.state_dict()), checkpoint.latest(tmp_path / "written")[0].model)
    assert done.tensors == len(loaded) == len(model.state_dict())
    assert done.bytes == files[0].stat().st_size


def test_what_is_tied_infinite_or_empty_is_exported(folder, tmp_path):
    done = export_newest(folder, tmp_path / "out.safetensors")
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "2", "tied": '{"out.weight": "in.weight"}'}
    loaded = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert same_bits(loaded, checkpoint.latest(folder)[0].model)
    assert (done.tensors, done.tied) == (5, {"out.weight": "in.weight"})


def test_format_1_is_exported(tmp_path):
    """Its model and its optimizer are two files, whose tensors may have the same names."""
    export_newest(FORMAT_1, tmp_path / "weights.safetensors")
    before = read(Place(FORMAT_1))
    assert same_bits(safetensors.torch.load_file(tmp_path / "weights.safetensors"), before[0])
    export_newest(FORMAT_1, tmp_path / "all.safetensors", whole=True)
    (tmp_path / "new").mkdir()
    import_file(Place(tmp_path / "new"), tmp_path / "all.safetensors")
    assert same_bits(before, read(Place(tmp_path / "new")))


def test_a_full_disk_leaves_the_file_that_was_there(folder, tmp_path, monkeypatch):
    (tmp_path / "out.safetensors").write_text("before")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"out.safetensors cannot be written: No space left on device; make room"):
        export_newest(folder, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_text() == "before" and names(tmp_path) == [
        "checkpoints",
        "out.safetensors",
    ]


# ── and back ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    """A run of two ranks and six steps that has saved every two, and its losses."""
    out = tmp_path_factory.mktemp("trained") / "run"
    config = TrainConfig(out=str(out), ranks=2, save_every=2, keep=9, **SETTINGS).resolved()
    pool.run(train_on_rank, 2, config, None, True, timeout=55)
    return config, out, losses(out)


SETTINGS = {"model": f"{__name__}:tied", "data": "text", "context": 8, "batch": 8, "steps": 6, "optimizer": "adamw"}


def losses(out):
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def go_on(pool, trained, tmp_path, change):
    """Copy the run as it was after step 4, change it, and let it go on; returns all its losses."""
    config, out, _ = trained
    shutil.copytree(out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    change(tmp_path / "run")
    pool.run(train_on_rank, 2, config, tmp_path / "run", True, timeout=55)
    return losses(tmp_path / "run")


def test_a_run_goes_on_from_a_whole_file_bit_for_bit(pool, trained, tmp_path):
    def through_a_file(run):
        export_newest(run / "checkpoints", tmp_path / "all.safetensors", whole=True)
        shutil.rmtree(run / "checkpoints")
        done = import_file(find(run), tmp_path / "all.safetensors")
        assert (done.step, done.whole, done.kept, done.newer, done.tensors) == (4, True, None, [], len(tied_once()))
        assert list_checkpoints(find(run), thoroughly=True)[0].damage is None

    assert go_on(pool, trained, tmp_path, through_a_file) == trained[2]


def tied_once():
    return {id(tensor) for tensor in tied().state_dict(keep_vars=True).values()}


def test_a_run_goes_on_with_weights_that_came_back_unchanged(pool, trained, tmp_path):
    def through_a_file(run):
        export_newest(run / "checkpoints", tmp_path / "weights.safetensors")
        before = read(find(run))
        done = import_file(find(run), tmp_path / "weights.safetensors")
        assert done.kept == run / "checkpoints" / "before-import-step-00000004" and not done.whole
        assert open_newest(find(done.kept))[0] == done.kept
        assert same_bits(before, read(find(run)))

    assert go_on(pool, trained, tmp_path, through_a_file) == trained[2]


def test_a_run_goes_on_with_other_weights(pool, trained, tmp_path):
    """Those of step 2 with the optimizer and the position of step 4: a loss that neither has."""

    def with_older_weights(run):
        older = open_newest(find(run / "checkpoints" / "step-00000002"))[1]
        weights = {name: tensor.clone() for name, tensor in older.model.items() if name != "head.weight"}
        safetensors.torch.save_file(weights, tmp_path / "older.safetensors")
        import_file(find(run), tmp_path / "older.safetensors")
        found = open_newest(find(run))[1]
        assert found.step == 4 and same_bits(found.model, older.model)
        assert not same_bits(found.optimizer_state, older.optimizer_state)

    gone_on = go_on(pool, trained, tmp_path, with_older_weights)
    assert gone_on[:4] == trained[2][:4] and gone_on[4] != trained[2][4]


def test_an_import_replaces_one_step_and_says_what_else_there_is(folder, tmp_path):
    mark_best(folder / "step-00000001", 0.1)
    export_newest(folder, tmp_path / "weights.safetensors")
    for number in ("", "-2"):
        done = import_file(Place(folder), tmp_path / "weights.safetensors", "1")
        assert done.kept == folder / f"before-import-step-00000001{number}"
        assert (done.step, done.newer, done.was_best) == (1, [2], number == "")
    assert best_of(folder)[0] is None
    assert float(open_newest(find(done.path))[1].model["count"]) == 2
    assert float(open_newest(find(folder / "before-import-step-00000001"))[1].model["count"]) == 1
    with pytest.raises(ConfigError, match="before-import-step-00000001 is not a checkpoint that a run goes on from"):
        import_file(find(folder / "before-import-step-00000001"), tmp_path / "weights.safetensors")
    export_newest(folder, tmp_path / "all.safetensors", whole=True)
    with pytest.raises(ConfigError, match=r"--step 1: .*all.safetensors holds a whole checkpoint, with its own step"):
        import_file(Place(folder), tmp_path / "all.safetensors", "1")


def test_finite_weights_may_replace_some_that_are_not(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, 1, value=float("nan"), finite=False)
    weights = checkpoint.latest(folder)[0].model
    del weights["out.weight"]
    safetensors.torch.save_file(weights, tmp_path / "nan.safetensors")
    import_file(Place(folder), tmp_path / "nan.safetensors")
    assert [one.finite for one in list_checkpoints(Place(folder))] == [False]
    good = {**weights, "in.weight": torch.ones(3, 4), "mask": torch.zeros(2).bfloat16()}
    safetensors.torch.save_file(good, tmp_path / "good.safetensors")
    import_file(Place(folder), tmp_path / "good.safetensors")
    assert [one.finite for one in list_checkpoints(Place(folder))] == [True]


def test_a_damaged_newest_one_is_passed_over(folder, tmp_path):
    export_newest(folder, tmp_path / "weights.safetensors")
    (folder / "step-00000002" / "state.json").write_text("{}")
    done = import_file(Place(folder), tmp_path / "weights.safetensors")
    assert (done.step, done.newer) == (1, [2])
    assert len(done.warnings) == 1 and "step-00000002 is damaged: state.json" in done.warnings[0]


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def without(name):
    return lambda weights: weights.pop(name)


def with_(**others):
    return lambda weights: weights.update({name.replace("_", "."): tensor for name, tensor in others.items()})


def renamed(weights):
    weights["mask_of_out"] = weights.pop("mask")


REFUSED = {
    "a name is missing": (without("count"), "does not fit the model of .*step-00000002: it has no count$"),
    "a name is another": (renamed, "it has no mask, but mask_of_out; rename that if it is the same"),
    "a name too many": (with_(other=torch.ones(1)), "other is no tensor of the model; leave it out of the file"),
    "another shape": (
        with_(in_weight=torch.ones(4, 3)),
        r"in.weight is float32 of shape \[4, 3\], and the model's is float32 of shape \[3, 4\]; import it into",
    ),
    "another dtype": (
        with_(in_weight=torch.ones(3, 4).half()),
        r"in.weight is float16 of shape \[3, 4\], and the model's is float32 of shape \[3, 4\]; convert it",
    ),
    "tied weights differ": (
        with_(out_weight=torch.ones(3, 4)),
        "in.weight and out.weight are one tensor in the model, and differ in the file; leave one of them out",
    ),
    "not a number": (with_(in_weight=torch.full((3, 4), torch.nan)), "in.weight is not finite, so a run could not"),
    "nothing": (dict.clear, "it has no count"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_weights_that_do_not_fit_are_refused_in_one_line(folder, tmp_path, change, words):
    weights = {name: tensor.clone() for name, tensor in checkpoint.latest(folder)[0].model.items()}
    if words.startswith(("in.weight is not", "in.weight is float16", r"in.weight is float32")):
        del weights["out.weight"]
    change(weights)
    safetensors.torch.save_file(weights, tmp_path / "other.safetensors")
    before = contents(tmp_path)
    with pytest.raises(DataError, match=words) as caught:
        import_file(Place(folder), tmp_path / "other.safetensors")
    assert "\n" not in str(caught.value) and "other.safetensors" in str(caught.value)
    assert contents(tmp_path) == before


def contents(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def header(**entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


BROKEN = {
    "nothing": b"",
    "not safetensors": b"PK\x03\x04 a zip file of torch.save",
    "a long header": (2**60).to_bytes(8, "little") + b"{}",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "a deep header": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "bytes beyond its end": header(w={"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}),
    "an unknown dtype": header(w={"dtype": "F4", "shape": [0], "data_offsets": [0, 0]}),
    "less than no elements": header(w={"dtype": "F32", "shape": [0, -4], "data_offsets": [0, 0]}),
    "metadata that are none": header(__metadata__=3),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_is_no_such_file_is_refused_in_one_line(folder, tmp_path, data):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(data)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=f"--import {path}: not a safetensors file, or a damaged one") as caught:
        import_file(Place(folder), path)
    assert "\n" not in str(caught.value) and contents(tmp_path) == before


def test_a_file_that_is_not_there_is_refused(folder, tmp_path):
    with pytest.raises(DataError, match=r"none.safetensors: No such file or directory; name a safetensors file"):
        import_file(Place(folder), tmp_path / "none.safetensors")
    with pytest.raises(DataError, match="Is a directory; name a safetensors file"):
        import_file(Place(folder), tmp_path)


RECORDS = {
    "no JSON": "{",
    "no record": "[]",
    "no step": '{"model": {}}',
    "a step before the first": '{"step": -3, "model": {}, "optimizer": {}, "by_rank": {}, "state": {}}',
    "a tensor that is not there": '{"step": 3, "model": {"w": "w"}, "optimizer": {}, "by_rank": {}, "state": {}}',
    "a tensor in the state": '{"step": 3, "model": {}, "optimizer": {}, "by_rank": {}, "state": {"$tensor": "w"}}',
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_whole_file_that_was_changed_is_refused(folder, tmp_path, record):
    safetensors.torch.save_file({"v": torch.ones(1)}, tmp_path / "all.safetensors", {"checkpoint": record})
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"what it says about its checkpoint cannot be understood .*; export it again"):
        import_file(Place(folder), tmp_path / "all.safetensors")
    assert contents(tmp_path) == before


def test_a_whole_file_of_another_model_is_refused(folder, tmp_path):
    checkpoint.save(tmp_path / "other", 7, {"w": torch.ones(1)}, {}, {})
    export_newest(tmp_path / "other", tmp_path / "all.safetensors", whole=True)
    with pytest.raises(DataError, match=r"does not fit the model of .*step-00000002: it has no count"):
        import_file(Place(folder), tmp_path / "all.safetensors")


def test_a_run_that_is_going_on_takes_no_import(folder, tmp_path):
    """The lock is that of the run, held by another process: this one could take it again."""
    (tmp_path / "config.toml").touch()
    export_newest(folder, tmp_path / "weights.safetensors")
    with held_by_another(tmp_path / "lock") as process:
        before = contents(folder)
        with pytest.raises(ConfigError, match=f"{tmp_path} is in use by process {process} on .*; wait until that has"):
            import_file(find(tmp_path), tmp_path / "weights.safetensors")
        assert contents(folder) == before
    import_file(find(tmp_path), tmp_path / "weights.safetensors")
    assert not (tmp_path / "lock").exists()


class held_by_another:  # used as a block
    """A process that holds a lock."""

    def __init__(self, path):
        self.ready, self.done = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            lock = FolderLock(path, "it")
            os.write(self.ready[1], b"!")
            os.read(self.done[0], 1)
            lock.release()
            os._exit(0)
        os.read(self.ready[0], 1)

    def __enter__(self):
        return self.pid

    def __exit__(self, *_):
        os.write(self.done[1], b"!")
        os.waitpid(self.pid, 0)
        for end in (*self.ready, *self.done):
            os.close(end)


# ── a process that ends in between ──────────────────────────────────────────────────────────────────────────────────


CALLS = ["open", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink"]


def killed_at_each(action):
    """Do it in one process after another, killed before its first call that changes the disk, its second, …"""
    for at in itertools.count(1):
        child = os.fork()
        if child == 0:
            do_until(at, action)
        _, status = os.waitpid(child, 0)
        yield at
        if not os.WIFSIGNALED(status):
            return


def do_until(at, action):
    number = itertools.count(1)

    def wrap(real):
        def call(*arguments, **options):
            if next(number) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))
    try:
        action()
    finally:
        os._exit(0)


def test_an_import_that_is_killed_leaves_the_old_or_the_new(folder, tmp_path):
    export_newest(folder, tmp_path / "weights.safetensors")
    shutil.copytree(folder, tmp_path / "before")
    others = ("before-import", "lock")  # an unheld lock is no lock
    save(tmp_path / "other", 1, value=5.0)
    export_newest(tmp_path / "other", tmp_path / "weights.safetensors")
    seen = []
    for at in killed_at_each(lambda: import_file(Place(folder), tmp_path / "weights.safetensors")):
        _, found, warnings = open_newest(Place(folder))
        seen.append(float(found.model["in.weight"][0, 0]))
        assert (found.step, warnings) == (2, []), at
        save(folder, 3)  # what was left half-written is cleared
        left = [name for name in names(folder) if not name.startswith(others)]
        assert left == [f"step-0000000{step}" for step in (1, 2, 3)], at
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "before", folder)
    assert len(seen) > 10 and sorted(seen) == seen and {*seen} == {0.0, 5.0}


def test_an_export_that_is_killed_leaves_the_old_or_the_new(folder, tmp_path):
    path = tmp_path / "out.safetensors"
    path.write_text("before")
    seen = []
    for _ in killed_at_each(lambda: export_newest(folder, path)):
        seen.append("before" if path.read_bytes() == b"before" else len(TensorFile(path).entries))
        path.write_text("before")
    assert seen == ["before"] * 2 + [5] * 3
    export_newest(folder, path)
    assert names(tmp_path) == ["checkpoints", "out.safetensors"]


@pytest.mark.parametrize("at", range(1, 8))
def test_an_import_on_a_full_disk_says_so_and_leaves_no_half(folder, tmp_path, monkeypatch, at):
    export_newest(folder, tmp_path / "weights.safetensors")
    before, number, real = contents(folder), itertools.count(1), os.fsync

    def full(file):
        if next(number) >= at:
            raise OSError(28, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-00000002: No space left on device"):
        import_file(Place(folder), tmp_path / "weights.safetensors")
    renamed = at > 5  # into its place: what failed is to wait until that is on the disk
    assert renamed or contents(folder) == before
    assert not [name for name in names(folder) if name.startswith(".")] and open_newest(Place(folder))[1].step == 2


def test_layouts_that_are_imported_can_be_loaded(pool, tmp_path):
    """What one rank has written is read by ranks in parts, as any checkpoint is."""
    pool.run(written_by_one_read_by_others, 4, tmp_path, "parameters 2", [], "tied, adamw", timeout=55)
    export_newest(tmp_path / "written", tmp_path / "all.safetensors", whole=True)
    (tmp_path / "imported").mkdir()
    import_file(Place(tmp_path / "imported"), tmp_path / "all.safetensors")
    pool.run(load_and_save, 3, tmp_path, timeout=55)
    written, again = (checkpoint.latest(tmp_path / name)[0] for name in ("written", "again"))
    assert same_bits(written.model, again.model) and same_bits(written.optimizer_state, again.optimizer_state)


def load_and_save(comms, folder):
    training = of_layout(comms, "parameters 3", "tied, adamw")
    found, _ = checkpoint.latest(folder / "imported", comms)
    training.load(found)
    training.save(folder / "again", keep=3)
    training.close()
