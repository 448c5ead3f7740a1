"""Shared parts of integrations: open, save, load and close a session."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossipgrad import gossip
from gossipgrad._messages import warn
from gossipgrad.engine import Session

__all__ = ["Open", "end", "load_state", "open_session", "path_of", "save_state"]

Open = Callable[..., Session]
"""`gg.gossip`, `gg.suda`, `gg.sparsify`, or a function of model and optimizer that calls one."""


def open_session(
    open: Open | None,
    model: nn.Module,
    optimizer: Any,
    *,
    scaler: torch.amp.GradScaler | None,
    options: dict[str, Any],
    plain: str,
) -> Session:
    """Open the session of an integration; a collective.

    Args:
        open: The function that opens it; None for `gg.gossip`.
        model: The plain model, not wrapped.
        optimizer: As `open` takes it.
        scaler: The scaler that steps the optimizer, if one does.
        options: Arguments of `open`.
        plain: How to keep the framework from wrapping the model, for messages.

    Raises:
        ValueError: The model is wrapped in DistributedDataParallel, or `open` does not return a
            session that has a consensus.
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which averages gradients over all "
            f"ranks in every step already, so gossip would exchange on top of it: {plain}"
        )
    if scaler is not None:
        options = {"scaler": scaler, **options}
    session = (gossip if open is None else open)(model, optimizer, **options)
    if not isinstance(session, Session):
        if hasattr(session, "close"):
            session.close()
        raise ValueError(
            f"open must return a session with a consensus, got {type(session).__name__}: give "
            "gg.gossip, gg.suda or gg.sparsify, or a function that opens one of them, then "
            "gg.shrink(..., session=session), and returns the first"
        )
    return session


def path_of(folder: str | Path, rank: int, world_size: int) -> Path:
    """Return the path of a rank's state in a checkpoint of the framework."""
    return Path(folder) / f"gossip-rank{rank}-of-{world_size}.pt"


def save_state(session: Session, folder: str | Path) -> None:
    """Write this rank's `session.state_dict()` atomically, and wait until it is on the disk."""
    path = path_of(folder, session.rank, session.world_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        torch.save(session.state_dict(copy=False), file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def load_state(session: Session, folder: str | Path | None) -> None:
    """Continue exactly from such states, or from rank 0's replica if one is missing.

    A collective. The framework must have loaded the consensus into the model of each rank.
    """
    path = path_of(folder or "", session.rank, session.world_size)
    if all(session.agree(int(folder is not None and path.exists()))):
        state = torch.load(path, map_location="cpu", weights_only=True)
        session.load_state_dict(state)
        return
    if session.rank == 0:
        warn(
            f"the checkpoint has no {path.name} for each of the {session.world_size} ranks: it is "
            "of another number of ranks, or of a run without gossip. All ranks continue from its "
            "model and from the optimizer state in it, and not exactly as they would have"
        )
    session.broadcast_()


def end(session: Session) -> None:
    """Set each rank's model to the consensus, and close; a collective."""
    session.average_()
    session.close()
