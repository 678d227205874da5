"""The plots of the lessons: they draw the table above them, all of its numbers and no others."""

import re
from pathlib import Path

import pages
import plots
import pytest

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


def test_a_format_has_as_many_cells_as_bits():
    block = pages.blocks_of(Path("page.md"), "```bits\ncaption: Two.\nbf16 8 7\nfp16 5 10\n```\n")[0]
    html = plots.bits(block)
    assert html.count('height="20"') == 32
    assert "bf16: 1 sign bit, 8 exponent bits, 7 fraction bits" in html
