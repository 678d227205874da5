"""Bring what each rank has of its own to rank 0, so that it can be saved."""

from __future__ import annotations

import json
from typing import Any

import safetensors.torch
import torch

from microparallel.comms import Comms
from microparallel.comms.notes import gather_json
from microparallel.train.encoding import TensorTable, decode, encode


def gather_states(state: dict[str, Any], comms: Comms) -> list[dict[str, Any]]:
    """Every rank's optimizer state, by rank; on other ranks than 0 an empty list.

    States may differ in shape: a rank that never had a sample has none. So they travel as the bytes they are saved as.
    """
    tensors = TensorTable()
    text = json.dumps(encode(state, "optimizer", tensors)).encode()
    content = tensors.to_bytes()
    sizes = gather_json([len(text), len(content)], comms)
    longest = max(map(sum, sizes))
    padded = torch.frombuffer(bytearray((text + content).ljust(longest, b"\0")), dtype=torch.uint8)
    arrived = comms.gather(padded)
    return [_state(part, *size) for part, size in zip(arrived or [], sizes[: len(arrived or [])], strict=True)]


def _state(arrived: torch.Tensor, text: int, content: int) -> dict[str, Any]:
    received = bytes(arrived.numpy())
    tensors = safetensors.torch.load(received[text : text + content])
    state: dict[str, Any] = decode(json.loads(received[:text]), tensors)
    return state
