"""How the ranks of a given world find each other, and do not wait forever for one that is lost."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from gossipgrad.errors import GossipError

# For starting processes and loading data; all that is waited for here is other processes.
_GATHER_TIMEOUT = timedelta(minutes=2)
# Rank 0 may fetch a data set first.
_OPEN_TIMEOUT = timedelta(minutes=30)
_POLL_SECONDS = 0.05


def open_store(rank: int, world_size: int) -> dist.Store:
    """The store of the world, at `MASTER_ADDR` and `MASTER_PORT`.

    Raises:
        GossipError: It cannot be reached, or the others did not come to it.
    """
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=_GATHER_TIMEOUT))
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise GossipError(
            f"rank {rank} waited {_GATHER_TIMEOUT.total_seconds():.0f} s for the {world_size} "
            f"ranks to meet at {where}, and not all came; start all of them, and see that "
            f"MASTER_ADDR and MASTER_PORT lead to rank 0 ({_first_line(error)})"
        ) from error
    return store


def hear_of_run(mailbox: dist.Store) -> dict | None:
    """What rank 0 says of the run, None if it was refused; waits while rank 0 fetches data.

    Raises:
        GossipError: Rank 0 is gone, or says nothing.
    """
    with _rank_0_is_needed():
        mailbox.wait(["run"], _OPEN_TIMEOUT)
        return json.loads(mailbox.get("run"))


def gather(mailbox: dist.Store, rank: int, world_size: int) -> None:
    """Wait until every rank is here, having loaded its data.

    Raises:
        GossipError: A rank has failed, or is missing for too long; the message names it.
    """
    with _rank_0_is_needed():
        mailbox.set(f"here{rank}", "")
        missing = set(range(world_size))
        deadline = time.monotonic() + _GATHER_TIMEOUT.total_seconds()
        while missing := {other for other in missing if not mailbox.check([f"here{other}"])}:
            for other in sorted(missing):
                if mailbox.check([f"rank{other}"]):
                    cause = json.loads(mailbox.get(f"rank{other}"))["cause"]
                    raise GossipError(f"rank {other} {cause}")
            if time.monotonic() > deadline:
                which = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))}"
                raise GossipError(
                    f"rank {rank} waited {_GATHER_TIMEOUT.total_seconds():.0f} s for {which} to "
                    "be ready to train; look there for what went wrong"
                )
            time.sleep(_POLL_SECONDS)


@contextmanager
def _rank_0_is_needed() -> Iterator[None]:
    try:
        yield
    except GossipError:
        raise
    except RuntimeError as error:
        raise GossipError(
            f"rank 0 cannot be reached: has it failed? ({_first_line(error)})"
        ) from error


def _first_line(error: RuntimeError) -> str:
    return str(error).split("\n", 1)[0]
