"""What a puzzle's page shows: the sets of levels, a board, and a hint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from microparallel.drawing.kinds import KINDS, kind_of, shaded
from microparallel.errors import ProgramError
from microparallel.playground.board import NEXT, Board, Move, Score, measure
from microparallel.playground.bounds import all_reduces, durations
from microparallel.playground.levels import MEASURES, ONE_BY_ONE, SETS, Level, all_levels, solved
from microparallel.playground.looking import how_to_run
from microparallel.playground.words import in_words, kind_words, named, object_words, sentence, slices_named
from microparallel.program import (
    AllGather,
    AllReduce,
    Collective,
    Free,
    Op,
    OptimizerStep,
    Program,
    ReduceScatter,
    Slices,
    TrainingStep,
    halves,
    lane,
    parse_op,
    parse_value,
    to_text,
)
from microparallel.program.symbols import promised, whole
from microparallel.schedules import complete
from microparallel.text import count, short
from microparallel.trace import Event, Trace

SECOND_STARS = {"activations": "activations", "memory": "memory", "bytes": "what is sent"}
IN_PYTHON = 'mp.Pipeline(model, comms, schedule=mp.program.from_text(open("mine.txt").read()), …)'


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
        "second": short(_counted(board, trace)) if trace is not None and level.counted else "",
        "missing": board.missing(),
        "score": None if score is None else _scored(board, score),
    }


def _counted(board: Board, trace: Trace) -> float:
    return board.peak_memory() if board.level.counted == "memory" else measure(trace, board.level.counted)


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
        "measure": MEASURES.get(level.counted, ""),
        "most": level.limits.get(level.counted),
        "targets": targets_of(level),
        "ranks": level.ranks,
        "slices": level.goal.slices if isinstance(level.goal, Collective) else 0,
        "legend": legend_of(level),
        "rules": rules_of(level),
    }


def targets_of(level: Level) -> list[str]:
    """What each star is for."""
    best = solved().get(level.id, {}).get("best")
    if best is None:
        return ["solved"]
    second = [f"at most {_amount(level.second, best['second'])}"] if level.second else []
    return ["solved", f"time at most {short(best['makespan'])}", *second]


def _amount(measured: str, number: float) -> str:
    """So much of what a level counts beside the time: "1 activation held at once by any one rank"."""
    nouns = {"activations": "activation", "memory": "byte", "bytes": "whole tensor"}
    does = "sent by any one rank" if measured == "bytes" else "held at once by any one rank"
    return f"{short(number)} {nouns[measured]}{'' if number == 1 else 's'} {does}"


def rules_of(level: Level) -> list[str]:
    """What a level's moves cost beside what the legend says, and its limits."""
    said = []
    if isinstance(level.goal, TrainingStep):
        if level.kind == "pipeline":
            said.append("Messages between ranks are added for you, and take no time.")
        else:
            said.append("Computation (the upper row) and communication (the lower one) go on side by side.")
            held = (
                f"bucket {index} has {'layer' if stop - start == 1 else 'layers'} {_listed(range(start, stop))}"
                for index, (start, stop) in enumerate(level.goal.buckets)
            )
            said.append(sentence(", ".join(held)))
    else:
        said += _costs_of_messages(level)
    nouns = {"activations": "activation", "memory": "byte"}
    for name, most in level.limits.items():
        if name == "hops":
            said.append(f"At most {count(int(most), 'hop')}.")
        else:
            said.append(f"A rank may hold at most {count(int(most), nouns[name])} at once.")
    return said


def _listed(numbers: Iterable[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


def legend_of(level: Level) -> list[list[str]]:
    """What stands on the board, and what it means: for each kind of operation in the trays, or of a collective."""
    if isinstance(level.goal, Collective):
        return _legend_of_messages(sums=_sums(level))
    ops = [op for tray in level.trays for op in tray]
    kinds: dict[str, list[Op]] = {}
    for op in sorted(ops, key=lambda op: KINDS.index(kind_of(op))):
        kinds.setdefault(str(op)[: 2 if isinstance(op, Free) else 1], []).append(op)
    takes = durations(level) if level.kind == "replicas" else {}
    return [_explained(level, mine, takes) for mine in kinds.values()]


def _explained(level: Level, ops: list[Op], takes: Mapping[Op, float]) -> list[str]:
    """One kind of operation, explained by one of its kind: if possible by one whose numbers differ."""
    op = next((op for op in ops if halves(op) and halves(op)[0].stage > halves(op)[0].microbatch), ops[0])
    words = f"{kind_words(op)} {object_words(level, op)}".strip()
    if halves(op):
        if level.kind == "replicas" and level.per_rank == 1:
            words += " on the rank's micro-batch"
        return [named(op), f"{words}; {_times(level, ops)}"]
    if isinstance(op, Free | OptimizerStep):
        return [named(op), f"{words}; it takes no time"]
    if isinstance(op, ReduceScatter):
        words += ": each rank gets its part of the sum"
    if isinstance(op, AllGather):
        words += ": each rank gets all of them"
    return [named(op), f"{words}; it takes {_times_of_buckets(level, ops, takes)}"]


def _times(level: Level, ops: list[Op]) -> str:
    """How long forwards, or backwards, take stage by stage."""
    times = {halves(op)[0].stage: level.costs.of(op, 0) for op in ops}
    if len(set(times.values())) == 1:
        return f"each takes {short(next(iter(times.values())))}"
    return "it takes " + ", ".join(f"{short(time)} on stage {stage}" for stage, time in sorted(times.items()))


def _times_of_buckets(level: Level, ops: list[Op], takes: Mapping[Op, float]) -> str:
    """How long an operation of the network takes, by the size of its bucket; a part of an all-reduce beside that."""
    assert isinstance(level.goal, TrainingStep)
    whole = all_reduces(level)
    said = []
    for index, (start, stop) in enumerate(level.goal.buckets):
        op = next((op for op in ops if op.value.index == index), None)  # type: ignore[union-attr]
        if op is not None:
            beside = "" if isinstance(op, AllReduce) else f" (an all-reduce takes {short(whole[stop - start])})"
            said.append(f"{short(takes[op])} for a bucket of {count(stop - start, 'layer')}{beside}")
    return ", ".join(dict.fromkeys(said))


def _legend_of_messages(*, sums: bool) -> list[list[str]]:
    digits = (
        "digits in a slice: the ranks whose parts are summed in it; whole, with a green frame, if it has all of them"
        if sums
        else "the digit in a slice: the rank from which it comes"
    )
    return [
        ["C0", "slice 0 of the tensor"],
        ["0 1" if sums else "0", digits],
        ["hop", "messages that travel at the same time: each carries what its sender held when the hop began"],
        ["new", "it arrived in this hop, and can be sent on in the next"],
    ]


def _costs_of_messages(level: Level) -> list[str]:
    costs, goal = level.costs, level.goal
    assert isinstance(goal, Collective)
    slice_takes = costs.seconds_per_byte / goal.slices
    parts = [
        f"{short(costs.latency)}" if costs.latency else "",
        f"{short(slice_takes)}{' more' if costs.latency else ''} for each slice in it" if slice_takes else "",
    ]
    said = [f"A message takes {', and '.join(filter(None, parts)) or 'no time'}."]
    if level.slow:
        pairs = dict.fromkeys((min(a, b), max(a, b)) for a, b, _ in level.slow)
        listed = ", ".join(f"{a} and {b}" for a, b in pairs)
        said.append(f"Between ranks {listed} it takes {short(level.slow[0][2])}.")
    return [*said, "A rank sends one message after another, and receives one after another."]


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
    stages = sorted({half.stage for one in level.trays[which] for half in halves(one)})
    shade = stages.index(halves(op)[0].stage) if level.kind == "pipeline" and len(stages) > 1 else 0
    quiet = isinstance(op, Free)
    return {
        "op": str(op),
        "name": named(op),
        "word": f"{kind_words(op)} {object_words(level, op)}".strip(),
        "fill": "#b8c0c8" if quiet else shaded(kind.fill, shade),
        "ink": "#000000" if quiet else kind.ink,
        "lane": str(lane(op)),
    }


def _hops(board: Board) -> dict[str, Any] | None:
    """Of a collective: what was sent hop by hop, and what each rank holds now."""
    level = board.level
    if level.kind != "messages" or not isinstance(level.goal, Collective):
        return None
    last = len(board.hops[-1])
    before = Board(level, board.moves[: len(board.moves) - last])
    return {
        "sent": [[sentence(_said(level, text)) for text in hop] for hop in board.hops],
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


def _said(level: Level, text: str) -> str:
    move = Move(text).sending
    assert move is not None
    sender, receiver, adds, value = move
    slices = parse_value(value)
    assert isinstance(slices, Slices)
    how = ", to be added there" if adds else ", in place of what is there" if _sums(level) else ""
    return f"rank {sender} sends rank {receiver} its {slices_named(slices)}{how}"


def _sums(level: Level) -> bool:
    """Whether a collective adds anything up; what arrives in another can only stand where nothing was."""
    return isinstance(level.goal, Collective) and level.goal.kind in ("all-reduce", "reduce-scatter", "reduce")


def _scored(board: Board, score: Score) -> dict[str, Any]:
    """A solved level: its stars, what is known of it, and the program to take away."""
    level, known = board.level, solved().get(board.level.id, {})
    program = complete(board.program) if level.kind == "replicas" else board.program
    return {
        "stars": score.stars,
        "most": most_stars(level),
        "makespan": score.makespan,
        "second": score.second,
        "missing": _stars_missing(level, score, known),
        "known": known_of(level, known),
        "program": to_text(program),
        "run": _run(level, program),
    }


def _stars_missing(level: Level, score: Score, known: Mapping[str, Any]) -> list[str]:
    """Which stars a solution has not reached, and by how much."""
    best = known.get("best")
    if best is None:
        return []
    said = []
    if (more := score.makespan - best["makespan"]) > 1e-9:
        said.append(f"The star for the time is missing: {short(score.makespan)} is {short(more)} too long.")
    if level.second and (more := score.second - best["second"]) > 1e-9:
        name = SECOND_STARS[level.second]
        held = _amount(level.second, score.second)
        said.append(f"The star for {name} is missing: {held} is {short(more)} too many.")
    return said


def _run(level: Level, program: Program) -> list[str]:
    """How a solved program runs on real ranks: first what to do, then the command or the Python for it."""
    first, *rest = how_to_run(program)
    first = first.replace("Save the text as", "Choose “Download the program”, and save it as")
    if level.kind == "pipeline":
        rest += ["or in Python:", IN_PYTHON]
    return [first, *rest]


def known_of(level: Level, known: dict[str, Any]) -> list[str]:
    """Par, the best that is known, and the bound, in words."""
    if not known:
        return []
    said = []

    def both(one: dict[str, Any]) -> str:
        return f"time {short(one['makespan'])}" + (f", {_amount(level.second, one['second'])}" if level.second else "")

    if known["par"] is not None:
        name = known["par"]["name"]
        whose = name if name == ONE_BY_ONE else f"what the course's best builder, {name}, takes"
        said.append(f"Par, which is {whose}: {both(known['par'])}.")
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
        return sentence(_said(level, move) + _as_it_was(board))
    which, _, word = move.partition(":")
    where = f" on rank {which.partition('@')[0]}" if level.kind == "pipeline" else ""
    return sentence(f"taken away{where}" if word == "-" else f"{in_words(level, parse_op(word))} is placed{where}")


def _as_it_was(board: Board) -> str:
    """A remark where a rank has sent what it had before something arrived in this hop."""
    sender, _, _, value = Move(board.moves[-1]).sending or (0, 0, False, "C0")
    slices = parse_value(value)
    assert isinstance(slices, Slices)
    before = Board(board.level, board.moves[:-1])
    return "; it is what the rank held when this hop began" if before.arrived_now(sender, slices) else ""


def move_words(level: Level, move: str) -> str:
    """A move that could be made, in words."""
    if move == NEXT:
        return "begin the next hop"
    if level.kind == "messages":
        return _said(level, move)
    which, _, word = move.partition(":")
    where = f" on rank {which}" if level.kind == "pipeline" else ""
    return f"place {in_words(level, parse_op(word))}{where}"


def place_words(level: Level, move: str) -> str:
    """Where a move is to be made and of which kind it is, without the move itself."""
    if move == NEXT:
        return "this hop is complete"
    if (message := Move(move).sending) is not None:
        return f"rank {message[0]} has something to send in this hop"
    which, _, word = move.partition(":")
    where = f" on rank {which}" if level.kind == "pipeline" else ""
    kind = kind_words(parse_op(word))
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}{where} comes next"
