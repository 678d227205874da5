"""One look at a program: is it right, what would it cost, how does it look, and how does it run on real ranks?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from microparallel import drawing
from microparallel.drawing.heading import title_of
from microparallel.drawing.html import panel, steps_of
from microparallel.errors import UsageError
from microparallel.playground.reading import finite, marks_of, read
from microparallel.playground.starts import completed_or_same
from microparallel.program import Collective, Program, TrainingStep, to_text
from microparallel.simulator import Costs, simulate
from microparallel.simulator.costs import default_costs
from microparallel.text import count, short, show_percent
from microparallel.trace import Trace
from microparallel.verifier import verify

_PER_STAGE = ("forward", "backward_input", "backward_weight")
_OF_MESSAGES = ("latency", "seconds_per_byte", "bytes_per_value")
_MOST_HOPS = 400  # messages of a collective that is shown hop by hop
_MOST = 1e9


def costs_of(program: Program, given: Mapping[str, Any]) -> Costs:
    """The costs that a page gives; for what it does not give, those of a drawing."""
    usual = default_costs(program)
    named: dict[str, Any] = {name: getattr(usual, name) for name in (*_PER_STAGE, *_OF_MESSAGES)}
    for name, value in given.items():
        if name not in named:
            raise UsageError(f"{name!r} is no cost; choose from {', '.join(named)}")
        several = isinstance(value, list) and name in _PER_STAGE
        numbers = value if several else [value]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= _MOST:
                raise UsageError(f"{name} {number!r}: a number from 0 to {_MOST:.0e} is needed")
        if several and isinstance(program.goal, TrainingStep) and len(numbers) != program.goal.stages:
            raise UsageError(
                f"{name} has {count(len(numbers), 'number')}, and the program {program.goal.stages} stages"
            )
        named[name] = value
    return Costs(**named)


def look(text: str, costs: Mapping[str, Any]) -> dict[str, Any]:
    """All that the page shows of a program. What is wrong with it is an answer, too: `problem` and `marks`."""
    program: Program | None = None
    try:
        program = read(text)
        whole = completed_or_same(program)  # once: to complete a program takes as long as to verify it
        verify(whole)
        problem, marks = "", []
    except UsageError as error:
        problem, marks = str(error), [[mark.start, mark.end] for mark in marks_of(error, text, program)]
    answer: dict[str, Any] = {"problem": problem, "marks": marks, "title": "", "figure": "", "numbers": []}
    if program is None:
        return answer
    answer |= {"title": title_of(program), "completed": whole is not program}
    answer["kind"] = "collective" if isinstance(program.goal, Collective) else "training"
    usual = default_costs(program)
    answer["costs"] = {name: getattr(usual, name) for name in (*_PER_STAGE, *_OF_MESSAGES)}
    try:
        trace = simulate(whole, costs_of(program, costs))
        figure = panel(trace, memory=_has_memory(trace))
    except UsageError as error:  # no end, or only observed, as `verify` has said; or a wrong cost
        return answer | ({} if problem else {"problem": str(error)})
    return answer | {
        "figure": figure,
        "numbers": numbers_of(trace),
        "waits": waits_of(trace),
        "hops": hops_of(program) if not problem else None,
        "run": how_to_run(program) if not problem else [],
    }


def hops_of(program: Program) -> dict[str, Any] | None:
    """A collective hop by hop, for a page that steps through it; None for what has no hops, or too many."""
    if not isinstance(program.goal, Collective) or len(program) > 2 * _MOST_HOPS:
        return None
    return steps_of(program)


def _has_memory(trace: Trace) -> bool:
    return isinstance(trace.followed.goal, TrainingStep)


def numbers_of(trace: Trace) -> list[list[Any]]:
    """What is measured, for people: name, words, number (for comparing two programs; less is better)."""
    rows: list[list[Any]] = [["makespan", short(trace.makespan), finite(trace.makespan)]]
    if isinstance(trace.followed.goal, TrainingStep):
        rows.append(["bubble", show_percent(trace.bubble_fraction), finite(trace.bubble_fraction)])
        peaks = trace.peak_activations
        rows.append(["peak activations", _each(peaks), max(peaks)])
        memory = trace.peak_memory
        rows.append(["peak bytes held", _each([short(size) for size in memory]), max(memory)])
    rows.append(["messages sent", _each(trace.messages_sent), max(trace.messages_sent)])
    sent = trace.bytes_sent
    rows.append(["bytes sent", _each([short(size) for size in sent]), max(sent)])
    return rows


def _each(numbers: list[Any]) -> str:
    """A number for each rank; if they are all alike, that one."""
    if len(set(numbers)) == 1:
        return str(numbers[0])
    return " ".join(map(str, numbers[:12])) + (" …" if len(numbers) > 12 else "")


def waits_of(trace: Trace) -> list[list[str]]:
    """For each rank: how long it computes, communicates with nothing to hide it, and does neither."""
    rows = zip(trace.work, trace.exposed_communication, trace.waiting, strict=True)
    return [[f"rank {rank}", *(short(max(0.0, part)) for part in parts)] for rank, parts in enumerate(rows)]


def how_to_run(program: Program) -> list[str]:
    """How a program runs on real ranks: what to do, and the command or the Python for it."""
    goal, ranks, file = program.goal, program.world_size, "mine.txt"
    if isinstance(goal, Collective):
        if goal.kind == "all-reduce":
            return [
                f"Save the text as {file}. Then, in Python, on {ranks} real processes:",
                "import torch, microparallel as mp\n\n"
                f'PROGRAM = mp.program.from_text(open("{file}").read())\n\n\n'
                "def add_up(comms):\n"
                "    return comms.all_reduce(torch.tensor([comms.rank]), algorithm=PROGRAM).item()\n\n\n"
                'if __name__ == "__main__":\n'
                f"    print(mp.launch(add_up, ranks={ranks}))\n",
            ]
        return [f"Save the text as {file}. Its cost on your links:", f"microparallel simulate {file}"]
    if goal.buckets:
        return [
            "Real ranks make a step like this one from your model's layers; a recorded run shows it:",
            f"microparallel train --ranks {ranks} --trace --out runs/mine && microparallel report runs/mine",
        ]
    return [
        f"Save the text as {file}. It trains on {ranks} real processes, each of which follows its line:",
        f"microparallel train --pp {ranks} --microbatches {goal.microbatches} --schedule {file}",
    ]


def file_of(text: str, costs: Mapping[str, Any], form: str) -> dict[str, str]:
    """A program as a file to keep: its text, a figure, or a Chrome trace."""
    program = read(text)
    if form == "text":
        return {"name": "mine.txt", "type": "text/plain", "content": to_text(program)}
    trace = simulate(program, costs_of(program, costs))
    if form == "svg":
        memory = _has_memory(trace)
        return {"name": "mine.svg", "type": "image/svg+xml", "content": drawing.draw(trace, as_="svg", memory=memory)}
    if form == "chrome":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace.to_chrome(path)
            content = json.dumps(json.loads(path.read_text(encoding="utf-8")), separators=(",", ":"))
        return {"name": "mine-chrome.json", "type": "application/json", "content": content}
    raise UsageError(f"{form!r} is no form of a file; choose text, svg or chrome")
