"""The last collectives that a rank has called, where all other ranks can read them: which one is it that differs?

    number signature │ number signature │ …      the last calls, in turn
    signature length text │ …                    the words of each, once: training makes the same few again and again

A rank's calls are numbered, and ranks that are in step make the same call under the same number. So the first number
under which two ranks made different calls is where they parted.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping

from microparallel.text import show_ranks
from microparallel.transport.shared_memory.segment import Segment

_CALLS, _TEXTS = 64, 160  # how many are kept
_LONGS_OF_TEXT = 40
_LONGEST = 8 * (_LONGS_OF_TEXT - 2)  # bytes of a text
LOG_BYTES = 8 * (2 * _CALLS + _LONGS_OF_TEXT * _TEXTS)


@functools.lru_cache(maxsize=4096)
def signature_of(call: str) -> int:
    """A number that stands for a call, the same in every process."""
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little")


def numbered(signature: int, number: int) -> int:
    """A call's signature that also says its number: the same call, made earlier or later, is another one."""
    return signature ^ number


class CallLog:
    """One rank's log in its segment: the rank itself writes it, and all others read."""

    def __init__(self, segment: Segment, start: int) -> None:
        self._longs = segment.longs
        self._map = segment.map
        self._calls = start // 8
        self._texts = self._calls + 2 * _CALLS
        self._written: dict[int, int] = {}  # where the text of a signature is

    def write(self, number: int, signature: int, text: str) -> None:
        """Write one more call down."""
        at = self._calls + number % _CALLS * 2
        self._longs[at], self._longs[at + 1] = number, signature
        if signature not in self._written:
            self._write_text(signature, text)

    def _write_text(self, signature: int, text: str) -> None:
        if len(self._written) == _TEXTS:  # begin anew: what is still called is written again
            self._written.clear()
        at = self._texts + len(self._written) * _LONGS_OF_TEXT
        self._written[signature] = at
        content = text.encode()[:_LONGEST]
        self._longs[at] = 0  # while the text changes, it belongs to no call
        self._map[8 * (at + 2) : 8 * (at + 2) + len(content)] = content
        self._longs[at + 1] = len(content)
        self._longs[at] = signature

    def read(self) -> dict[int, int]:
        """The signatures of the last calls, by number."""
        pairs = self._longs[self._calls : self._calls + 2 * _CALLS].tolist()
        return {number: signature for number, signature in zip(pairs[::2], pairs[1::2], strict=True) if number}

    def text_of(self, signature: int) -> str:
        """A call in words."""
        for at in range(self._texts, self._texts + _TEXTS * _LONGS_OF_TEXT, _LONGS_OF_TEXT):
            if self._longs[at] == signature:
                content = self._map[8 * (at + 2) : 8 * (at + 2) + min(self._longs[at + 1], _LONGEST)]
                return bytes(content).decode(errors="replace")
        return "a call that it made long ago"


# ── where ranks parted ──────────────────────────────────────────────────────────────────────────────────────────────


def first_difference(logs: Mapping[int, CallLog]) -> tuple[int, dict[int, int]] | None:
    """The first number under which ranks made different calls, and each rank's signature; None if there is none."""
    calls = {rank: log.read() for rank, log in logs.items()}
    for number in sorted(set().union(*calls.values())):
        made = {rank: of_rank[number] for rank, of_rank in calls.items() if number in of_rank}
        if len(set(made.values())) > 1:
            return number, made
    return None


def difference_in_words(logs: Mapping[int, CallLog], number: int, made: Mapping[int, int]) -> str:
    """Who made which call; and which call is one too many, if what follows shows that."""
    ranks_of: dict[str, list[int]] = {}
    for rank, signature in sorted(made.items()):
        ranks_of.setdefault(logs[rank].text_of(signature), []).append(rank)
    rows = [f"  {show_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()]
    return "\n".join(rows + _too_many(logs, number, made))


def _too_many(logs: Mapping[int, CallLog], number: int, made: Mapping[int, int]) -> list[str]:
    """A line for each rank whose next call is the one that the others make now."""
    lines = []
    for rank, signature in sorted(made.items()):
        following = logs[rank].read().get(number + 1)
        others = [other for other, theirs in sorted(made.items()) if theirs == following]
        if following is not None and others and following != signature:
            few = Counter(made.values())[signature] < len(others)
            alternative = "" if few else f", unless {show_ranks(others)} left it out"
            lines.append(
                f"  {logs[rank].text_of(signature)} of rank {rank} is one call too many{alternative}: "
                f"the call after it is {logs[rank].text_of(following)}"
            )
    return lines
