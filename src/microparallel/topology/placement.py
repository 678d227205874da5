"""Where does this process stand in its world? torchrun and Slurm say so in environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from microparallel.errors import ConfigError, UsageError


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank's place in the world, and the address of the store where the ranks find each other."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str = "127.0.0.1"
    port: int = 0
    hosts_store: bool = True  # whether this rank opens the store: rank 0 does, unless torchrun's agent has one
    shared_store: bool = False  # whether it is the agent's: then the worlds of all its attempts meet there

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} of a world of {self.world_size} makes no sense; see RANK and WORLD_SIZE"
            )


ALONE = Placement(rank=0, world_size=1, local_rank=0, local_world_size=1)


def find_placement(environment: Mapping[str, str]) -> Placement:
    """Read torchrun's variables; Slurm's when those are absent; a world of one when there are none."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    # The script that sbatch runs has Slurm's variables too, but it is no task: only srun starts those.
    batch_script = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
    if "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment and not batch_script:
        return _from_slurm(environment)
    return ALONE


def ranks_of_the_world(environment: Mapping[str, str], asked: int | None) -> int | None:
    """How many ranks torchrun or Slurm has started; None without them. `asked` is the user's --ranks, if any."""
    world = find_placement(environment)
    if world == ALONE:
        return None
    if asked not in (None, world.world_size):
        raise ConfigError(f"--ranks {asked}: this process belongs to a world of {world.world_size} ranks; leave it out")
    return world.world_size


def _from_torchrun(environment: Mapping[str, str]) -> Placement:
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if world_size == 1 and "MASTER_PORT" not in environment:
        return ALONE
    shared_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environment, "LOCAL_RANK", default=rank),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", default=world_size),
        address=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=_port(environment),
        hosts_store=rank == 0 and not shared_store,
        shared_store=shared_store,
    )


def _from_slurm(environment: Mapping[str, str]) -> Placement:
    rank, world_size = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
    if world_size == 1:
        return ALONE
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
    # Every task must find the same port without talking first; the job's number is what they all know.
    job_port = 20000 + _number(environment, "SLURM_JOB_ID", default=0) % 10000
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environment, "SLURM_LOCALID", default=rank),
        local_world_size=_tasks_on_this_node(environment, world_size),
        address=environment.get("MASTER_ADDR") or first_host(nodes),
        port=_port(environment) if "MASTER_PORT" in environment else job_port,
        hosts_store=rank == 0,
    )


def first_host(nodes: str) -> str:
    """The first machine of Slurm's short form: `gpu[003-005,9],login` starts with `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\]([^,]*))?", nodes)
    if match is None:
        raise UsageError(f"SLURM_JOB_NODELIST={nodes!r} names no machine; set MASTER_ADDR to the first one")
    prefix, ranges, suffix = match.groups()
    if ranges is None:
        return prefix
    return prefix + re.split("[-,]", ranges)[0] + suffix


def _tasks_on_this_node(environment: Mapping[str, str], world_size: int) -> int:
    # "4(x2),3": two nodes with four tasks each, then one with three.
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(repeat or 1)
    node = _number(environment, "SLURM_NODEID", default=0)
    return counts[node] if node < len(counts) else world_size


def _port(environment: Mapping[str, str]) -> int:
    port = _number(environment, "MASTER_PORT", default=29500)
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT={port} is not a port; choose one from 1024 to 65535")
    return port


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise UsageError(f"{name} is not set, but its companion is; set both, or start with torchrun")
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number") from None
