"""The flight recorder: what every rank did last, readable whatever becomes of it, and what that says about a hang."""

from microparallel.flight.diagnosis import diagnose, in_words
from microparallel.flight.finding import Finding
from microparallel.flight.flight import Flight, agreed_folder, new_folder
from microparallel.flight.gathering import gather
from microparallel.flight.record import Record, Snapshot
from microparallel.flight.recorder import Entry, GroupLog, NoEntry, NoLog

__all__ = [
    "Entry",
    "Finding",
    "Flight",
    "GroupLog",
    "NoEntry",
    "NoLog",
    "Record",
    "Snapshot",
    "agreed_folder",
    "diagnose",
    "gather",
    "in_words",
    "new_folder",
]
