"""Tables whose columns are declared once: which are shown, how wide they are, and their legend."""

import io

from rich.console import Console

from microparallel.bench.engine import Measured
from microparallel.bench.report import Column, cores_are_shared, few_steps, fitting, legend, make_table, spread

COLUMNS = [
    Column("name", str, on_the_left=True),
    Column("length", lambda word: str(len(word)), "letters of {what}", left_out=2),
    Column("loud", str.upper, "louder,\nand louder", {"!": "very loud"}, width=8, left_out=1),
    Column("empty", lambda _: "–", "says nothing"),
]
ROWS = ["ring", "tree"]


def headings(columns):
    return [column.heading for column in columns]


def test_a_column_that_says_nothing_is_not_shown():
    assert headings(fitting(COLUMNS, ROWS, 80)) == ["name", "length", "loud"]


def test_where_there_is_no_room_columns_are_left_out_in_their_order():
    assert headings(fitting(COLUMNS, ROWS, 4 + 2 + 6 + 2 + 8)) == ["name", "length", "loud"]
    assert headings(fitting(COLUMNS, ROWS, 4 + 2 + 6 + 2 + 7)) == ["name", "length"]
    assert headings(fitting(COLUMNS, ROWS, 4 + 1 + 6 + 1 + 8, gap=1)) == ["name", "length", "loud"]
    assert headings(fitting(COLUMNS, ROWS, 1)) == ["name"]


def test_a_table_is_as_wide_as_was_reckoned():
    for gap in (1, 2):
        console = Console(file=io.StringIO(), width=80)
        console.print(make_table(fitting(COLUMNS, ROWS, 80, gap), ROWS, gap=gap))
        heading, line, *rows = console.file.getvalue().splitlines()
        assert len(line) == 4 + 6 + 8 + 2 * gap and rows[0].split() == ["ring", "4", "RING"]
        assert heading.startswith("name") and rows[1].startswith("tree")


def test_the_legend_explains_what_is_shown():
    assert legend(fitting(COLUMNS, ROWS, 80), what="a word").splitlines() == [
        "length  letters of a word",
        "loud    louder,",
        "        and louder",
        "!       very loud",
    ]
    assert legend([COLUMNS[0]]) == ""


def test_times_have_a_median_with_quartiles_and_extremes():
    found = spread([1, 5, 2, 4, 3])
    assert list(found.values()) == [3, 2, 4, 1, 5]
    assert set(spread([7.0]).values()) == {7.0}


def test_a_reader_is_warned():
    assert few_steps("mlp", 5) == [] and few_steps("mlp", 1)[0].startswith("mlp: 1 step of each method")
    crowded = Measured(4, 4, 2, "shm", "cpu")
    assert cores_are_shared(crowded)[0].startswith("4 ranks share 2 cores")
    assert (
        cores_are_shared(Measured(4, 4, 4, "shm", "cpu")) == cores_are_shared(Measured(4, 4, 2, "nccl", "cuda")) == []
    )
