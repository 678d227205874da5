"""What a flight file says, once it has been read: the last calls of one rank, and how the rank is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from microparallel.flight.place import Place, best_of, worth


@dataclass(frozen=True, slots=True)
class Record:
    """One call of one rank.

    Ranks are numbered as in the world. Times are those of the machine's monotonic clock; None is for what has not
    happened.
    """

    number: int  # of this rank's records
    kind: str  # collective, send or recv
    text: str  # as the user wrote it
    agreement: str  # what the ranks that make it together must all say
    group: tuple[int, ...]
    group_name: str
    sequence: int  # from 1: of the group's collectives, or of the messages to or from this peer
    begin: float
    started: float | None = None  # when the call had been made, and what remains is to wait for it
    wait: float | None = None
    end: float | None = None
    outcome: str = "open"
    peer: int | None = None
    tag: int = 0
    size: int = 0
    place: Place | None = None
    begun_in_main: bool = True
    waits_in_main: bool = True

    @property
    def name(self) -> str:
        """The call without its arguments."""
        return self.text.partition("(")[0]

    @property
    def waits(self) -> bool:
        """Whether a thread stands in this call: it waits for it, or has not even come back from making it."""
        return self.end is None and (self.wait is not None or self.started is None)

    @property
    def in_main(self) -> bool:
        """Whether that is the main thread."""
        return self.begun_in_main if self.wait is None else self.waits_in_main

    @property
    def since(self) -> float:
        """When the waiting began."""
        return self.begin if self.wait is None else self.wait

    @property
    def channel(self) -> tuple[str, str, int | None, int]:
        """What its sequence counts: the group's collectives, or messages one way to or from one peer under one tag."""
        return (self.group_name, self.kind, self.peer, self.tag)

    def __str__(self) -> str:
        # A call counts ranks within its group, which need not be how the world counts them.
        renumbered = self.group != tuple(range(len(self.group)))
        group = f" in the group {', '.join(map(str, self.group))}" if renumbered else ""
        return f"{self.text}{group}" + (f" ({self.place})" if self.place is not None else "")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank, as it was when somebody looked.

    Attributes:
        state: of the process: running, stopped, ended, or unknown (on another machine, or it left no file).
        exit: how the process ended, in words, where that is known.
        ending: running, finished (its function returned), closed (it left the world), exited, raised, broke off (with
            an error that follows from another rank's).
        last_words: what it said at its end.
        stack: where its main thread stands, innermost first; empty where it could not be asked.
    """

    rank: int
    world_size: int
    pid: int = 0
    parent: int = 0
    host: str = ""
    world: str = ""
    began: float = 0.0  # wall clock
    now: float = 0.0  # monotonic clock
    state: str = "running"
    exit: str = ""
    ending: str = "running"
    last_words: str = ""
    end_place: Place | None = None
    step: int | None = None
    doing: str = ""
    doing_since: float | None = None
    answers: bool = False
    start_ticks: int = 0
    records: tuple[Record, ...] = ()
    stack: tuple[Place, ...] = ()

    def with_state(self, state: str, exit_words: str) -> Snapshot:
        """The same, with what is known of the process."""
        return replace(self, state=state, exit=self.exit or exit_words)

    @property
    def last(self) -> Record | None:
        """The newest call."""
        return max(self.records, key=lambda record: record.number, default=None)

    @property
    def current(self) -> Record | None:
        """The call that holds this rank up: its main thread stands in it, or gave up in it and has made none since."""
        waiting = [record for record in self.records if record.waits]
        in_main = [record for record in waiting if record.in_main]
        everything_elsewhere = not any(record.in_main or record.begun_in_main for record in self.records)
        candidates = in_main or (waiting if everything_elsewhere else [])
        if candidates:
            return max(candidates, key=lambda record: record.number)
        last = self.last
        return last if last is not None and last.outcome in ("timed out", "failed") else None

    @property
    def here(self) -> Place | None:
        """Where it is in the user's code: by its stack, if that has anything of the user's."""
        place = best_of(self.stack)
        return place if place is not None and worth(place.file) > 0 else None
