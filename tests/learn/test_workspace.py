"""A learner's folder: nothing of theirs is ever lost, and where they were is remembered."""

import pytest

from microparallel.errors import ConfigError, DataError, UsageError
from microparallel.learn.catalogue import EXERCISES, find_exercise
from microparallel.learn.workspace import Workspace

FIRST, SECOND = EXERCISES[:2]


@pytest.fixture
def workspace(tmp_path):
    workspace = Workspace(tmp_path / "my_work")
    workspace.start()
    return workspace


def test_it_begins_with_all_exercises(workspace):
    assert all(workspace.path(exercise).read_bytes() == exercise.task.read_bytes() for exercise in EXERCISES)
    assert workspace.current == FIRST


def test_beginning_again_leaves_what_is_there(workspace):
    workspace.path(FIRST).write_text("mine")
    workspace.path(SECOND).unlink()
    assert Workspace(workspace.folder).start() == [workspace.path(SECOND)]
    assert workspace.path(FIRST).read_text() == "mine"


def test_what_has_passed_is_remembered(workspace):
    assert workspace.note_passed(FIRST)
    assert not workspace.note_passed(FIRST)
    workspace.note_hint(SECOND, 2)
    again = Workspace(workspace.folder)
    assert list(again.passed) == [FIRST.name]
    assert again.hints == {SECOND.name: 2}
    assert again.current == SECOND


def test_where_one_went_is_remembered_until_it_has_passed(workspace):
    workspace.go_to(EXERCISES[3])
    assert Workspace(workspace.folder).current == EXERCISES[3]
    workspace.note_passed(EXERCISES[3])
    assert Workspace(workspace.folder).current == EXERCISES[4]


def test_after_the_last_come_those_left_out(workspace):
    workspace.go_to(EXERCISES[-1])
    workspace.note_passed(EXERCISES[-1])
    assert workspace.current == FIRST
    for exercise in EXERCISES:
        workspace.note_passed(exercise)
    assert workspace.current is None


def test_a_reset_keeps_what_was_written(workspace):
    backups = []
    for text in ("mine", "mine again"):
        workspace.path(FIRST).write_text(text)
        workspace.note_passed(FIRST)
        backups.append(workspace.reset(FIRST))
        assert workspace.path(FIRST).read_bytes() == FIRST.task.read_bytes()
    assert [backup.read_text() for backup in backups] == ["mine", "mine again"]
    assert Workspace(workspace.folder).passed == {}


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"learn init --folder .*nowhere"):
        Workspace(tmp_path / "nowhere").require(FIRST)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "my_work").write_text("")
    with pytest.raises((ConfigError, DataError), match=r"is a file|cannot be read"):
        Workspace(tmp_path / "my_work").start()


def test_strange_lines_are_no_obstacle(workspace):
    (workspace.folder / "progress.txt").write_text(
        f"passed\nhints x\n\npassed {FIRST.name}\nhints {SECOND.name} many\n"
    )
    assert list(Workspace(workspace.folder).passed) == [FIRST.name]


@pytest.mark.parametrize(
    "name", ["1f1b", "1F1B", "one_f_one_b", "07_one_f_one_b.py", "my_work/pipeline/07_one_f_one_b.py"]
)
def test_an_exercise_has_several_names(name):
    assert find_exercise(name).name == "1f1b"


def test_another_name_gets_advice():
    with pytest.raises(UsageError, match="did you mean 'ring-all-reduce'"):
        find_exercise("ring-allreduce")
