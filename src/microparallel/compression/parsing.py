"""Compressors by name, as the command line has them: `topk:0.01`, `int8`, `topk:0.01+bf16`."""

from __future__ import annotations

from typing import Any

import torch

from microparallel.collectives.compressed import Method, parse_methods
from microparallel.compression.chain import Chain
from microparallel.compression.compressor import Compressor
from microparallel.compression.low_rank import PowerSGD
from microparallel.compression.methods import Cast, Int8, RandomK, Sign, TopK


def parse(text: str, **options: Any) -> Compressor:
    """The compressor that a name means.

    Args:
        text: `bf16`, `fp16`, `topk:0.01`, `randomk:0.01`, `int8:256`, `sign`, `powersgd:2`, or two of them:
            `topk:0.01+bf16`. Without a number, the method's usual one.
        options: `feedback`, `warmup`, `smallest`, `seed`.

    Raises:
        UsageError: with what was meant, perhaps.
    """
    first, *second = parse_methods(text.replace(":", "-"), text)
    if not second:
        return _made(first, options)
    of_chain = {name: value for name, value in options.items() if name != "seed"}
    return Chain(_made(first, options), _made(second[0], {}), **of_chain)


def _made(method: Method, options: dict[str, Any]) -> Compressor:
    if method.name not in ("randomk", "powersgd"):
        options = {name: value for name, value in options.items() if name != "seed"}
    whole = int(method.number)
    match method.name:
        case "bf16":
            return Cast(torch.bfloat16, **options)
        case "fp16":
            return Cast(torch.float16, **options)
        case "topk":
            return TopK(method.number, **options)
        case "randomk":
            return RandomK(method.number, **options)
        case "int8":
            return Int8(whole, **options)
        case "powersgd":
            return PowerSGD(whole, **options)
    return Sign(**options)
