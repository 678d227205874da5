"""Sends that wait for their receiver: why 1F1B hangs with them, and who waits for whom.

Question   1F1B is a fine schedule. Why does it hang if a send returns only once the other rank
           has received? And what must change so that it does not?
Look at    the two ranks at the end: each stands in a send, and its receiver would have to come
           out of its own send first. The verifier said so before anything ran.
Try        python examples/pipeline_deadlock.py --fix              sends that do not wait
           python examples/pipeline_deadlock.py --schedule gpipe   does every schedule hang?
           python examples/pipeline_deadlock.py --microbatches 1   how many does it take?
           python examples/pipeline_deadlock.py --ranks 3          who is in the circle, and who
                                                                   only waits for it?
"""

import argparse
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

import microparallel as mp
from microparallel.broken_pipe import quiet_broken_pipe
from microparallel.comms import Request
from microparallel.program import Act, Backward, Forward, Free, Grad, Op, Program, Recv, Send, Wait
from microparallel.verifier.order import find_circle

SHAPE = (4, 16)  # of what crosses from stage to stage: samples, width
NOT_BEGUN = -1

WHY_REQUESTS_ARE_KEPT = """\
Each send was started with isend, and its request was kept until the end. That
matters: soon after a send the schedule frees the tensor (>G0.0@0 !G0.0), and
the other rank may not have come to its receive. The request holds on to the
memory. If it is dropped, nobody does: the next tensor may be put there while
it is still being sent, and other numbers arrive. (The requests of this library
warn when they are dropped, and keep their memory for ever.)
"""


class Board:
    """A noticeboard in a file that all processes map into their memory: what is every rank doing now?"""

    def __init__(self, path: Path, ranks: int) -> None:
        numbers = torch.from_file(str(path), shared=True, size=2 * ranks, dtype=torch.int64)
        self.places, self.processes = numbers[:ranks], numbers[ranks:]  # place: in the rank's list of operations


class Watchdog(threading.Thread):
    """Looks at the board, and ends a rank (so that launch ends the rest) once nobody has moved for too long."""

    def __init__(self, board: Board, program: Program, limit: float) -> None:
        super().__init__(daemon=True)
        self.board, self.program, self.limit = board, program, limit
        self.over = threading.Event()
        self.stuck_at: list[int] | None = None

    def run(self) -> None:
        """Look ten times within the limit."""
        last, since = None, 0.0
        while not self.over.wait(self.limit / 10):
            places, now = self.board.places.tolist(), time.monotonic()
            if places != last or not self.all_wait(places):
                last, since = places, now
            elif now - since > self.limit:
                self.stuck_at = places
                waiting = next(rank for rank, ops in enumerate(self.program.ranks) if places[rank] < len(ops))
                os.kill(int(self.board.processes[waiting]), signal.SIGKILL)
                return

    def all_wait(self, places: list[int]) -> bool:
        """Whether every rank that has not finished stands at a message: whoever computes will go on."""
        if NOT_BEGUN in places:
            return False
        rest = [ops[place] for ops, place in zip(self.program.ranks, places, strict=True) if place < len(ops)]
        return bool(rest) and all(isinstance(op, Send | Recv) for op in rest)

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.join()


class Messages:
    """Sends and receives in two ways. With `fix`, a send only starts; without it, it waits for the receiver."""

    def __init__(self, comms: mp.Comms, fix: bool) -> None:
        self.comms, self.fix = comms, fix
        # Answers travel apart from the tensors: messages between two ranks arrive in the order in which they were sent.
        self.answers = comms.group(range(comms.world_size))
        self.requests: list[Request[None]] = []

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Start sending; or send, and come back when the tensor has been received."""
        if self.fix:
            self.requests.append(self.comms.isend(tensor, to))
            return
        # Small messages are usually copied on their way, and their send returns at once: a deadlock that waits for a
        # larger model. A large one cannot leave before it is received, so here every send waits for an answer.
        self.comms.send_tensor(tensor, to)
        self.answers.recv_tensor(1, to)

    def receive(self, source: int) -> torch.Tensor:
        """Receive, and answer a sender who waits for that."""
        tensor = self.comms.recv_tensor(SHAPE, source)
        if not self.fix:
            self.answers.send_tensor(torch.ones(1), source)
        return tensor

    def finish(self) -> None:
        """Come back when everything that was sent has left."""
        for request in self.requests:
            request.wait()


def step(comms: mp.Comms, program: Program, path: Path, fix: bool) -> float:
    """Do one rank's operations of a training step, one after another; returns the loss on the last rank, else 0."""
    board, messages = Board(path, comms.world_size), Messages(comms, fix)
    torch.manual_seed(comms.rank)
    layer, values, loss = nn.Linear(SHAPE[1], SHAPE[1]), {}, 0.0
    board.processes[comms.rank] = os.getpid()
    comms.barrier()
    for place, op in enumerate(program.ranks[comms.rank]):
        board.places[comms.rank] = place
        match op:
            case Forward(stage, microbatch):
                received = torch.ones(SHAPE) if stage == 0 else values[Act(stage - 1, microbatch)]
                values[Act(stage, microbatch)] = layer(received)
            case Backward(stage, microbatch):
                if stage == comms.world_size - 1:
                    output = values[Act(stage, microbatch)].square().mean() / program.goal.microbatches
                    output.backward()
                    loss += output.item()
                else:
                    values[Act(stage, microbatch)].backward(values[Grad(stage, microbatch)])
                if stage > 0:
                    values[Grad(stage - 1, microbatch)] = values[Act(stage - 1, microbatch)].grad
            case Send(value, to):
                messages.send(values[value].detach(), to)
            case Recv(value, source):
                values[value] = messages.receive(source).requires_grad_(isinstance(value, Act))
            case Free(value):
                values.pop(value, None)
    messages.finish()
    board.places[comms.rank] = len(program.ranks[comms.rank])
    return loss


def in_words(rank: int, op: Op) -> str:
    if isinstance(op, Send):
        return f"rank {rank} is in send of {op.value} to rank {op.to}, which has not received it"
    return f"rank {rank} is in receive of {op.value} from rank {op.source}, which has not sent it"


def diagnose(program: Program, places: list[int]) -> str:
    """Say who waits for whom; returns the circle, as 0 → 1 → 0."""
    waits = []
    for rank, place in enumerate(places):
        if place == len(program.ranks[rank]):
            print(f"  rank {rank} has finished")
            continue
        op = program.ranks[rank][place]
        print(f"  {in_words(rank, op)}")
        waits.append(Wait(rank, place, str(op), op.to if isinstance(op, Send) else op.source))
    circle = [wait.rank for wait in find_circle(waits)[0]]
    return " → ".join(map(str, [*circle, circle[0]]))


def foresee(program: Program) -> bool:
    """Ask the verifier whether blocking sends make a deadlock of it."""
    try:
        mp.verify(program, sends="blocking")
    except mp.errors.ProgramError as error:
        print("before it runs, mp.verify(program, sends='blocking') says:")
        for line in str(error).splitlines():
            print(textwrap.fill(line.strip(), 80, initial_indent="  ", subsequent_indent="    "))
        return True
    print("before it runs, mp.verify(program, sends='blocking') finds no deadlock")
    return False


@quiet_broken_pipe()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="send without waiting, and keep the requests")
    parser.add_argument("--ranks", type=int, default=2, help="stages, one on each rank (default 2)")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches of the step (default 4)")
    parser.add_argument("--schedule", choices=["naive", "gpipe", "1f1b"], default="1f1b", help="default 1f1b")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds without progress that are too long (2)")
    options = parser.parse_args()
    if not 2 <= options.ranks <= 16 or options.microbatches < 1 or not 0 < options.limit < 3600:
        parser.error("--ranks must be from 2 to 16, --microbatches at least 1, and --limit above 0 seconds")

    program = mp.schedules.build(options.schedule, options.ranks, options.microbatches)
    foreseen = foresee(program) and not options.fix
    print(f"\nnow it runs, with sends that {'only start' if options.fix else 'wait for their receiver'} …", flush=True)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, MICROPARALLEL_FLIGHT_DIR=folder):
        # What ranks were doing when they died is kept for `microparallel why`; here it goes with the board.
        path = Path(folder) / "board"
        path.write_bytes(bytes(16 * options.ranks))
        board = Board(path, options.ranks)
        board.places.fill_(NOT_BEGUN)
        with Watchdog(board, program, options.limit) as watchdog:
            try:
                losses = mp.launch(step, options.ranks, program, path, options.fix, device="cpu", timeout=120)
            except (mp.errors.UsageError, mp.errors.LaunchError) as failure:
                if watchdog.stuck_at is None:
                    sys.exit(getattr(failure, "refusal", None) or str(failure))

    if watchdog.stuck_at is not None:
        print(f"nobody has moved for {options.limit:g} s, and the board says:")
        circle = diagnose(program, watchdog.stuck_at)
        if not foreseen:
            sys.exit(f"\nit hangs, and the verifier did not foresee it: {circle}; is the machine too busy?")
        sys.exit(f"\ndeadlock: {circle}. Each waits for the next: start sends and go on (--fix)")
    if foreseen:
        sys.exit("\nit came to its end, and the verifier had foreseen a deadlock")
    print(f"every rank came to its end; the loss is {losses[-1]:.6f}\n")
    if options.fix:
        print(WHY_REQUESTS_ARE_KEPT)
    print(f"conclusion: {options.schedule} comes to its end", end=" ")
    print("when sends do not wait for their receivers" if options.fix else "even with sends that wait")


if __name__ == "__main__":
    main()
