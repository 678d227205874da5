"""Before the first step: do all ranks mean the same run? On several hosts, each was given a command of its own.

Ranks with other settings, other code or other versions would train to the end and have other weights there, or wait for
each other for ever. What differs is named, with the hosts where it does, on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.errors import CommsError, ConfigError, DataError
from microparallel.settings import declared
from microparallel.text import show_ranks
from microparallel.train.config import TrainConfig
from microparallel.train.fingerprint import code_of, versions

_MAY_DIFFER = ("out",)  # rank 0 tells the others where the run is kept


def require_same_run_everywhere(config: TrainConfig, comms: Comms) -> None:
    """Raise a `ConfigError` on every rank if not all have the same settings, code and versions."""
    if comms.world_size == 1:
        return
    fields = declared(TrainConfig)
    settings = {name: value for name, value in asdict(config).items() if name not in _MAY_DIFFER}
    made = versions() | {"Python": platform.python_version().rpartition(".")[0]}
    everyone = gather_json([socket.gethostname(), settings, made, code_of(config)], comms)
    hosts = [host for host, *_ in everyone]
    differences = [
        *_differences([one for _, one, _, _ in everyone], hosts, lambda name, value: _given(fields[name], value)),
        *_differences([one for _, _, one, _ in everyone], hosts, lambda name, value: f"{name} {value}"),
        *_differences([one for *_, one in everyone], hosts, lambda name, value: f"{name} with checksum {value}"),
    ]
    if differences:
        _let_all_hear(comms)
        raise ConfigError(
            "the ranks do not agree about this run; start it with the same settings, code and versions on every host"
            + "".join(f"\n  {difference}" for difference in differences)
        )


def require_same_data(made_of: Mapping[str, Any] | None, comms: Comms) -> None:
    """Raise a `DataError` on every rank if not all have the same samples, and parameters of the same names."""
    if comms.world_size == 1 or made_of is None:
        return
    names = hashlib.sha256("\n".join(made_of["parameters"]).encode()).hexdigest()[:16]
    mine = {"samples": made_of["samples"], "checksum of data": made_of["data"], "checksum of parameters' names": names}
    hosts, found = zip(*gather_json([socket.gethostname(), mine], comms), strict=True)
    if differences := _differences(found, hosts, lambda name, value: f"{name}: {value}"):
        _let_all_hear(comms)
        raise DataError(
            "the ranks do not have the same data or model; every host needs a copy of the same files"
            + "".join(f"\n  {difference}" for difference in differences)
        )


def _let_all_hear(comms: Comms) -> None:
    """Stay until every rank knows: one that ends first would take the words of the others away."""
    with contextlib.suppress(CommsError):
        comms.barrier()


def _given(one: Any, value: Any) -> str:
    return f"no {one.flag}" if value is None or value is False else str(one.given(value))


def _differences(found: Sequence[Mapping[str, Any]], hosts: Sequence[str], shown: Any) -> list[str]:
    """For each value that is not the same everywhere: which ranks have which, a line each."""
    lines = []
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one.get(name) for one in found]
        if any(value != values[0] for value in values):
            kinds = [value for number, value in enumerate(values) if value not in values[:number]]
            parts = [
                f"{shown(name, kind)} on {_where([rank for rank, value in enumerate(values) if value == kind], hosts)}"
                for kind in kinds
            ]
            lines.append("; ".join(parts))
    return lines


def _where(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return f"{show_ranks(ranks)} ({', '.join(dict.fromkeys(hosts[rank] for rank in ranks))})"
