"""Every method in one process: what is sent and what is kept add up, and bytes are the formula's."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import microparallel as mp
from microparallel.collectives import payload
from microparallel.compression import (
    Cast,
    Chain,
    Compressor,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
    compressed_sum,
    in_process,
    parse,
)
from microparallel.compression.compressor import packed, unpacked
from microparallel.compression.methods import largest
from microparallel.errors import UsageError

METHODS = {
    "bf16": lambda: Cast(torch.bfloat16, feedback=True),
    "fp16": lambda: Cast(torch.float16, feedback=True),
    "topk-0.1": lambda: TopK(0.1),
    "randomk-0.1": lambda: RandomK(0.1),
    "sign": Sign,
    "int8-16": lambda: Int8(16),
    "powersgd-1": lambda: PowerSGD(1),
    "topk-0.1+bf16": lambda: Chain(TopK(0.1), Cast()),
    "topk-0.2+int8-8": lambda: Chain(TopK(0.2), Int8(8)),
    "randomk-0.2+fp16": lambda: Chain(RandomK(0.2), Cast(torch.float16)),
    "randomk-0.2+sign": lambda: Chain(RandomK(0.2), Sign()),
    "powersgd-1+bf16": lambda: Chain(PowerSGD(1), Cast()),
}
shapes_of_buckets = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


def numbers(seed, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", METHODS)
@given(shapes=shapes_of_buckets, ranks=st.integers(1, 4), passes=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_all_that_was_given_is_sent_or_kept(name, shapes, ranks, passes, seed):
    """Σ sent + residuals = Σ gradients, over passes and ranks, to rounding; every rank has the same bits."""
    size = sum(map(math.prod, shapes))
    methods = [METHODS[name]().for_bucket(3) for _ in range(ranks)]
    residuals = [torch.zeros(size, dtype=torch.float64) for _ in range(ranks)]
    sent, given_in = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for number in range(passes):
        gradients = [numbers(seed + 17 * number + rank, size) for rank in range(ranks)]
        given_in += sum(gradient.double() for gradient in gradients)
        sums = in_process(
            [compressed_sum(*row) for row in zip(methods, gradients, [shapes] * ranks, residuals, strict=True)]
        )
        assert all(torch.equal(sums[0], other) for other in sums)
        sent += sums[0].double()
    # 16-bit sums are rounded once more, which no rank's residual knows of.
    inexact = {"bf16": 2.0**-7, "fp16": 2.0**-10}.get(name.rpartition("+")[2], 0.0) * (ranks > 1)
    scale = 1 + 4 * passes * ranks * math.sqrt(size)
    torch.testing.assert_close(sent + sum(residuals), given_in, rtol=0, atol=(inexact + 1e-6) * scale)


@pytest.mark.parametrize("name", METHODS)
@given(shapes=shapes_of_buckets)
def test_bytes_are_those_of_the_formula(name, shapes):
    compressor = METHODS[name]()
    size = sum(map(math.prod, shapes))
    rounds = payload(compressor.algorithm(shapes), 4 * size)
    assert [one.kind for one in rounds] == list(compressor.rounds)
    # That of the base class encodes zeros, and counts.
    assert [one.bytes for one in rounds] == Compressor.payload(compressor, shapes) == compressor.payload(shapes)
    assert [one.bytes for one in payload(compressor.name, 4 * size, shapes)] == compressor.payload(shapes)


@given(st.integers(1, 300), st.integers(0, 1000))
def test_what_each_method_keeps_of_one_bucket(size, seed):
    """decode(encode) of each: what it is of the bucket."""
    bucket, shapes = numbers(seed, size), [(size,)]

    def alone(compressor):
        return in_process([compressed_sum(compressor, bucket, shapes)])[0]

    assert torch.equal(alone(Cast(torch.bfloat16)), bucket.bfloat16().float())
    assert torch.equal(alone(TopK(1.0)), bucket)
    assert torch.equal(alone(RandomK(1.0)), bucket)
    assert torch.equal(alone(PowerSGD(2)), bucket)  # one dimension is sent as it is
    assert torch.equal(alone(Sign()), torch.where(bucket >= 0, 1.0, -1.0) * bucket.abs().mean())
    largest = torch.nn.functional.pad(bucket.abs(), (0, -size % 16)).view(-1, 16).amax(1).repeat_interleave(16)[:size]
    assert ((alone(Int8(16)) - bucket).abs() <= largest / 127 / 2 * 1.001).all()
    count = max(1, round(0.1 * size))
    top, random = alone(TopK(0.1)), alone(RandomK(0.1))
    assert torch.equal(top[top != 0].abs().sort().values, bucket.abs().sort().values[-count:])
    assert (random != 0).sum() == count and torch.equal(random[random != 0], bucket[random != 0])


@given(st.sampled_from(["normal", "sorted", "equal", "few", "periodic"]), st.sampled_from([1, 77, 1000, 30_000]))
def test_the_largest_of_many_are_found(kind, count):
    """Whatever a sample says of them."""
    sizes = {
        "normal": numbers(3, 70_001).abs(),
        "sorted": torch.arange(70_001.0),
        "equal": torch.ones(70_001),
        "few": torch.zeros(70_001).index_fill_(0, torch.arange(5, 5000, 7), 2.0),
        "periodic": torch.arange(70_001.0).remainder(8),
    }[kind]
    places = largest(sizes, count)
    assert len(set(places.tolist())) == count
    assert torch.equal(sizes[places].sort().values, sizes.sort().values[-count:])


def test_powersgd_finds_a_matrix_of_low_rank_in_a_few_passes():
    matrix = torch.outer(numbers(0, 30), numbers(1, 20)) + torch.outer(numbers(2, 30), numbers(3, 20))
    compressor = PowerSGD(2)
    for _ in range(3):
        (found,) = in_process([compressed_sum(compressor, matrix.view(-1), [(30, 20)])])
    torch.testing.assert_close(found.view(30, 20), matrix, rtol=1e-3, atol=1e-3)


def test_randomk_draws_other_places_in_each_pass_and_bucket():
    bucket = torch.ones(1000)

    def places(compressor):
        (found,) = in_process([compressed_sum(compressor, bucket, [(1000,)])])
        return frozenset(found.nonzero().view(-1).tolist())

    one, other = RandomK(0.05).for_bucket(0), RandomK(0.05).for_bucket(1)
    drawn = [places(one), places(one), places(other)]
    assert len(set(drawn)) == 3
    again = RandomK(0.05).for_bucket(0)
    again.load_state_dict({"drawn": 1})
    assert places(again) == drawn[1]


def test_state_goes_on():
    """A copy with the state of a compressor does what the compressor does."""
    for name, make in METHODS.items():
        shapes, size = [(8, 9), (5,)], 77
        compressor, other = make().for_bucket(1), make().for_bucket(1)
        for number in range(3):
            in_process([compressed_sum(compressor, numbers(number, size), shapes)])
        other.load_state_dict(compressor.state_dict())
        found = [in_process([compressed_sum(one, numbers(9, size), shapes)])[0] for one in (compressor, other)]
        assert torch.equal(*found), name


def test_a_factor_saves_what_float16_would_lose():
    tiny = torch.full((8,), 1e-9)
    compressor = Cast(torch.float16)
    assert not in_process([compressed_sum(compressor, tiny, [(8,)])])[0].any()
    compressor.factor = 2.0**16
    torch.testing.assert_close(in_process([compressed_sum(compressor, tiny, [(8,)])])[0], tiny, rtol=1e-3, atol=0)


def test_a_rank_that_sends_nothing_keeps_its_residual():
    for make in METHODS.values():
        residual = numbers(1, 60)
        before = residual.clone()
        bad = torch.full((60,), math.nan)
        (found,) = in_process([compressed_sum(make(), bad, [(60,)], residual, sends_nothing=True)])
        assert torch.equal(residual, before) and not found.any()


@given(st.lists(st.sampled_from([torch.int8, torch.float32, torch.bfloat16, torch.int64]), min_size=1, max_size=4))
def test_parts_are_packed_without_gaps(dtypes):
    parts = tuple(torch.arange(3 + index).to(dtype) for index, dtype in enumerate(dtypes))
    message = packed(parts)
    assert message.nbytes == sum(part.nbytes for part in parts)
    assert all(torch.equal(one, other) for one, other in zip(parts, unpacked(message, parts), strict=True))


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("topk:0.01", "topk-0.01"),
        ("topk", "topk-0.01"),
        ("randomk:1e-5", "randomk-1e-05"),
        ("int8", "int8-256"),
        ("powersgd:4", "powersgd-4"),
        ("topk:0.5+bf16", "topk-0.5+bf16"),
        ("sign", "sign"),
        ("fp16", "fp16"),
    ],
)
def test_by_name(text, name):
    compressor = parse(text, warmup=3)
    assert (compressor.name, compressor.warmup) == (name, 3)
    assert parse(compressor.name).name == name


def test_feedback_is_on_where_needed():
    assert [parse(name).feedback for name in ("bf16", "topk", "randomk", "sign", "int8", "powersgd", "topk+bf16")] == [
        False,
        *[True] * 6,
    ]
    assert not parse("topk", feedback=False).feedback


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topkk:0.1", "did you mean 'topk'"),
        ("topk:0", "above 0, and at most 1"),
        ("topk:1.5", "above 0, and at most 1"),
        ("randomk:nan", "above 0, and at most 1"),
        ("topk:x", "above 0, and at most 1"),
        ("int8:0", "at least 1"),
        ("powersgd:1.5", "whole number"),
        ("sign:3", "takes no number"),
        ("bf16+topk", "a chain is"),
        ("topk+bf16+int8", "a chain is"),
        ("powersgd+int8", "bf16 or fp16 only"),
    ],
)
def test_wrong_names_are_refused(text, words):
    with pytest.raises(UsageError, match=words) as error:
        parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(0),
        lambda: TopK(1.01),
        lambda: RandomK(-0.5),
        lambda: Int8(0),
        lambda: PowerSGD(0),
        lambda: Cast(torch.float32),
        lambda: TopK(warmup=-1),
        lambda: TopK(smallest=1.5),
        lambda: Chain(Cast(), TopK()),
    ],
)
def test_wrong_numbers_are_refused(make):
    with pytest.raises(UsageError):
        make()


def test_a_compressor_has_a_program():
    for name, make in METHODS.items():
        program = make().program(3, [(16, 16)])
        mp.verify(program)
        assert program.name.startswith(name)
