"""The one hook: an observer is told when an operation of its rank begins, waits and ends."""

from microparallel.observe.observer import NOBODY, Activity, Observer, Told, Watched, watch

__all__ = ["NOBODY", "Activity", "Observer", "Told", "Watched", "watch"]
