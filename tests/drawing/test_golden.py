"""Drawings that a person has checked by eye, kept as they were.

After a deliberate change, `MICROPARALLEL_UPDATE_GOLDEN=1 pytest tests/drawing/test_golden.py` rewrites them: look at
the difference before you keep it.
"""

import os
from pathlib import Path

import pytest

import microparallel as mp

FOLDER = Path(__file__).parent.parent / "golden"
WIDTH = 200


def schedule(name):
    program = mp.schedules.build(name, ranks=4, microbatches=8)
    return mp.draw(program, width=WIDTH) + "\n" + mp.draw(program, view="clock", width=WIDTH)


DRAWINGS = {
    "1f1b": lambda: schedule("1f1b"),
    "gpipe": lambda: schedule("gpipe"),
    "interleaved": lambda: schedule("interleaved"),
    "zb-h1": lambda: schedule("zb-h1"),
    "ring": lambda: mp.draw(mp.collectives.build("ring", 4), width=WIDTH),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_as_it_was(name):
    file = FOLDER / f"{name}.txt"
    drawing = DRAWINGS[name]()
    if os.environ.get("MICROPARALLEL_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(drawing, encoding="utf-8")
    assert drawing == file.read_text(encoding="utf-8")


def test_the_golden_drawings_show_the_known_numbers():
    """FACTS: with p=4, m=8 and B=2F, 1F1B and GPipe end at 33, and 3/11 of that is bubble."""
    heads = {name: (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()[0] for name in DRAWINGS}
    assert "makespan 33 · bubble 27.3 % · peak activations 4 3 2 1" in heads["1f1b"]
    assert "makespan 33 · bubble 27.3 % · peak activations 8 8 8 8" in heads["gpipe"]
    assert "makespan 57 · bubble 15.8 % · peak activations 11" in heads["interleaved"]  # 48 + 3·(2+4)/2
    assert "makespan 27 · bubble 11.1 % · peak activations 4 4 4 4" in heads["zb-h1"]  # 24 + 3·(1+1−1)
    assert "6 hops · messages sent 6 6 6 6" in heads["ring"]


def test_the_readme_s_figure_is_drawn_from_the_program():
    """`python docs/images/record.py` draws it anew."""
    figure = Path(__file__).parents[2] / "docs" / "images" / "1f1b.svg"
    assert figure.read_text() == mp.draw(mp.schedules.build("1f1b", 4, 8), as_="svg")
