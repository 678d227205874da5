"""A recorded step over slower links: what its messages would take on them, beside what was recorded.

```
recorded   forward ▒▒▒▒ backward ▒▒▒▒▒▒ │ sum ▓▓ │ optimizer ▒▒            links that take no time
slower     forward ▒▒▒▒ backward ▒▒▒▒▒▒ │ sum ▓▓░░░░░░░░░ │ optimizer ▒▒   ░ its program, simulated on the link
```

What a rank does for a sum (to copy, to add, to encode and decode what is compressed) was recorded, and stays. What the
messages of the sum's program take on the link is simulated, and comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from microparallel.program import Goal, MeetingOp, Op, Send
from microparallel.simulator.costs import Costs
from microparallel.simulator.engine import simulate
from microparallel.simulator.fitted import Fitted, RecordedCosts
from microparallel.topology import Link
from microparallel.trace.meetings import meetings


def over_link(step: Fitted, link: Link, transport: str = "gloo") -> Fitted:
    """The step as it would be if all ranks were connected by this link.

    Args:
        step: recorded over links that took no time.
        link: between any two ranks; what a message takes on it is added.
        transport: what carries the messages, which decides what "auto" stands for.
    """
    added = link_seconds(step, link, transport)
    seconds = {key: known + added.get(key, 0.0) for key, known in step.costs.seconds.items()}
    return replace(step, costs=replace(step.costs, seconds=seconds))


def link_seconds(step: Fitted, link: Link, transport: str = "gloo") -> dict[tuple[int, Op], float]:
    """How long the messages of what ranks do together take on a link, by rank and operation."""
    costs = _MessagesAlone(
        latency=link.latency or 0.0,
        seconds_per_byte=link.seconds_per_byte or 0.0,
        transport=transport,
        recorded=step.costs,
    )
    events = simulate(step.program, costs).events
    found: dict[tuple[int, Op], float] = {}
    for places in meetings(events):
        together = [events[place] for place in places]
        longest = max(event.duration for event in together)
        found |= {(event.rank, event.op): longest for event in together}
    return found


@dataclass(frozen=True, kw_only=True)
class _MessagesAlone(Costs):
    """Computing takes no time; messages have the sizes that were recorded."""

    recorded: RecordedCosts

    def of(self, op: Op, rank: int = 0) -> float:  # noqa: ARG002
        """Nothing."""
        return 0.0

    def bytes(self, op: Send | MeetingOp, goal: Goal, rank: int, shards: int = 1) -> float:
        """How many bytes a message has, or a collective: as recorded."""
        return self.recorded.bytes(op, goal, rank, shards)
