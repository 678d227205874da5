"""Ranks that stay warm for the whole session: starting processes is what costs time in these tests."""

import pytest
from hypothesis import settings

import microparallel as mp

# How long an example takes says more about the machine than about the code; pytest's own timeout catches hangs.
settings.register_profile("microparallel", deadline=None)
settings.load_profile("microparallel")


class CpuPool:
    """Warm ranks on the CPU, also where there is a GPU, that talk over one transport unless a test says otherwise."""

    def __init__(self, ranks, transport):
        self._ranks = ranks
        self._transport = transport

    def run(self, function, ranks, *arguments, **named_arguments):
        defaults = {"transport": self._transport, "device": "cpu"}
        return self._ranks.run(function, ranks, *arguments, **defaults | named_arguments)


@pytest.fixture(scope="session")
def warm_ranks():
    with mp.Pool() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def pool(warm_ranks):
    return CpuPool(warm_ranks, "gloo")


@pytest.fixture(scope="session", params=["gloo", "shm"])
def any_pool(request, warm_ranks):
    """For what must hold on every transport."""
    return CpuPool(warm_ranks, request.param)
