"""Talk: every communication primitive, over any transport."""

from microparallel.comms.comms import Comms
from microparallel.comms.request import Request

__all__ = ["Comms", "Request"]
