"""Over gloo, the receives of an exchange are posted before its sends start."""

from types import SimpleNamespace

import pytest
import torch

import microparallel as mp
from microparallel.transport.torch_distributed import TorchExchange


def test_sends_start_when_all_receives_are_posted():
    done = []
    transport = SimpleNamespace(
        batched=frozenset(),
        isend=lambda _, to, tag: done.append(("send", to, tag)) or SimpleNamespace(poll=lambda: True, wait=done.append),
        irecv=lambda _, source, tag: done.append(("receive", source, tag)),
    )
    exchange = TorchExchange(transport, 5)
    first = exchange.isend(torch.zeros(1), 1)
    exchange.irecv(torch.zeros(1), 2)
    exchange.isend(torch.zeros(1), 3)
    exchange.borrow(torch.zeros(1), 1)
    assert not first.poll()
    with pytest.raises(mp.errors.CommsError, match="waited for before the exchange was closed"):
        first.wait()
    exchange.close()
    assert done == [("receive", 2, 5), ("receive", 1, 5), ("send", 1, 5), ("send", 3, 5)]
    first.wait(0.5)
    assert first.poll() and done[-1] == 0.5
