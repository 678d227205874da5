"""Counts, sizes, times and names are written in one way."""

import pytest

from microparallel.errors import UsageError
from microparallel.text import (
    count,
    did_you_mean,
    nearest,
    one_of,
    parse_ranges,
    parse_sizes,
    short,
    show_age,
    show_percent,
    show_ranges,
    show_ranks,
    show_seconds,
    show_size,
    time_unit,
)


def test_counts_know_their_plural():
    assert [count(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert count(3, "micro-batch", "es") == "3 micro-batches"


@pytest.mark.parametrize(
    ("number", "shown"), [(33.0, "33"), (0.25, "0.25"), (27.3149, "27.31"), (10**6, "1000000"), (1234.5, "1234")]
)
def test_numbers_without_a_unit_are_short(number, shown):
    assert short(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (1.5e-7, "0.15 µs"),
        (1.23e-5, "12.3 µs"),
        (0.9996e-3, "1.00 ms"),
        (0.1234, "123 ms"),
        (99.96, "100 s"),
        (2, "2.00 s"),
    ],
)
def test_times_have_three_digits(seconds, shown):
    assert show_seconds(seconds) == shown


def test_a_row_of_times_shares_a_unit():
    assert time_unit(0.0123) == (1e-3, "ms")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *((-0.2, "0.0 s"), (0.41, "0.4 s"), (11.9, "12 s"), (119, "119 s"), (120, "2 min"), (181, "3 min")),
        *((7140, "119 min"), (7200, "2 h"), (47 * 3600, "47 h"), (48 * 3600, "2 days"), (12.4 * 86400, "12 days")),
    ],
)
def test_ages_are_told_as_people_tell_them(seconds, shown):
    assert show_age(seconds) == shown


def test_shares_have_one_digit_after_the_point():
    assert show_percent(0.1249) == "12.5 %"


def test_sizes_have_the_unit_that_suits_them():
    shown = [show_size(size) for size in (100, 4_000, 4_096, 1_500_000, 100_000_000, 2 * 10**9)]
    assert shown == ["100 B", "4 KB", "4.096 KB", "1.5 MB", "100 MB", "2 GB"]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4KB", (4_000,)),
        ("4 kb, 64KiB", (4_000, 65_536)),
        ("1.5MB,1MiB,1M", (1_500_000, 1_048_576, 1_000_000)),
        ("100,100B,2GB", (100, 2_000_000_000)),
    ],
)
def test_sizes_as_people_write_them(text, sizes):
    assert parse_sizes(text, "--sizes") == sizes


@pytest.mark.parametrize("text", ["4XB", "4KB,,1MB", "-4KB", "0", "1.5"])
def test_what_is_no_size_is_refused_with_the_flag(text):
    with pytest.raises(UsageError, match=f"--sizes {text}: .*(4KB)"):
        parse_sizes(text, "--sizes")


def test_names_to_choose_from():
    assert [one_of(names) for names in (["sgd"], ["adam", "sgd"], ["adam", "adamw", "sgd"])] == [
        "sgd",
        "adam or sgd",
        "adam, adamw or sgd",
    ]


def test_the_nearest_name_is_offered():
    known = ("ring", "tree", "halving-doubling")
    assert did_you_mean("rnig", known) == "did you mean 'ring'?"
    assert did_you_mean("doubling", known) == "did you mean 'halving-doubling'?"  # a part of it
    assert did_you_mean("zzz", known) == "choose one of ring, tree, halving-doubling"
    assert did_you_mean("zzz", known, "see --help") == "see --help"
    assert nearest("e", known) is None  # too little to guess from


@pytest.mark.parametrize(
    ("ranks", "text"), [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7"), ((3, 1), "3,1")]
)
def test_ranges_of_ranks(ranks, text):
    assert show_ranges(ranks) == text
    assert parse_ranges(text) == ranks


def test_a_text_that_was_cut_has_the_ranks_before_the_cut():
    assert parse_ranges("0-3,7…#0123abcd") == (0, 1, 2, 3, 7)


def test_ranks_by_number():
    assert [show_ranks(ranks) for ranks in ([2], [0, 1], range(3))] == ["rank 2", "ranks 0, 1", "ranks 0, 1, 2"]
