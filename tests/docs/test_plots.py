"""The plots of the lessons: they draw the table above them, all of its numbers and no others."""

import re
from pathlib import Path

import pages
import plots
import pytest
import results

PAGE = """\
# A page

```output
step  everything  top 1%
  25        0.75    1.22
  50        0.50       –
 100        0.25    0.61
(a line of words)
```

Words.

```plot
caption: A loss of `all` methods.
x: step
y: loss{log}
```
"""


def drawn(log=""):
    file = Path("page.md")
    markdown = plots.with_data(PAGE.format(log=log), file)
    [plot] = [block for block in pages.blocks_of(file, markdown) if block.kind == "plot"]
    return plots.plot(plot)


def points(html):
    lines = re.findall(r'<polyline points="([^"]+)"', html)
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in lines]


@pytest.mark.parametrize("log", ["", ", log"])
def test_each_column_is_a_line_and_what_is_no_number_is_left_out(log):
    html = drawn(log)
    everything, top = points(html)
    assert (len(everything), len(top)) == (3, 2)
    assert [x for x, _ in top] == [everything[0][0], everything[2][0]]
    assert top[0][1] < everything[0][1]  # higher up
    assert re.findall(r"</svg>([^<]+)</span>", html) == ["everything", "top 1%"]
    assert "A loss of <code>all</code> methods." in html


def test_equal_steps_are_as_wide_on_a_plain_axis_and_equal_ratios_on_a_logarithmic_one():
    (a, b, c), _ = points(drawn())
    assert (c[0] - b[0]) == pytest.approx(2 * (b[0] - a[0]), abs=0.2)
    assert (c[1] - b[1]) == pytest.approx(b[1] - a[1], abs=0.2)
    (a, b, c), _ = points(drawn(", log"))  # 0.75, 0.5, 0.25
    assert (c[1] - b[1]) > 1.5 * (b[1] - a[1])


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (0, 10, False, [0, 2, 4, 6, 8, 10]),
        (0, 410, False, [0, 100, 200, 300, 400]),
        (0.09, 110, True, [0.1, 1, 10, 100]),
        (0.11, 2.2, True, [0.2, 0.5, 1, 2]),
    ],
)
def test_ticks_are_round(low, high, log, ticks):
    assert plots.Axis("", log, low, high).ticks() == pytest.approx(ticks)


def test_an_output_without_columns_cannot_be_drawn():
    markdown = "```output\nonly words\n```\n\n```plot\nx: step\n```\n"
    block = pages.blocks_of(Path("page.md"), plots.with_data(markdown, Path("page.md")))[-1]
    with pytest.raises(ValueError, match="no columns of numbers"):
        plots.plot(block)


KEPT = """\
# command: python benchmarks/some.py
# machine: 2 cores, Linux
# date: 2026-11-19

── first ──────
buckets  formula  simulated  other
 1       4.0      4.0        9
 2       3.0      –          9
 4       2.5      2.5        9

── second ──────
buckets  time
1        7
"""
FENCE = """\
```plot
caption: A step.
data: benchmarks/results/kept.txt::first
columns: buckets, formula, simulated
{style}
x: buckets
y: time
```
"""


def drawn_from(folder, monkeypatch, kept=KEPT, fence=FENCE, style="lines: formula"):
    monkeypatch.setattr(results, "ROOT", folder)
    (folder / "benchmarks" / "results").mkdir(parents=True)
    (folder / "benchmarks" / "results" / "kept.txt").write_text(kept)
    markdown = plots.with_data(fence.format(style=style), Path("page.md"))
    return plots.plot(pages.blocks_of(Path("page.md"), markdown)[0])


def test_a_kept_table_is_drawn_and_says_where_it_comes_from(tmp_path, monkeypatch):
    html = drawn_from(tmp_path, monkeypatch, style="lines: formula\npoints: simulated")
    assert [len(line) for line in points(html)] == [3]  # the other column is points
    assert html.count('r="4"') == 1 + 2  # one beside its name
    assert 'r="3"' not in html
    assert "A step. Made by <code>python benchmarks/some.py</code>: 2 cores, Linux, 2026-11-19." in html
    assert "other" not in html


def test_steps_stay_level_until_the_next_number(tmp_path, monkeypatch):
    formula, simulated = points(drawn_from(tmp_path, monkeypatch, style="steps: all"))
    assert len(formula) == 5
    assert formula[0][1] == formula[1][1]
    assert formula[1][0] == formula[2][0]
    assert len(simulated) == 3


def test_a_kept_table_may_have_commas(tmp_path, monkeypatch):
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    lines = ["# command: some", "# machine: one", "# date: 2026-11-19", "n,time", "1,4.5", "2,3"]
    (tmp_path / "benchmarks" / "results" / "kept.csv").write_text("\n".join(lines))
    monkeypatch.setattr(results, "ROOT", tmp_path)
    block = pages.blocks_of(Path("page.md"), "```plot\ndata: benchmarks/results/kept.csv\n```\n")[0]
    assert [len(line) for line in points(plots.plot(block))] == [2]


@pytest.mark.parametrize("missing", ["command", "machine", "date"])
def test_a_table_without_its_origin_cannot_be_drawn(missing, tmp_path, monkeypatch):
    lines = [line for line in KEPT.splitlines() if f"# {missing}" not in line]
    with pytest.raises(ValueError, match=r"kept\.txt does not say where it comes from; its first lines must be"):
        drawn_from(tmp_path, monkeypatch, kept="\n".join(lines))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("formula, simulated", "formula, simlated", "no column simlated; there are buckets, formula"),
        ("kept.txt::first", "kept.txt::third", "no part 'third'"),
        ("results/kept.txt", "results/none.txt", "none.txt is no file below benchmarks/results/"),
        ("lines: formula", "lines: forms", "lines: this plot has no column forms"),
    ],
)
def test_what_a_plot_cannot_find_is_named(old, new, complaint, tmp_path, monkeypatch):
    fence = FENCE.format(style="lines: formula").replace(old, new)
    with pytest.raises(ValueError, match=complaint):
        drawn_from(tmp_path, monkeypatch, fence=fence)


def test_a_format_has_as_many_cells_as_bits():
    block = pages.blocks_of(Path("page.md"), "```bits\ncaption: Two.\nbf16 8 7\nfp16 5 10\n```\n")[0]
    html = plots.bits(block)
    assert html.count('height="20"') == 32
    assert "bf16: 1 sign bit, 8 exponent bits, 7 fraction bits" in html
