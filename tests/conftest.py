"""Ranks that stay warm for the whole session: starting processes is what costs time in these tests."""

import pytest

import microparallel as mp


@pytest.fixture(scope="session")
def pool():
    with mp.Pool() as warm_ranks:
        yield warm_ranks
