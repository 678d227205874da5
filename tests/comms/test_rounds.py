"""`comms.exchange_rounds`: sums and gathers that need each other's results, as one call among others."""

import pytest
import torch

from microparallel.comms.message_group import count_messages
from microparallel.comms.slow_links import slow_network
from microparallel.errors import CommsError, Mismatch


def three_rounds(comms, number):
    """A sum; a gather of what it gave and who asks; a sum of 16-bit numbers."""
    total = yield "sum", torch.full((3,), float(comms.rank + number))
    everyone = yield "gather", torch.stack([total[0], torch.tensor(float(comms.rank))])
    wide = yield "sum", torch.full((5,), 1 / 3, dtype=torch.bfloat16)
    return total.tolist(), [one.tolist() for one in everyone], wide[0].item()


def expected(ranks, number):
    total = float(sum(rank + number for rank in range(ranks)))
    third = torch.tensor(1 / 3, dtype=torch.bfloat16).float()
    rounded = (third * ranks).to(torch.bfloat16).item()
    return [total] * 3, [[total, float(rank)] for rank in range(ranks)], rounded


def among_other_calls(comms):
    found = []
    for over in (comms, slow_network(comms, 0.0001), count_messages(comms)[0]):
        before = over.all_reduce(torch.ones(2), async_op=True)
        first = over.exchange_rounds(three_rounds(over, 1), "three", async_op=True)
        second = over.exchange_rounds(three_rounds(over, 5), "three again", async_op=True)
        after = over.all_gather(torch.tensor(over.rank), async_op=True)
        results = [first.wait(), second.wait()]
        found.append((results, before.wait().tolist(), [int(one) for one in after.wait()]))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("check", [False, True])
def test_rounds_among_other_calls(any_pool, ranks, check):
    for found in any_pool.run(among_other_calls, ranks, check=check, timeout=30):
        for results, before, after in found:
            assert results == [expected(ranks, 1), expected(ranks, 5)]
            assert before == [float(ranks)] * 2 and after == list(range(ranks))


def different_words(comms):
    try:
        comms.exchange_rounds(three_rounds(comms, 1), f"of rank {comms.rank}")
    except Mismatch as error:
        return str(error)


def test_ranks_that_exchange_different_things_are_told(any_pool):
    for words in any_pool.run(different_words, 2, check=True, timeout=30):
        assert "of rank 0" in words and "of rank 1" in words


def fails_in_the_middle(comms):
    def rounds():
        yield "sum", torch.ones(3)
        raise ValueError("cannot decode this")

    try:
        comms.exchange_rounds(rounds(), "what fails")
    except (ValueError, CommsError) as error:
        words = str(error)
    return words, comms.all_reduce(torch.ones(1)).item()


def test_an_error_of_the_generator_is_raised_and_the_group_goes_on(any_pool):
    for words, total in any_pool.run(fails_in_the_middle, 2, timeout=30):
        assert "cannot decode this" in words and total == 2


def test_a_large_sum_goes_in_blocks(any_pool):
    """More than a block of shared memory, and an odd number."""

    def large(comms):
        def rounds():
            total = yield "sum", torch.full((2_500_001,), 1.0 + comms.rank)
            everyone = yield "gather", torch.full((1_300_001,), comms.rank, dtype=torch.uint8)
            return float(total.min()), float(total.max()), [one.unique().tolist() for one in everyone]

        return comms.exchange_rounds(rounds(), "large")

    assert any_pool.run(large, 3, timeout=50) == [(6.0, 6.0, [[0], [1], [2]])] * 3
