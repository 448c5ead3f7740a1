"""The function `suda`: resolves settings, checks the graph, and starts a session."""

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
from gossipgrad.muon._backbones import make_backbone, resolve_backbone
from gossipgrad.muon._graph import resolve_graph
from gossipgrad.muon._session import SudaSession, SudaSettings

__all__ = ["resolve_settings", "suda"]

_HEARTBEATS = Heartbeats()


def suda(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    backbone: str = "semi-atc-gt",
    topology: Any = "dissemination",
    lazy: bool = False,
    mode: str | Mode | None = None,
    process_group: dist.ProcessGroup | Group | None = None,
    mesh: DeviceMesh | None = None,
    wire_dtype: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    transport: str | Callable[[Group], Transport] = "tcp",
    recorder: Recorder | None = None,
    heartbeats: Heartbeats | None = _HEARTBEATS,
    start_timeout_seconds: float = 30.0,
) -> SudaSession:
    r"""Train `model` by decentralized Muon: momentum is tracked before it is polarised.

    A collective: all ranks call it, with the same model and settings. The replicas become that of
    rank 0. Polarising is not linear, so the mean of polarised gradients is not the polarised mean,
    and ranks with different data would stop where their polar factors cancel. Here each rank tracks
    the mean over all ranks of the tensor to polarise, by communication with neighbours only, and
    the backbone mixes weights around the update:

    .. math:: H \leftarrow W (H + M - M_{before}), \quad X \leftarrow A (C X - U(H)) - B Y

    with $U$ the optimizer's update, including weight decay. With `gg.Muon` the momentum is tracked,
    and for AdamW's parameters the gradient; with any other optimizer the gradients, which are
    written to `.grad`. All parameters are tracked and mixed; the paper does not mention those that
    are not matrices. With one rank, training is the plain optimizer's, bit for bit.

    A step waits for a late partner for five minutes, then continues, and mixes the message when it
    arrives. When a rank dies, the living ranks continue in a new generation: trackers restart from
    each rank's momentum, duals from zero, and weights are unchanged.

    Args:
        model: On any device; parameters of floating types, DTensors by their local shards.
        optimizer: One optimizer, `gg.Muon` or another.
        backbone: `"semi-atc-gt"`, `"atc-gt"`, `"non-atc-gt"` and `"demuon"` run on any graph;
            `"ed"` and `"extra"` on a constant graph.
        topology: With one partner in a step, another in the next: `"dissemination"`,
            `"hypercube"`, `"matching"`, `"complete"`, or such a schedule. With all neighbours in
            each exchange, one round for each matching: `"ring"`, a networkx graph, or a matrix of
            weights (or `topology.from_graph`, `from_matrix`). Graphs get the weights
            `1 / (2 max(d_i, d_j))`.
        lazy: Whether `(I + W) / 2` replaces W.
        mode: `"overlap"`: tensors that do not depend on the update are sent during forward and
            backward; `"sync"`: they are sent with the trackers. None: overlap, unless the backbone
            has no such tensors (`"ed"`, `"atc-gt"`, `"demuon"`). Both wait 300 s for a partner
            that is not ready; `Overlap(patience_seconds=...)` and `Sync(...)` wait otherwise.
        process_group: The ranks that take part; see `gossip`.
        mesh: Instead of `process_group`; see `gossip`.
        wire_dtype: Type on the wire. Means over ranks are still kept.
        scaler: The `torch.amp.GradScaler` that steps the optimizer, if one does.
        seed: Seed of the rotation of partners.
        bucket_bytes: Size of a message.
        transport: See `gossip`.
        recorder: Gets spans of time.
        heartbeats: How ranks detect lost ranks; None: all ranks stay members.
        start_timeout_seconds: How long this call waits for the other ranks.

    Returns:
        The session; `close()` it, or use it in a `with` statement.

    Raises:
        ValueError: For invalid settings, or a graph on which the backbone diverges; the message has
            the eigenvalue, the rule, and two settings that work.
        AgreementError: If the ranks differ in names, shapes, dtypes, settings or secrets.
        GossipError: If a rank dies, or is missing after the timeout; it is named.

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
    check_replica(model, optimizers, call="suda", process_group=process_group, mesh=mesh)
    check_ranks(process_group, mesh)
    if len(optimizers) != 1:
        raise ValueError(
            f"{len(optimizers)} optimizers: suda() takes one, whose update it mixes. gg.Muon has "
            "AdamW in it for what is no hidden matrix"
        )
    check_numbers(every=1, bucket_bytes=bucket_bytes, wire_dtype=wire_dtype)
    _resolve_mode(mode, resolve_backbone(backbone))
    check_heartbeats(heartbeats)
    links = resolve_transport(transport)
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
                Replica(model, optimizers, call="suda"),
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
    backbone: str = "semi-atc-gt",
    topology: Any = "dissemination",
    lazy: bool = False,
    mode: str | Mode | None = None,
    wire_dtype: torch.dtype | None = None,
    seed: int = 0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> SudaSettings:
    """Return the settings of a run of `world_size` ranks.

    Raises:
        ValueError: As `suda`.
    """
    backbone = resolve_backbone(backbone)
    mode = _resolve_mode(mode, backbone)
    rule = make_backbone(backbone, [])
    # In sync, early exchanges are sent with the trackers.
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


def _resolve_mode(mode: str | Mode | None, backbone: str) -> Mode:
    starts_early = make_backbone(backbone, []).starts_early
    if mode is None:
        mode = "overlap" if starts_early else "sync"
    # Trackers that miss each other lose a part of the gradients: so these wait longer than gossip.
    resolved = Overlap(patience_seconds=300.0) if mode == "overlap" else resolve_mode(mode)
    if isinstance(resolved, Stale):
        raise ValueError(
            "mode 'stale' is not for suda(): trackers that miss each other lose the sum of "
            "gradients, and no rule is known that converges. Use mode='overlap' or 'sync', whose "
            "patience_seconds says how long a step waits"
        )
    if isinstance(resolved, Sync) and resolved.momentum:
        raise ValueError(
            f"momentum={resolved.momentum} of mode sync is not for suda(), whose trackers and "
            "duals correct the differences of ranks: leave it at 0"
        )
    if isinstance(resolved, Sync) and resolved.overlap:
        raise ValueError(
            "overlap=True of mode sync is not for suda(), which has no second exchange of weights: "
            "leave it out, or use mode='overlap' with backbone='semi-atc-gt'"
        )
    if isinstance(resolved, Overlap) and not starts_early:
        raise ValueError(
            f"mode='overlap' with backbone={backbone!r}: all that it exchanges depends on the "
            "update, so nothing can travel behind it. Use mode='sync', or backbone='semi-atc-gt'"
        )
    return resolved
