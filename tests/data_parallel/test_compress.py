"""DataParallel(compress=…): what ranks get, keep and send; held against the same methods in one process."""

import math
import re

import pytest
import torch
from torch import nn

import microparallel as mp
from microparallel.collectives import traffic
from microparallel.comms.message_group import count_messages
from microparallel.compression import (
    Cast,
    Compressor,
    Int8,
    TopK,
    compressed_sum,
    in_process,
    parse,
)
from microparallel.errors import GradientError, UsageError
from microparallel.program import AllReduce, Bucket, to_text

METHODS = ["bf16", "fp16", "topk:0.05", "randomk:0.05", "int8:64", "sign", "powersgd:2", "topk:0.1+bf16"]


class Net(nn.Module):
    """Two matrices that are compressed, and two biases that are small."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(30, 40)
        self.last = nn.Linear(40, 25)

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs)))


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(rank, number, dtype=torch.float32):
    return torch.randn(6, 30, generator=torch.Generator().manual_seed(100 * rank + number)).to(dtype)


def loss_of(model, rank, number, dtype=torch.float32):
    return model(batch(rank, number, dtype)).square().mean()


def plain_gradients(rank, number):
    model = net()
    loss_of(model, rank, number).backward()
    return dict(model.named_parameters())


def flat(gradients):
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def expected(compressor, ranks, passes):
    """For each pass the gradients of the two matrices, computed in one process, last layer first."""
    names = ["last.weight", "first.weight"]
    shapes = [(25, 40), (40, 30)]
    size = sum(map(math.prod, shapes))
    methods = [compressor.for_bucket(1) for _ in range(ranks)]
    residuals = [torch.zeros(size) if compressor.feedback else None for _ in range(ranks)]
    found = []
    for number in range(passes):
        mine = [plain_gradients(rank, number) for rank in range(ranks)]
        scaled = [flat([one[name].grad * (1.0 / ranks) for name in names]) for one in mine]
        sums = [
            compressed_sum(method, given, shapes, residual)
            for method, given, residual in zip(methods, scaled, residuals, strict=True)
        ]
        found.append(in_process(sums)[0])
    return found


def gradients_of(comms, text, passes, overlap):
    model = mp.DataParallel(net(), comms, compress=parse(text, smallest=1000), overlap=overlap)
    found = []
    for number in range(passes):
        model.zero_grad()
        loss_of(model, comms.rank, number).backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    return found


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("text", METHODS)
def test_ranks_do_what_one_process_does(any_pool, text, overlap):
    ranks, passes = 3, 3
    everyone = any_pool.run(gradients_of, ranks, text, passes, overlap)
    wanted = expected(parse(text, smallest=1000), ranks, passes)
    for number in range(passes):
        first = everyone[0][number]
        assert all(torch.equal(first[name], other[number][name]) for other in everyone for name in first)
        compressed = flat([first["last.weight"], first["first.weight"]])
        torch.testing.assert_close(compressed, wanted[number], rtol=1e-6, atol=1e-8)
        for name in ("first.bias", "last.bias"):  # small: left alone
            average = sum(plain_gradients(rank, number)[name].grad for rank in range(ranks)) / ranks
            torch.testing.assert_close(first[name], average)


def gradients_on_gpu(comms, text):
    """The same step with CUDA tensors and with the CPU's."""
    found = []
    for device in (comms.device, torch.device("cpu")):
        model = mp.DataParallel(net().to(device), comms, compress=parse(text, smallest=1000))
        for number in range(3):
            model.zero_grad()
            model(batch(comms.rank, number).to(device)).square().mean().backward()
        found.append([parameter.grad.cpu() for parameter in model.parameters()])
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", METHODS)
def test_on_a_gpu(warm_ranks, text):
    everyone = warm_ranks.run(gradients_on_gpu, 2, text, transport="gloo", device="cuda", timeout=50)
    for on_gpu, on_cpu in everyone:
        assert all(torch.equal(one, other) for one, other in zip(on_gpu, everyone[0][0], strict=True))
        for one, other in zip(on_gpu, on_cpu, strict=True):
            assert (one - other).norm() <= 0.2 * other.norm() + 1e-6  # a sign, or a place, may be another


def order_of_buckets(comms, text):
    model = mp.DataParallel(net(), comms, compress=parse(text, smallest=1000))
    before = to_text(model.program())
    loss_of(model, comms.rank, 0).backward()
    return [len(bucket.parameters) for bucket in model._reducer.buckets], before, to_text(model.program())


def test_the_program(pool):
    sizes, before, after = pool.run(order_of_buckets, 2, "topk:0.1")[0]
    assert sizes == [2, 2] and before == after  # buckets keep the order of registration
    _, before, after = pool.run(order_of_buckets, 2, "bf16")[0]
    assert ":order@dp" in before and ":order@dp" not in after  # these need not


def summed_up(comms, text, dtype):
    """Σ sent and what all ranks keep, beside Σ of all gradients."""
    model = mp.DataParallel(net(dtype), comms, compress=parse(text, smallest=1000))
    sent = dict.fromkeys(("first.weight", "last.weight"), 0.0)
    given = dict.fromkeys(sent, 0.0)
    for number in range(3):
        model.zero_grad()
        with model.no_sync():
            loss_of(model, comms.rank, 10 * number, dtype).backward()
        loss_of(model, comms.rank, 10 * number + 1, dtype).backward()
        alone = net(dtype)
        for micro in (0, 1):
            loss_of(alone, comms.rank, 10 * number + micro, dtype).backward()
        for name in sent:
            sent[name] = sent[name] + model.get_parameter(name).grad.double()
            given[name] = given[name] + alone.get_parameter(name).grad.double() / comms.world_size
    kept = model.compression_state()["residuals"]
    assert kept.keys() == sent.keys()
    results = []
    for name in sent:
        waiting = comms.all_reduce(kept[name].double())
        results.append((sent[name] + waiting, comms.all_reduce(given[name])))
    return results


@pytest.mark.parametrize(
    ("text", "dtype"), [(text, torch.float32) for text in METHODS[2:-1]] + [("topk", torch.float64)]
)
def test_all_that_was_given_is_sent_or_kept_also_with_no_sync(any_pool, text, dtype):
    for results in any_pool.run(summed_up, 2, text, dtype):
        for found, wanted in results:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def with_warmup(comms):
    compressed = mp.DataParallel(net(), comms, compress=TopK(0.01, warmup=2, smallest=1000))
    plain = mp.DataParallel(net(), comms)
    alike, names = [], []
    for number in range(3):
        names.append([op.algorithm for op in compressed.program().ranks[0] if isinstance(op, AllReduce)])
        for model in (compressed, plain):
            model.zero_grad()
            loss_of(model, comms.rank, number).backward()
        both = zip(compressed.parameters(), plain.parameters(), strict=True)
        alike.append(all(torch.equal(one.grad, other.grad) for one, other in both))
    return alike, names


def test_warmup(any_pool):
    alike, names = any_pool.run(with_warmup, 2)[0]
    assert alike == [True, True, False]
    assert names == [["auto"] * 2, ["auto"] * 2, ["auto", "topk-0.01", "auto"]]


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def counted(comms, text):
    """What each rank really sends in a step, and what the program says."""
    over, counts = count_messages(comms)
    model = mp.DataParallel(net(), over, compress=parse(text, smallest=1000), broadcast_buffers=False)
    loss_of(model, comms.rank, 0).backward()
    model.zero_grad()
    messages, sent = counts.messages_sent, counts.bytes_sent
    program = model.program()
    loss_of(model, comms.rank, 1).backward()
    expected = [0.0, 0.0]
    for op in program.ranks[comms.rank]:
        if isinstance(op, AllReduce):
            size = 8 * 3  # of the counts: two parameters, and how many are not finite
            if isinstance(op.value, Bucket):
                size = 4 * 2200 if op.algorithm != "auto" else model._reducer.buckets[op.value.index].buffer.nbytes
            found = traffic(op, range(comms.world_size), size, "gloo")[comms.rank]
            expected = [one + other for one, other in zip(expected, found, strict=True)]
    return (counts.messages_sent - messages, counts.bytes_sent - sent), tuple(expected), str(program)


@pytest.mark.parametrize("text", METHODS)
def test_bytes_on_the_wire_are_the_programs(any_pool, text):
    for found, wanted, program in any_pool.run(counted, 2, text):
        assert found[0] == wanted[0], program
        assert found[1] == pytest.approx(wanted[1], abs=12), program  # halves of odd numbers


# ── an object of a user's own ───────────────────────────────────────────────────────────────────────────────────────


class Half(Compressor):
    """Every second number, the other half in the next pass."""

    name = "half"
    rounds = ("sum",)
    turn = 0

    def encode(self, bucket, shapes, *received):
        self.turn += 1
        return (bucket[self.turn % 2 :: 2].clone(),)

    def decode(self, shapes, *received):
        bucket = torch.zeros(sum(map(math.prod, shapes)))
        bucket[self.turn % 2 :: 2] = received[0]
        return bucket


def with_own(comms):
    model = mp.DataParallel(net(), comms, compress=Half(smallest=1000))
    program = model.program()
    mp.verify(program)
    halves = []
    for number in range(2):
        model.zero_grad()
        loss_of(model, comms.rank, number).backward()
        halves.append(model.last.weight.grad.view(-1).clone())
    return str(program.ranks[0]), halves


def test_an_object_of_a_users_own(any_pool):
    for program, (odd, even) in any_pool.run(with_own, 2):
        assert "half-sum-4400" in program
        assert not odd[::2].any() and odd[1::2].all() and not even[1::2].any()
        average = sum(plain_gradients(rank, 0)["last.weight"].grad.view(-1) for rank in range(2)) / 2
        torch.testing.assert_close(odd[1::2], average[1::2])
        later = sum(plain_gradients(rank, 1)["last.weight"].grad.view(-1) for rank in range(2)) / 2
        torch.testing.assert_close(even[::2], (average + later)[::2])


# ── gradients that cannot be sent ───────────────────────────────────────────────────────────────────────────────────


def not_finite_on_rank_1(comms, text):
    model = mp.DataParallel(net(), comms, compress=parse(text, smallest=1000))
    loss_of(model, comms.rank, 0).backward()
    before = model.compression_state()["residuals"]
    model.zero_grad()
    factor = math.inf if comms.rank == 1 else 1.0
    try:
        (loss_of(model, comms.rank, 1) * factor).backward()
    except GradientError as error:
        words = str(error)
    kept = model.compression_state()["residuals"]
    same = all(torch.equal(before[name], kept[name]) for name in before)
    model.zero_grad()
    loss_of(model, comms.rank, 2).backward()
    return words, same, all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("text", ["topk:0.05", "powersgd:2", "sign"])
def test_gradients_that_are_not_finite_are_named_and_not_sent(any_pool, text):
    found = any_pool.run(not_finite_on_rank_1, 2, text)
    for words, _, fine_afterwards in found:
        assert re.fullmatch(r"step 2: gradients that are not finite for parameters of rank 1: .*last.weight.*", words)
        assert "rank 0" not in words and "\n" not in words
        assert fine_afterwards
    assert found[1][1]  # its residual stayed


def skipped_instead(comms):
    """As with float16: no error, and all ranks see gradients that are not finite."""
    model = mp.DataParallel(net(), comms, compress=TopK(0.05, smallest=1000))
    model._reducer.refuses_not_finite = False
    (loss_of(model, comms.rank, 1) * (math.nan if comms.rank else 1.0)).backward()
    return bool(model.last.weight.grad.isfinite().any())


def test_gradients_that_are_not_finite_without_an_error(any_pool):
    assert any_pool.run(skipped_instead, 2) == [False, False]


def infinite_in_16_bits(comms):
    """A cast without feedback sends what it has: all ranks see it."""
    model = mp.DataParallel(net(), comms, compress=Cast(torch.float16, smallest=1000))
    (loss_of(model, comms.rank, 1) * (1e9 if comms.rank else 1.0)).backward()
    return bool(model.last.weight.grad.isfinite().all())


def test_a_cast_sends_infinity(any_pool):
    assert any_pool.run(infinite_in_16_bits, 2) == [False, False]


def multiplied_on_wire(comms):
    model = mp.DataParallel(net(), comms, compress=Cast(torch.float16, smallest=1000))
    found = []
    for factor in (1.0, 2.0**16):
        model._reducer.multiply_on_wire(factor)
        model.zero_grad()
        (loss_of(model, comms.rank, 1) * 1e-8).backward()
        found.append(int(model.last.weight.grad.count_nonzero()))
    return found


def test_a_factor_on_the_wire(any_pool):
    for without, scaled in any_pool.run(multiplied_on_wire, 2):
        assert without == 0 and scaled > 900


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)

    def forward(self, inputs, both):
        return self.used(inputs) + (self.other(inputs) if both else 0)


def skipping_a_parameter(comms):
    """What waits for a parameter is sent in a pass that skips it on all ranks, and is given to it."""
    torch.manual_seed(0)
    model = mp.DataParallel(Two(), comms, compress=TopK(0.5))
    total = torch.zeros(40, 40)
    for number in range(4):
        model.zero_grad()
        model(torch.ones(2, 40) * (1 + number), number == 0).square().mean().backward()
        if model.other.weight.grad is not None:
            total += model.other.weight.grad
    return total, comms.all_reduce(model.compression_state()["residuals"]["other.weight"])


def test_what_waits_is_sent_though_no_rank_uses_the_parameter(any_pool):
    torch.manual_seed(0)
    alone = Two()
    alone(torch.ones(2, 40), True).square().mean().backward()
    for total, waiting in any_pool.run(skipping_a_parameter, 2):
        torch.testing.assert_close(total + waiting, alone.other.weight.grad)
        assert (total != 0).sum() > 800  # more than the first pass has sent


# ── going on ────────────────────────────────────────────────────────────────────────────────────────────────────────


def halfway(comms, text, states=None):
    """Four passes, or the last two with the state after two; returns the last gradients, and the state after two."""
    model = mp.DataParallel(net(), comms, compress=parse(text, warmup=1, smallest=1000))
    if states is not None:
        model.load_compression_state(states)
    state = None
    for number in range(4) if states is None else (2, 3):
        if number == 2:
            state = model.compression_state()
        model.zero_grad()
        loss_of(model, comms.rank, number).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}, state


@pytest.mark.parametrize("text", ["topk:0.05", "randomk:0.05", "powersgd:2", "topk:0.1+int8"])
def test_a_state_goes_on_bit_for_bit(any_pool, text):
    found = any_pool.run(halfway, 2, text)
    again = any_pool.run(halfway, 2, text, [state for _, state in found])
    for (gradients, _), (others, _) in zip(found, again, strict=True):
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.parametrize("ranks", [2, 4])
def test_another_number_of_ranks_keeps_the_sum_of_residuals(pool, ranks):
    states = [state for _, state in pool.run(halfway, 3, "topk:0.05")]
    others = [state for _, state in pool.run(halfway, ranks, "topk:0.05", states)]
    for name in ("first.weight", "last.weight"):
        before = sum(state["residuals"][name] for state in states)
        torch.testing.assert_close(sum(state["residuals"][name] for state in others), before)


def converted(comms):
    model = mp.DataParallel(net(), comms, compress=TopK(0.05, smallest=1000))
    loss_of(model, comms.rank, 0).backward()
    before = model.compression_state()["residuals"]["last.weight"]
    model.double()
    model.zero_grad()
    with torch.no_grad():
        model(batch(0, 0, torch.float64))
    model._prepare()
    after = model.compression_state()["residuals"]["last.weight"]
    return torch.equal(before.double(), after)


def test_residuals_outlive_new_buckets(pool):
    assert pool.run(converted, 2) == [True, True]


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────


def refused(comms, case):
    words = None
    try:
        if case == "ranks":
            mp.DataParallel(net(), comms, compress=TopK(0.1 + comms.rank / 10))
        elif case == "one rank":
            mp.DataParallel(net(), comms, compress="sign" if comms.rank else None)
        elif case == "shard":
            mp.DataParallel(net(), comms, compress=TopK(), shard="optimizer")
        elif case == "units":
            mp.FullyShardedDataParallel(net(), comms, compress=TopK())
        elif case == "complex":
            mp.DataParallel(nn.Linear(64, 64, dtype=torch.complex64), comms, compress=Int8())
        elif case == "object":
            mp.DataParallel(net(), comms, compress=0.01)
        elif case == "name":
            mp.DataParallel(net(), comms, compress="topp:0.1")
        else:
            comms.all_reduce(torch.ones(4), algorithm="topk-0.5")
    except UsageError as error:
        words = str(error)
    return words


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("ranks", "rank 0 has compress=topk-0.1, error feedback.* rank 1 has compress=topk-0.2, error feedback"),
        ("one rank", "rank 0 has compress=None, and rank 1 has compress=sign"),
        ("shard", "compress=topk-0.01 with shard='optimizer'"),
        ("units", "a rank keeps its part"),
        ("complex", "weight has complex64 gradients"),
        ("object", "compress=0.01; give an object"),
        ("name", "there is no compression 'topp:0.1'; did you mean 'topk'"),
        ("all_reduce", "algorithm='topk-0.5' loses most of the numbers"),
    ],
)
def test_refusals(pool, case, words):
    for found in pool.run(refused, 2, case):
        assert found is not None and re.search(words, found) and "\n" not in found


def test_a_wrong_object_is_named():
    class Empty(Half):
        name = "Not A Name"

    with pytest.raises(UsageError, match="small letters"):
        Empty().algorithm([(4, 4)])


def alone(comms):
    model = mp.DataParallel(net(), comms, compress=TopK(0.01), check_finite=True)
    loss_of(model, 0, 0).backward()
    return model.last.weight.grad, model.compression_state()["residuals"]


def test_a_single_rank_compresses_nothing(pool):
    gradient, residuals = pool.run(alone, 1)[0]
    torch.testing.assert_close(gradient, plain_gradients(0, 0)["last.weight"].grad)
    assert not residuals
