"""The function `join`: join a running run with the replica of a member."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Unpack

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gossipgrad.comm import (
    Group,
    fingerprint,
    resolve_island,
    resolve_optimizers,
    trained_parameters,
)
from gossipgrad.decentralized._options import (
    GossipOptions,
    check_options,
    resolve_settings,
    with_options,
)
from gossipgrad.decentralized._session import GossipSession
from gossipgrad.engine import (
    Claim,
    Island,
    Joiner,
    Replica,
    check_replica,
    narrow,
    own_address,
)

__all__ = ["join"]


@with_options
def join(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    address: str,
    *,
    island: DeviceMesh | dist.ProcessGroup | None = None,
    timeout_seconds: float = 300.0,
    **options: Unpack[GossipOptions],
) -> GossipSession:
    """Join a running `gossip()` run as one more rank; local to this one.

    Build the same model and optimizer as the other ranks, and pass the settings that they passed to
    `gossip()`. A different model or setting is refused by name before anything is loaded.

    The lowest member, the donor, copies its replica between two of its steps and sends it in the
    background; no other rank waits, and no process group is needed here. The replica replaces the
    model's parameters and buffers, and the optimizer's state and hyper-parameters. Then this rank
    becomes a member.

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
        island: The ranks that join together as one more island, if the run has islands; all of them
            call this. Usually a process group of their own, such as `dist.group.WORLD` in processes
            that `gossipgrad launch --island` has started again.
        timeout_seconds: How long to wait until the donor starts to send its replica.
        **options: As in `gossip()`, except `heartbeats=None`. With `local_steps` this rank's outer
            momentum begins at zero.

    Returns:
        The session. Its `rank` is a number that no rank had before, and `position` continues at the
        others' position: set schedules and samplers by it.

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
    check_replica(model, optimizers, call="join")
    chosen = check_options(join, options)
    if chosen.heartbeats is None:
        raise ValueError("heartbeats=None has a membership that never changes: no rank can join")
    early = Claim("join")  # before anything is loaded; the session makes its own claim
    early.take(trained_parameters(model, optimizers))
    early.release()
    inside = resolve_island(island)
    with ExitStack() as at_end:
        shared: Island | None = None
        if inside is not None:
            shared = Island(inside, start_timeout_seconds=timeout_seconds)
            at_end.callback(shared.close)
        made = Joiner(own_address(address, shared), timeout_seconds=timeout_seconds)
        joiner = at_end.enter_context(closing(made))
        if chosen.bucket_bytes is None:
            chosen = replace(chosen, bucket_bytes=joiner.bucket_bytes)
        size = 1 if shared is None else shared.size
        settings = resolve_settings(joiner.world_size, chosen, island=size)
        narrow(model, joiner.shapes)
        joiner.check(
            fingerprint(model, optimizers, {**settings.describe(), "heartbeats": chosen.heartbeats})
        )
        joiner.reserve_rank(shared)
        store = joiner.clone_store()
        group = Group(store, joiner.rank, joiner.world_size, members=(joiner.rank,))
        try:
            session = GossipSession(
                Replica(model, optimizers, call="gossip"),
                settings,
                group=group,
                transport=lambda group: joiner.transport(),
                scaler=chosen.scaler,
                recorder=chosen.recorder,
                heartbeats=chosen.heartbeats,
                joiner=joiner,
                island=shared,
            )
        except BaseException:
            group.close()
            raise
        at_end.pop_all()
        joiner.close()
        return session
