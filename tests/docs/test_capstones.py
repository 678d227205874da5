"""The scripts of the capstones' pages, by which a reader tries an answer: with our answers they say what is right."""

import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest

from microparallel.learn.catalogue import find_exercise
from microparallel.learn.holes import solved

DOCS = Path(__file__).parents[2] / "docs"


def tried(folder, name, *arguments):
    """What the script of a capstone's page prints beside our answer."""
    exercise = find_exercise(name)
    blocks = pages.blocks_of(DOCS / f"{exercise.lesson}.md")
    (script,) = (block.text for block in blocks if any(option.startswith('title="try_') for option in block.options))
    answer = folder / "my_work" / "capstones" / exercise.file
    answer.parent.mkdir(parents=True)
    answer.write_text(solved(exercise.solution.read_text("utf-8")), "utf-8")
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # with processes of its own that are killed; the exercise's grader judges the same answer
def test_the_trainer_has_one_process_s_losses(tmp_path):
    found = re.findall(r"one process (\S+)  yours \[(.*?)\]", tried(tmp_path, "trainer"))
    assert len(found) == 6
    for alone, losses in found:
        assert [float(loss) for loss in losses.split(", ")] == pytest.approx([float(alone)] * 3, abs=1e-8)


def test_the_pipeline_has_one_process_s_gradients(tmp_path):
    apart = re.findall(r"apart by (\S+),", tried(tmp_path, "gpt-pipeline", "3", "6"))
    assert len(apart) == 3
    assert all(float(one) < 1e-14 for one in apart)


@pytest.mark.parametrize("machine", [(), ("2",)])
def test_the_schedule_is_shorter_than_1f1b(tmp_path, machine):
    ((theirs, mine),) = re.findall(r"1F1B (\S+), mine (\S+);", tried(tmp_path, "beat-1f1b", *machine))
    assert float(mine) < float(theirs)
