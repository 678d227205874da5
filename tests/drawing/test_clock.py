"""The clock-cycle view: who works on what at each tick."""

import re

import pytest

import microparallel as mp


def rows(text):
    return [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if line.startswith("tick")]


def test_the_diagonal_of_a_pipeline():
    text = mp.draw(mp.schedules.build("gpipe", 4, 4), view="clock")
    assert "tick  3 │ F0.3   │ F1.2   │ F2.1   │ F3.0   │" in text


@pytest.mark.parametrize("name", mp.schedules.PIPELINES)
def test_every_operation_begins_once_and_goes_on_for_as_long_as_it_takes(name):
    program = mp.schedules.build(name, 3, 6)
    trace = mp.simulate(program)
    table = rows(mp.draw(program, view="clock"))
    assert len(table) == trace.makespan
    for rank, events in enumerate(trace.compute):
        column = [row[rank + 1] for row in table]
        assert [cell for cell in column if cell not in ("·", "┊")] == [str(event.op) for event in events]
        assert len(column) - column.count("·") == trace.work[rank]
        for event in events:
            assert column[int(event.start)] == str(event.op)


def test_it_counts_ticks_whatever_a_trace_took():
    program = mp.schedules.build("1f1b", 2, 2)
    slow = mp.simulate(program, mp.Costs(forward=7.3, latency=3))
    assert mp.draw(slow, view="clock") == mp.draw(program, view="clock")


def test_ranks_that_do_not_fit_are_named():
    text = mp.draw(mp.schedules.build("gpipe", 9, 2), view="clock", width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert re.search(r"ranks 3 to 8\s+do not fit", text)
