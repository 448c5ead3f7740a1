"""Muon for the hidden matrices of a model and AdamW for the rest, as one optimizer."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossipgrad.comm import is_sharded, local
from gossipgrad.errors import AgreementError
from gossipgrad.muon._layouts import (
    PLAIN,
    Layout,
    Split,
    layouts_of,
    matrices_of,
    sides_of,
    tensor_of,
)
from gossipgrad.muon._polar import polarise, product_dtype, resolve_polar
from gossipgrad.muon._sharing import update_shared
from gossipgrad.optim import MatrixOptimizer, Parameters, unwrapped

__all__ = ["Muon"]

Track = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], Sequence[Tensor]]

_ADAMW_LR = 3e-4
_DTYPES = {str(d): d for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Muon(MatrixOptimizer):
    r"""Muon for hidden matrices, AdamW for embeddings, heads, norms and biases.

    For a matrix, with $G$ the gradient, $b$ the momentum and $P$ the polar factor
    $U V^T$ of $U S V^T$:

    .. math::
        M \leftarrow b M + G, \quad
        X \leftarrow X - \text{lr} (\text{scale} \cdot P(b M + G) + \text{weight\_decay} \cdot X)

    with $P(M)$ where `nesterov` is False. $P$ does not depend on the scale of gradients. Kernels of
    convolutions are flattened to one row per output, in each group; other leading dimensions are a
    stack of matrices, each polarised by itself, as are the three projections in
    `nn.MultiheadAttention` and the gates of recurrent layers. Matrices of equal shapes are
    polarised together. State is in fp32 (float64 for float64 parameters), whatever the type of
    parameters. A DTensor (FSDP2) is gathered before it is
    polarised, and each rank keeps its shard.

    Ranks share the work: each matrix is polarised by one of them, and factors are sent while others
    are computed, with the same bits. Under FSDP2 these are the ranks of the mesh; under
    DistributedDataParallel those of the model, or of `process_group`. `step()` is then a
    collective of them: a rank that does not call it, or is dead, is waited for as in all-reduce.

    `repr(optimizer)` lists the parameters of each role. There is one group per role:
    `param_groups[0]` has the matrices and `param_groups[1]` the rest, if there are both.

    Args:
        params: The model, whose parameters are chosen by `muon` and `adamw`, and by what their
            layer does (see Note). Or the usual tensors, `(name, tensor)` pairs or groups, of which
            matrices are polarised that are not named as embeddings or heads, except in groups with
            a `"role"`, `"muon"` or `"adamw"`.
        lr: Learning rate of matrices.
        momentum: $b$, 0 to below 1.
        nesterov: Whether to use Nesterov momentum.
        momentum_form: `"sum"`, $b M + G$ from zero; or `"ema"`, the SUDA-Muon paper's
            $b M + (1 - b) G$ from the first gradient. A polar factor has no scale, so the two
            differ only in how much the first gradient counts.
        scale: `"original"`, $\sqrt{\max(1, outputs / inputs)}$; or `"match_rms_adamw"`,
            $0.2 \sqrt{\max(outputs, inputs)}$, for learning rates like AdamW's.
        weight_decay: Decoupled weight decay of all parameters.
        polar: The polarisation: `"polar-express"`, `"muon"` (that of torch.optim.Muon), `"svd"`, or
            a sequence of coefficients, one triple per step.
        polar_dtype: Type of the matrix products; None: bf16 on CUDA, else fp32.
        adamw_lr: Learning rate of the rest; None: `lr` with `scale="match_rms_adamw"`, else 3e-4.
        betas: AdamW's betas.
        eps: AdamW's eps.
        muon: Patterns of names that are always polarised.
        adamw: Patterns of names that AdamW always updates.
        split: Number, or sizes, of the parts of fused outputs, each of which is polarised by
            itself; by patterns of names of parameters or of their modules: `{"qkv": 3}`, or
            `{"q_proj": heads}` for one part per head.
        maximize: Whether to go along the gradients instead of against them.
        process_group: Ranks with equal weights and gradients that share the work; None: those of
            the model, if it is a DistributedDataParallel.

    Raises:
        ValueError: If a number is out of range, no parameter has a name, or there is nothing to
            train.

    Note:
        Polarised are the weights of linear and recurrent layers, kernels of convolutions between
        channels, 3-D parameters of experts, and a module's own 2-D parameters. AdamW updates
        vectors (also of shape (n, 1)), embeddings, parameters of norms, gains of weight norm,
        depthwise kernels, routers, the head, and what is named like `A_log`, `time_mix` or
        `position`. A head is named so outside of blocks (`lm_head`, `classifier`, `conv_out`), or
        is the last linear layer or convolution and in no block. `repr(optimizer)` shows what was
        found. Another head has to be named: `Muon(model, adamw=["project.weight"])`.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        ... )
        >>> gg.Muon(model, lr=0.02)
        Muon (
          muon, lr 0.02: momentum 0.95, nesterov, sum, scale original, 5 steps, weight decay 0
            0.weight (8, 4)
          adamw, lr 0.0003: betas (0.9, 0.95), eps 1e-08, weight decay 0
            0.bias (8,)
            2.weight (2, 8)
            2.bias (2,)
        )

    References:
        Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/. Amsel et al., The Polar
        Express, arXiv:2505.16932. Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982,
        for `match_rms_adamw`.
    """

    role = "muon"
    squares_matrices = False
    with_stacks = True
    process_group: dist.ProcessGroup | None = None  # a copy has none: it polarises everything
    track: ClassVar[Track | None] = None
    """Called in `step()` with the parameters that have gradients and the source of each update: for
    a matrix the tensor to polarise, else the gradient, in fp32, by local shards. Returns the
    tensors to use instead; it must not write into its arguments. `suda()` sets it on the
    instance."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        momentum_form: str = "sum",
        scale: str = "original",
        weight_decay: float = 0.0,
        polar: str | Sequence[Sequence[float]] = "polar-express",
        polar_dtype: torch.dtype | None = None,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        muon: Sequence[str] = (),
        adamw: Sequence[str] = (),
        split: Split | None = None,
        maximize: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if adamw_lr is None:
            adamw_lr = lr if scale == "match_rms_adamw" else _ADAMW_LR
        super().__init__(
            params,
            settings={
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "momentum_form": momentum_form,
                "scale": scale,
                "polar": resolve_polar(polar),
                "polar_dtype": polar_dtype and str(polar_dtype),
                "maximize": maximize,
            },
            adamw_settings={"lr": adamw_lr, "betas": betas, "eps": eps, "maximize": maximize},
            weight_decay=weight_decay,
            matrices=muon,
            adamw=adamw,
            argument="muon",
        )
        if process_group is None and isinstance(params, DistributedDataParallel):
            process_group = params.process_group
        self.process_group = process_group
        model = unwrapped(params)
        if isinstance(model, nn.Module):
            layouts = layouts_of(model, split or {})
            for group in self.param_groups:
                if group["role"] == self.role:
                    group["layouts"] = [layouts[name] for name in group["param_names"]]
        elif split:
            raise ValueError("split= names parameters of a model: pass the model itself")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `MatrixOptimizer`; leading dimensions of tensors are stacks of matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["role"] == self.role:
            group.setdefault("layouts", [PLAIN] * len(group["params"]))

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for matrix settings out of range."""
        group["polar"] = resolve_polar(group["polar"])
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum={group['momentum']!r} must be from 0 to below 1")
        for name, known in (
            ("momentum_form", ("sum", "ema")),
            ("scale", tuple(_SCALES)),
            ("polar_dtype", (None, *_DTYPES)),
        ):
            if group[name] not in known:
                raise ValueError(f"{name}={group[name]!r} must be one of {known}")

    def describe_group(self, group: Mapping[str, Any]) -> list[str]:
        """Return the settings of matrices, for `repr`."""
        steps = f"{len(group['polar'])} steps" if group["polar"] else "singular values"
        nesterov = ["nesterov"] if group["nesterov"] else []
        momentum = [f"momentum {group['momentum']:g}", *nesterov, group["momentum_form"]]
        return [*momentum, f"scale {group['scale']}", steps]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have finite gradients; return the closure's result.

        Raises:
            RuntimeError: A gradient is sparse.
            AgreementError: Of ranks that share the work, some only have a gradient of a matrix. All
                raise, and nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_equal_gradients()
        held = self.parameters_to_update()
        sources = [
            self._momentum(group, parameters)
            if group["role"] == self.role
            else self._gradients(group, parameters)
            for group, parameters in zip(self.param_groups, held, strict=True)
        ]
        if self.track is not None:
            tracked = iter(
                self.track([p for ps in held for p in ps], [s for ss in sources for s in ss])
            )
            sources = [[next(tracked) for _ in parameters] for parameters in held]
        for group, parameters, source in zip(self.param_groups, held, sources, strict=True):
            if parameters:
                update = self._muon if group["role"] == self.role else self.adamw
                update(group, parameters, source)
        return loss

    def _check_equal_gradients(self) -> None:
        """Raise on all ranks that share the work if some only have a gradient of a matrix."""
        sharing: dict[dist.ProcessGroup, list[tuple[str, nn.Parameter]]] = {}
        for group in self.param_groups:
            if group["role"] != self.role:
                continue
            unnamed = [f"a matrix of shape {tuple(p.shape)}" for p in group["params"]]
            for name, p in zip(group.get("param_names", unnamed), group["params"], strict=True):
                ranks = self._ranks_of(p)
                if ranks is not None and ranks.size() > 1:
                    sharing.setdefault(ranks, []).append((name, p))
        for ranks, named in sharing.items():
            has_gradient = [p.grad is not None for _, p in named]
            counts = torch.tensor(has_gradient, dtype=torch.int32, device=named[0][1].device)
            dist.all_reduce(counts, group=ranks)
            of_ranks = zip(named, counts.tolist(), strict=True)
            if unequal := [(name, n) for (name, _), n in of_ranks if 0 < n < ranks.size()]:
                (first, count), others = unequal[0], len(unequal) - 1
                raise AgreementError(
                    f"{first} has a gradient on {count} of {ranks.size()} ranks "
                    f"(and {others} more on some only): ranks that share the work of gg.Muon need "
                    "equal gradients. Freeze a parameter on all ranks or on none, and let "
                    "DistributedDataParallel average gradients, with find_unused_parameters=True "
                    "where ranks use different layers"
                )

    def _ranks_of(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """Return the ranks that share the work on a matrix."""
        return _group_of_rows(parameter) if is_sharded(parameter) else self.process_group

    def _gradients(
        self, group: Mapping[str, Any], parameters: Sequence[nn.Parameter]
    ) -> list[Tensor]:
        gradients = self.gradients(parameters)
        return list(torch._foreach_neg(gradients)) if group["maximize"] else gradients

    def _momentum(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Update the momentum; return the local shards to polarise, which must not be written."""
        if not parameters:
            return []
        b, is_ema = group["momentum"], group["momentum_form"] == "ema"
        gradients = self._gradients(group, parameters)
        buffers = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = self.zeros(parameter)
                if is_ema:  # M_0 = G_0
                    local(state["momentum_buffer"]).copy_(gradient)
            buffers.append(local(state["momentum_buffer"]))
        if is_ema:
            torch._foreach_lerp_(buffers, gradients, 1 - b)
        else:
            torch._foreach_mul_(buffers, b)
            torch._foreach_add_(buffers, gradients)
        if not group["nesterov"]:
            return buffers
        if is_ema:
            return list(torch._foreach_lerp(gradients, buffers, b))
        return list(torch._foreach_add(gradients, buffers, alpha=b))

    def _muon(
        self,
        group: dict[str, Any],
        parameters: Sequence[nn.Parameter],
        sources: Sequence[Tensor],
    ) -> None:
        layout_of = dict(zip(map(id, group["params"]), group["layouts"], strict=True))
        alike: dict[tuple[Any, ...], list[int]] = {}
        for index, (p, source) in enumerate(zip(parameters, sources, strict=True)):
            kind = self._ranks_of(p), is_sharded(p), source.dtype, source.device
            alike.setdefault(kind, []).append(index)
        updates = partial(_updates, group)
        lr, scale = float(group["lr"]), _SCALES[group["scale"]]
        for (ranks, are_sharded, *_), indices in alike.items():
            held, some = [parameters[i] for i in indices], [sources[i] for i in indices]
            layouts = [layout_of[id(p)] for p in held]
            if ranks is None or ranks.size() == 1:
                wholes = list(map(_whole, held, some))
                parts = list(map(_part, held, updates(wholes, layouts)))
            else:
                shapes = [p.shape for p in held] if are_sharded else None
                dtype = product_dtype(some[0], group["polar"], _DTYPES.get(group["polar_dtype"]))
                parts = update_shared(some, layouts, updates, dtype, ranks, shapes=shapes)
            for p, part, layout in zip(held, parts, layouts, strict=True):
                (_, *sides), *_ = sides_of(p.shape, layout)
                self.subtract(local(p), part, lr * scale(*sides), lr * group["weight_decay"])


def _updates(
    group: Mapping[str, Any], wholes: Sequence[Tensor], layouts: Sequence[Layout]
) -> list[Tensor]:
    """Polarise whole parameters; the rate has the scale of the first matrix of each."""
    stacks = [matrices_of(whole, layout) for whole, layout in zip(wholes, layouts, strict=True)]
    dtype, scale = _DTYPES.get(group["polar_dtype"]), _SCALES[group["scale"]]
    factors = iter(polarise([m for each in stacks for m in each], group["polar"], dtype))
    updates = []
    for whole, stack, layout in zip(wholes, stacks, layouts, strict=True):
        scales = [scale(*matrix.shape[-2:]) for matrix in stack]
        parts = [next(factors) for _ in stack]
        for part, each in zip(parts, scales, strict=True):
            if each != scales[0]:  # parts of unequal sizes
                part.mul_(each / scales[0])
        updates.append(tensor_of(parts, layout, whole.shape))
    return updates


def _group_of_rows(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """Return the ranks that hold the rows of a matrix, as under FSDP2; None for other shardings."""
    if not is_sharded(parameter):
        return None
    from torch.distributed.tensor import DTensor, Shard  # takes 0.6 s, so only where needed

    assert isinstance(parameter, DTensor)
    rest = [each for each in parameter.placements if not each.is_replicate()]
    if rest != [Shard(0)]:
        return None
    return parameter.device_mesh.get_group(parameter.placements.index(rest[0]))


def _whole(parameter: nn.Parameter, source: Tensor) -> Tensor:
    """Gather a tensor that is sharded like the parameter; a collective if it is."""
    if not is_sharded(parameter):
        return source
    from torch.distributed.tensor import DTensor  # takes 0.6 s, so only where needed

    assert isinstance(parameter, DTensor)
    placed = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        source, *placed, run_check=False, shape=parameter.shape, stride=parameter.stride()
    ).full_tensor()


def _part(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this rank's shard of it; local."""
    if not is_sharded(parameter):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    placed = parameter.device_mesh, parameter.placements
    return local(distribute_tensor(whole, *placed, src_data_rank=None))
