"""Talk: every communication primitive, over any transport."""

from microparallel.comms.comms import Comms
from microparallel.comms.in_process import run_in_process
from microparallel.comms.request import Request

__all__ = ["Comms", "Request", "run_in_process"]
