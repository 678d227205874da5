"""The clock-cycle view: at each tick, which stage of each rank works on which micro-batch.

```
        │ rank 0  │ rank 1  │
tick  0 │ F0.0    │ ·       │
tick  1 │ F0.1    │ F1.0    │
tick  2 │ ·       │ B1.0    │
tick  3 │ ·       │ ┊       │
```
"""

from __future__ import annotations

from microparallel.drawing.heading import head_of
from microparallel.drawing.kinds import Naming, kind_of, naming_of
from microparallel.drawing.legend import Entry, legend_text, of_kind
from microparallel.drawing.lines import Line, Segment, prose
from microparallel.program import Program
from microparallel.simulator import Costs, simulate
from microparallel.trace import Event, Trace

_GOES_ON = "┊"
Clock = list[list[tuple[Event, bool] | None]]  # for each rank and tick: what it does, and whether it begins here


def clock(program: Program, width: int | None) -> list[Line]:
    """Draw a schedule tick by tick. A forward takes one tick, as does each half of a backward; messages take none."""
    trace = simulate(program, Costs())
    table, naming = _table(trace), naming_of(program)
    cell_width = max(
        [len(str(event.op)) for events in trace.compute for event in events] + [len(f"rank {program.world_size - 1}")]
    )
    gutter = len(f"tick {max(0, len(table[0]) - 1)} ")
    ranks = program.world_size
    if width is not None:
        ranks = max(1, min(ranks, (width - gutter - 1) // (cell_width + 3)))
    titles = [Segment(f"│ {f'rank {rank}':{cell_width}} ", style="bold") for rank in range(ranks)]
    lines: list[Line] = [
        *prose(head_of(trace), width, style="bold", between=" · "),
        [Segment(" " * gutter), *titles, Segment("│")],
    ]
    for tick in range(len(table[0])):
        name = f"tick {tick:>{gutter - 6}} "
        cells = [segment for rank in range(ranks) for segment in _cell(table[rank][tick], cell_width, rank, naming)]
        lines.append([Segment(name), *cells, Segment("│")])
    return [*lines, *_notes(trace, ranks, width)]


def _table(trace: Trace) -> Clock:
    ticks = round(trace.makespan)
    table: Clock = [[None] * ticks for _ in trace.compute]
    for rank, events in enumerate(trace.compute):
        for event in events:
            for tick in range(round(event.start), round(event.end)):
                table[rank][tick] = (event, tick == round(event.start))
    return table


def _cell(doing: tuple[Event, bool] | None, width: int, rank: int, naming: Naming) -> Line:
    if doing is None:
        return [Segment(f"│ {'·':{width}} ", style="dim")]
    event, begins = doing
    text = f" {str(event.op) if begins else _GOES_ON:{width}} "
    return [Segment("│"), Segment(text, kind_of(event.operation), naming.shade(rank, event.operation))]


def _notes(trace: Trace, shown: int, width: int | None) -> list[Line]:
    kinds = dict.fromkeys(kind_of(event.operation) for events in trace.compute for event in events)
    signs = ((_GOES_ON, "goes on"), ("·", "idle"), ("", "the numbers are stage.micro-batch"))
    notes = legend_text([*map(of_kind, kinds), *(Entry(*sign, quiet=True) for sign in signs)], width)
    if shown < trace.followed.world_size:
        missing = f"ranks {shown} to {trace.followed.world_size - 1} do not fit: a greater width shows them"
        notes += prose(missing, width, style="dim")
    return notes
