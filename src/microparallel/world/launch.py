"""Start a world of ranks on this machine, run a function on each, and bring their results home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from microparallel.world.pool import Pool


def launch(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    transport: str = "auto",
    device: str = "auto",
    timeout: float | None = None,
    check: bool = False,
    **named_arguments: Any,
) -> list[Any]:
    """Run `function(comms, *arguments, **named_arguments)` in `ranks` fresh processes; return results in rank order.

    The function may live anywhere, in a script without a main guard and in a notebook too. Each rank computes with its
    share of the cores. No process outlives the call: not after an error, nor after Ctrl-C, nor when this process is
    killed.

    Args:
        function: takes a `Comms` first; what it returns comes back to the caller.
        ranks: how many processes.
        arguments: handed to the function after its Comms.
        transport: "auto", "shm", "gloo" or "nccl"; see `connect`.
        device: "auto", "cpu" or "cuda"; see `connect`.
        timeout: seconds after which the ranks are ended; None waits for ever.
        check: compare calls between ranks before each one; see `connect`.
        named_arguments: handed to the function by name (other than the four above, which are `launch`'s own).

    Raises:
        RankFailed: a rank raised, exited or was killed; says which, with its traceback.
        RanksTimedOut: says which ranks had not finished, why, and where each stood.

    Example:
        ```python
        def add_up(comms):
            return comms.all_reduce(torch.tensor([comms.rank])).item()

        mp.launch(add_up, ranks=4)  # [6, 6, 6, 6]
        ```
    """
    with Pool() as pool:
        return pool.run(
            function,
            ranks,
            *arguments,
            transport=transport,
            device=device,
            timeout=timeout,
            check=check,
            **named_arguments,
        )
