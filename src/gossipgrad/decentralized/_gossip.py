"""The function `gossip`: resolves its arguments to settings, and starts a session."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gossipgrad._messages import warn
from gossipgrad.comm import (
    DEFAULT_BUCKET_BYTES,
    Group,
    Heartbeats,
    Recorder,
    Transport,
    check_heartbeats,
    check_ranks,
    check_timeout,
    fitting_bucket_bytes,
    resolve_group,
    resolve_optimizers,
    resolve_transport,
    trained_parameters,
)
from gossipgrad.compression import SharedMask
from gossipgrad.decentralized._outer import Nesterov
from gossipgrad.decentralized._session import GossipSession
from gossipgrad.decentralized._settings import (
    GossipSettings,
    Gradients,
    GradientsAndWeights,
    Payload,
    check_compress,
    check_exchanges,
    resolve_compress,
    resolve_local_steps,
    resolve_payload,
)
from gossipgrad.engine import (
    Mode,
    Replica,
    check_numbers,
    check_replica,
    check_stale,
    resolve_average_every,
    resolve_mode,
)
from gossipgrad.topology import SCHEDULE_NAMES, Schedule, by_name

__all__ = ["gossip"]

TransportFactory = Callable[[Group], Transport]
_HEARTBEATS = Heartbeats()


def gossip(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    topology: str | Schedule = "matching",
    mode: str | Mode = "overlap",
    payload: str | Payload = "weights",
    every: int = 1,
    average_every: int | str | None = None,
    exchanges: int = 1,
    local_steps: int | None = None,
    outer: Nesterov | None = None,
    process_group: dist.ProcessGroup | Group | None = None,
    mesh: DeviceMesh | None = None,
    wire_dtype: torch.dtype | None = None,
    compress: str | SharedMask | None = None,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    bucket_bytes: int | None = None,
    transport: str | TransportFactory = "tcp",
    recorder: Recorder | None = None,
    heartbeats: Heartbeats | None = _HEARTBEATS,
    start_timeout_seconds: float = 30.0,
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
            all-reduce's accuracy, at twice the bytes; only the last exchange is hidden.
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
    optimizers = resolve_optimizers(optimizer)
    check_replica(model, optimizers, door="gossip", process_group=process_group, mesh=mesh)
    check_timeout(start_timeout_seconds)
    group = resolve_group(process_group, mesh, start_timeout_seconds=start_timeout_seconds)
    try:
        check_settings(
            topology=topology,
            mode=mode,
            payload=payload,
            every=every,
            average_every=average_every,
            exchanges=exchanges,
            local_steps=local_steps,
            outer=outer,
            wire_dtype=wire_dtype,
            compress=compress,
            scaler=scaler,
            seed=seed,
            bucket_bytes=bucket_bytes,
            transport=transport,
            heartbeats=heartbeats,
        )
        settings = resolve_settings(
            group.world_size,
            topology=topology,
            mode=mode,
            payload=payload,
            every=every,
            average_every=average_every,
            exchanges=exchanges,
            local_steps=local_steps,
            outer=outer,
            wire_dtype=wire_dtype,
            compress=compress,
            seed=seed,
            bucket_bytes=fitting_bucket_bytes(
                trained_parameters(model, optimizers).values(), wire_dtype
            )
            if bucket_bytes is None
            else bucket_bytes,
        )
        with group.limit(start_timeout_seconds):
            return GossipSession(
                Replica(model, optimizers, door="gossip"),
                settings,
                group=group,
                transport=resolve_transport(transport),
                scaler=scaler,
                recorder=recorder,
                heartbeats=heartbeats,
            )
    except BaseException:
        group.close()
        raise


def resolve_settings(
    world_size: int,
    *,
    topology: str | Schedule,
    mode: str | Mode,
    payload: str | Payload,
    every: int,
    average_every: int | str | None,
    exchanges: int = 1,
    local_steps: int | None = None,
    outer: Nesterov | None = None,
    wire_dtype: torch.dtype | None,
    compress: str | SharedMask | None,
    seed: int,
    bucket_bytes: int,
) -> GossipSettings:
    """Return the settings of a run that starts with `world_size` ranks; warn of unused ones.

    `check_settings` must have passed them.
    """
    resolved_mode = resolve_mode(mode)
    resolved_payload = resolve_payload(payload, resolved_mode)
    if isinstance(resolved_payload, Gradients):
        warn(
            "payload='gradients' never mixes weights: replicas drift apart. It is the wording "
            "of the paper's abstract, kept for study; train with payload='weights'"
        )
    steps, optimizer = resolve_local_steps(local_steps, outer, every, resolved_payload)
    compressor = resolve_compress(compress)
    masked = compressor is not None
    schedule = _resolve_schedule(topology, world_size, seed, seeds_all=not masked)
    return GossipSettings(
        schedule=schedule,
        mode=resolved_mode,
        payload=resolved_payload,
        every=steps,
        average_every=resolve_average_every(average_every, world_size),
        wire_dtype=wire_dtype,
        bucket_bytes=int(bucket_bytes),
        exchanges=int(exchanges),
        compress=compressor,
        outer=optimizer,
        seed=int(seed) if masked else 0,
    )


def check_settings(
    *,
    topology: object = "matching",
    mode: Any = "overlap",
    payload: Any = "weights",
    every: object = 1,
    average_every: Any = None,
    exchanges: Any = 1,
    local_steps: Any = None,
    outer: Any = None,
    wire_dtype: object = None,
    compress: Any = None,
    scaler: object = None,
    seed: Any = 0,
    bucket_bytes: object = None,
    transport: object = "tcp",
    heartbeats: object = None,
    process_group: object = None,
    mesh: object = None,
    **_others: object,
) -> None:
    """Refuse settings of `gossip()` that are invalid for any group, before it exists; local.

    Raises:
        ValueError: For the first of them.
    """
    check_ranks(process_group, mesh)
    size = DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    check_numbers(every=every, bucket_bytes=size, wire_dtype=wire_dtype)
    resolved_mode = resolve_mode(mode)
    resolved = resolve_payload(payload, resolved_mode)
    if isinstance(resolved, Gradients | GradientsAndWeights) and scaler is not None:
        raise ValueError(
            f"payload {resolved} sends gradients before the step, when each rank's scaler has "
            "scaled them differently: use payload='weights'"
        )
    compressor = resolve_compress(compress)
    check_compress(compressor, resolved, seed)
    resolve_average_every(average_every, 1)
    check_exchanges(exchanges, resolved_mode)
    resolve_local_steps(local_steps, outer, every, resolved)
    if isinstance(topology, str):
        check_stale(
            resolved_mode,
            average_every=average_every,
            symmetric=by_name(topology, 4).symmetric,  # any schedule of one or two ranks is
            topology=repr(topology),
        )
    elif isinstance(topology, Schedule):
        check_stale(
            resolved_mode,
            average_every=average_every,
            symmetric=topology.symmetric,
            topology=str(topology),
        )
    else:
        raise ValueError(
            f"topology must be one of {', '.join(map(repr, SCHEDULE_NAMES))} or a schedule from "
            f"gossipgrad.topology, got {topology!r}"
        )
    resolve_transport(transport)
    check_heartbeats(heartbeats)


def _resolve_schedule(
    topology: str | Schedule, world_size: int, seed: int, *, seeds_all: bool
) -> Schedule:
    """Return the schedule; warn of a seed without effect, if it `seeds_all`."""
    unused = seeds_all and seed != 0
    if isinstance(topology, str):
        if topology == "ring" and unused:
            warn(
                f"seed={seed} is ignored: the ring does not rotate; topology=gossipgrad.topology."
                "ring(world_size, seed=..., rotate=True) does"
            )
        return by_name(topology, world_size, seed=seed)
    if topology.world_size != world_size:
        raise ValueError(
            f"the schedule {topology} is for {topology.world_size} ranks, the group has "
            f"{world_size}: make it for world_size={world_size}"
        )
    if unused:
        warn(f"seed={seed} is ignored: the schedule given as topology has its own")
    return topology
