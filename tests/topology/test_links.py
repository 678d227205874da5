"""Slow ranks and links, as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import microparallel as mp
from microparallel.topology import Link, parse_link, parse_slow_links, parse_slow_ranks, show_link


def test_ranks():
    assert parse_slow_ranks(["2=3x", "0=1.5"], 3) == {2: 3.0, 0: 1.5}


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("0-1=5ms", Link(0.005, 0)),
        ("1-0=100Mbit", Link(0, 8e-8)),
        ("0-1=20us,1GB/s", Link(2e-5, 1e-9)),
        ("0-1=8bit", Link(0, 1.0)),
    ],
)
def test_links(text, link):
    ((ends, found),) = parse_slow_links([text], 2).items()
    assert ends == {0, 1}
    assert found.latency == pytest.approx(link.latency)
    assert found.seconds_per_byte == pytest.approx(link.seconds_per_byte)


LINKS = ("0-1", "0-1=", "0-1=5", "0-0=5ms", "0-3=5ms", "0-1=5ms,0Mbit", "0-1=5ms;1Mbit")


@pytest.mark.parametrize(
    ("parse", "texts", "words"),
    [
        *((parse_slow_ranks, [text], f"--slow-rank {text}: ") for text in ("2", "2=", "2=x", "2=0.5x", "a=2x", "3=2x")),
        (parse_slow_ranks, ["2=3x", "2=4x"], "--slow-rank 2=4x: rank 2 has a speed already"),
        *((parse_slow_links, [text], f"--slow-link {text}: ") for text in LINKS),
        (parse_slow_links, ["0-1=5ms", "1-0=1Gbit"], "--slow-link 1-0=1Gbit: these two have a link already"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_means_nothing_or_is_said_twice(parse, texts, words):
    with pytest.raises(mp.errors.ConfigError, match=words):
        parse(texts, 3)


@given(st.floats(1e-6, 100), st.floats(1e-12, 0.1))
def test_a_link_is_written_as_it_is_read(latency, seconds_per_byte):
    text = show_link(Link(latency, seconds_per_byte))
    found = parse_link(text, f"--between {text}")
    assert found.latency == pytest.approx(latency, rel=0.01)
    assert found.seconds_per_byte == pytest.approx(seconds_per_byte, rel=0.01)


def test_a_link_as_people_write_it():
    assert show_link(Link(5e-3, 8e-8)) == "5ms,100Mbit"
    assert show_link(Link(1.204e-4, 1e-9)) == "120us,8Gbit"
    assert show_link(Link(2, None)) == "2s"
