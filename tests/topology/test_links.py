"""Slow ranks and links, as people write them."""

import pytest

import microparallel as mp
from microparallel.topology import Link, parse_slow_links, parse_slow_ranks


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


def test_what_is_said_twice():
    with pytest.raises(mp.errors.ConfigError, match="--slow-rank 2=4x: rank 2 has a speed already"):
        parse_slow_ranks(["2=3x", "2=4x"], 3)
    with pytest.raises(mp.errors.ConfigError, match="--slow-link 1-0=1Gbit: these two have a link already"):
        parse_slow_links(["0-1=5ms", "1-0=1Gbit"], 3)


@pytest.mark.parametrize("text", ["2", "2=", "2=x", "2=0.5x", "a=2x", "3=2x"])
def test_ranks_that_mean_nothing(text):
    with pytest.raises(mp.errors.ConfigError, match=f"--slow-rank {text}: "):
        parse_slow_ranks([text], 3)


@pytest.mark.parametrize("text", ["0-1", "0-1=", "0-1=5", "0-0=5ms", "0-3=5ms", "0-1=5ms,0Mbit", "0-1=5ms;1Mbit"])
def test_links_that_mean_nothing(text):
    with pytest.raises(mp.errors.ConfigError, match=f"--slow-link {text}: "):
        parse_slow_links([text], 3)
