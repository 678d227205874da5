"""Ranks that stay warm for the whole session: starting processes is what costs time in these tests."""

import pytest
from hypothesis import settings

import microparallel as mp

# How long an example takes says more about the machine than about the code; pytest's own timeout catches hangs.
settings.register_profile("microparallel", deadline=None)
settings.load_profile("microparallel")


class CpuPool(mp.Pool):
    """Warm ranks that talk over gloo and compute on the CPU unless a test says otherwise, also where there is a GPU."""

    def run(self, function, ranks, *arguments, **named_arguments):
        return super().run(function, ranks, *arguments, **{"transport": "gloo", "device": "cpu"} | named_arguments)


@pytest.fixture(scope="session")
def pool():
    with CpuPool() as warm_ranks:
        yield warm_ranks
