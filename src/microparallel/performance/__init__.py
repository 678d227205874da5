"""How well does it go? Measurements and their reading."""

from microparallel.performance.ping_pong import MessageTime, ping_pong

__all__ = ["MessageTime", "ping_pong"]
