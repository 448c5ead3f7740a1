"""Joining a run that others have begun, with the replica of one of them."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad._claims import Claim
from gossipgrad.comm import (
    Group,
    Recorder,
    Transport,
    ZeroMQTransport,
    fingerprint,
    load_replica,
    misfit,
    trained_parameters,
)
from gossipgrad.decentralized._arrival import Arrival
from gossipgrad.decentralized._invitation import Invitation
from gossipgrad.decentralized._session import GossipSession
from gossipgrad.decentralized._taking import Taking

__all__ = ["join"]


def join(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    invitation: str,
    *,
    scaler: torch.amp.GradScaler | None = None,
    recorder: Recorder | None = None,
    timeout_seconds: float = 300.0,
) -> GossipSession:
    """Joins a run of `gossip()` that others have begun, as one more rank; local to this one.

    One of the members, the donor, copies its replica between two of its steps and sends it in the
    background; nobody else is held up, and no process group is needed here. What it sends replaces
    the model's parameters and buffers, and the optimizer's state and hyper-parameters. Then this
    rank enters: a new generation of the membership has it among the living, and the others make
    links to it when they first need them. Settings are the run's.

    From then on collectives wait for it as for any member, so have data and all else ready before.
    In rounds nobody waits for it until it has made a step, which is its own; it then goes on at the
    round that the others are at.

    A donor that dies or falls silent is replaced by another. A run that is over, or whose store
    does not answer, is told by an error, within `timeout_seconds`; the transfer itself may take as
    long as it needs. Where joining fails, nothing in the run has changed.

    Args:
        model: As on the other ranks, on any device; its weights are overwritten.
        optimizer: The optimizer, or several, as on the other ranks.
        invitation: What `GossipSession.invitation` returned on one of them.
        scaler: The `torch.amp.GradScaler` that steps the optimizer, if one does.
        recorder: Gets spans of time.
        timeout_seconds: How long it may take until a member begins to send its replica.

    Returns:
        The session. Its `rank` is a number that nobody had before, `joined_with` what the donor's
        loop carried, and `position` goes on where the others are.

    Raises:
        ValueError: The invitation is none, or of another version; the model, the optimizer or the
            settings are others than the run's; a parameter is in a session of `sparsify`; or this
            host cannot be reached by the others.
        AgreementError: This rank has another secret than the run.
        GossipError: The run is over, or no member answers in time.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Linear(2, 1)
        >>> gg.join(model, torch.optim.SGD(model.parameters()), "come along")
        Traceback (most recent call last):
            ...
        ValueError: this is no invitation: give what session.invitation() returned on a rank
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    invited = Invitation.from_text(invitation)
    settings, heartbeats = invited.to_settings()
    _check_same(invited, model, optimizers, {**settings.describe(), "heartbeats": heartbeats})
    early = Claim("join")  # before anything is loaded; the session takes its own
    early.take(trained_parameters(model, optimizers))
    early.release()
    with Taking(invited, timeout_seconds=timeout_seconds) as taking:
        donor, gift = taking.take()
        if (why := misfit(model, optimizers, gift["replica"])) is not None:
            raise ValueError(f"the replica of rank {donor} does not fit: {why}")
        load_replica(model, optimizers, gift["replica"])
        rank, membership, store = taking.become_a_rank()
        arrival = Arrival(
            membership=membership,
            name=invited.name,
            donor=donor,
            place=gift["place"],
            run=bytes.fromhex(gift["run"]),
            carried=gift["carried"],
        )
        told = taking.introductions(membership)
        secret, address = taking.secret, taking.address

    def transport(group: Group, largest_bytes: int) -> Transport:
        return ZeroMQTransport.joining(
            secret,
            rank,
            invited.world_size,
            occasion=invited.occasion,
            introductions=told,
            bind=address,
            max_payload_bytes=largest_bytes,
            encrypt=invited.encrypt,
        )

    group = Group(store, rank, invited.world_size, members=(rank,))
    try:
        return GossipSession(
            model,
            optimizers,
            settings,
            group=group,
            transport=transport,
            scaler=scaler,
            recorder=recorder,
            heartbeats=heartbeats,
            arrival=arrival,
        )
    except BaseException:
        group.close()
        raise


def _check_same(
    invited: Invitation,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    settings: dict[str, object],
) -> None:
    """Refuses another model, optimizer or version than the run's, before anybody is asked."""
    here = fingerprint(model, optimizers, settings)
    there = invited.fingerprint
    for key in sorted({**here, **there}, key=lambda key: key.startswith(("order", "optimizer"))):
        if here.get(key) != there.get(key):
            raise ValueError(
                f"this is not what the run trains: {key} is {here.get(key) or 'missing'} here, but "
                f"{there.get(key) or 'missing'} there. Build the same model and optimizer as the "
                "other ranks"
            )
