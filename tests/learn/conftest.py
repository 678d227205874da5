"""Judge answers with ranks that are shared with the other tests."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # answers.py, for the lists of wrong answers


@pytest.fixture
def judge(warm_ranks, tmp_path):
    """Judge a text as an exercise's answer, in this process: how a referee is kept at arm's length is tested apart."""
    from microparallel.learn.referee import judge

    def of(exercise, text):
        file = tmp_path / exercise.file
        file.write_text(text, "utf-8")
        return judge(exercise.name, file, warm_ranks)

    return of
