"""The function `sparsify`: resolves its arguments to settings, and starts a session."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gossipgrad import topology
from gossipgrad._messages import warn
from gossipgrad.comm import Group, Recorder, resolve_group, resolve_optimizers
from gossipgrad.engine import Replica, check_replica
from gossipgrad.planning import Plan
from gossipgrad.sparsification._density import (
    DEFAULT_DENSITY,
    Density,
    warn_of_loss,
)
from gossipgrad.sparsification._session import SparseSession
from gossipgrad.sparsification._settings import (
    Settings,
    check_listeners,
    check_momentum,
)

__all__ = ["sparsify"]


def sparsify(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    density: Density = DEFAULT_DENSITY,
    plan: str | int | Plan = "optimal",
    methods: Sequence[str] = ("sparse", "dense"),
    value_dtype: torch.dtype | None = None,
    momentum_correction: float | None = None,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    process_group: dist.ProcessGroup | Group | None = None,
    mesh: DeviceMesh | None = None,
    recorder: Recorder | None = None,
) -> SparseSession:
    """Train `model` with sparse gradients: from now on every backward pass aggregates them.

    A collective: all ranks call it, with the same model and settings. The replicas become that of
    rank 0. When `backward()` returns, `.grad` is the mean over ranks of the sent elements: the
    largest of each rank's gradients plus its unsent rest of earlier rounds. The training loop,
    clipping, scheduler and scaler stay the user's, and see the aggregated gradient; the session
    uses hooks, which `close()` removes. Until then the hooks keep the session alive as long as the
    optimizer, even if the return value is dropped. With one rank, training is the plain
    optimizer's, bit for bit.

    Gradients are sent in groups during backward. `plan="optimal"` first sends whole gradients in
    the buckets of DistributedDataParallel, measures backward, selection and network, and computes
    which tensors to merge and which not to compress. At each density of the warm-up that plan is
    compared with whole gradients in real steps until it is faster; if it never is, gradients stay
    whole, with a message.

    All ranks wait for the slowest in every step. When one has died, `backward()` raises on the
    others: that step's gradients are not aggregated, weights and residuals are as before it. They
    wait for a rank whose host hangs until the timeout of the group, half an hour by default.

    Every backward pass outside `no_sync()` is a round of the whole `.grad`. A parameter without a
    gradient counts as zeros and gets the mean of the others'; so its `.grad` is never None after a
    round. A step with gradients that were not averaged runs its own round, and so does a step
    without gradients, on all ranks: a rank that has none, or zeros, keeps its residuals and gets
    the mean of the others'; if no rank has any, all stay None, and the step does nothing. If the
    gradient of any rank is not finite, all are NaN on all ranks, and residuals are unchanged: a
    scaler then skips the steps of all optimizers.

    The set of trained parameters is recorded at the start, and by `session.broadcast_()`: a step
    with a gradient of a parameter that was unfrozen, added or frozen since raises
    `ReplicaChangedError`.

    Args:
        model: On one device; parameters of floating types, not sharded.
        optimizer: The optimizer, or several that step together. One that steps separately, as in a
            GAN, needs a separate session, and the passes of the others run inside its `no_sync()`:
            a round covers all parameters of the session, whatever the loss.
        density: The share of coordinates that is sent, above 0 and at most 1, or a
            `gg.sparsification.Warmup`. By default everything for 250 steps, then 0.25, 0.0625 and
            0.015625 for as many, then 0.01. A group goes dense while that is fewer bytes.
        plan: `"optimal"`; a published rule: `"greedy"` (OMGS-SGD's, which decides on the first two
            tensors, too, and theirs does not), `"mg-wfbp"`, `"wfbp"` or `"layerwise"` (each tensor
            alone), `"single"` (all in one); bytes at which a group is full; or a
            `gossipgrad.planning.Plan`, which finds its tensors by their names, and without names
            counts them from the model's last to its first.
        methods: What `"optimal"` may choose among: `"sparse"`, `"dense"` (all-reduce), `"fp16"`
            and `"bf16"` (all-reduce of rounded gradients). Other plans use the first.
        value_dtype: Type of values in sparse messages, such as `torch.bfloat16`; rounding errors
            stay in the residual. None: float32, or float64 for float64 gradients.
        momentum_correction: Momentum of Deep Gradient Compression, applied before selection, such
            as 0.9; the optimizer's momentum must then be 0. With one rank it has no effect, with a
            warning.
        clip_norm: The norm of the mean gradient that is to be clipped by each rank, before it adds
            its gradient to the residual (local gradient clipping of Deep Gradient Compression): to
            this times the root of the number of ranks. Clip the mean no more. The norm is known
            when backward ends, so nothing is sent before. With one rank it has no effect, with a
            warning.
        scaler: The `torch.amp.GradScaler` that scales the loss, if one does: residuals are kept in
            its units. The last pass of each step must then be outside `no_sync()`, and all before
            it inside.
        process_group: The ranks that take part; by default all. Nothing is sent on it. The session
            owns a `gg.Group` passed here, and closes it.
        mesh: A one-dimensional mesh whose ranks take part, instead of `process_group`.
        recorder: Gets spans of time, for example a `gossipgrad.report.Trace`.

    Returns:
        The session; `close()` it, or use it in a `with` statement.

    Raises:
        ValueError: For invalid settings, or if a parameter is in another open session of
            `sparsify` or `gossip` whose optimizer is alive.
        AgreementError: If the ranks differ in names, shapes, dtypes or settings.
        GossipError: If a rank dies.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with gg.sparsify(model, optimizer, density=0.01) as session:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> session.world_size
        1

    References:
        Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient
        Sparsification on GPUs, INFOCOM 2020. Deviations are numbered in
        `gossipgrad.sparsification._reference`.
    """
    optimizers = resolve_optimizers(optimizer)
    check_replica(
        model,
        optimizers,
        call="sparsify",
        process_group=process_group,
        mesh=mesh,
        warns=False,
    )
    if any(getattr(each, "sharding", None) is not None for each in optimizers):
        raise ValueError(
            "share_roots(shard=True) is for DistributedDataParallel alone: with sparsify() call "
            "share_roots(optimizer) without shard=True"
        )
    group = resolve_group(process_group, mesh, asks="sparsify()")
    try:
        check_listeners(scaler, recorder)
        settings = Settings(
            schedule=topology.complete(group.world_size),
            density=density,
            plan=plan,
            methods=methods,
            value_dtype=value_dtype,
            momentum_correction=momentum_correction,
            clip_norm=clip_norm,
        )
        check_momentum(optimizers, settings.momentum_correction)
        if group.world_size > 1 and "sparse" in settings.methods:
            warn_of_loss(settings.density)
        if group.world_size == 1 and momentum_correction:
            warn(
                f"momentum_correction={momentum_correction} does nothing with one rank: the "
                "optimizer steps without momentum. Give it one, and leave momentum_correction out"
            )
        if group.world_size == 1 and clip_norm:
            warn(f"clip_norm={clip_norm} does nothing with one rank: use clip_grad_norm_")
        replica = Replica(model, optimizers, call=SparseSession.call)
        return SparseSession(replica, settings, group=group, scaler=scaler, recorder=recorder)
    except BaseException:
        group.close()
        raise
