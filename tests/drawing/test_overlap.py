"""The drawing of a step bucket by bucket, of simulated steps whose times are known."""

import xml.etree.ElementTree as ElementTree

import pytest

import microparallel as mp
from microparallel.drawing import coloured
from microparallel.drawing.overlap import overlap_lines, rows_by_bucket
from microparallel.program import Program, TrainingStep

SVG = "{http://www.w3.org/2000/svg}"


def simulated(layers=4, buckets=2, ranks=2, seconds_per_byte=2.0):
    return mp.simulate(mp.schedules.ddp(layers, buckets, ranks), mp.Costs(seconds_per_byte=seconds_per_byte))


def test_a_step_is_drawn_as_it_happened():
    # 4 forwards of 1, 4 backwards of 2, then 2 all-reduces of 4: one from 8 to 12, one from 12 to 16
    assert mp.course.draw_overlap(simulated(), rank=0, width=60) == (
        "ddp · 2 ranks · 2 all-reduces · step 16\n"
        "communication 8, 50.0 % of it hidden\n"
        "rank 0     │forward    │B3   │B2   │B1   │B0   │···········│\n"
        "  bucket 0                   •    •████████████\n"
        "  bucket 1                               •    •░░░░░░░░░░░░\n"
        "           ├──────────────┼──────────────┼──────────────┼──┤\n"
        "time       0              5              10             15\n"
        "│B0  backward of layer 0   • its gradient is ready\n"
        "─ full: waits its turn, or other ranks\n"
        "█ all-reduce behind computation\n"
        "░ all-reduce with nothing to hide behind\n"
    )


def test_every_rank_has_its_rows_and_a_full_bucket_waits_for_the_one_before():
    rows = rows_by_bucket(simulated(layers=4, buckets=4, seconds_per_byte=3.0))  # each all-reduce takes 3
    assert [mine.rank for mine in rows] == [0, 1]
    for mine in rows:
        assert [bucket.name for bucket in mine.buckets] == ["gradient 3", "gradient 2", "gradient 1", "gradient 0"]
        assert [(bucket.full, bucket.start, bucket.end) for bucket in mine.buckets] == [
            (6, 6, 9),
            (8, 9, 12),
            (10, 12, 15),
            (12, 15, 18),
        ]
        assert [bucket.exposed for bucket in mine.buckets] == [(), (), ((12, 15),), ((15, 18),)]
        assert [stretch.name for stretch in mine.computed] == ["forward", "B3", "B2", "B1", "B0"]


@pytest.mark.parametrize("width", [40, 57, 100, 200])
@pytest.mark.parametrize("layers", [1, 3, 40])
def test_no_line_is_wider_than_asked_for(width, layers):
    trace = simulated(layers, layers, ranks=3)
    text = mp.course.draw_overlap(trace, width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert text.count("gradient") >= 3 * layers
    assert coloured(overlap_lines(trace, width=width)).plain == "".join(
        "".join(segment.text for segment in line) + "\n" for line in overlap_lines(trace, width=width)
    )


def test_the_figure_has_a_bar_for_every_bucket_and_a_dot_for_every_gradient():
    root = ElementTree.fromstring(mp.course.draw_overlap(simulated(layers=6, buckets=3), "svg"))
    bars = [shape for shape in root.iter(f"{SVG}rect") if shape.get("class") == "hidden"]
    exposed = [shape for shape in root.iter(f"{SVG}rect") if shape.get("class") == "exposed"]
    dots = [shape for group in root.iter(f"{SVG}g") if group.get("class") == "bucket" for shape in group]
    assert len(bars) == 6 and len(exposed) == 2
    assert sum(shape.tag == f"{SVG}circle" for shape in dots) == 12
    # A unit of time is as long everywhere: each all-reduce takes 4 of 22, the last one all exposed.
    widths = {round(float(bar.get("width"))) for bar in bars + exposed}
    assert widths == {round((960 - 96 - 12) * 4 / 22)}
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert "bucket 2: ready at 18, under way from 18 to 22, of which 4 exposed" in titles


def test_times_in_seconds_are_shown_in_milliseconds():
    trace = mp.simulate(
        mp.schedules.ddp(4, 2, 2),
        mp.Costs(forward=1e-3, backward_input=1e-3, backward_weight=1e-3, seconds_per_byte=2e-3),
    )
    text = mp.course.draw_overlap(trace, seconds=True)
    assert "step 16.0 ms · communication 8.00 ms, 50.0 % of it hidden" in text
    assert "\nms         0 " in text
    assert "of which 4.00 ms exposed" in mp.course.draw_overlap(trace, "svg", seconds=True)


def test_a_trace_in_which_nothing_took_time_is_drawn_too():
    program = Program("nothing", TrainingStep(1, 1, ((0, 1),)), ((),))
    for as_ in ("text", "svg"):
        assert "nothing" in mp.course.draw_overlap(mp.Trace([], program), as_)
    at_once = mp.simulate(mp.schedules.ddp(2, 2, 2), mp.Costs(forward=0, backward_input=0, backward_weight=0))
    assert at_once.makespan == 0
    for as_ in ("text", "svg"):
        assert "gradient 1" in mp.course.draw_overlap(at_once, as_)


@pytest.mark.parametrize(
    ("trace", "options", "words"),
    [
        (lambda: mp.simulate(mp.schedules.build("gpipe", 2, 2), mp.Costs()), {}, "has no buckets to draw"),
        (lambda: simulated(), {"rank": 2}, "ranks 0 to 1"),
        (lambda: simulated(), {"as_": "html"}, "text, svg"),
        (lambda: simulated(), {"width": 39}, "at least 40"),
    ],
)
def test_what_cannot_be_drawn_is_refused(trace, options, words):
    with pytest.raises(mp.errors.UsageError, match=words):
        mp.course.draw_overlap(trace(), **options)


def test_what_is_broadcast_is_no_computation():
    ranks = [f"^:w@dp/0 = F0.{rank} B0.{rank} *U0@dp" for rank in (0, 1)]
    text = "program step\ngoal: training step of 1 stage, 2 micro-batches, buckets 0:1\n"
    step = mp.program.from_text(text + "\n".join(f"rank {rank}: {ops}" for rank, ops in enumerate(ranks)))
    (rows,) = rows_by_bucket(mp.simulate(step, mp.Costs(latency=1)), rank=0)
    assert [(part.name, part.start, part.end) for part in rows.computed] == [("forward", 1, 2), ("B0", 2, 4)]
