"""`microparallel checkpoints` as a person runs it."""

import json
import shutil

import pytest
import safetensors.torch

SMALL = ["--steps", "6", "--dim", "16", "--depth", "3", "--batch", "50", "--ranks", "2", "--quiet"]
SAVING = ["--save-every", "2", "--validate-every", "2", "--keep", "9"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Where the first test that needs a run leaves it for the others."""
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def run(trained, microparallel, tmp_path):
    """A run that has saved every second step."""
    if not trained.exists():
        result = microparallel("train", *SMALL, *SAVING, "--out", trained)
        assert result.returncode == 0, result.stderr
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def checkpoints(microparallel):
    """A call that succeeds: what it prints."""

    def call(*arguments, **environment):
        result = microparallel("checkpoints", *arguments, **environment)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    return call


def columns(text):
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_list_fits_narrow_terminals(run, checkpoints, width):
    table, found, words = checkpoints("run", COLUMNS=width).partition("4 checkpoints in run/checkpoints, ")
    assert found and "\nbest by validation: step 6, loss " in words and words.count("\n") == 2
    assert max(map(len, table.splitlines())) <= min(width, 60)
    head, *rows = columns(table)
    assert head == ["step", "size", "age", "ranks"] and [row[0] for row in rows[:4]] == ["0", "2", "4", "6"]
    assert [row[5] for row in rows[:4]] == ["2"] * 4  # behind sizes and ages, which have units
    assert [word for row in rows for word in row[6:] or row[:1] if word.isalpha() or "," in word] == ["newest,", "best"]


def test_verify_finds_damage_and_exits_with_1(run, microparallel, checkpoints):
    assert "every byte is as it was written" in checkpoints("run", "--verify")
    part = run / "checkpoints" / "step-00000004" / "part-00001.safetensors"
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    result = microparallel("checkpoints", "run", "--verify")
    assert result.returncode == 1
    rows = {row[0]: row[6:] for row in columns(result.stdout)[1:5]}
    assert rows == {"0": ["whole"], "2": ["whole"], "4": ["damaged"], "6": ["newest,", "best,", "whole"]}
    assert "damaged: run/checkpoints/step-00000004 is damaged: the bytes of part-00001.safetensors are" in result.stdout
    assert microparallel("checkpoints", "run", "--verify", "--step", 6).returncode == 0
    assert microparallel("checkpoints", part.parent, "--verify").returncode == 1
    part.write_bytes(data[:-1])
    about = json.loads(checkpoints("run", "--json"))  # a list is a list, whatever it lists
    assert [one["damage"] is None for one in about["checkpoints"]] == [True, True, False, True]
    (part.parent / "manifest.json").unlink()
    assert "?" in checkpoints("run")


def test_json_says_all(run, checkpoints):
    about = json.loads(checkpoints("run", "--json", "--step", "best", "--verify"))
    assert (about["folder"], about["verified"], about["left_over"]) == ("run/checkpoints", True, [])
    [one] = about["checkpoints"]
    assert {name: one[name] for name in ("step", "ranks", "finite", "newest", "best", "damage", "path")} == {
        **{"step": 6, "ranks": 2, "finite": True, "newest": True, "best": True, "damage": None},
        "path": "run/checkpoints/step-00000006",
    }
    assert one["bytes"] > 0 < one["loss"] and one["saved"].startswith("20")


def test_weights_go_out_and_come_back(run, checkpoints, microparallel):
    out = checkpoints("run", "--export", "out.safetensors", "--step", 4)
    assert out.startswith("wrote out.safetensors (") and "): the model of step 4, 6 tensors" in out
    assert len(safetensors.torch.load_file("out.safetensors")) == 6
    words = checkpoints("run", "--import", "out.safetensors").splitlines()
    assert words == [
        "made run/checkpoints/step-00000006: the weights of out.safetensors (6 tensors), everything else as it was",
        "what was there is kept as run/checkpoints/before-import-step-00000006; remove it if you do not need it",
        "it was the best by validation; these weights are yet to be measured, so none is marked as the best",
        "go on with: microparallel train --resume run",
    ]
    assert "left over: before-import-step-00000006 (" in checkpoints("run")
    about = json.loads(checkpoints("run", "--import", "out.safetensors", "--step", 2, "--json"))
    assert (about["step"], about["newer"], about["whole"], about["was_best"]) == (2, [4, 6], False, False)
    result = microparallel("train", "--resume", "run", "--steps", 7, "--quiet")
    assert result.returncode == 0, result.stderr


def test_all_goes_out_and_comes_back(run, checkpoints):
    about = json.loads(checkpoints("run", "--export", "all.safetensors", "--whole", "--step", 4, "--json"))
    assert (about["step"], about["whole"], about["checkpoint"]) == (4, True, "run/checkpoints/step-00000004")
    words = checkpoints("run", "--import", "all.safetensors")
    assert words.startswith("made run/checkpoints/step-00000004: all of all.safetensors\n")
    assert "a run goes on from the newest: remove the checkpoints of later steps (6) to go on from this one" in words


def test_a_damaged_newest_one_is_said_to_be_passed_over(run, microparallel):
    (run / "checkpoints" / "step-00000006" / "state.json").unlink()
    result = microparallel("checkpoints", "run", "--export", "out.safetensors")
    assert result.returncode == 0 and "the model of step 4" in result.stdout
    assert result.stderr == "warning: run/checkpoints/step-00000006 is damaged: state.json is missing\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["none"], 2, "none: there is no such folder; name the folder of a run, such as runs/"),
        (["other"], 2, "other is not the folder of a run: it has neither a config.toml nor checkpoints; name one such"),
        (["empty", "--verify"], 1, "empty/checkpoints holds no checkpoint to verify"),
        (["empty", "--export", "out.safetensors"], 1, "empty/checkpoints holds no checkpoint; a run writes its first"),
        (["empty", "--step", "best"], 2, "--step best: no checkpoint in empty/checkpoints is marked as the best"),
        (["empty", "--step", "7"], 2, "--step 7: empty/checkpoints has no checkpoint of step 7; it has none"),
        (["empty", "--verify", "--export", "x"], 2, "--verify and --export: one at a time; --export and --import veri"),
        (["empty", "--whole"], 2, "--whole says what --export writes; add --export FILE"),
        (["empty", "--export", "other"], 2, "--export other: this is a folder; name a file in it"),
        (["empty", "--export", "no/such/file"], 2, "--export no/such/file: there is no folder no/such; create it"),
        (["empty", "--import", "none"], 2, "--import none: No such file or directory; name a safetensors file"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(microparallel, tmp_path, arguments, code, words):
    (tmp_path / "other").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").touch()
    result = microparallel("checkpoints", *arguments)
    assert (result.returncode, len(result.stderr.splitlines())) == (code, 1)
    assert words in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "other"]


def test_a_run_that_has_saved_nothing_has_an_empty_list(checkpoints, tmp_path):
    (tmp_path / "config.toml").touch()
    assert checkpoints(tmp_path) == f"no checkpoints in {tmp_path}/checkpoints\n"
    assert json.loads(checkpoints(tmp_path, "--json"))["checkpoints"] == []


def test_an_export_may_not_damage_a_checkpoint(run, microparallel):
    part = run / "checkpoints" / "step-00000006" / "part-00000.safetensors"
    before = part.read_bytes()
    result = microparallel("checkpoints", "run", "--export", part)
    assert result.returncode == 2 and "this would damage the checkpoint it is in" in result.stderr
    assert part.read_bytes() == before
