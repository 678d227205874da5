"""The one hook: an observer is told when an operation of its rank begins, waits and ends."""

from microparallel.observe.observer import Activity, Observer, Watched, watch

__all__ = ["Activity", "Observer", "Watched", "watch"]
