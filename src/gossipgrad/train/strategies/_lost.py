"""What it means that a peer is gone: the run was stopped, or is lost."""

import threading
from collections.abc import Callable

import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.errors import GossipError
from gossipgrad.train._result import PeerLostError, RunStopped

# The word to stop and the loss of a peer that heard it first arrive by different ways.
_STOP_GRACE_SECONDS = 2.0


def explained(
    error: RuntimeError,
    stop: threading.Event,
    what: str,
    *,
    others_told: Callable[[], bool] = lambda: False,
) -> RuntimeError:
    """The error to raise for one that `what`, a collective of all ranks, has raised.

    A failed collective is the stop if this rank, too, was told to stop; the word may take a moment.
    It is as well if `others_told`.
    """
    if not _is_lost_peer(error):
        return error
    if others_told() or stop.wait(_STOP_GRACE_SECONDS):
        return RunStopped("the run was told to stop")
    return PeerLostError(f"{what} failed because a rank is gone ({first_line(error)})")


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether Gloo raised this: its errors are plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError | GossipError) or "gloo" in text or "Connection" in text
