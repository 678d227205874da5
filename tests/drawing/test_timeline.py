"""The text timeline tells the truth about time, shows every operation once, and says what it leaves out."""

import re
from collections import Counter
from dataclasses import replace
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import microparallel as mp
from microparallel.drawing.lines import width_of
from microparallel.drawing.rows import rows_of
from microparallel.drawing.scale import choose_scale
from microparallel.drawing.timeline import timeline
from microparallel.program import Free, Join, Lane, Program, Recv, Send, from_text
from microparallel.trace import Event, Trace

PIPELINES = [*mp.schedules.PIPELINES]
SCHEDULE = mp.schedules.build("1f1b", 2, 2)
times = st.floats(min_value=0.01, max_value=100)


def body(text):
    """What each row shows behind its name, up to the line that ends it."""
    rows = [line for line in text.splitlines() if re.match(r"rank +\d+|       *(comm|send|recv)", line)]
    gutter = min(len(re.match(r"(rank +\d+|  +)( comm| send| recv)? *", row)[0]) for row in rows)
    return [row[gutter:] for row in rows]


def names_in(row):
    return re.findall(r"[FBIW]\d+(?:\.\d+)?(?:&B\d+(?:\.\d+)?)?", row)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 3), (3, 2), (4, 8)])
def test_every_operation_appears_once(name, ranks, microbatches):
    program = mp.schedules.build(name, ranks, microbatches)
    one_stage = program.goal.stages == ranks
    for row, ops in zip(body(mp.draw(program)), program.ranks, strict=True):
        computed = [str(op) for op in ops if mp.program.lane(op) is Lane.COMPUTE and not isinstance(op, Free)]
        expected = [re.sub(r"(\w)\d+\.", r"\1", name) for name in computed] if one_stage else computed
        assert names_in(row) == expected


def test_rows_and_notes_account_for_every_operation():
    for program in (mp.schedules.build("ddp", 3), mp.schedules.build("zbv", 2, 4), mp.collectives.build("direct", 4)):
        rows = rows_of(mp.simulate(program, mp.Costs(latency=0.5)))
        shown = Counter((row.rank, cell.op) for row in rows.rows for cell in row.cells)
        shown.update((event.rank, event.op) for event in rows.instant)
        ops = Counter((rank, op) for rank, mine in enumerate(program.ranks) for op in mine)
        assert shown == Counter({key: n for key, n in ops.items() if not isinstance(key[1], Free | Join)})
        assert not rows.missing


def test_a_part_that_replicas_sum_is_explained():
    hybrid = mp.schedules.zero(3, 1, 4, replicas=2)
    text = mp.draw(hybrid, width=80)
    assert "│U0.0" in text and "│U0.0/" in text
    assert "U0.0/ is a rank's part of U0.0, summed along replica" in text
    for as_ in ("svg", "html"):
        assert "is a rank's part of U0.0, summed along replica" in unescape(mp.draw(hybrid, as_=as_))
    assert "is a rank's part" not in mp.draw(mp.schedules.zero(3, 1, 4))
    cells = rows_of(mp.simulate(mp.schedules.zero(3, 4, 4, replicas=2, buckets=2), mp.Costs(latency=1))).cells
    assert {cell.related for cell in cells if cell.full == "U0.0/"} == {(2, 3)}  # the layers of its bucket


@given(forward=times, backward_input=times, backward_weight=times, latency=st.floats(0, 10), width=st.integers(30, 300))
@settings(max_examples=60, deadline=None)
def test_a_cell_stands_where_its_time_is(forward, backward_input, backward_weight, latency, width):
    """No boundary is further from its time than half a column, and every row is as long as the makespan."""
    costs = mp.Costs(forward=forward, backward_input=backward_input, backward_weight=backward_weight, latency=latency)
    rows = rows_of(mp.simulate(mp.schedules.build("zb-h1", 3, 4), costs))
    scale = choose_scale(rows, width)
    for cell in rows.cells:
        for time in (cell.start, cell.end):
            if time <= scale.end:
                assert abs(scale.column(time) - time * scale.columns_per_time) <= 0.5 + 1e-6
    assert scale.column(scale.end) <= width
    lines = timeline(rows, width + 20)
    rows_drawn = [line for line in lines if line and re.match(r"rank|   ", line[0].text) and len(line) > 2]
    assert rows_drawn
    assert len({width_of(line) for line in rows_drawn}) == 1


def test_widths_are_proportional_and_sum_to_the_makespan():
    text = mp.draw(mp.schedules.build("1f1b", 4, 8))
    rows = body(text)
    assert all(len(row) == 33 * 3 + 1 for row in rows)
    boxes = re.findall(r"│([FB]\d) *(?=[│·])", rows[3])
    assert len(boxes) == 16
    assert {len(cell) for cell in re.findall(r"│F\d *", rows[3])} == {3}
    assert {len(cell) for cell in re.findall(r"│B\d *", rows[3])} == {6}


def test_uneven_times_get_whole_columns_where_they_can():
    rows = rows_of(mp.simulate(mp.schedules.build("gpipe", 2, 2), mp.Costs(forward=2, backward_input=2)))
    scale = choose_scale(rows, 200)
    assert scale.columns_per_time == 2  # 1.5 would be enough for the names, and would tear B's of 3 apart


def test_idle_is_visible_and_the_axis_is_below():
    text = mp.draw(mp.schedules.build("1f1b", 2, 2)).splitlines()
    assert text[1:5] == [
        "rank 0  │F0│F1│·····│B0   │··│B1   │",
        "rank 1  ···│F0│B0   │F1│B1   │·····│",
        "        ├──┼──┼──┼──┼──┼──┼──┼──┼──┤",
        "time    0  1  2  3  4  5  6  7  8  9",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipev"])
def test_nothing_is_wider_than_it_may_be(name, width):
    text = mp.draw(mp.schedules.build(name, 4, 8), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_names_give_way_before_time_does():
    program = mp.schedules.build("1f1b", 4, 8)
    wide, narrow = mp.draw(program, width=110), mp.draw(program, width=50)
    assert "too narrow" not in wide
    assert "32 cells are too narrow for their name" in narrow
    assert {len(row) for row in body(narrow)} == {33 + 1}
    assert "stages are not named" in mp.draw(mp.schedules.build("interleaved", 4, 8), width=200)


def test_what_does_not_fit_is_cut_with_a_mark():
    text = mp.draw(mp.schedules.build("gpipe", 2, 200), width=60)
    assert all(row.endswith("…") for row in body(text))
    assert re.search(r"cut at time 51 of 603: a greater width shows more", text)


def test_communication_has_a_row_only_when_it_takes_time():
    program = mp.schedules.build("1f1b", 2, 2)
    assert "comm" not in mp.draw(program) and "recv" not in mp.draw(program)
    assert "takes no time here: 4 × send, 4 × receive" in mp.draw(program)
    with_time = mp.draw(program, costs=mp.Costs(latency=1))
    assert "takes no time" not in with_time
    assert [len(re.findall(word, with_time)) for word in (">A0", "<A0", ">G1", "<G1")] == [1, 1, 1, 1]


def test_sends_and_receives_at_once_have_rows_of_their_own():
    text = mp.draw(mp.collectives.build("ring", 3), view="timeline")
    assert text.splitlines()[1:3] == [
        "rank 0 send  │>C0@1 │>C2@1 │>C1@1 │>C0@1 │",
        "       recv  │<+C2@2│<+C1@2│<C0@2 │<C2@2 │",
    ]


def test_buckets_overlap_with_the_backward():
    rows = body(mp.draw(mp.schedules.build("ddp", 2, layers=4, buckets=2)))
    computing, talking = rows[0], rows[1]
    assert names_in(computing) == ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0"]
    assert talking.index("U0") == computing.index("B1")
    assert talking.index("U1") > computing.index("B0")


def test_a_real_run_is_drawn_in_its_own_unit_from_its_own_beginning():
    program = mp.schedules.build("1f1b", 2, 2)
    simulated = mp.simulate(program, mp.Costs(latency=0.001, forward=1, backward_input=1, backward_weight=1))
    seconds = [
        event._replace(start=1e9 + event.start * 0.0013, end=1e9 + event.end * 0.0013) for event in simulated.events
    ]
    text = mp.draw(Trace(seconds, program))
    assert names_in(body(text)[0]) == ["F0", "F1", "B0", "B1"]
    assert "×10⁻³" in text
    assert "too short to be seen" in text
    assert max(map(len, text.splitlines())) < 200


def test_cells_that_overlap_go_into_rows_of_their_own():
    program = from_text("program p\ngoal: training step of 1 stage, 2 micro-batches\nrank 0: F0.0 F0.1 B0.0 B0.1\n")
    events = [Event(0, Lane.COMPUTE, op, start, start + 2) for start, op in enumerate(program.ranks[0])]
    text = mp.draw(Trace(events, program))
    assert sorted(name for row in text.splitlines()[1:3] for name in names_in(row)) == ["B0", "B1", "F0", "F1"]


def test_what_never_happens_is_said():
    ring = mp.collectives.build("ring", 2)
    program = replace(ring, ranks=((*ring.ranks[0], Send(ring.ranks[0][0].value, 1)), ring.ranks[1]))
    trace = Trace(mp.simulate(ring, mp.Costs(latency=1)).events, program)
    assert "never happens: >C0@1 of rank 0" in mp.draw(trace, view="timeline")


def test_a_program_that_waits_for_ever_is_refused():
    program = Program("stuck", mp.program.Collective("all-reduce", 1), ((Recv(mp.program.Slices(0, 1), 1),), ()))
    with pytest.raises(mp.errors.ProgramError):
        mp.draw(program)


def test_nothing_to_do():
    assert "nothing happens" in mp.draw(mp.collectives.build("ring", 1))
    assert "nothing happens" in mp.draw(mp.collectives.build("ring", 1), view="timeline")


@pytest.mark.parametrize(
    ("subject", "arguments", "words"),
    [
        (SCHEDULE, {"as_": "pdf"}, "text, svg, html"),
        (SCHEDULE, {"view": "sideways"}, "timeline, clock, hops"),
        (SCHEDULE, {"view": "hops"}, "no hops"),
        (SCHEDULE, {"width": 39}, "width=39"),
        (SCHEDULE, {"as_": "svg", "view": "clock"}, "view='clock'"),
        (mp.simulate(SCHEDULE), {"costs": mp.Costs()}, "costs are for a program"),
        (mp.collectives.build("ring", 3), {"view": "clock"}, "no clock view"),
        (mp.collectives.build("tree", 65), {"as_": "html"}, "65 ranks do not fit on a page"),
        (Trace([], ranks=1), {"as_": "html"}, "microparallel report"),  # what was recorded has its page there
    ],
)
def test_wrong_calls(subject, arguments, words):
    with pytest.raises(mp.errors.UsageError, match=re.escape(words)):
        mp.draw(subject, **arguments)


def test_a_page_knows_how_many_activations_are_held():
    """1F1B's first rank of three holds one more with every forward of its warm-up, and never more than three."""
    page = mp.draw(mp.schedules.build("1f1b", ranks=3, microbatches=5), as_="html")
    held = re.findall(r'data-rank="0" [^>]*data-op="([FB]0\.\d)"[^>]*data-held="(\d)"', page)
    assert held[:4] == [("F0.0", "1"), ("F0.1", "2"), ("F0.2", "3"), ("B0.0", "3")]
    assert max(number for _, number in held) == "3"
