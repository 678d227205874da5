"""Move bytes between ranks."""

from microparallel.transport.base import Transport, Work

__all__ = ["Transport", "Work"]
