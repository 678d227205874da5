"""What a page says to do with a program on real ranks is done here."""

import shlex

import pytest

import microparallel as mp
from microparallel.playground.looking import how_to_run
from microparallel.program import to_text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_pipeline_s_command_trains_by_its_file(start, tmp_path, name):
    program = mp.schedules.build(name, 2, 2)
    (tmp_path / "mine.txt").write_text(to_text(program))
    words = shlex.split(how_to_run(program)[1])
    command = start(*words, "--steps", 2, "--out", "runs/mine")
    assert command.wait(55) == 0, command.errors
    assert "2 steps" in command.output


@pytest.mark.slow
def test_an_all_reduce_s_script_adds_up_by_its_program(start, tmp_path):
    program = mp.collectives.build("ring", 3)
    (tmp_path / "mine.txt").write_text(to_text(program))
    (tmp_path / "script.py").write_text(how_to_run(program)[1])
    command = start("python", "script.py")
    assert command.wait(55) == 0, command.errors
    assert command.output.strip() == "[3, 3, 3]"


@pytest.mark.slow
def test_other_collectives_are_simulated_from_their_file(start, tmp_path):
    program = mp.collectives.build("broadcast", 3)
    (tmp_path / "mine.txt").write_text(to_text(program))
    command = start(*shlex.split(how_to_run(program)[1]))
    assert command.wait(55) == 0, command.errors
    assert "broadcast" in command.output
