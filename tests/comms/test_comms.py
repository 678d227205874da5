"""The rest of a Comms: topology, groups, requests, refusals."""

import gc
import warnings

import pytest
import torch

import microparallel as mp


def topology(comms):
    return comms.rank, comms.world_size, comms.local_rank, comms.prev_rank, comms.next_rank, str(comms.device)


def test_topology_is_a_line_with_two_ends(any_pool):
    device = "cuda:0" if any_pool._transport == "cuda" else "cpu"
    assert any_pool.run(topology, 3, timeout=30) == [
        (0, 3, 0, None, 1, device),
        (1, 3, 1, 0, 2, device),
        (2, 3, 2, 1, None, device),
    ]


def sums_in_groups(comms):
    odd_or_even = [rank for rank in range(comms.world_size) if rank % 2 == comms.rank % 2]
    evens, odds = comms.group([0, 2, 4]), comms.group([3, 1])
    mine = evens or odds
    total = mine.all_reduce(torch.tensor([comms.rank])).item()
    inner = mine.group([0, 1])  # a group inside a group
    pair = None if inner is None else inner.all_reduce(torch.tensor([comms.rank])).item()
    if inner is not None:
        inner.close()
    mine.close()
    return (evens is None) != (odds is None), total == sum(odd_or_even), mine.rank, pair


def sums_in_groups_that_overlap(comms):
    """Ranks are in different numbers of groups when the next one is made, and groups of the same ranks come again."""
    first, last = comms.group([0, 1, 2]), comms.group([1, 2, 3])
    groups = [first, last, comms.group([0, 3]), comms.group([0, 3]), comms.group(range(4))]
    return [float(group.all_reduce(torch.tensor(float(comms.rank)))) if group else None for group in groups]


def test_groups_may_overlap(any_pool):
    together = [
        [3.0, None, 3.0, 3.0, 6.0],
        [3.0, 6.0, None, None, 6.0],
        [3.0, 6.0, None, None, 6.0],
        [None, 6.0, 3.0, 3.0, 6.0],
    ]
    assert any_pool.run(sums_in_groups_that_overlap, 4, timeout=30) == together


@pytest.mark.parametrize("check", [False, True])
def test_groups_count_from_zero_and_nest(any_pool, check):
    results = any_pool.run(sums_in_groups, 5, check=check, timeout=30)
    assert [result[:2] for result in results] == [(True, True)] * 5
    assert [result[2] for result in results] == [0, 0, 1, 1, 2]
    assert [result[3] for result in results] == [2, 4, 2, 4, None]


def dropped_request(comms):
    """The temporary tensor must survive although the caller does not keep the request."""
    if comms.rank == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comms.isend(torch.full((1 << 20,), 7.0), 1)
            gc.collect()
            for _ in range(10):
                torch.zeros(1 << 20)  # would reuse the memory
        comms.barrier()
        comms.recv_tensor((1,), 1)
        return [str(warning.message) for warning in caught]
    comms.barrier()
    received = comms.recv_tensor((1 << 20,), 0)
    comms.send_tensor(torch.zeros(1), 0)
    return bool((received == 7.0).all())


def test_a_request_owns_its_buffer(any_pool):
    warned, intact = any_pool.run(dropped_request, 2, timeout=30)
    assert intact
    assert "isend(float32[1048576], dest=1) was dropped before it was waited for" in warned[0]


def under_either_name(comms):
    other = 1 - comms.rank
    for send, recv in ((comms.send, comms.recv_tensor), (comms.send_tensor, comms.recv)):
        if comms.rank == 0:
            send(torch.tensor([7.0, 8.0]), other)
        else:
            yield recv(2, other).tolist()


def test_send_and_recv_are_send_tensor_and_recv_tensor(any_pool):
    assert any_pool.run(lambda comms: list(under_either_name(comms)), 2, timeout=30) == [[], [[7.0, 8.0]] * 2]
    assert mp.Comms.send is mp.Comms.send_tensor
    assert mp.Comms.recv is mp.Comms.recv_tensor


def receives_into_a_tensor(comms):
    try:
        comms.recv(torch.ones(2, 3), 1 - comms.rank)
    except mp.errors.UsageError as error:
        return str(error)


def test_a_tensor_to_receive_into_is_refused(pool):
    said = "recv_tensor returns a new tensor: pass the shape and the dtype of what comes, here (2, 3) and torch.float32"
    assert said in pool.run(receives_into_a_tensor, 2, timeout=30)[0]


def after_closing(comms):
    group = comms.group([0, 1])
    group.close()
    group.close()
    try:
        group.barrier()
    except mp.errors.UsageError as error:
        return str(error)


def test_a_closed_comms_says_so(any_pool):
    assert "this Comms has been closed" in any_pool.run(after_closing, 2, timeout=30)[0]


def in_place_on_a_parameter(comms):
    layer = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(layer.weight, float(comms.rank))
    comms.all_reduce(layer.weight)
    comms.broadcast(layer.bias)
    return layer.weight.requires_grad, layer.weight.is_leaf, layer.weight.flatten()[0].item()


def test_parameters_need_no_special_care(any_pool):
    assert any_pool.run(in_place_on_a_parameter, 3, timeout=30) == [(True, True, 3.0)] * 3


def refusals(comms):
    tensor = torch.zeros(2)
    attempts = {
        "mean of integers": lambda: comms.all_reduce_mean(torch.zeros(2, dtype=torch.int64)),
        "unknown op": lambda: comms.all_reduce(tensor, op="summ"),
        "unknown algorithm": lambda: comms.all_reduce(tensor, algorithm="rings"),
        "no such rank": lambda: comms.send_tensor(tensor, 9),
        "negative rank": lambda: comms.broadcast(tensor, src=-1),
        "itself": lambda: comms.recv_tensor((2,), comms.rank),
        "expanded": lambda: comms.all_reduce(torch.zeros(1).expand(4)),
        "sparse": lambda: comms.all_reduce(torch.eye(3).to_sparse()),
        "scatter": lambda: comms.scatter([tensor] * 3, src=comms.rank),
        "reduce_scatter": lambda: comms.reduce_scatter([tensor] * 3),
        "group": lambda: comms.group([0, 0]),
        "dtype": lambda: comms.all_reduce(torch.zeros(2).to(torch.float8_e4m3fn)),
    }
    texts = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except mp.errors.UsageError as error:
            texts[name] = str(error)
    return texts


def test_what_cannot_work_is_refused_with_the_fix(any_pool):
    texts = any_pool.run(refusals, 2, timeout=30)[0]
    assert "torch.int64" in texts["mean of integers"] and "tensor.float()" in texts["mean of integers"]
    assert "did you mean 'sum'" in texts["unknown op"]
    assert "'rings'" in texts["unknown algorithm"]
    assert "dest=9" in texts["no such rank"] and "0 to 1" in texts["no such rank"]
    assert "src=-1" in texts["negative rank"]
    assert "this rank itself" in texts["itself"]
    assert "tensor.clone()" in texts["expanded"]
    assert "to_dense" in texts["sparse"]
    assert "not 3 tensors" in texts["scatter"]
    assert "not 3" in texts["reduce_scatter"]
    assert "[0, 0]" in texts["group"]
    assert "float8" in texts["dtype"]


def late(comms):
    if comms.rank == 1:
        return comms.irecv((1,), 0).wait(0.2)
    comms.recv_tensor((1,), 1)  # never comes


def test_a_wait_that_takes_too_long_names_the_call(any_pool):
    with pytest.raises(
        mp.errors.RankFailed, match=r"rank 1 raised CommsTimeout: rank 1 waited in vain in irecv\(float32\[1\], src=0\)"
    ):
        any_pool.run(late, 2, timeout=30)


def waits_again(comms):
    if comms.rank == 0:
        comms.recv_tensor((1,), 1)  # so that this rank stays
        return None
    request = comms.irecv((1,), 0)
    texts = []
    for _ in range(2):
        try:
            request.wait(0.1)
        except mp.errors.CommsTimeout as error:
            texts.append(str(error))
    comms.send_tensor(torch.zeros(1), 0)
    return texts


def test_a_request_that_failed_fails_again(pool):
    """What its buffer holds is no result."""
    _, texts = pool.run(waits_again, 2, transport="shm", timeout=30)
    assert len(texts) == 2 and texts[0] == texts[1]
