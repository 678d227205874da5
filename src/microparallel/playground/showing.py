"""What a puzzle's page shows: the sets of levels, a board, and a hint."""

from __future__ import annotations

from typing import Any

from microparallel.drawing.kinds import KINDS, kind_of, shaded
from microparallel.errors import ProgramError
from microparallel.playground.board import NEXT, Board, Move, Score, measure
from microparallel.playground.levels import MEASURES, SETS, Level, all_levels, solved
from microparallel.playground.looking import how_to_run
from microparallel.program import Collective, Op, Program, TrainingStep, halves, lane, to_text
from microparallel.program.symbols import promised, whole
from microparallel.schedules import complete
from microparallel.text import short
from microparallel.trace import Event, Trace


def sets() -> list[dict[str, Any]]:
    """All levels, set by set."""
    levels = all_levels().values()
    return [
        {
            "name": name,
            "title": title,
            "levels": [
                {"id": one.id, "title": one.title, "stars": most_stars(one)} for one in levels if one.set == name
            ],
        }
        for name, title in SETS.items()
    ]


def most_stars(level: Level) -> int:
    """How many stars a level has: one for solving it, one for the time, one for what else it counts."""
    return 3 if level.second else 2


# ── a board ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def shown(board: Board) -> dict[str, Any]:
    """Everything that a page shows of a board."""
    level = board.level
    known = solved().get(level.id, {})
    trace = _trace(board)
    score = board.score(known.get("best"))
    return {
        "level": about(level),
        "moves": list(board.moves),
        "rows": _rows(board, trace),
        "hops": _hops(board),
        "makespan": short(trace.makespan) if trace is not None else "",
        "length": trace.makespan if trace is not None else 0,
        "second": short(_second(board, trace)) if trace is not None and level.second else "",
        "missing": board.missing(),
        "score": None if score is None else _scored(board, score),
    }


def _second(board: Board, trace: Trace) -> float:
    return board.peak_memory() if board.level.second == "memory" else measure(trace, board.level.second)


def about(level: Level) -> dict[str, Any]:
    """What does not change while a level is played."""
    return {
        "id": level.id,
        "set": SETS[level.set],
        "title": level.title,
        "kind": level.kind,
        "story": level.story,
        "goal": str(level.goal),
        "lesson": level.lesson,
        "stars": most_stars(level),
        "measure": MEASURES.get(level.second, ""),
        "ranks": level.ranks,
        "slices": level.goal.slices if isinstance(level.goal, Collective) else 0,
        "rules": rules_of(level),
    }


def rules_of(level: Level) -> list[str]:
    """The costs and limits of a level, in words."""
    said = []
    if isinstance(level.goal, TrainingStep):
        costs, goal = level.costs, level.goal
        times = ", ".join(f"{name} {_each(values)}" for name, values in _times(level).items())
        said.append(f"Times: {times}.")
        said.append(_notation(level))
        if costs.seconds_per_byte:
            said.append(f"A layer's gradients or parameters take {short(costs.seconds_per_byte)} to send.")
        if goal.stages and level.kind == "pipeline":
            said.append("Messages between ranks are added for you, and take no time.")
    else:
        said += _costs_of_messages(level)
    words = {"activations": "A rank may hold {} activations at once.", "memory": "A rank may hold {} bytes at once."}
    words["hops"] = "There are {} hops."
    said += [words[name].format(short(most)) for name, most in level.limits.items()]
    return said


def _notation(level: Level) -> str:
    """How operations are written, for who has not seen it."""
    halved = any(str(op).startswith("I") for tray in level.trays for op in tray)
    back = "I and W are the two halves of its backward" if halved else "B is its backward"
    if level.kind == "pipeline":
        return f"F1.0 is the forward of stage 1 on micro-batch 0; {back}."
    more = f"; F1.1 is that on its second, of {level.per_rank}" if level.per_rank > 1 else ""
    return f"F1.0 is the forward of layer 1 on a rank's micro-batch{more}; {back}."


def _times(level: Level) -> dict[str, list[float]]:
    """How long each kind of operation takes, stage by stage."""
    found: dict[str, list[float]] = {}
    names = {"F": "F", "B": "B", "I": "I", "W": "W"}
    for op in sorted((op for tray in level.trays for op in tray if halves(op)), key=lambda op: halves(op)[0].stage):
        (half,) = halves(op)
        times = found.setdefault(names[str(op)[0]], [])
        if len(times) <= half.stage:
            times.append(level.costs.of(op, 0))
    return found


def _each(values: list[float]) -> str:
    return short(values[0]) if len(set(values)) == 1 else " ".join(map(short, values)) + " (stage by stage)"


def _costs_of_messages(level: Level) -> list[str]:
    costs, goal = level.costs, level.goal
    assert isinstance(goal, Collective)
    slice_takes = costs.seconds_per_byte / goal.slices
    parts = [
        f"{short(costs.latency)}" if costs.latency else "",
        f"{short(slice_takes)} for each slice" if slice_takes else "",
    ]
    said = [f"A message takes {' and '.join(filter(None, parts)) or 'no time'}."]
    if level.slow:
        pairs = dict.fromkeys((min(a, b), max(a, b)) for a, b, _ in level.slow)
        listed = ", ".join(f"{a} and {b}" for a, b in pairs)
        said.append(f"Between ranks {listed} it takes {short(level.slow[0][2])}.")
    return [*said, "A rank sends one message at a time, and receives one."]


def _trace(board: Board) -> Trace | None:
    try:
        return board.trace()
    except ProgramError:
        return None


def _rows(board: Board, trace: Trace | None) -> list[dict[str, Any]]:
    """Of a training step: each list with its cells in time, and what is still to be placed in it."""
    level = board.level
    if level.kind == "messages":
        return []
    rows = []
    for which, mine in enumerate(board.lists):
        name = f"rank {which}" if level.kind == "pipeline" else "every rank"
        times = _times_of(which, mine, trace)
        placed = [
            _cell(level, which, op) | {"at": at, "start": start, "end": end}
            for at, (op, (start, end)) in enumerate(zip(mine, times, strict=True))
        ]
        left = [_cell(level, which, op) for op in sorted(board.left(which), key=_kind_first)]
        rows.append({"name": name, "placed": placed, "left": left})
    return rows


def _kind_first(op: Op) -> tuple[int, str]:
    """In a tray operations lie by kind, so that their order gives nothing away."""
    kind = kind_of(op)
    return KINDS.index(kind) if kind in KINDS and str(op)[0] != "!" else len(KINDS), str(op)


def _times_of(rank: int, ops: tuple[Op, ...], trace: Trace | None) -> list[tuple[float, float]]:
    """When each operation of a list begins and ends; a Free takes no time, and stands where the one before it ends."""
    events: dict[Op, list[Event]] = {}
    for event in sorted(trace.by_rank[rank] if trace is not None else (), key=lambda event: event.start):
        events.setdefault(event.operation, []).append(event)
    times: list[tuple[float, float]] = []
    for op in ops:
        mine = events.get(op, [])
        before = max((end for _, end in times), default=0.0)
        times.append((mine[0].start, mine.pop(0).end) if mine else (before, before))
    return times


def _cell(level: Level, which: int, op: Op) -> dict[str, Any]:
    kind = kind_of(op)
    word = {"!": "free"}.get(str(op)[0], kind.word)
    stages = sorted({half.stage for one in level.trays[which] for half in halves(one)})
    shade = stages.index(halves(op)[0].stage) if level.kind == "pipeline" and len(stages) > 1 else 0
    quiet = str(op)[0] == "!"
    return {
        "op": str(op),
        "name": str(op).removesuffix("@dp"),
        "word": f"{word} {_words(level, op)}".strip(),
        "fill": "#b8c0c8" if quiet else shaded(kind.fill, shade),
        "ink": "#000000" if quiet else kind.ink,
        "lane": str(lane(op)),
    }


def _words(level: Level, op: Op) -> str:
    if halves(op):
        (half,) = halves(op)
        noun = "layer" if level.kind == "replicas" else "stage"
        batch = f", micro-batch {half.microbatch}" if level.per_rank != 1 or level.kind == "pipeline" else ""
        return f"of {noun} {half.stage}{batch}"
    value = str(getattr(op, "value", ""))
    names = {"U": "gradients", "T": "parameters", "D": "gradients"}
    if value[:1] not in names:
        return ""
    number, _, turn = value[1:].partition(".")
    kind = "layer" if value[0] == "D" else "bucket"
    batch = f", micro-batch {turn}" if turn and level.per_rank > 1 else ""
    what = f"the {names[value[0]]} of {kind} {number}{batch}"
    return what if str(op)[0] == "!" else f"of {what}"


def _hops(board: Board) -> dict[str, Any] | None:
    """Of a collective: what was sent hop by hop, and what each rank holds now."""
    level = board.level
    if level.kind != "messages" or not isinstance(level.goal, Collective):
        return None
    last = len(board.hops[-1])
    before = Board(level, board.moves[: len(board.moves) - last])
    return {
        "sent": [[_said(text) for text in hop] for hop in board.hops],
        "holds": _holds(level, level.goal, board),
        "begin": _holds(level, level.goal, before),
    }


def _holds(level: Level, goal: Collective, board: Board) -> list[list[dict[str, Any]]]:
    """What each rank holds, slice by slice: whose parts, whether it is whole, and whether the goal wants it there."""
    return [
        [
            {
                "of": sorted(rank for (rank, _), times in symbol.items() for _ in range(times)),
                "whole": dict(symbol) == whole(goal, level.ranks, index),
                "wanted": promised(goal, rank, index),
            }
            for index, symbol in enumerate(slices)
        ]
        for rank, slices in enumerate(board.holdings())
    ]


def _said(text: str) -> str:
    move = Move(text).sending
    assert move is not None
    sender, receiver, adds, value = move
    return f"rank {sender} sends {value} to rank {receiver}, {'added' if adds else 'in place of what is there'}"


def _scored(board: Board, score: Score) -> dict[str, Any]:
    """A solved level: its stars, what is known of it, and the program to take away."""
    level, known = board.level, solved().get(board.level.id, {})
    program = complete(board.program) if level.kind == "replicas" else board.program
    return {
        "stars": score.stars,
        "most": most_stars(level),
        "makespan": score.makespan,
        "second": score.second,
        "known": known_of(level, known),
        "program": to_text(program),
        "run": _run(level, program),
    }


def _run(level: Level, program: Program) -> list[str]:
    """How a solved program runs on real ranks."""
    if level.kind != "pipeline":
        return how_to_run(program)
    said = how_to_run(program)
    return [
        *said,
        "or in Python:",
        'mp.Pipeline(model, comms, schedule=mp.program.from_text(open("mine.txt").read()), …)',
    ]


def known_of(level: Level, known: dict[str, Any]) -> list[str]:
    """Par, the best that is known, and the bound, in words."""
    if not known:
        return []
    said = []
    second = MEASURES.get(level.second, "")

    def both(one: dict[str, Any]) -> str:
        beside = f", {second}: {short(one['second'])}" if second else ""
        return f"time {short(one['makespan'])}{beside}"

    if known["par"] is not None:
        said.append(f"Par: {both(known['par'])} ({known['par']['name']}).")
    best = known["best"]
    said.append(f"The best that is known: {both(best)} ({best['by']}).")
    bound = known["bound"]
    reached = (
        "so no order is faster"
        if bound["makespan"] >= best["makespan"] - 1e-9
        else "whether it can be reached is not known"
    )
    if known.get("exhausted"):
        reached = f"it cannot be reached: {known['exhausted']}"
    said.append(f"No time can be below {short(bound['makespan'])}: {bound['because']}; {reached}.")
    return said


# ── moves in words ──────────────────────────────────────────────────────────────────────────────────────────────────


def done(board: Board) -> str:
    """What the last move did, in words."""
    level, move = board.level, board.moves[-1]
    if move == NEXT:
        return f"Hop {len(board.hops)} begins: what arrived can be sent now."
    if level.kind == "messages":
        return f"R{_said(move)[1:]}."
    which, _, word = move.partition(":")
    where = f" on rank {which.partition('@')[0]}" if level.kind == "pipeline" else ""
    return f"Taken away{where}." if word == "-" else f"{word} is placed{where}."


def move_words(level: Level, move: str) -> str:
    """A move that could be made, in words."""
    if move == NEXT:
        return "begin the next hop"
    if level.kind == "messages":
        return _said(move)
    which, _, word = move.partition(":")
    return f"{word} on rank {which}" if level.kind == "pipeline" else word
