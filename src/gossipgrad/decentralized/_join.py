"""The function `join`: join a running run with the replica of a member."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad.comm import (
    Group,
    Heartbeats,
    Recorder,
    Transport,
    fingerprint,
    load_replica,
    misfit,
    resolve_optimizers,
    trained_parameters,
)
from gossipgrad.compression import SharedMask
from gossipgrad.decentralized._gossip import check_settings, resolve_settings
from gossipgrad.decentralized._outer import Nesterov
from gossipgrad.decentralized._session import GossipSession
from gossipgrad.decentralized._settings import Payload
from gossipgrad.engine import Claim, Joiner, Mode, Replica, check_replica, narrow
from gossipgrad.topology import Schedule

__all__ = ["join"]

_HEARTBEATS = Heartbeats()


def join(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    address: str,
    *,
    topology: str | Schedule = "matching",
    mode: str | Mode = "overlap",
    payload: str | Payload = "weights",
    every: int = 1,
    average_every: int | str | None = None,
    exchanges: int = 1,
    local_steps: int | None = None,
    outer: Nesterov | None = None,
    wire_dtype: torch.dtype | None = None,
    compress: str | SharedMask | None = None,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    bucket_bytes: int | None = None,
    recorder: Recorder | None = None,
    heartbeats: Heartbeats = _HEARTBEATS,
    timeout_seconds: float = 300.0,
) -> GossipSession:
    """Join a running `gossip()` run as one more rank; local to this one.

    Build the same model and optimizer as the other ranks, and pass the settings that they passed to
    `gossip()`. A different model or setting is refused by name before anything is loaded.

    One member, the donor, copies its replica between two of its steps and sends it in the
    background; no other rank waits, and no process group is needed here. The replica replaces the
    model's parameters and buffers, and the optimizer's state and hyper-parameters. Then this rank
    becomes a member, and the others connect to it when they first need it.

    From then on collectives wait for it as for any member, so prepare data and everything else
    before. Rounds do not wait for it until it has made its first step, which is local; it then
    continues in the others' round.

    If the donor dies or fails, or joining fails otherwise, nothing in the run has changed, and
    joining can be retried.

    Args:
        model: As the other ranks built it, on any device; its weights are overwritten, and it
            becomes as narrow as theirs if they have shrunk since.
        optimizer: The optimizer, or several, as on the other ranks.
        address: The result of `GossipSession.join_address` on one of them.
        topology: As in `gossip()`.
        mode: As in `gossip()`.
        payload: As in `gossip()`.
        every: As in `gossip()`.
        average_every: As in `gossip()`.
        exchanges: As in `gossip()`.
        local_steps: As in `gossip()`. This rank's outer momentum begins at zero.
        outer: As in `gossip()`.
        wire_dtype: As in `gossip()`.
        compress: As in `gossip()`.
        scaler: The `torch.amp.GradScaler` that steps the optimizer, if one does.
        seed: As in `gossip()`.
        bucket_bytes: As in `gossip()`.
        recorder: Gets spans of time.
        heartbeats: As in `gossip()`.
        timeout_seconds: How long to wait until a member starts to send its replica.

    Returns:
        The session. Its `rank` is a number that no rank had before, `joined_with` is the donor's
        `carry`, and `position` continues at the others' position.

    Raises:
        ValueError: The address is invalid; the model, the optimizer or the settings differ from the
            run's; a parameter is in another session; or the others cannot reach this host.
        AgreementError: This rank's secret differs from the run's, or only one of both has a file.
        GossipError: The run is over, no member sends its replica in time, or the donor fails.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Linear(2, 1)
        >>> gg.join(model, torch.optim.SGD(model.parameters()), "run 7")
        Traceback (most recent call last):
            ...
        ValueError: 'run 7' is no address of a run: pass the result of session.join_address()
    """
    optimizers = resolve_optimizers(optimizer)
    check_replica(model, optimizers, door="join")
    chosen: dict[str, Any] = {
        "topology": topology,
        "mode": mode,
        "payload": payload,
        "every": every,
        "average_every": average_every,
        "exchanges": exchanges,
        "local_steps": local_steps,
        "outer": outer,
        "wire_dtype": wire_dtype,
        "compress": compress,
        "seed": seed,
        "bucket_bytes": bucket_bytes,
    }
    check_settings(**chosen, scaler=scaler, heartbeats=heartbeats)
    if heartbeats is None:
        raise ValueError("heartbeats=None has a membership that never changes: no rank can join")
    early = Claim("join")  # before anything is loaded; the session makes its own claim
    early.take(trained_parameters(model, optimizers))
    early.release()
    made = Joiner(address, timeout_seconds=timeout_seconds)
    with closing(made) as joiner:
        if bucket_bytes is None:
            chosen["bucket_bytes"] = joiner.bucket_bytes
        settings = resolve_settings(joiner.world_size, **chosen)
        narrow(model, joiner.shapes)
        joiner.check(
            fingerprint(model, optimizers, {**settings.describe(), "heartbeats": heartbeats})
        )
        replica, arrival = joiner.fetch()
        narrow(
            model, {name: list(t.shape) for name, t in replica["model"].items()}
        )  # it may have shrunk since
        if (why := misfit(model, optimizers, replica)) is not None:
            raise ValueError(f"the replica of rank {arrival.donor} does not fit: {why}")
        load_replica(model, optimizers, replica)
        store = joiner.clone_store()

    def transport(_: Group, largest_bytes: int) -> Transport:
        return joiner.transport(arrival.membership, largest_bytes)

    group = Group(store, joiner.rank, joiner.world_size, members=(joiner.rank,))
    try:
        return GossipSession(
            Replica(model, optimizers, door="gossip"),
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
