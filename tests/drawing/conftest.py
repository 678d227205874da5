"""Programs of every kind, for the drawings that must show all of them."""

import pytest

import microparallel as mp

PROGRAMS = {
    "1f1b": lambda: mp.schedules.build("1f1b", 4, 8),
    "dualpipev": lambda: mp.schedules.build("dualpipev", 2, 4),
    "ddp": lambda: mp.schedules.build("ddp", 2),
    "ring": lambda: mp.collectives.build("ring", 4),
    "gather-add": lambda: mp.collectives.build("gather-add", 3),
    "alone": lambda: mp.collectives.build("ring", 1),
}


@pytest.fixture(params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]()
