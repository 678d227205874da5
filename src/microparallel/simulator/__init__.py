"""What would happen: costs, and an engine that walks through a program with a clock for every lane."""

from microparallel.simulator.costs import Costs
from microparallel.simulator.engine import simulate

__all__ = ["Costs", "simulate"]
