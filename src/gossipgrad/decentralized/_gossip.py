"""The function `gossip`: resolves its arguments to settings, and starts a session."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Unpack

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Adam, AdamW, Optimizer

from gossipgrad import topology
from gossipgrad._messages import warn
from gossipgrad.comm import (
    Group,
    Transport,
    check_island,
    fitting_bucket_bytes,
    resolve_group,
    resolve_island,
    resolve_optimizers,
    resolve_transport,
    trained_parameters,
)
from gossipgrad.decentralized._options import (
    GossipOptions,
    check_options,
    resolve_settings,
    with_options,
)
from gossipgrad.decentralized._session import GossipSession
from gossipgrad.decentralized._settings import GossipSettings, Weights
from gossipgrad.engine import Island, Replica, Sync, check_replica

__all__ = ["gossip"]

TransportFactory = Callable[[Group], Transport]

_MANY_RANKS = 8  # from which on Adam was seen to lose accuracy


@with_options
def gossip(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    process_group: dist.ProcessGroup | Group | None = None,
    mesh: DeviceMesh | None = None,
    island: DeviceMesh | dist.ProcessGroup | None = None,
    weight: float = 1.0,
    transport: str | TransportFactory = "tcp",
    start_timeout_seconds: float = 30.0,
    **options: Unpack[GossipOptions],
) -> GossipSession:
    """Train `model` by gossip: from now on every `optimizer.step()` is a round with one partner.

    A collective: all ranks call it, with the same model and settings. The replicas become that of
    rank 0 (parameters, buffers, optimizer state). The training loop, scheduler, clipping and scaler
    stay the user's: the session uses hooks, which `close()` removes. With one rank, training is the
    plain optimizer's, bit for bit.

    A step waits for a partner that is not ready for a second, then continues, and mixes the part
    when it arrives; until that partner is heard of again, no step of any rank waits for it. With
    `mode="stale"` none ever waits. So a run is repeated bit for bit only with
    `mode=gg.Overlap(patience_seconds=math.inf)`. A partner that died or left is skipped, and soon
    the living ranks get a schedule without it. None of this raises. A rank that hung for so long
    that the others declared it dead gets an `EvictedError` from its next step.

    Args:
        model: On any device; parameters of floating types, DTensors by their local shards.
        optimizer: The optimizer, or several: a round ends after the last of them has stepped.
        topology: `"dissemination"`, `"hypercube"`, `"matching"`, `"ring"`, `"complete"`, or a
            schedule from `gossipgrad.topology`. `"dissemination"` suits ranks that all stay and
            are never late: a round that is void at one end shifts the mean over ranks.
        mode: `"overlap"` (a snapshot is sent during the step and mixed at its end), `"sync"`
            (exchanged and mixed after the update) or `"stale"` (mixed when it arrives: no step
            waits); or a value such as `Stale(max_staleness=4)`.
        payload: `"weights"`, `"weights+momentum"` (also the momentum of SGD or `GossipAdamW`),
            `"weights+state"` (all moments), or, for study, `"gradients"` and `"gradients+weights"`.
        every: Steps in a round.
        average_every: Steps between exact averages over all ranks (Gossip-PGA); `"log_p"` for
            `ceil(log2(world_size))`; None for never, and in mode stale.
        exchanges: Number of partners per step, one after the other, in mode sync. Two nearly reach
            all-reduce's accuracy, at twice the bytes. The forward pass hides the last exchange;
            with `gg.Sync(overlap=True)` backward hides one more.
        local_steps: Steps that each rank makes alone between two exchanges. Their total change is
            one step of the outer optimizer, whose weights are then mixed with the partner's:
            Factored Gossip DiLoCo. With a complete average it is DiLoCo. None: no outer optimizer,
            see `every`.
        outer: The optimizer at the end of the local steps, by default `gg.Nesterov(lr=0.7,
            momentum=0.9)`.
        process_group: The ranks that take part; by default all. Nothing is sent on it. The session
            owns a `gg.Group` passed here, and closes it.
        mesh: A one-dimensional mesh whose ranks take part, instead of `process_group`. With FSDP2
            inside a replica, the axis between replicas: each rank mixes its shards with the same
            shards of its partner's replica, and distances are of these shards only.
        island: The ranks that share a replica, such as those of one node: another axis of the mesh.
            Whole replicas stay equal bit for bit inside it, and each rank exchanges its share of
            every message. Gradients are averaged inside by DistributedDataParallel over the
            island, FSDP2 or another means of torch; of a bare model by the session. If a rank of it
            dies, the whole island has to end. Of islands of unequal sizes the first ranks of each
            exchange, as many as the smallest one has; others give a `process_group` of themselves
            alone, and their `session.membership` has their own island alone.
        weight: What this rank counts, such as its batch size, the same on the ranks of an island.
            Where these differ, exchanges keep the weighted mean, and averages are weighted. Needs a
            symmetric topology; no rank can then join.
        wire_dtype: Type on the wire, for example `torch.bfloat16` to halve the bytes. The mean over
            ranks is still kept.
        compress: `SharedMask(density)`: each round sends and mixes that share of the weights'
            coordinates, the same on all ranks, and others in the next round. Also as text,
            `"shared-mask:0.1"`. With `payload="weights"`.
        scaler: The `torch.amp.GradScaler` that steps the optimizer, if one does.
        seed: Seed of the rotation of partners, and of a shared mask.
        bucket_bytes: Size of a message. None: by the model, so that it has about 12 to 60.
        transport: `"tcp"`, or a function from the session's group to a transport.
        recorder: Gets spans of time, for example a `gossipgrad.report.Trace`.
        heartbeats: How ranks detect lost ranks and continue with the living ones; None: all ranks
            stay members, and after a death no average of all is possible.
        start_timeout_seconds: How long this call waits for the other ranks; the error names missing
            ranks.
        **options: The other arguments above; `GossipOptions` has their types.

    Returns:
        The session; `close()` it, or use it in a `with` statement.

    Raises:
        ValueError: For invalid settings; if a parameter is in another session, or
            DistributedDataParallel averages its gradients; or if no parameter of the optimizer is
            one of the model's.
        AgreementError: If the ranks differ in names, shapes, dtypes, settings or secrets.
        GossipError: If a rank dies, or is missing after the timeout; it is named.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with gg.gossip(model, optimizer) as session:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> session.world_size
        1

    References:
        Daily et al., GossipGraD, arXiv:1803.05880; deviations are numbered in
        `gossipgrad.decentralized._reference`. Local steps: Koneputugodage et al., Factored Gossip
        DiLoCo, arXiv:2606.22768; deviations in `gossipgrad.decentralized._reference_local_steps`.
    """
    chosen = check_options(gossip, options)
    optimizers = resolve_optimizers(optimizer)
    check_replica(model, optimizers, call="gossip", process_group=process_group, mesh=mesh)
    inside = resolve_island(island)
    check_island(inside, mesh or process_group)
    group = resolve_group(process_group, mesh, start_timeout_seconds=start_timeout_seconds)
    shared: Island | None = None
    try:
        links = resolve_transport(transport)
        if chosen.bucket_bytes is None:
            parameters = trained_parameters(model, optimizers).values()
            bucket_bytes = fitting_bucket_bytes(parameters, chosen.wire_dtype)
            chosen = replace(chosen, bucket_bytes=bucket_bytes)
        if inside is not None:
            shared = Island(inside, start_timeout_seconds=start_timeout_seconds)
            with shared.group.limit(start_timeout_seconds):
                group = shared.between(group)
        sizes = (1, 1) if shared is None else (shared.size, shared.slices)
        settings = resolve_settings(group.world_size, chosen, island=sizes[0], slices=sizes[1])
        with group.limit(start_timeout_seconds):
            settings = _weighted(settings, weight, group, shared)
            if group.rank == 0:
                _warn_of_adam(optimizers, settings)
            return GossipSession(
                Replica(model, optimizers, call="gossip"),
                settings,
                group=group,
                transport=links,
                scaler=chosen.scaler,
                recorder=chosen.recorder,
                heartbeats=chosen.heartbeats,
                island=shared,
            )
    except BaseException:
        if shared is not None:
            shared.close()
        group.close()
        raise


def _warn_of_adam(optimizers: Sequence[Optimizer], settings: GossipSettings) -> None:
    """Warn of what Adam loses at many ranks, if the settings do nothing about it."""
    ranks = settings.schedule.world_size
    has_momentum = isinstance(settings.mode, Sync) and settings.mode.momentum > 0
    helps = has_momentum or settings.payload != Weights() or settings.outer is not None
    names = [type(o).__name__ for o in optimizers if isinstance(o, Adam | AdamW)]
    if ranks >= _MANY_RANKS and names and not helps:
        warn(
            f"{names[0]} on {ranks} ranks divides by the noise of each rank's own small batch, and "
            "loses accuracy to all-reduce: 0.5 points on 8 ranks and 1.9 on 32 where it was "
            "measured. With mode=gg.Sync(momentum=0.9), exchanges=2, wire_dtype=torch.bfloat16 it "
            "lost 0.0 and 0.4, with as many bytes and longer steps. Search the learning rate from "
            f"half of that of all-reduce up to sqrt({ranks}) times it: docs/settings.md"
        )


def _weighted(
    settings: GossipSettings, weight: float, group: Group, island: Island | None
) -> GossipSettings:
    """Return the settings of ranks that may count unequally; a collective."""
    if not isinstance(weight, Real):
        raise ValueError(f"weight is {weight!r}: give a number above 0, such as the batch size")
    weight = float(weight)
    of_island = [weight] if island is None else island.agree(weight)
    if island is not None and any(other != of_island[0] for other in of_island):
        raise ValueError(f"the weights of an island are {of_island}: give one number on all of it")
    masses = group.all_gather_object(weight)
    masses = masses if island is None else island.from_first(masses)
    if {*masses} == {1.0}:
        return settings
    group.barrier()  # what follows may raise, and ends no collective of the others
    schedule = topology.weighted(settings.schedule, masses)
    return settings if len({*masses}) == 1 else replace(settings, schedule=schedule)
