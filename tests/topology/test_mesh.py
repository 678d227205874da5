"""A mesh: rows are pipelines, columns are replicas, and every rank is in one of each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microparallel.errors import UsageError
from microparallel.topology import Mesh


def test_the_drawing():
    mesh = Mesh(dp=2, pp=3)
    assert mesh.size == 6
    assert [mesh.row(replica) for replica in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert [mesh.column(place) for place in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert mesh.where(4) == (1, 1)


@given(dp=st.integers(1, 9), pp=st.integers(1, 9))
def test_each_rank_is_in_one_row_and_one_column(dp, pp):
    mesh = Mesh(dp, pp)
    everybody = list(range(mesh.size))
    assert sorted(rank for replica in range(dp) for rank in mesh.row(replica)) == everybody
    assert sorted(rank for place in range(pp) for rank in mesh.column(place)) == everybody
    for rank in everybody:
        replica, place = mesh.where(rank)
        assert mesh.rank(replica, place) == rank
        assert mesh.row(replica)[place] == mesh.column(place)[replica] == rank


@pytest.mark.parametrize(("dp", "pp", "word"), [(0, 2, "dp=0"), (2, -1, "pp=-1")])
def test_an_axis_has_at_least_one_rank(dp, pp, word):
    with pytest.raises(UsageError, match=f"{word}: a mesh has at least 1 rank along each axis"):
        Mesh(dp, pp)
