"""The world of processes that this one belongs to, as its environment tells it, and its store."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import AskedStore
from gossipgrad.errors import GossipError

_LEAST_SECONDS = 0.2  # to reach a store that is there
_MORE_SECONDS = 1.0  # torch's own message is the better one
_STORE_TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Which rank this process is, of how many, and who has started them."""

    rank: int
    world_size: int
    launcher: str

    @property
    def found_by(self) -> str:
        """Return in words how the world was found, and how to start workers here instead."""
        names, way_out = "RANK and WORLD_SIZE", "unset them to start workers on this machine"
        if self.launcher == "Slurm":
            names, way_out = "SLURM_PROCID and SLURM_NTASKS", "in a batch script start tasks with "
            way_out += "srun, or give --nproc to start workers on this machine"
        return f"rank {self.rank} of {self.world_size} by {names} ({self.launcher}); {way_out}"


def find_world(environ: Mapping[str, str], *, nproc: int | None = None) -> World | None:
    """The world that the environment describes, None outside of one.

    torchrun sets `RANK` and `WORLD_SIZE`; Slurm sets `SLURM_PROCID` and `SLURM_NTASKS`, and means a
    world where there is more than one task. It sets them in a batch script, too, where `srun` has
    started nothing: there an explicit `nproc` starts workers on this machine.

    Args:
        environ: The environment.
        nproc: The number of workers to start, where the user gave one.

    Example:
        >>> find_world({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
        World(rank=3, world_size=8, launcher='Slurm')
        >>> find_world({})
    """
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return World(
            rank=int(environ["RANK"]), world_size=int(environ["WORLD_SIZE"]), launcher="torchrun"
        )
    if nproc is not None and "SLURM_STEP_ID" not in environ:
        return None
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        return World(
            rank=int(environ["SLURM_PROCID"]),
            world_size=int(environ["SLURM_NTASKS"]),
            launcher="Slurm",
        )
    return None


def slurm_rendezvous(environ: Mapping[str, str]) -> dict[str, str]:
    """`MASTER_ADDR` and `MASTER_PORT` for a Slurm step: its first node, a port from its numbers.

    What the environment has already is kept.

    Example:
        >>> slurm_rendezvous({"SLURM_JOB_NODELIST": "node[07-09,12]", "SLURM_JOB_ID": "42"})
        {'MASTER_ADDR': 'node07', 'MASTER_PORT': '20042'}
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    first = "".join(part or "" for part in match.groups()) if match else nodes
    step = int(environ.get("SLURM_STEP_ID", "0"))  # those of one job begin on the same node
    port = 20_000 + (int(environ.get("SLURM_JOB_ID", "0")) + 997 * step) % 20_000
    return {
        "MASTER_ADDR": environ.get("MASTER_ADDR", first),
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }


def hosts_store(rank: int) -> bool:
    """Whether this process holds the store; otherwise an agent does, or rank 0."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(rank: int, world_size: int, timeout_seconds: float = 120.0) -> dist.Store:
    """The store of the world, at `MASTER_ADDR` and `MASTER_PORT`; in rank 0 unless an agent has it.

    Nobody is awaited but the store.

    Raises:
        GossipError: It cannot be reached.
    """
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    limit_seconds = max(timeout_seconds, _LEAST_SECONDS)

    def connect() -> dist.Store:
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=hosts_store(rank),
            timeout=timedelta(seconds=limit_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        # In a thread: after a connection that was reset torch waits several times its timeout.
        store = AskedStore(connect, timeout_seconds=limit_seconds + _MORE_SECONDS).ask(
            lambda connection: connection
        )
    except KeyError as error:
        raise GossipError(
            f"rank {rank} does not know where to meet the others: {error.args[0]} is not set"
        ) from error
    except RuntimeError as error:
        raise GossipError(
            f"rank {rank} found no store to meet the others in at {where} within "
            f"{timeout_seconds:g} s; start rank 0, and see that MASTER_ADDR and MASTER_PORT lead "
            f"to it, and that no other program listens there ({first_line(error)})"
        ) from error
    store.set_timeout(_STORE_TIMEOUT)
    return store
