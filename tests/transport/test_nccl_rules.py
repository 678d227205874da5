"""The transport that keeps NCCL's rules: that it is strict, and that every collective program runs on it."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import microparallel as mp
from microparallel.collectives import ALL_REDUCES, OTHERS, build
from microparallel.comms import run_in_process
from microparallel.comms.interpreter import COMBINE, Memory, perform, rounds
from microparallel.program import Program, from_text
from microparallel.transport import CountingTransport, in_process_transports, nccl_rules_transports
from microparallel.transport.base import SeparateMessages
from microparallel.transport.in_process import Channels, InProcessTransport

SIZES = (0, 1, 4, 40)  # fewer elements than ranks, and numbers that most ranks do not divide


# ── the rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_send_then_receive_on_both_sides_deadlocks():
    """A transport with buffers would let both sends end."""
    first, second = nccl_rules_transports(2)
    received = [torch.zeros(3), torch.zeros(3)]
    first.isend(torch.ones(3), 1)
    work = first.irecv(received[0], 1)
    second.isend(torch.ones(3), 0)
    second.irecv(received[1], 0)
    with pytest.raises(mp.errors.CommsError) as refusal:
        work.wait()
    assert str(refusal.value) == (
        "deadlock under NCCL's rules: rank 0 is in exchange 1 (send of 3 × float32 to rank 1); "
        "rank 1 is in exchange 1 (send of 3 × float32 to rank 0)"
    )
    assert not any(map(torch.any, received))


def test_the_same_as_one_exchange_ends():
    transports = nccl_rules_transports(2)
    received = [torch.zeros(3), torch.zeros(3)]
    works = []
    for rank, transport in enumerate(transports):
        exchange = transport.exchange()
        exchange.isend(torch.full((3,), 1.0 + rank), 1 - rank)
        works.append(exchange.irecv(received[rank], 1 - rank))
        assert not works[0].poll()  # an exchange begins when it is closed
        exchange.close()
    for work in works:
        work.wait()
    assert [tensor.tolist() for tensor in received] == [[2.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(("make_transports", "arrived"), [(in_process_transports, 2.0), (nccl_rules_transports, 1.0)])
def test_tags_are_ignored(make_transports, arrived):
    """A rank that asks for the second message by its tag gets the first."""
    sender, receiver = make_transports(2)
    sender.isend(torch.full((3,), 1.0), 1, tag=1)
    sender.isend(torch.full((3,), 2.0), 1, tag=2)
    tensor = torch.zeros(3)
    receiver.irecv(tensor, 0, tag=2).wait()
    assert tensor.tolist() == [arrived] * 3


def test_tags_do_not_rescue_a_wrong_order():
    sender, receiver = nccl_rules_transports(2)
    sender.isend(torch.zeros(2), 1, tag=1)
    sender.isend(torch.zeros(3), 1, tag=2)
    with pytest.raises(mp.errors.Mismatch) as refusal:
        receiver.irecv(torch.zeros(3), 0, tag=2)
    assert "rank 0's send of 2 × float32 to rank 1 meets rank 1's receive of 3 × float32 from rank 0" in str(
        refusal.value
    )


def test_messages_of_another_kind_do_not_meet():
    sender, receiver = nccl_rules_transports(2)
    sender.isend(torch.zeros(2), 1)
    with pytest.raises(mp.errors.Mismatch):
        receiver.irecv(torch.zeros(2, dtype=torch.int64), 0)


def test_a_send_is_not_buffered():
    sender, receiver = nccl_rules_transports(2)
    tensor, arrived = torch.ones(2), torch.zeros(2)
    work = sender.isend(tensor, 1)
    assert not work.poll()
    tensor.fill_(7)  # too early
    receiver.irecv(arrived, 0).wait()
    assert work.poll()
    assert arrived.tolist() == [7, 7]


def test_exchanges_of_a_rank_run_one_after_another():
    first, second, third = nccl_rules_transports(3)
    first.isend(torch.zeros(1), 1)
    first.isend(torch.zeros(1), 2)
    overtaking = third.irecv(torch.zeros(1), 0)
    assert not overtaking.poll()
    second.irecv(torch.zeros(1), 0).wait()
    assert overtaking.poll()


def test_messages_of_an_exchange_run_side_by_side_and_end_together():
    first, second, third = nccl_rules_transports(3)
    exchange = first.exchange()
    to_second, to_third = exchange.isend(torch.zeros(1), 1), exchange.isend(torch.zeros(1), 2)
    exchange.close()
    third.irecv(torch.zeros(1), 0).wait()
    assert not to_third.poll()
    second.irecv(torch.zeros(1), 0).wait()
    assert to_second.poll() and to_third.poll()


def test_messages_of_an_exchange_must_not_share_memory():
    transport = nccl_rules_transports(2)[0]
    exchange = transport.exchange()
    tensor = torch.zeros(4)
    exchange.isend(tensor[:3], 1)
    exchange.irecv(tensor[2:], 1)
    with pytest.raises(
        mp.errors.CommsError, match=r"rank 0: send of 3 .* and receive of 2 .* use the same memory in one exchange"
    ):
        exchange.close()


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_message_needs_another_rank(peer):
    with pytest.raises(mp.errors.CommsError, match=f"to rank {peer}, which is not another rank of 2"):
        nccl_rules_transports(2)[0].isend(torch.zeros(1), peer)


# ── the interpreter on it ─────────────────────────────────────────────────────────────────────────────────────────────


def all_programs(ranks):
    for name in [*ALL_REDUCES, *OTHERS]:
        options = [{}]
        if name.startswith(("hierarchical", "leaders")):
            options = [{"ranks_per_node": ranks_per_node} for ranks_per_node in range(1, ranks + 1)]
        yield from (build(name, ranks, **chosen) for chosen in options)


def promised(program: Program, before: list[torch.Tensor], rank: int) -> list[tuple[int, torch.Tensor]]:
    """The slices of which the goal says what a rank holds at the end, and what that is."""
    goal = program.goal
    everything = [[tensor[bounds] for bounds in slices_of(tensor, goal.slices)] for tensor in before]
    total = [sum(contributions) for contributions in zip(*everything, strict=True)]
    wanted = {
        "all-reduce": total,
        "reduce": total,
        "reduce-scatter": total,
        "all-gather": [everything[index % len(before)][index] for index in range(goal.slices)],
        "gather": [everything[index % len(before)][index] for index in range(goal.slices)],
        "all-to-all": [everything[index // len(before)][index] for index in range(goal.slices)],
        "broadcast": everything[0],
        "scatter": everything[0],
    }[goal.kind]
    if goal.kind in ("reduce", "gather") and rank != 0:
        return []
    if goal.kind == "all-to-all":
        return [(index, wanted[index]) for index in range(rank, goal.slices, len(before))]
    only_one = goal.kind in ("reduce-scatter", "scatter")
    return [(index, tensor) for index, tensor in enumerate(wanted) if index == rank or not only_one]


def slices_of(tensor, count):
    bounds = [index * len(tensor) // count for index in range(count + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_program_gives_the_right_result(ranks):
    for program in all_programs(ranks):
        for size in SIZES:
            tensors = [torch.arange(size) + 100 * rank for rank in range(ranks)]
            before = [tensor.clone() for tensor in tensors]
            run_in_process(program, tensors, nccl_rules_transports(ranks))
            for rank, tensor in enumerate(tensors):
                cuts = slices_of(tensor, program.goal.slices)
                for index, wanted in promised(program, before, rank):
                    assert torch.equal(tensor[cuts[index]], wanted), (program.name, size, rank, index)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_rank_ends_with_the_same_bits_as_on_the_other_transport(ranks):
    for program in all_programs(ranks):
        for size in SIZES:
            generator = torch.Generator().manual_seed(size)
            tensors = [torch.randn(size, generator=generator) for _ in range(ranks)]
            buffered = [tensor.clone() for tensor in tensors]
            run_in_process(program, tensors, nccl_rules_transports(ranks))
            run_in_process(program, buffered)
            assert all(map(torch.equal, tensors, buffered)), (program.name, size)
            if program.goal.kind == "all-reduce":
                assert all(torch.equal(tensors[0], tensor) for tensor in tensors), (program.name, size)


class Ungrouped(CountingTransport):
    """What would happen if exchanges were not handed over as such."""

    def exchange(self, tag=0):
        return SeparateMessages(self, tag)


@pytest.mark.parametrize("name", ["ring", "direct", "gather-add", "recursive-doubling", "halving-doubling"])
def test_without_exchanges_programs_deadlock(name):
    transports = [Ungrouped(transport) for transport in nccl_rules_transports(4)]
    with pytest.raises(mp.errors.ProgramError):
        run_in_process(build(name, 4), [torch.zeros(8) for _ in range(4)], transports)


def test_a_program_that_stands_still_names_where():
    program = from_text("program wrong\ngoal: all-reduce of 1 slice\nrank 0: <+C0@1 >C0@1\nrank 1: <+C0@0 >C0@0\n")
    with pytest.raises(mp.errors.ProgramError) as refusal:
        run_in_process(program, [torch.zeros(2), torch.zeros(2)], nccl_rules_transports(2))
    assert str(refusal.value) == (
        "program 'wrong' stands still: rank 0 is in exchange 1 (receive of 2 × float32 from rank 1); "
        "rank 1 is in exchange 1 (receive of 2 × float32 from rank 0)"
    )
    with pytest.raises(mp.errors.ProgramError, match="rank 0 waits for C0 from rank 1; rank 1 waits for C0 from"):
        run_in_process(program, [torch.zeros(2), torch.zeros(2)])


class Letter:
    """A send without a buffer: what its tensor holds is read when it is received."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.taken = False

    def poll(self):
        return self.taken


class Taking:
    """A receive of a letter."""

    def __init__(self, tensor, letters):
        self.tensor = tensor
        self.letters = letters
        self.done = False

    def poll(self):
        if not self.done and self.letters:
            letter = self.letters.popleft()
            self.tensor.copy_(letter.tensor)
            letter.taken = self.done = True
        return self.done


class UnbufferedTransport(InProcessTransport):
    """As gloo moves large tensors: messages do not wait for each other, and none is copied before it is received."""

    def isend(self, tensor, to, tag=0):
        letter = Letter(tensor)
        self._channels.messages[self.rank, to, tag].append(letter)
        return letter

    def irecv(self, tensor, source, tag=0):
        return Taking(tensor, self._channels.messages[source, self.rank, tag])


def run_unbuffered(program, tensors, order):
    """Let each rank go on for as long as it can before the next one's turn, so that overwriting too early shows."""
    channels = Channels()
    slices = program.goal.slices
    transports = [UnbufferedTransport(rank, len(tensors), channels) for rank in range(len(tensors))]
    runs = [
        perform(rounds(ops), Memory(tensor, slices), transport, COMBINE["sum"])
        for ops, tensor, transport in zip(program.ranks, tensors, transports, strict=True)
    ]
    waiting = dict.fromkeys(order)
    for rank in itertools.islice(itertools.cycle(order), (len(program) + 1) * len(order)):
        while rank in waiting and (waiting[rank] is None or waiting[rank].poll()):
            waiting[rank] = next(runs[rank], None)
            if waiting[rank] is None:
                del waiting[rank]
                unread = [key for key, letters in channels.messages.items() if key[0] == rank and letters]
                assert not unread, f"rank {rank} ended before {unread} was received"
    assert not waiting


@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("step", [1, -1])
def test_nothing_is_overwritten_while_it_is_sent(ranks, step):
    for program in all_programs(ranks):
        tensors = [torch.arange(40) + 100 * rank for rank in range(ranks)]
        copied = [tensor.clone() for tensor in tensors]
        run_unbuffered(program, tensors, range(ranks)[::step])
        run_in_process(program, copied)
        assert all(map(torch.equal, tensors, copied)), program.name


def test_a_message_waits_until_its_place_has_been_sent():
    """Rank 2's message could arrive at rank 0 before rank 1 has taken what it overwrites."""
    program = from_text(
        "program shift\ngoal: broadcast of 1 slice, root 2\nrank 0: >C0@1 <C0@2\nrank 1: <C0@0\nrank 2: >C0@0\n"
    )
    tensors = [torch.tensor([rank]) for rank in range(3)]
    run_unbuffered(program, tensors, [2, 0, 1])
    assert [tensor.item() for tensor in tensors] == [2, 0, 2]


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (">C0@1 <+C2@2 >C2@1 <+C1@2", ">C0@1 <+C2@2 | >C2@1 <+C1@2"),  # a ring
        (">C0@1 >C0@2 <P2@2 <P1@1 C0+=P1", ">C0@1 >C0@2 <P2@2 <P1@1 | C0+=P1"),  # gather-add
        ("<+C0@1 <+C0@2 >C0@1 >C0@2", "<+C0@1 | <+C0@2 | >C0@1 >C0@2"),  # the root of the naive one
        (">C0@1 <+C0@1 <+C0@2", ">C0@1 <+C0@1 <+C0@2"),  # messages to be added arrive side by side
        (">C0@1 <C0@1", ">C0@1 | <C0@1"),  # what is being sent must not be overwritten,
        (">C0@1 C0+=P1 <C1@1", ">C0@1 | C0+=P1 <C1@1"),  # nor added to;
        (">C0@1 P0+=P1 <C1@1", "P0+=P1 >C0@1 <C1@1"),  # other additions overtake a send that is held back
        (">C0@1 <+C1@1 <C1@2", ">C0@1 <+C1@1 | <C1@2"),  # the second message overwrites the sum
    ],
)
def test_rounds(text, cut):
    ops = from_text(f"program any\ngoal: all-reduce of 3 slices\nrank 0: {text}\n").ranks[0]
    found = [
        " ".join(map(str, [*(one.op for one in step.adds), *step.sends, *(one.op for one in step.receives)]))
        for step in rounds(ops)
    ]
    assert " | ".join(found) == cut


# ── torch's own batches, as NCCL gets them ────────────────────────────────────────────────────────────────────────────


def in_batches(comms):
    """Hand CPU tensors to torch as if they were on a GPU; gloo takes batches too."""
    comms._group.batched = frozenset({"cpu"})
    found = {}
    for name in ALL_REDUCES:
        tensor = torch.arange(12.0) + comms.rank
        with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as batch:
            comms.all_reduce(tensor, algorithm=name)
        found[name] = tensor.tolist(), [len(call.args[0]) for call in batch.call_args_list]
    return found


@pytest.mark.parametrize("ranks", [3, 4])
def test_each_exchange_reaches_torch_as_one_batch(pool, ranks):
    total = (ranks * torch.arange(12.0) + ranks * (ranks - 1) / 2).tolist()
    for rank, found in enumerate(pool.run(in_batches, ranks, timeout=50, transport="gloo")):
        for name, (result, batches) in found.items():
            assert result == total, (name, rank)
            exchanges = [len(step.sends) + len(step.receives) for step in rounds(build(name, ranks).ranks[rank])]
            assert batches == [messages for messages in exchanges if messages], (name, rank)
        assert found["ring"][1] == [2] * 2 * (ranks - 1)
        assert found["gather-add"][1] == [2 * (ranks - 1)]
