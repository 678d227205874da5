"""Fewer bytes: what a rank sends of its gradients, and how all ranks read it.

`mp.DataParallel(model, comms, compress=mp.compression.TopK(0.01))` sends one number in a hundred. How many bytes each
method sends stands in `collectives/compressed.py`; how to write one of your own, in `Compressor`.
"""

from microparallel.compression.chain import Chain
from microparallel.compression.compressor import Compressor, Parts, Received, Shape
from microparallel.compression.exchange import compressed_sum, in_process
from microparallel.compression.low_rank import PowerSGD
from microparallel.compression.methods import Cast, Int8, RandomK, Sign, TopK
from microparallel.compression.parsing import parse

__all__ = [
    "Cast",
    "Chain",
    "Compressor",
    "Int8",
    "Parts",
    "PowerSGD",
    "RandomK",
    "Received",
    "Shape",
    "Sign",
    "TopK",
    "compressed_sum",
    "in_process",
    "parse",
]
