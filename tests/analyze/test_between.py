"""What hosts are to each other: who measures with whom when, and what is said of versions."""

import itertools

import pytest

from microparallel.analyze.between import Host, Pair, Report, differences, differing, rounds
from microparallel.analyze.hosts import parse_hosts
from microparallel.analyze.link_probe import Measured
from microparallel.errors import UsageError
from microparallel.topology import Link


@pytest.mark.parametrize("count", range(2, 10))
def test_each_pair_meets_once_and_no_host_has_two_links_at_once(count):
    played = [*rounds(count)]
    assert sorted(itertools.chain(*played)) == [*itertools.combinations(range(count), 2)]
    assert len(played) == count - 1 + count % 2
    for group in played:
        busy = [*itertools.chain(*group)]
        assert len(busy) == len({*busy})


def host(name, **versions):
    return Host(name, "10.0.0.1", "eth0", 1500, versions)


def test_versions_that_differ_are_named_with_their_hosts():
    hosts = [host("alpha", torch="2.9", Python="3.11"), host("beta", torch="2.10", Python="3.11")]
    assert differing([*hosts, host("gamma", torch="2.9", Python="3.11")]) == {
        "torch": "2.9 on alpha, gamma; 2.10 on beta"
    }


@pytest.mark.parametrize(
    ("ahead", "said"), [(3.0, "3.00 s ahead of"), (-2.0, "2.00 s behind"), (0.6, None), (0.1, None)]
)
def test_clocks_that_are_apart_are_told_beyond_their_doubt(ahead, said):
    hosts = [host("alpha", torch="2.9"), host("beta", torch="2.9")]
    link = Measured(0.4, (0.4, 0.4), 1e6, 1e6, ahead, clock_error=0.2)
    found = differences(hosts, [Pair(0, 1, link), Pair(1, 0)])
    assert [one.what for one in found] == ([f"beta's clock is {said} alpha's"] if said else [])


def test_the_slowest_link_is_planned_with():
    pairs = [Pair(0, 1, None, Link(1e-3, 1e-9)), Pair(0, 2, None, Link(1e-6, 1e-6)), Pair(1, 2)]
    assert Report("alpha:1", [], [], pairs).slowest == pairs[1]
    assert Report("alpha:1", [], [], [Pair(0, 1)]).slowest is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("alpha", "a link has two ends; name at least two hosts, as in --between alpha,HOST2"),
        ("alpha,", "there is a comma too many"),
        ("alpha,beta,alpha", "alpha is named more than once"),
        ("localhost,beta", "localhost is every host itself"),
        ("127.0.1.1,beta", "127.0.1.1 is every host itself"),
    ],
)
def test_names_that_make_no_sense(text, reason):
    with pytest.raises(UsageError) as raised:
        parse_hosts(text)
    assert reason in str(raised.value) and f"--between {text}" in str(raised.value)
