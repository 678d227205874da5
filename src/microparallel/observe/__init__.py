"""See what a rank does: observers, which are told of every operation, and the flight recorder with its diagnosis."""

from microparallel.observe.observer import UNOBSERVED, Activity, Observation, ObservedCall, Observer, observe_call

__all__ = ["UNOBSERVED", "Activity", "Observation", "ObservedCall", "Observer", "observe_call"]
