"""Which checkpoints there are, what each of them is, and which one is meant."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from microparallel.errors import CheckpointError, ConfigError
from microparallel.train import checkpoint
from microparallel.train.checkpoint_folder import mark_best
from microparallel.train.checkpoint_listing import find, left_over, list_checkpoints, open_newest, select

FORMAT_1 = Path(__file__).parent / "format_1"


def save(folder, *steps, **options):
    for step in steps:
        model = {"weight": torch.arange(300.0) + step}
        checkpoint.save(folder, step, model, {}, {"loss": 0.5}, keep=9, **options)


@pytest.fixture
def run(tmp_path):
    """A run that has saved twice; the first is the best."""
    folder = tmp_path / "run"
    save(folder / "checkpoints", 5, 10)
    (folder / "config.toml").touch()
    mark_best(folder / "checkpoints" / "step-00000005", 0.25)
    return folder


# ── which are meant ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_its_checkpoints_and_one_of_them_can_be_named(run, tmp_path, monkeypatch):
    checkpoints = run / "checkpoints"
    for place in (find(run), find(checkpoints)):
        assert (place.folder, place.run, [*place.steps()]) == (checkpoints, run, [5, 10])
    one = find(checkpoints / "step-00000005")
    assert (one.folder, one.run, [*one.steps()]) == (checkpoints, run, [5])
    monkeypatch.chdir(checkpoints / "step-00000010")
    assert [*find(Path()).steps()] == [10] and find(Path()).folder == checkpoints
    (tmp_path / "link").symlink_to(run)
    assert [*find(tmp_path / "link").steps()] == [5, 10]
    elsewhere = tmp_path / "copied"
    shutil.copytree(checkpoints, elsewhere)
    assert (find(elsewhere).folder, find(elsewhere).run) == (elsewhere, elsewhere)


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    for name, words in (
        ("file", "this is a file; name the folder of a run"),
        ("none", "there is no such folder; name the folder of a run"),
        ("other", "is not the folder of a run: it has neither a config.toml nor checkpoints"),
    ):
        with pytest.raises(ConfigError, match=words):
            find(tmp_path / name)


def test_a_step_or_the_best_can_be_chosen(run):
    place = find(run)
    assert select(place, None) == place
    assert [*select(place, "10").steps()] == [10] and [*select(place, "best").steps()] == [5]
    for wanted, words in (
        ("7", "--step 7: .*checkpoints has no checkpoint of step 7; it has 10, 5"),
        ("-5", "--step -5: a whole number is needed, or best; name one of 10, 5"),
        ("latest", "--step latest: a whole number is needed"),
        ("²", "--step ²: a whole number is needed"),
    ):
        with pytest.raises(ConfigError, match=words):
            select(place, wanted)
    with pytest.raises(ConfigError, match="step-00000010 has no checkpoint of step 5; it has 10"):
        select(find(run / "checkpoints" / "step-00000010"), "5")
    (run / "checkpoints" / "best.json").unlink()
    with pytest.raises(ConfigError, match=r"--step best: no checkpoint in .* is marked as the best; name one of 10, 5"):
        select(place, "best")


# ── what they are ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_is_described(run, pool):
    pool.run(save_together, 3, run / "checkpoints", timeout=50)
    save(run / "checkpoints", 20, finite=False)
    os.utime(run / "checkpoints" / "step-00000005" / "manifest.json", (1e9, 1e9))
    found = list_checkpoints(find(run))
    assert [(one.step, one.ranks, one.finite, one.newest, one.best, one.loss, one.damage) for one in found] == [
        (5, 1, True, False, True, 0.25, None),
        (10, 1, True, False, False, None, None),
        (15, 3, True, False, False, None, None),
        (20, 1, False, True, False, None, None),
    ]
    for one in found:
        files = {file.name: file.stat().st_size for file in one.path.iterdir()}
        assert one.bytes == sum(files.values()) - files["manifest.json"]
    assert found[0].saved == 1e9 < found[1].saved
    assert [one.step for one in list_checkpoints(select(find(run), "best"))] == [5]


def save_together(comms, folder):
    save(folder, 15, comms=comms)


def test_format_1_is_described():
    assert [(one.step, one.ranks, one.damage) for one in list_checkpoints(find(FORMAT_1), thoroughly=True)] == [
        (2, 1, None),
        (4, 1, None),
    ]


def damage(path, kind, name):
    data = (path / name).read_bytes()
    if kind == "gone":
        (path / name).unlink()
    else:
        flipped = data[:5] + bytes([data[5] ^ 1]) + data[6:]
        (path / name).write_bytes({"flipped": flipped, "cut off": data[:-1]}[kind])


WORDS = {
    ("part-00000.safetensors", "flipped"): "the bytes of part-00000.safetensors are not those that were written",
    ("part-00000.safetensors", "cut off"): r"part-00000.safetensors has \d+ bytes, and \d+ were written",
    ("part-00000.safetensors", "gone"): "part-00000.safetensors is missing",
    ("state.json", "flipped"): "the bytes of state.json are not those that were written",
    ("state.json", "cut off"): r"state.json has \d+ bytes, and \d+ were written",
    ("state.json", "gone"): "state.json is missing",
    ("manifest.json", "flipped"): "manifest.json (cannot be understood|was changed)",
    ("manifest.json", "cut off"): "manifest.json cannot be understood",
    ("manifest.json", "gone"): "manifest.json is missing",
}


@pytest.mark.parametrize(("name", "kind"), WORDS)
def test_any_damage_is_found(run, name, kind):
    path = run / "checkpoints" / "step-00000010"
    damage(path, kind, name)
    thorough = list_checkpoints(find(run), thoroughly=True)
    assert [one.damage is None for one in thorough] == [True, False]
    with pytest.raises(CheckpointError, match=f"^{path} is damaged: {WORDS[name, kind]}") as caught:
        raise CheckpointError(thorough[1].damage)
    assert "\n" not in str(caught.value)
    # A look compares sizes: a flipped bit in what is not looked into costs reading everything.
    seen = kind != "flipped" or name == "manifest.json"
    assert (list_checkpoints(find(run))[1].damage is not None) == seen
    path, found, warnings = open_newest(find(run))
    assert (found.step, warnings) == (5, [str(caught.value)])
    with pytest.raises(CheckpointError, match="is damaged"):
        open_newest(select(find(run), "10"))
    damage(run / "checkpoints" / "step-00000005", kind, name)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be used\n  .*00000010 .*\n  .*00000005 is dama"
    ):
        open_newest(find(run))


def test_every_byte_is_told(run):
    told = []

    def begin(what, size):
        told.append([what, size, 0])

        def tell(done):
            told[-1][2] += done

        return tell

    found = list_checkpoints(find(run), thoroughly=True, begin=begin)
    assert told == [[f"verifying {one.path.name}", one.bytes, one.bytes] for one in found]


def test_a_run_that_has_saved_nothing_has_an_empty_list(tmp_path):
    (tmp_path / "config.toml").touch()
    assert list_checkpoints(find(tmp_path)) == left_over(find(tmp_path)) == []
    with pytest.raises(CheckpointError, match="holds no checkpoint; a run writes its first one before its first step"):
        open_newest(find(tmp_path))


def test_one_that_a_run_removes_meanwhile_is_left_out(run, monkeypatch):
    place = find(run)
    there = place.steps()
    monkeypatch.setattr(type(place), "steps", lambda _: there)
    shutil.rmtree(there[5])
    assert [one.step for one in list_checkpoints(place)] == [10]


def test_what_else_is_there_is_told(run):
    folder = run / "checkpoints"
    for name in (".step-00000015-writing", "before-import-step-00000005", "before-import-step-00000005-2", "mine"):
        shutil.copytree(folder / "step-00000005", folder / name)
    (folder / "step-00000010").rename(folder / ".step-00000010-replaced")
    others = left_over(find(run))
    assert [(one.path.name, one.what.partition(";")[0]) for one in others] == [
        (".step-00000015-writing", "a save that is under way, or was cut off"),
        ("before-import-step-00000005", "what an import has replaced"),
        ("before-import-step-00000005-2", "what an import has replaced"),
    ]
    assert others[0].bytes == sum(file.stat().st_size for file in (folder / "step-00000005").iterdir())
    # Replaced by one that has not got the name yet: this is still the newest that a run would go on from.
    assert [(one.step, one.newest) for one in list_checkpoints(find(run))] == [(5, False), (10, True)]
    kept = find(folder / "before-import-step-00000005-2")
    [one] = list_checkpoints(kept, thoroughly=True)
    assert (one.step, one.newest, one.best, one.damage) == (5, False, False, None)
    assert open_newest(kept)[1].step == 5 and left_over(kept) == []
