"""Move bytes between ranks."""

from microparallel.transport.base import Exchange, Transport, Work
from microparallel.transport.counting import CountingTransport
from microparallel.transport.in_process import InProcessTransport, in_process_transports
from microparallel.transport.nccl_rules import NcclRulesTransport, nccl_rules_transports

__all__ = [
    "CountingTransport",
    "Exchange",
    "InProcessTransport",
    "NcclRulesTransport",
    "Transport",
    "Work",
    "in_process_transports",
    "nccl_rules_transports",
]
