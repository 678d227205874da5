"""Links that are slower than they are: messages between some ranks arrive late, to see what that does to a run.

A message holds its link for its latency and its bytes, and the next one waits for it, as in the simulator. All-reduces
run as a ring over such messages. The other collectives are not slowed down.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from microparallel.collectives import all_reduce_program
from microparallel.comms.comms import Comms
from microparallel.comms.group import Group
from microparallel.comms.interpreter import COMBINE, Memory, perform, rounds, slices_of
from microparallel.comms.turns import Line, Turn
from microparallel.errors import TransportError
from microparallel.topology import Link
from microparallel.transport.base import COMPLETE, SeparateMessages, Work


def slow_down(comms: Comms, links: Mapping[frozenset[int], Link]) -> Comms:
    """The same ranks, with slow links between some of them; links name ranks of the world."""
    group = SlowGroup(comms._transport, links)
    comms.before_closing.append(group.stop)
    return Comms(
        group,
        device=comms.device,
        local_rank=comms.local_rank,
        check=comms._checker is not None,
    )


class SlowGroup:
    """A group some of whose messages arrive late; for all else it is the group it was made from."""

    def __init__(self, group: Group, links: Mapping[frozenset[int], Link]) -> None:
        self._group = group
        self._links = links
        self._line = Line()
        self._wires: dict[int, Wire] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending; over a slow link, a copy leaves later."""
        link = self._links.get(frozenset((self._group.world_ranks[self._group.rank], self._group.world_ranks[to])))
        if link is None:
            return self._group.isend(tensor, to, tag)
        if to not in self._wires:
            self._wires[to] = Wire(self._group, to, link)
        return self._wires[to].send(tensor.clone(), tag)

    def exchange(self, tag: int = 0) -> SeparateMessages:
        """Open an exchange; copies wait for nobody."""
        return SeparateMessages(self, tag)

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: str = "auto") -> Turn:
        """Combine everybody's tensor by messages."""
        program = all_reduce_program("ring" if algorithm == "auto" else algorithm, self._group.world_size)
        steps, memory = rounds(program.ranks[self._group.rank]), Memory(tensor, slices_of(program))

        def run(deadline: float | None) -> None:
            for work in perform(steps, memory, self, COMBINE[op]):
                work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

        return self._line.append(run)

    def run_in_background(self) -> None:
        """Let a thread go on with what has been called and not waited for."""
        self._line.run_in_background()

    @property
    def has_free_cores(self) -> bool:
        """A slow link leaves the cores alone."""
        return True

    def subgroup(self, ranks: list[int]) -> SlowGroup | None:
        """Make a group of some of these ranks, over the same links."""
        smaller = self._group.subgroup(ranks)
        return None if smaller is None else SlowGroup(smaller, self._links)

    def stop(self) -> None:
        """Send what is left, and end the threads."""
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()
        self._line.close()

    def close(self) -> None:
        """Leave the group."""
        self.stop()
        self._group.close()


class Wire:
    """A slow link from this rank to another: a thread that lets one message after another through."""

    def __init__(self, group: Group, to: int, link: Link) -> None:
        self._group = group
        self._to = to
        self._link = link
        self._waiting: queue.SimpleQueue[tuple[torch.Tensor, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"slow link to rank {to}", daemon=True)
        self._thread.start()

    def send(self, tensor: torch.Tensor, tag: int) -> Work:
        """Let a message of one's own go."""
        self._waiting.put((tensor, tag))
        return COMPLETE

    def _run(self) -> None:
        while (message := self._waiting.get()) is not None:
            tensor, tag = message
            time.sleep(self._link.seconds(tensor.nbytes))
            try:
                self._group.isend(tensor, self._to, tag).wait()
            except TransportError:  # whoever waits for it finds out why
                return

    def close(self) -> None:
        """Send what is left, and end."""
        self._waiting.put(None)
        self._thread.join()
