"""The line of the user's code that led to a call."""

import subprocess
import sys
import threading
from pathlib import Path

import torch

import microparallel.comms.comms
import microparallel.data_parallel.reducer
import microparallel.torch_backend.group
from microparallel.observe import place
from microparallel.observe.place import relevance


def test_relevance_of_files():
    user, ours = __file__, microparallel.data_parallel.reducer.__file__
    assert relevance(user) > relevance(ours) > relevance("<string>") > 0
    inside = [microparallel.comms.comms.__file__, microparallel.torch_backend.group.__file__, place.__file__]
    libraries = [torch.__file__, threading.__file__, "<frozen runpy>"]
    assert [relevance(file) for file in (*inside, *libraries)] == [0] * 6


def test_the_packages_that_are_passed_over_exist():
    """A package that was renamed would otherwise be named to the user as the place of every call."""
    assert all(Path(folder).is_dir() for folder in place._BENEATH)


def made_through_torch(comms):
    torch.distributed.all_reduce(torch.ones(2))
    folder = comms.flight.folder
    comms.barrier()
    return [str(record.place) for record in microparallel.observe.flight_file.read(folder / "rank-0.flight").records]


def test_a_call_through_torch_is_placed_in_the_user_s_code(pool):
    first, *_ = pool.run(made_through_torch, 2, transport="shm", timeout=40)
    assert [found.partition(":")[0] for found in first] == ["test_place.py"] * len(first)


def test_reading_a_flight_needs_no_torch():
    names = [path.stem for path in Path(place.__file__).parent.glob("[a-z]*.py")]
    imports = "; ".join(f"import microparallel.observe.{name}" for name in names)
    program = f"import sys; {imports}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"
