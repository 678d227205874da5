"""Reduce-scatter and all-gather into memory of the caller's, where parts of one flat tensor stay in their place."""

import pytest
import torch

from microparallel.errors import UsageError


def both_halves(comms, length, in_segment, in_place):
    """An all-reduce in two halves, on parts of one flat tensor; returns it beside what was to be expected."""
    size = length * comms.world_size
    flat = comms.empty(size, torch.float64) if in_segment else torch.empty(size, dtype=torch.float64)
    flat.copy_(torch.arange(size, dtype=torch.float64) * (comms.rank + 1))
    mine = flat[comms.rank * length : (comms.rank + 1) * length]
    before = flat.clone()
    part = mine if in_place else torch.empty_like(mine)
    request = comms.reduce_scatter(flat, into=part, async_op=True)
    kept = request.wait() is part
    others = torch.ones(size, dtype=torch.bool)
    others[comms.rank * length : (comms.rank + 1) * length] = not in_place
    untouched = torch.equal(flat[others], before[others])
    gathered = comms.all_gather(part, flat)
    same_memory = [one.data_ptr() for one in gathered] == [part.data_ptr() for part in flat.chunk(comms.world_size)]
    factor = sum(range(1, comms.world_size + 1))
    return kept, untouched, same_memory, torch.equal(flat, torch.arange(size, dtype=torch.float64) * factor)


@pytest.mark.parametrize("length", [1, 5, 700_000])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "beside it"])
@pytest.mark.parametrize("in_segment", [True, False], ids=["transport's memory", "any memory"])
def test_parts_of_a_flat_tensor(any_pool, length, in_segment, in_place):
    if in_segment and any_pool._transport == "cuda":
        pytest.skip("the transport's own memory is the CPU's")
    for found in any_pool.run(both_halves, 3, length, in_segment, in_place, timeout=50):
        assert found == (True, True, True, True)


def uneven(comms):
    """Parts of 0, 1, 2, … elements, as where whole parameters are given to ranks."""
    parts = [torch.full((rank,), float(comms.rank), dtype=torch.float64) for rank in range(comms.world_size)]
    mine = comms.reduce_scatter(parts, into=parts[comms.rank])
    places = [torch.empty(rank, dtype=torch.float64) for rank in range(comms.world_size)]
    comms.all_gather(mine, places)
    return [place.tolist() for place in places]


def test_parts_of_different_sizes(any_pool):
    assert any_pool.run(uneven, 3, timeout=50) == [[[], [3.0], [3.0, 3.0]]] * 3


def refused(comms):
    flat, errors = torch.zeros(2 * comms.world_size), []
    for call in (
        lambda: comms.reduce_scatter(torch.zeros(2 * comms.world_size + 1)),
        lambda: comms.reduce_scatter(flat, into=torch.zeros(3)),
        lambda: comms.reduce_scatter(flat, into=torch.zeros(2, dtype=torch.float64)),
        lambda: comms.all_gather(torch.zeros(2), torch.zeros(1)),
        lambda: comms.all_gather(torch.zeros(2), [torch.zeros(2)]),
        lambda: comms.all_gather(torch.zeros(2), torch.zeros(1).expand(2 * comms.world_size)),
    ):
        try:
            call()
        except UsageError as error:
            errors.append(str(error))
    return errors


def test_places_that_cannot_hold_what_comes(pool):
    for errors in pool.run(refused, 2, transport="shm", timeout=50):
        assert len(errors) == 6
        assert "2 equal parts" in errors[0] and "float32[3]" in errors[1] and "float64[2]" in errors[2]
