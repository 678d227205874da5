"""A recorded step has exactly the operations of its program, on each rank and lane, one for one."""

import statistics
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import microparallel as mp
from microparallel.collectives import payload
from microparallel.program import Join, Lane, Named, from_text, lane, to_text
from microparallel.program import values as names

LAYERS, WIDTH = 4, 8


def operations(trace, rank, which):
    """What a rank did, in the order in which it came to it."""
    mine = [event for event in trace.events if event.rank == rank and event.lane is which]
    return [str(event.op) for event in sorted(mine, key=lambda event: event.asked)]


def differences(trace, program):
    """Where a trace is not what its program says; a Join is nothing to be done, but an order that must be kept."""
    mp.verify(program)
    assert from_text(to_text(program)) == program
    found = [wrong for rank, ops in enumerate(program.ranks) for wrong in broken_joins(trace, rank, ops)]
    for rank, ops in enumerate(program.ranks):
        for which in Lane:
            meant = [str(op) for op in ops if lane(op) is which and not isinstance(op, Join)]
            done = operations(trace, rank, which)
            if meant != done:
                found.append(f"rank {rank}, {which}: meant {meant}, did {done}")
    return found


def broken_joins(trace, rank, ops):
    waiting = defaultdict(list)
    for event in sorted(trace.events, key=lambda event: event.asked):
        if event.rank == rank:
            waiting[str(event.op)].append(event)
    events = [waiting[str(op)].pop(0) if waiting[str(op)] else None for op in ops]
    for place, op in enumerate(ops):
        if isinstance(op, Join):
            before = [event.end for event in events[:place] if event is not None]
            after = [event.asked for event in events[place:] if event is not None]
            if before and after and max(before) > min(after):
                first = max((event for event in events[:place] if event is not None), key=lambda event: event.end)
                then = min((event for event in events[place:] if event is not None), key=lambda event: event.asked)
                late = first.end - then.asked
                yield f"rank {rank}: {then.op}, behind Join {place}, began {late} s before {first.op} had ended"


# ── data parallelism ────────────────────────────────────────────────────────────────────────────────────────────────


def replicas(comms, kind, overlap):
    """Three steps, each beside the program of it: the first learns the order of the gradients."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    norm = [nn.BatchNorm1d(WIDTH)] if kind == "buffers and weights" else []
    model = mp.DataParallel(nn.Sequential(*layers[:2], *norm, *layers[2:]), comms, bucket_cap_mb=3e-4, overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    microbatches = 3 if kind == "accumulation" else 1
    weights = {"weight": comms.rank + 1.0} if norm else {"weight": 1.0, "total": float(comms.world_size)}
    programs = []
    with mp.record(comms) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            with model.weighted(**weights):
                programs.append(model.program(microbatches))
                for number in range(microbatches):
                    with model.no_sync() if number < microbatches - 1 else nullcontext():
                        model(torch.ones(comms.rank + 2, WIDTH)).sum().backward()
            optimizer.step()
    steps = [recorder.trace.step(number) for number in range(3)]
    wrong = [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]
    return wrong, [to_text(program) for program in programs]


@pytest.mark.parametrize("kind", ["plain", "accumulation", "buffers and weights"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one after another"])
def test_a_data_parallel_step(any_pool, kind, overlap):
    for wrong, (first, *later) in any_pool.run(replicas, 2, kind, overlap, timeout=50):
        assert not wrong
        assert ":order" in first and not any(":order" in text for text in later)
        assert (":buffers" in first) == (":weights" in first) == (kind == "buffers and weights")
        assert ("B0.4" in later[0]) == (kind == "accumulation")
        assert ("=" in later[0].partition("rank 0")[2]) == (not overlap or kind == "buffers and weights")


def compressed(comms, text, overlap, microbatches):
    """Three steps, of which the first is sent as it is; beside each its program, and what was sent for the last."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    compressor = mp.compression.parse(text, warmup=1, smallest=WIDTH * WIDTH)
    model = mp.DataParallel(
        nn.Sequential(*layers, nn.BatchNorm1d(WIDTH)), comms, bucket_cap_mb=2e-4, overlap=overlap, compress=compressor
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs = []
    with mp.record(comms) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            programs.append(model.program(microbatches))
            for number in range(microbatches):
                with model.no_sync() if number < microbatches - 1 else nullcontext():
                    model(torch.randn(comms.rank + 2, WIDTH)).square().sum().backward()
            optimizer.step()
    steps = [recorder.trace.step(number) for number in range(3)]
    wrong = [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]
    last = [e for e in steps[-1].events if e.rank == comms.rank and "@dp:" in str(e.op)]
    meant = [op for op in programs[-1].ranks[comms.rank] if "@dp:" in str(op)]
    payloads = [payload(op.algorithm, 4 * WIDTH * WIDTH) for op in meant]
    return wrong, [to_text(program) for program in programs], [(e.messages, e.sent) for e in last], payloads


@pytest.mark.in_turn
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one after another"])
@pytest.mark.parametrize(("text", "microbatches"), [("topk:0.1", 1), ("randomk:0.1", 2), ("powersgd", 1), ("bf16", 2)])
def test_a_compressed_step(any_pool, text, microbatches, overlap):
    for wrong, (first, *later), sent, payloads in any_pool.run(compressed, 2, text, overlap, microbatches, timeout=50):
        assert not wrong
        name = mp.compression.parse(text).name
        assert name not in first and ":presence" not in first
        assert all(text.count(f"@dp:{name}") == 2 * LAYERS and text.count(":presence0") == 2 for text in later)
        # Between two ranks a sum sends a half to be added and a half of the result; a gather sends the whole.
        assert len(sent) == LAYERS
        for (messages, size), rounds in zip(sent, payloads, strict=True):
            assert size == sum(one.bytes for one in rounds)
            assert messages == sum(2 if one.kind == "sum" else 1 for one in rounds)


def summed_and_counted(outputs, targets):
    return nn.functional.mse_loss(outputs, targets, reduction="sum"), targets.numel()


def accumulated(comms, loss_fn):
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms)
    batches = [(torch.ones(2, WIDTH), torch.ones(2, WIDTH))] * 2
    program = model.program(2, samples=True, loss=True)
    with mp.record(comms) as recorder:
        mp.course.accumulated_step(model, batches, loss_fn)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return differences(recorder.trace, program)


@pytest.mark.parametrize("loss_fn", [nn.functional.mse_loss, summed_and_counted], ids=["mean", "sum and count"])
def test_an_accumulated_step_counts_samples_first_and_sums_the_loss_last(pool, loss_fn):
    """What a loss counts goes with the loss: no message of its own."""
    assert pool.run(accumulated, 2, loss_fn, transport="shm", timeout=50) == [[], []]


# ── ZeRO ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sharded(comms, shard, overlap, microbatches, clip, local):
    """Three steps, each beside its program, and the bytes that each rank has sent beside those of the simulator."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    options = {"bucket_cap_mb": 3e-4, "overlap": overlap, "shard": shard}
    model = mp.DataParallel(nn.Sequential(*layers, nn.BatchNorm1d(WIDTH)), comms, **options)
    optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms, lr=0.1)
    programs = []
    with mp.record(comms) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            programs.append(model.program(microbatches, clip=clip, at_once=not local))
            for number in range(microbatches):
                with model.no_sync() if local and number < microbatches - 1 else nullcontext():
                    model(torch.ones(comms.rank + 2, WIDTH)).sum().backward()
            if clip:
                model.clip_grad_norm_(1.0)
            optimizer.step()
    steps = [recorder.trace.step(number) for number in range(3)]
    wrong = [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]
    followed = [to_text(step.followed) for step in steps]
    sent = sum(e.sent for e in steps[-1].events if e.rank == comms.rank and str(e.op)[0] in "%~")
    bucket_bytes = sum(4 * bucket.layout.length for bucket in model._reducer.sharded_buckets)
    return wrong, followed, sent / bucket_bytes, len(recorder.trace.steps)


@pytest.mark.in_turn
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one after another"])
@pytest.mark.parametrize(
    ("shard", "microbatches", "clip", "local", "rounds"),
    [
        ("optimizer", 1, True, True, 2),
        ("optimizer", 3, False, True, 2),
        ("gradients", 1, False, False, 2),
        ("gradients", 3, True, False, 4),
        ("gradients", 3, False, True, 2),
    ],
)
def test_a_step_in_parts(any_pool, shard, microbatches, clip, local, rounds, overlap):
    """Gradients leave once, or once a micro-batch, and parameters once: (p-1)/p of a bucket each time."""
    arguments = (shard, overlap, microbatches, clip, local)
    by_rank = any_pool.run(sharded, 3, *arguments, timeout=50)
    for wrong, followed, sent, steps in by_rank:
        assert not wrong
        assert "~T0@dp" in followed[0] and "presence" in followed[0]
        assert sent == pytest.approx(rounds * 2 / 3) or not any_pool.shares_evenly
        assert steps == 3
    assert statistics.mean(sent for _, _, sent, _ in by_rank) == pytest.approx(rounds * 2 / 3)


def skipping(comms, shard, microbatches, local):
    """Three steps in float16, of which the second is not taken: rank 1 overflows in its first micro-batch."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = mp.DataParallel(nn.Sequential(*layers), comms, bucket_cap_mb=3e-4, shard=shard, precision="fp16")
    if shard:
        optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    programs = []
    with mp.record(comms) as recorder:
        for step in range(3):
            optimizer.zero_grad()
            programs.append(model.program(microbatches, clip=True, at_once=not local))
            for number in range(microbatches):
                overflows = step == 1 and number == 0 and comms.rank == 1
                with model.no_sync() if local and number < microbatches - 1 else nullcontext():
                    (model(torch.ones(2, WIDTH)).mean() * (torch.inf if overflows else 1.0)).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
    steps = [recorder.trace.step(number) for number in range(3)]
    wrong = [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]
    return wrong, to_text(programs[1]).count(":overflow"), model.loss_scale.skipped


@pytest.mark.parametrize(
    ("shard", "microbatches", "local", "messages"),
    [(None, 2, True, 0), ("optimizer", 2, True, 1), ("gradients", 3, False, 3), ("gradients", 2, True, 1)],
)
def test_a_step_that_is_not_taken(any_pool, shard, microbatches, local, messages):
    """Where each rank has its part of the gradients, the ranks tell each other after each pass whether it is finite."""
    for wrong, counted, skipped in any_pool.run(skipping, 2, shard, microbatches, local, timeout=50):
        assert not wrong
        assert counted == messages * 2  # of each rank
        assert skipped == 1


def sharded_alone(comms):
    """One rank that looks for gradients that are not finite follows the program of several."""
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms, shard="gradients", check_finite=True)
    optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms)
    program = model.program()
    with mp.record(comms) as recorder:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    return differences(recorder.trace, program)


def test_a_step_in_parts_of_one_rank(any_pool):
    assert any_pool.run(sharded_alone, 1, timeout=50) == [[]]


class Tied(nn.Module):
    """Parameters that are used again in the end, and one that the model itself has."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.offset = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs):
        hidden = self.embed(inputs.long()[:, 0]) + self.offset
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden @ self.embed.weight.T


def in_units(comms, kind, overlap, microbatches, local, how):
    """Three steps, each beside its program, the bytes that each rank has sent, and what it held."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    module = Tied() if kind == "tied" else nn.Sequential(*layers, nn.BatchNorm1d(WIDTH))
    model = mp.FullyShardedDataParallel(module, comms, overlap=overlap, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    programs = []
    with mp.record(comms) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            with model.weighted(comms.rank + 1.0):
                programs.append(model.program(microbatches, clip=True, at_once=not local))
                for number in range(microbatches):
                    with model.no_sync() if local and number < microbatches - 1 else nullcontext():
                        model(torch.ones(comms.rank + 2, WIDTH)).sum().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
    steps = [recorder.trace.step(number) for number in range(3)]
    pairs = list(zip(steps, programs, strict=True))[kind == "tied" :]  # it learns where `embed` is used again
    wrong = [one for step, program in pairs for one in differences(step, program)]
    mine = [event for event in steps[-1].events if event.rank == comms.rank and str(event.op)[0] in "%~"]
    size = sum(4 * part.layout.length for unit in model.units for part in unit.parts)
    held = steps[-1].memory[comms.rank].peak_of("parameters")
    return wrong, sum(event.sent for event in mine) / size, held / size


@pytest.mark.in_turn
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one after another"])
@pytest.mark.parametrize(
    ("kind", "microbatches", "local", "how", "rounds"),
    [
        ("layers", 1, False, {}, 3),
        ("layers", 2, False, {"prefetch": 2}, 6),
        ("layers", 3, True, {"prefetch": 0}, 7),
        ("layers", 2, False, {"reshard_after_forward": False}, 4),
        ("tied", 2, False, {}, 6),
        ("tied", 1, False, {"units": None}, 3),
    ],
)
def test_a_step_in_units(any_pool, kind, microbatches, local, how, rounds, overlap):
    """Parameters are gathered for forward and backward, gradients leave: (p-1)/p of everything each time."""
    by_rank = any_pool.run(in_units, 3, kind, overlap, microbatches, local, how, timeout=50)
    for wrong, sent, held in by_rank:
        assert not wrong
        assert sent == pytest.approx(rounds * 2 / 3) or not any_pool.shares_evenly
        assert held < 1 or how.get("units", "auto") is None or "reshard_after_forward" in how
    assert statistics.mean(sent for _, sent, _ in by_rank) == pytest.approx(rounds * 2 / 3)


def in_groups_of_units(comms):
    model = mp.FullyShardedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), comms, replicas=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs = []
    with mp.record(comms) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            programs.append(model.program(2))
            for _ in range(2):
                model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
    steps = [recorder.trace.step(number) for number in range(2)]
    return [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]


def test_a_hybrid_step(any_pool):
    assert any_pool.run(in_groups_of_units, 4, timeout=50) == [[]] * 4


def in_units_without_samples(comms, microbatches, how):
    """Two steps in which a rank has fewer micro-batches, from the first on."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = mp.FullyShardedDataParallel(module, comms, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs = []
    with mp.record(comms) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            programs.append(model.program(microbatches))
            for number in range(max(microbatches)):
                has_samples = number < microbatches[comms.rank]
                model(torch.ones(2, WIDTH)).sum().backward() if has_samples else model.sit_out()
            optimizer.step()
    for program in programs:
        mp.verify(program)
    steps = [recorder.trace.step(number) for number in range(2)]
    return [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]


@pytest.mark.in_turn
@pytest.mark.parametrize("how", [{}, {"prefetch": 2, "overlap": False}, {"reshard_after_forward": False}], ids=str)
def test_a_step_in_units_of_ranks_without_samples(any_pool, how):
    assert any_pool.run(in_units_without_samples, 3, (0, 2, 1), how, timeout=50) == [[]] * 3


def buffers_of_nothing(comms):
    module = nn.Linear(WIDTH, WIDTH)
    module.register_buffer("empty", torch.zeros(0))
    model = mp.DataParallel(module, comms)
    program = model.program()
    with mp.record(comms) as recorder:
        model(torch.ones(2, WIDTH)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return differences(recorder.trace, program), ":buffers" in to_text(program)


def test_buffers_of_nothing_are_not_sent(pool):
    assert pool.run(buffers_of_nothing, 2, transport="shm", timeout=50) == [([], False)] * 2


def uneven(comms, counts, overlap, samples):
    """Two steps in which rank r has counts[r] micro-batches; one that has none sits out."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    model = mp.DataParallel(nn.Sequential(*layers), comms, bucket_cap_mb=3e-4, overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * counts[comms.rank]
    known = None if samples else 2 * sum(counts)
    programs = []
    with mp.record(comms) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            programs.append(model.program(counts, samples=samples, loss=True))
            mp.course.accumulated_step(model, batches, nn.functional.mse_loss, samples=known)
            optimizer.step()
    steps = [recorder.trace.step(number) for number in range(2)]
    wrong = [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]
    return wrong, [to_text(program) for program in programs]


@pytest.mark.parametrize("counts", [(2, 1, 0), (0, 1), (0, 0, 3)], ids=str)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one after another"])
def test_ranks_with_different_numbers_of_micro_batches(any_pool, counts, overlap):
    for wrong, (first, later) in any_pool.run(uneven, len(counts), counts, overlap, overlap, timeout=50):
        assert not wrong
        assert "^:buffers@dp/0" in later and ":order" in first and ":order" not in later
        assert (":samples" in later) == overlap


def weighted_and_sitting_out(comms):
    """The last rank sits out, which the others learn only from the exchange of weights."""
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms)
    sits_out = comms.rank == comms.world_size - 1
    with mp.record(comms) as recorder, model.weighted(0.0 if sits_out else 1.0):
        program = model.program([1] * (comms.world_size - 1) + [0])
        model.sit_out() if sits_out else model(torch.ones(2, WIDTH)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return differences(recorder.trace, program), ":weights" in to_text(program)


def test_a_rank_that_sits_out_tells_the_others_that_it_has_no_data(any_pool):
    assert any_pool.run(weighted_and_sitting_out, 3, timeout=50) == [([], True)] * 3


def running_out(comms, lengths):
    """Rank r has lengths[r] batches. One that has none left takes part in the steps of the others."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    model = mp.DataParallel(nn.Sequential(*layers), comms, bucket_cap_mb=3e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs = []
    with mp.record(comms) as recorder, model.join():
        for number in range(lengths[comms.rank]):
            optimizer.zero_grad()
            gone = [rank for rank, length in enumerate(lengths) if length <= number]
            programs.append(to_text(model.program(gone=gone)))
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
    done = [operations(recorder.trace, rank, which) for rank in range(comms.world_size) for which in Lane]
    return programs, done


@pytest.mark.parametrize("lengths", [(1, 3), (2, 0, 3)], ids=str)
def test_ranks_that_run_out_of_data(any_pool, lengths):
    """Without an optimizer nobody counts the steps of a rank that has run out, so all of them are compared at once."""
    told = any_pool.run(running_out, len(lengths), lengths, timeout=50)
    longest = lengths.index(max(lengths))
    programs = [from_text(text) for text in told[longest][0]]
    for texts, done in told:
        assert texts == told[longest][0][: len(texts)]  # all ranks mean the same
        for rank, ops in enumerate(zip(*(program.ranks for program in programs), strict=True)):
            for lane_number, which in enumerate(Lane):
                meant = [str(op) for one in ops for op in one if lane(op) is which and not isinstance(op, Join)]
                found = done[2 * rank + lane_number]
                assert found[: len(meant)] == meant
                # In the end all find that nobody is left, and get the last one's parameters.
                assert found[len(meant) :][:1] == (["*:weights@dp"] if which is Lane.COMM else [])
    for number, program in enumerate(programs):
        mp.verify(program)
        root = next(rank for rank, length in enumerate(lengths) if length > number)
        assert f"^:buffers@dp/{root}" in to_text(program)
        assert (f"^:order@dp/{root}" in to_text(program)) == (number == 0)


def alone(comms, checked):
    """Two steps of two micro-batches, and one with samples and loss; checks look at gradients, and sum nothing."""
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms, overlap=True, check_finite=checked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs = []
    with mp.record(comms) as recorder:
        for _ in range(2):
            programs.append(model.program(2))
            with model.no_sync():
                model(torch.ones(2, WIDTH)).sum().backward()
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        programs.append(model.program(samples=True, loss=True))
        mp.course.accumulated_step(model, [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))], nn.functional.mse_loss)
        optimizer.step()
    steps = [recorder.trace.step(number) for number in range(3)]
    wrong = [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]
    return wrong, [to_text(program).splitlines()[-1] for program in programs]


def test_a_world_of_one_rank(pool):
    [(wrong, (first, _, last))] = pool.run(alone, 1, False, transport="shm", timeout=50)
    assert not wrong
    assert first == "rank 0: F0:1.0 B0.0 F0:1.1 B0.1 S"
    assert last == "rank 0: *:samples@dp = F0:1.0 B0.0 *:loss@dp S"
    [(wrong, (first, *_))] = pool.run(alone, 1, True, transport="shm", timeout=50)
    assert not wrong
    assert first == "rank 0: F0:1.0 B0.0 F0:1.1 B0.1 S"


def breaks(_):
    raise ValueError("broken")


def alone_after_an_error(comms):
    """A backward that broke is forgotten: the next step is told as if it had not been."""
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms)
    hook = model.module.weight.register_hook(breaks)
    with pytest.raises(ValueError, match="broken"):
        model(torch.ones(2, WIDTH)).sum().backward()
    hook.remove()
    with mp.record(comms) as recorder:
        model(torch.ones(2, WIDTH)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return differences(recorder.trace, model.program())


def test_a_world_of_one_rank_goes_on_after_an_error(pool):
    assert pool.run(alone_after_an_error, 1, transport="shm", timeout=50) == [[]]


def models_side_by_side(comms):
    """Two models on one Comms, whose buckets have the same names; a layer that raises; a backward for inputs alone."""
    one, other = (mp.DataParallel(nn.Linear(WIDTH, size), comms, overlap=True) for size in (WIDTH, 4 * WIDTH))
    one.requires_grad_(True)
    with mp.record(comms) as recorder:
        for _ in range(8):
            (one(torch.ones(2, WIDTH)).sum() + other(torch.ones(2, WIDTH)).sum()).backward()
    return [(event.number, event.name, event.bytes) for event in recorder.trace.events if event.kind == "collective"]


def test_two_models_keep_their_operations_apart(pool):
    for calls in pool.run(models_side_by_side, 2, transport="shm", timeout=50):
        half = len(calls) // 2
        assert sorted(calls[:half]) == sorted(calls[half:])  # both ranks count alike
        assert len({size for _, name, size in calls if name == "*U0@dp"}) == 2


def begun_in_the_middle(comms):
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms)
    with model.no_sync():
        model(torch.ones(2, WIDTH)).sum().backward()
    torch.autograd.grad(model(torch.ones(2, WIDTH, requires_grad=True)).sum(), list(model.parameters()))
    with mp.record(comms) as recorder:
        model(torch.ones(2, WIDTH)).sum().backward()
    return [event.name for event in recorder.trace.events if event.rank == 0 and event.computes]


def test_micro_batches_are_counted_whether_anybody_looks_or_not(pool):
    assert pool.run(begun_in_the_middle, 2, transport="shm", timeout=50) == [["F0:1.2", "B0.2"]] * 2


def frozen(comms):
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms)
    model.requires_grad_(False)
    inputs = torch.ones(2, WIDTH, requires_grad=True)
    with mp.record(comms) as recorder:
        model(inputs).sum().backward()
    return inputs.grad is not None, [event.kind for event in recorder.trace.by_rank[comms.rank] if event.computes]


def test_a_backward_for_the_inputs_alone_follows_nothing(pool):
    assert pool.run(frozen, 2, transport="shm", timeout=50) == [(True, ["forward", "backward"])] * 2


# ── pipelines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def stages(comms, schedule, count, tied):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if tied:
        layers[-1].weight = layers[0].weight
    loss_fn = nn.functional.mse_loss
    pipe = mp.Pipeline(layers, comms, schedule, microbatches=3, loss_fn=loss_fn, replicas=count)
    batch = torch.ones(6, WIDTH), torch.zeros(6, WIDTH)
    pipe.step(*batch)
    with mp.record(comms) as recorder:
        pipe.step(*batch)
    _, traced = pipe.traced_step(*batch)
    recorded = [event for event in recorder.trace.events if event.kind != "other" or "!" in event.name]
    assert len(recorded) == len(recorder.trace.events)
    return [*differences(recorder.trace, pipe.program), *differences(traced, pipe.program)], to_text(pipe.program)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("schedule", "ranks", "count", "tied"),
    [("1f1b", 2, 1, False), ("1f1b", 4, 2, True), ("zbv", 2, 1, True), ("interleaved", 4, 2, False)],
    ids=["1f1b", "dp × pp, tied weights", "shared on one rank", "dp × pp, several stages on a rank"],
)
def test_a_pipelines_step(any_pool, schedule, ranks, count, tied):
    for wrong, text in any_pool.run(stages, ranks, schedule, count, tied, timeout=50):
        assert not wrong
        assert ":loss@world" in text
        assert text.count("^:batch@pp/0 =") == ranks // count
        assert (":samples@dp" in text) == (count > 1)
        assert (":tied0@pp" in text) == (tied and schedule == "1f1b")


def scaled_stages(comms, schedule, count, shard):
    """Steps in float16: one that is taken, and one that is not, because a gradient is not finite."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    layers[-1].weight = layers[0].weight
    more = {"replicas": count, "shard": shard, "precision": "fp16"}
    pipe = mp.Pipeline(layers, comms, schedule, 3, nn.functional.mse_loss, **more)
    batch = torch.ones(6, WIDTH), torch.zeros(6, WIDTH)
    optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.SGD, comms, lr=0.1)
    pipe.step(*batch)
    wrong, taken = [], []
    for pipe.loss_scale.value in (1.0, 1e30):
        optimizer.zero_grad()
        with mp.record(comms) as recorder:
            pipe.step(*batch)
            pipe.clip_grad_norm_(1.0)
            if shard:
                optimizer.step()
        wrong += differences(recorder.trace, pipe.program_with(norm=True))
        taken.append(any(parameter.grad is not None for parameter in pipe.parameters()))
    _, traced = pipe.traced_step(*batch)
    return [*wrong, *differences(traced, pipe.program_with(update=False))], taken, to_text(pipe.program)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("schedule", "ranks", "count", "shard"),
    [("1f1b", 2, 1, None), ("zb-h1", 4, 2, None), ("1f1b", 4, 2, "optimizer")],
)
def test_a_pipelines_step_in_float16(any_pool, schedule, ranks, count, shard):
    for wrong, taken, text in any_pool.run(scaled_stages, ranks, schedule, count, shard, timeout=50):
        assert not wrong
        assert taken == [True, False]
        assert text.count("*:loss@world *:overflow0@world") == ranks


def clipped(comms, count):
    """A step, whose gradients are clipped, and whose replicas then agree on their buffers."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    pipe = mp.Pipeline(
        layers, comms, "1f1b", 2, nn.functional.mse_loss, [2, 2][: comms.world_size // count] or "auto", replicas=count
    )
    batch = torch.ones(4, WIDTH), torch.zeros(4, WIDTH)
    pipe.step(*batch)
    with mp.record(comms) as recorder:
        pipe.step(*batch)
        pipe.clip_grad_norm_(1.0)
        pipe.broadcast_buffers()
    program = pipe.program_with(norm=True, buffers=True)
    return differences(recorder.trace, program), to_text(program)


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 2)], ids=["one pipeline", "dp × pp"])
def test_a_pipelines_gradients_are_clipped_and_its_buffers_copied(any_pool, ranks, count):
    for wrong, text in any_pool.run(clipped, ranks, count, timeout=50):
        assert not wrong
        assert text.count("*:norm@pp") == ranks
        assert text.count("^:buffers@dp/0") == (2 if count > 1 else 0)  # those of the first stage; the last has none


def sharded_pipelines(comms, schedule, count, counts):
    """Two steps of replicas that keep the optimizer's state in parts; one stage of zbv has nothing to train."""
    torch.manual_seed(0)
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    linear[2].weight = linear[0].weight
    layers = nn.Sequential(linear[0], nn.BatchNorm1d(WIDTH), linear[1], nn.ReLU(), linear[2])
    balance = [2, 1, 1, 1] if schedule == "zbv" else [2, 3]
    loss_fn = nn.functional.mse_loss
    more = {"replicas": count, "shard": "optimizer", "bucket_cap_mb": 1e-6}
    pipe = mp.Pipeline(layers, comms, schedule, 2, loss_fn, balance, **more)
    optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.AdamW, comms, lr=0.1)
    mine = 2 * counts[pipe.replica]
    batch = (torch.ones(mine, WIDTH), torch.zeros(mine, WIDTH)) if mine else ()
    known = {"samples": 2 * sum(counts)} if 0 in counts else {}
    wrong = []
    pipe.step(*batch, **known)
    program = pipe.program_with(counts, samples=not known, norm=True, buffers=True)
    for _ in range(2):
        with mp.record(comms) as recorder:
            optimizer.zero_grad()
            pipe.step(*batch, **known)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            pipe.broadcast_buffers()
        wrong += differences(recorder.trace, program)
    _, traced = pipe.traced_step(*batch, **known)
    assert traced.program == pipe.program_with(counts, samples=not known, update=False)
    return [*wrong, *differences(traced, traced.program)], to_text(program)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("schedule", "counts"), [("1f1b", (2, 2)), ("zbv", (2, 2)), ("gpipe", (2, 0))], ids=["tied", "shared", "idle"]
)
def test_pipelines_that_keep_the_optimizers_state_in_parts(any_pool, schedule, counts):
    for wrong, text in any_pool.run(sharded_pipelines, 4, schedule, 2, counts, timeout=50):
        assert not wrong
        assert text.count("*:presence0@dp = ") == text.count("*:norm@world = S ~T") == 4
        assert (":tied0" in text) == (schedule != "zbv")
        assert text.count("%U") == text.count("~T") == (8 if schedule == "zbv" else 4)


def pipelines_of_different_lengths(comms, counts, samples):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    pipe = mp.Pipeline(layers, comms, "1f1b", 3, nn.functional.mse_loss, replicas=len(counts))
    mine = counts[pipe.replica]
    batch = (torch.ones(mine, WIDTH), torch.zeros(mine, WIDTH)) if mine else ()
    known = {"samples": sum(counts)} if samples else {}
    pipe.step(*batch, **known, allow_fewer=True)
    with mp.record(comms) as recorder:
        pipe.step(*batch, **known, allow_fewer=True)
    _, traced = pipe.traced_step(*batch, **known, allow_fewer=True)
    program = pipe.program_with(counts, samples=not samples)
    assert traced.program == program
    for wrong in ([3], [4] * len(counts), [-1] * len(counts), [0] * len(counts)):
        with pytest.raises(mp.errors.UsageError, match=f"give {len(counts)} numbers from 0 to 3, one"):
            pipe.program_with(wrong)
    return [*differences(recorder.trace, program), *differences(traced, program)], to_text(program)


@pytest.mark.in_turn
@pytest.mark.parametrize(("counts", "samples"), [((3, 1), False), ((0, 2), True), ((1, 0, 2), True)], ids=str)
def test_pipelines_with_different_numbers_of_micro_batches(any_pool, counts, samples):
    for wrong, text in any_pool.run(pipelines_of_different_lengths, 2 * len(counts), counts, samples, timeout=50):
        assert not wrong
        assert (":samples" in text) == (not samples)


class Chain(nn.Module):
    """A model with a forward of its own: a mask goes along with what its blocks compute."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, inputs, mask):
        for block in self.blocks:
            inputs = inputs + block(inputs) * mask[:, None]
        return inputs


def counted(comms, count, weighted):
    """Steps whose micro-batches do not count by their samples."""
    torch.manual_seed(0)
    batch = {"inputs": torch.ones(4, WIDTH), "mask": torch.ones(4)}
    mean, both = nn.functional.mse_loss, lambda outputs, targets: (((outputs - targets) ** 2).sum(), len(targets))
    layers = mp.pipeline_layers(Chain(), example=batch)
    pipe = mp.Pipeline(layers, comms, "1f1b", 2, mean if weighted else both, replicas=count)
    more = {"weight": torch.arange(4.0)} if weighted else {}
    pipe.step(batch, torch.zeros(4, WIDTH), **more)
    with mp.record(comms) as recorder:
        pipe.step(batch, torch.zeros(4, WIDTH), **more)
    return differences(recorder.trace, pipe.program)


@pytest.mark.in_turn
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "count"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 2)], ids=["one pipeline", "dp × pp"])
def test_a_model_of_ones_own_and_losses_that_are_counted(any_pool, ranks, count, weighted):
    assert any_pool.run(counted, ranks, count, weighted, timeout=50) == [[]] * ranks


def one_stage(comms):
    pipe = mp.Pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH)), comms, "1f1b", 2, nn.functional.mse_loss)
    batch = torch.ones(4, WIDTH), torch.zeros(4, WIDTH)
    pipe.step(*batch)
    with mp.record(comms) as recorder:
        pipe.step(*batch)
        pipe.clip_grad_norm_(1.0)
    return differences(recorder.trace, pipe.program_with(norm=True))


def test_a_pipeline_of_one_rank(pool):
    assert pool.run(one_stage, 1, transport="shm", timeout=50) == [[]]


def test_every_name_that_ranks_tell_stands_in_a_builder():
    known = {value for value in vars(names).values() if isinstance(value, Named)} | {names.tied(0)}
    norms = [[names.moments(0)], [names.moments_gradient(0)], []]
    known |= {names.moments(0), names.moments_gradient(0), names.overflow()}
    options = {"buffers": True, "weights": True, "order": True, "samples": True, "loss": True}
    data_parallel = mp.schedules.data_parallel_step(1, 2, **options, norms=norms)
    pipelines = mp.schedules.with_sums(
        mp.schedules.build("1f1b", 2, 1), 2, batch=0, shared=[0], ties=[[0, 1]], overflow=True, norm=True, buffers=[0]
    )
    built = {op.value for program in (data_parallel, pipelines) for ops in program.ranks for op in ops if is_named(op)}
    assert built == known


def is_named(op):
    return isinstance(getattr(op, "value", None), Named)


def test_a_step_that_does_something_else_is_noticed():
    program = mp.schedules.data_parallel_step(2, 2)
    trace = mp.simulate(program)
    assert not differences(trace, program)
    assert differences(mp.Trace(trace.events[:-1], program), program)
    assert differences(trace, mp.schedules.data_parallel_step(2, 2, loss=True))


class Fragile(nn.Module):
    broken = True

    def forward(self, inputs):
        if Fragile.broken:
            raise RuntimeError("broken")
        return inputs


def after_an_error(comms):
    pipe = mp.Pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), Fragile()), comms, "gpipe", 2, nn.functional.mse_loss)
    batch = torch.ones(4, WIDTH), torch.zeros(4, WIDTH)
    with mp.record(comms) as recorder:
        for Fragile.broken in (True, False):
            recorder.step += 1
            with pytest.raises(mp.errors.StageError) if Fragile.broken else nullcontext():
                pipe.step(*batch)
        nn.Linear(2, 2)(torch.ones(1, 2))
    seen = [event.name for event in recorder.trace.step(2).events if event.computes]
    return seen[0], seen[-1]


def test_a_step_after_one_that_failed_is_recorded_whole(pool):
    assert pool.run(after_an_error, 1, transport="shm", timeout=50) == [("F0.0", "forward of Linear")]


def many_buckets(comms):
    """Sums over replicas that are several calls each, of which early ones may be back before later ones leave."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.ReLU())
    loss_fn = nn.functional.mse_loss
    pipe = mp.Pipeline(layers, comms, "1f1b", 2, loss_fn, balance=[4, 1], replicas=2, bucket_cap_mb=1e-6)
    batch = torch.ones(4, WIDTH), torch.zeros(4, WIDTH)
    pipe.step(*batch)
    _, trace = pipe.traced_step(*batch)
    sizes = {event.name: event.bytes for event in trace.events if event.rank == 0 and event.name.startswith("*U")}
    return differences(trace, pipe.program), sizes


def test_a_sum_of_several_calls_is_one_operation_and_one_of_nothing_is_none(any_pool):
    for wrong, sizes in any_pool.run(many_buckets, 4, timeout=50):
        assert not wrong
        assert sizes["*U0@dp"] > 4 * 4 * WIDTH * WIDTH  # all of its eight tensors
