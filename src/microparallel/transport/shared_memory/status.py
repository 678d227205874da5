"""A rank's last words: at the beginning of its segment, where the others can still read them when it is gone."""

from __future__ import annotations

import json
from typing import Any

from microparallel.transport.shared_memory.segment import Segment

STATUS_BYTES = 4096
_WELL, _CLOSED, _FAILED = 0, 1, 2
_TEXT = 64


class Status:
    """How a rank is doing: well, closed, or failed with the reason."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @property
    def closed(self) -> bool:
        """Whether the rank has left in an orderly way."""
        return self._segment.words[0] == _CLOSED

    @property
    def called(self) -> int:
        """How many collectives the rank has called, modulo 2³²; it may not have run them."""
        return self._segment.words[2]

    def has_called(self, number: int) -> bool:
        """Whether the rank has called the collective of this number."""
        return (self.called - number) % 2**32 < 2**31

    def call(self) -> int:
        """Count one more; returns its number."""
        self._segment.words[2] = number = (self.called + 1) % 2**32
        return number

    @property
    def told(self) -> int:
        """How many pieces of news the rank has sent to all others (`regions.py`), modulo 2³²."""
        return self._segment.words[3]

    def tell(self) -> None:
        """Count one more."""
        self._segment.words[3] = (self.told + 1) % 2**32

    def close(self) -> None:
        """Leave."""
        if self._segment.words[0] == _WELL:
            self._segment.words[0] = _CLOSED

    def fail(self, account: dict[str, Any]) -> None:
        """Leave word of what went wrong; the first word counts."""
        if self._segment.words[0] != _WELL:
            return
        text = json.dumps(account).encode()[: STATUS_BYTES - _TEXT]
        self._segment.map[_TEXT : _TEXT + len(text)] = text
        self._segment.words[1] = len(text)
        self._segment.words[0] = _FAILED

    def account(self) -> dict[str, Any] | None:
        """What went wrong on that rank, if it said so."""
        if self._segment.words[0] != _FAILED:
            return None
        text = self._segment.map[_TEXT : _TEXT + self._segment.words[1]]
        try:
            account = json.loads(text)
        except ValueError:  # cut off, or half-written by a rank that died over it
            return {}
        return account if isinstance(account, dict) else {}
