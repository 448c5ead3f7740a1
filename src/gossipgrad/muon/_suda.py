"""The door: where strings become settings, the graph is checked, and a session begins."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gossipgrad.comm import (
    DEFAULT_BUCKET_BYTES,
    Group,
    Heartbeats,
    Recorder,
    Transport,
    check_heartbeats,
    check_ranks,
    check_timeout,
    resolve_group,
    resolve_optimizers,
    resolve_transport,
)
from gossipgrad.engine import (
    Mode,
    Overlap,
    Replica,
    Stale,
    Sync,
    check_numbers,
    check_replica,
    resolve_mode,
)
from gossipgrad.muon._backbones import Polynomial, make_backbone, resolve_backbone
from gossipgrad.muon._graph import resolve_graph
from gossipgrad.muon._session import SudaSession, SudaSettings

__all__ = ["resolve_settings", "suda"]

_HEARTBEATS = Heartbeats()


def suda(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    backbone: str | Polynomial = "semi-atc-gt",
    topology: Any = "dissemination",
    lazy: bool = False,
    mode: str | Mode | None = None,
    process_group: dist.ProcessGroup | Group | None = None,
    mesh: DeviceMesh | None = None,
    wire_dtype: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    transport: str | Callable[[Group], Transport] = "zeromq",
    encrypt: bool | None = None,
    recorder: Recorder | None = None,
    heartbeats: Heartbeats | None = _HEARTBEATS,
    start_timeout_seconds: float = 60.0,
) -> SudaSession:
    r"""Trains `model` by decentralized Muon: momentum is tracked before it is polarised.

    A collective: all ranks call it, with the same model and settings. The replicas become that of
    rank 0. Polarising is not linear, so the mean of polarised gradients is not the polarised mean,
    and ranks with data of their own would stop where their polar factors cancel. Here each rank
    tracks the mean over all of what it would polarise, by neighbour communication alone, and the
    backbone mixes weights around the update:

    .. math:: H \leftarrow W (H + M - M_{before}), \quad X \leftarrow A (C X - U(H)) - B Y

    with $U$ whatever the optimizer subtracts, weight decay included. With `gg.Muon` what is tracked
    is its momentum, and of AdamW's parameters the gradient; with any other optimizer its gradients,
    which are written to `.grad`. Matrices or not, all parameters are tracked and mixed; the paper
    is silent on those that are no matrices. With one rank, training is the plain optimizer's, bit
    for bit.

    A partner that is late holds a step up to a deadline, after which it goes on, and mixes when
    the message comes. When a rank dies, the living go on in a new generation: trackers begin anew
    from each one's momentum, duals from zero, and weights as they are.

    Args:
        model: On any device; parameters of floating types, DTensors by their local shards.
        optimizer: One, `gg.Muon` or another.
        backbone: `"semi-atc-gt"`, `"atc-gt"`, `"non-atc-gt"`, `"demuon"` and the manuscript's
            `"paper-extra"` run on any graph; `"ed"`, `"extra"`, the manuscript's `"paper-ed"` and
            `Polynomial(a, b2, c)` on one that stays the same.
        topology: With one partner in a step, another in the next: `"dissemination"`,
            `"hypercube"`, `"matching"`, `"complete"`, or such a schedule. With all neighbours in
            each exchange, one round for each matching: `"ring"`, a networkx graph, or a matrix of
            weights (or `topology.from_graph`, `from_matrix`). Graphs get the weights
            `1 / (2 max(d_i, d_j))`.
        lazy: Whether `(I + W) / 2` takes the place of W.
        mode: `"overlap"`: what does not depend on the update travels behind forward and backward;
            `"sync"`: it travels with the trackers. None: overlap, unless the backbone
            has nothing of that kind (`"ed"`, `"atc-gt"`, `"demuon"`).
        process_group: Whose ranks take part; see `gossip`.
        mesh: In place of `process_group`; see `gossip`.
        wire_dtype: What everything is sent as. Means over ranks are kept all the same.
        scaler: The `torch.amp.GradScaler` that steps the optimizer, if one does.
        seed: Of the rotation of partners.
        bucket_bytes: Size of a message.
        transport: See `gossip`.
        encrypt: See `gossip`.
        recorder: Gets spans of time.
        heartbeats: How ranks see that others are lost; None: all stay members for good.
        start_timeout_seconds: How long ranks wait for each other in here.

    Returns:
        The session; `close()` it, or use it in a `with` statement.

    Raises:
        ValueError: For settings that cannot be, or a graph on which the backbone diverges: with
            the eigenvalue, the rule, and two settings that work.
        AgreementError: If the ranks differ in names, shapes, dtypes, settings or secrets.
        GossipError: If a rank dies meanwhile, or does not come in time; it is named.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = gg.Muon(model, lr=0.02)
        >>> with gg.suda(model, optimizer, backbone="ed", topology="ring") as session:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> session.world_size
        1

    References:
        SUDA-Muon, arXiv:2604.23980; deviations are numbered in `gossipgrad.muon._reference`.
    """
    optimizers = resolve_optimizers(optimizer)
    check_replica(model, optimizers, door="suda", process_group=process_group, mesh=mesh)
    check_timeout(start_timeout_seconds)
    check_ranks(process_group, mesh)
    if len(optimizers) != 1:
        raise ValueError(
            f"{len(optimizers)} optimizers: suda() takes one, whose update it mixes. gg.Muon has "
            "AdamW in it for what is no hidden matrix"
        )
    check_numbers(every=1, bucket_bytes=bucket_bytes, wire_dtype=wire_dtype)
    _resolve_mode(mode, resolve_backbone(backbone))
    check_heartbeats(heartbeats)
    links = resolve_transport(transport, encrypt=encrypt)
    group = resolve_group(
        process_group, mesh, asks="suda()", start_timeout_seconds=start_timeout_seconds
    )
    try:
        settings = resolve_settings(
            group.world_size,
            backbone=backbone,
            topology=topology,
            lazy=lazy,
            mode=mode,
            wire_dtype=wire_dtype,
            seed=seed,
            bucket_bytes=bucket_bytes,
        )
        with group.limit(start_timeout_seconds):
            return SudaSession(
                Replica(model, optimizers, door="suda"),
                settings,
                group=group,
                transport=links,
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
    backbone: str | Polynomial = "semi-atc-gt",
    topology: Any = "dissemination",
    lazy: bool = False,
    mode: str | Mode | None = None,
    wire_dtype: torch.dtype | None = None,
    seed: int = 0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> SudaSettings:
    """The settings of a run of `world_size` ranks.

    Raises:
        ValueError: As `suda`.
    """
    backbone = resolve_backbone(backbone)
    mode = _resolve_mode(mode, backbone)
    rule = make_backbone(backbone, [])
    # In sync what starts early goes with the trackers.
    exchanges = rule.exchanges + (not rule.starts_early or isinstance(mode, Overlap))
    graph = resolve_graph(
        topology, world_size, backbone, lazy=lazy, exchanges=exchanges, seed=int(seed)
    )
    return SudaSettings(
        schedule=graph.schedule,
        mode=mode,
        every=1,
        average_every=None,
        wire_dtype=wire_dtype,
        bucket_bytes=int(bucket_bytes),
        backbone=backbone,
        graph=graph,
    )


def _resolve_mode(mode: str | Mode | None, backbone: str | Polynomial) -> Mode:
    starts_early = make_backbone(backbone, []).starts_early
    if mode is None:
        return Overlap() if starts_early else Sync()
    resolved = resolve_mode(mode)
    if isinstance(resolved, Stale):
        raise ValueError(
            "mode 'stale' is not for suda(): trackers that miss each other lose the sum of "
            "gradients, and no rule is known that converges. Use mode='overlap' or 'sync', whose "
            "deadline_seconds says how long a step waits"
        )
    if isinstance(resolved, Overlap) and not starts_early:
        raise ValueError(
            f"mode='overlap' with backbone={backbone!r}: all that it exchanges depends on the "
            "update, so nothing can travel behind it. Use mode='sync', or backbone='semi-atc-gt'"
        )
    return resolved
