"""Checked mode: what would hang or corrupt memory is named instead."""

import torch

import microparallel as mp


def caught(function, *arguments, **named_arguments):
    try:
        function(*arguments, **named_arguments)
    except mp.errors.Mismatch as error:
        return str(error)
    return "nothing was caught"


def different_shapes(comms):
    return caught(comms.all_reduce, torch.zeros(5 if comms.rank == 1 else 4))


def test_shapes_are_named_with_their_ranks(any_pool):
    for text in any_pool.run(different_shapes, 3, check=True, timeout=30):
        assert "ranks 0, 2: all_reduce(float32[4], op='sum')" in text
        assert "rank 1: all_reduce(float32[5], op='sum')" in text


def different_dtypes(comms):
    return caught(comms.broadcast, torch.zeros(2, dtype=torch.float64 if comms.rank else torch.float32))


def test_dtypes(any_pool):
    for text in any_pool.run(different_dtypes, 2, check=True, timeout=30):
        assert "rank 0: broadcast(float32[2], src=0)" in text
        assert "rank 1: broadcast(float64[2], src=0)" in text


def different_calls(comms):
    if comms.rank == 0:
        return caught(comms.barrier)
    return caught(comms.all_gather, torch.zeros(2))


def test_calls(any_pool):
    for text in any_pool.run(different_calls, 2, check=True, timeout=30):
        assert "rank 0: barrier()" in text
        assert "rank 1: all_gather(float32[2])" in text


def different_roots(comms):
    return caught(comms.gather, torch.zeros(2), dst=comms.rank)


def test_roots(any_pool):
    for text in any_pool.run(different_roots, 2, check=True, timeout=30):
        assert "rank 1: gather(float32[2], dst=1)" in text


def different_groups(comms):
    return caught(comms.group, [0, 1] if comms.rank else [0])


def test_groups(any_pool):
    for text in any_pool.run(different_groups, 2, check=True, timeout=30):
        assert "rank 0: group([0])" in text


def wrong_message_then_right_ones(comms):
    if comms.rank == 0:
        for numbers in ([1.0, 2.0, 3.0], [4.0], [5.0]):
            comms.send_tensor(torch.tensor(numbers), 1)
        return None
    text = caught(comms.recv_tensor, (2,), 0)
    # waiting in another order than the messages came
    first, second = comms.irecv((1,), 0), comms.irecv((1,), 0)
    return text, second.wait().item(), first.wait().item()


def test_a_wrong_message_is_taken_off_the_line(any_pool):
    text, second, first = any_pool.run(wrong_message_then_right_ones, 2, check=True, timeout=30)[1]
    assert "rank 0: send_tensor(float32[3], dest=1)" in text
    assert "rank 1: recv_tensor(float32[2], src=0)" in text
    assert (first, second) == (4.0, 5.0)


def message_against_collective(comms):
    return caught(comms.barrier) if comms.rank == 0 else caught(comms.recv_tensor, (2,), 0)


def test_a_receive_against_a_collective_is_caught_on_both_sides(any_pool):
    for text in any_pool.run(message_against_collective, 2, check=True, timeout=30):
        assert "rank 0: barrier()" in text
        assert "rank 1: recv_tensor(float32[2], src=0)" in text


def many_shapes(comms):
    lists = [torch.zeros(size + (comms.rank == 1 and size == 39)) for size in range(comms.world_size, 0, -1)]
    shapes = [torch.zeros(3, 4, 5, size) for size in range(comms.world_size)]
    return caught(comms.reduce_scatter, shapes if comms.rank else lists)


def test_long_descriptions_still_fit(any_pool):
    for text in any_pool.run(many_shapes, 5, check=True, timeout=30):
        assert "reduce_scatter" in text
