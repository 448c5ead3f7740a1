"""Muon for the hidden matrices of a model and AdamW for the rest, as one optimizer."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import is_sharded, local, widened
from gossipgrad.muon._polar import polarise, resolve_polar
from gossipgrad.muon._roles import ADAMW, MUON, choose_roles

__all__ = ["Muon"]

Track = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], Sequence[Tensor]]
Parameters = nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]] | Iterable[tuple[str, Any]]

_ADAMW_LR = 3e-4
_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Muon(Optimizer):
    r"""Muon for hidden matrices, AdamW for embeddings, heads, norms and biases.

    For a matrix, with $G$ the gradient, $b$ the momentum and $P$ the polar factor
    $U V^T$ of $U S V^T$:

    .. math::
        M \leftarrow b M + G, \quad
        X \leftarrow X - \text{lr} (\text{scale} \cdot P(b M + G) + \text{weight\_decay} \cdot X)

    with $P(M)$ where `nesterov` is False. Convolution kernels are flattened to one row an output.
    Equal shapes are polarised together. State is in fp32 (float64 for float64 parameters),
    whatever the type of parameters. A DTensor (FSDP2) is gathered before it is polarised, and each
    rank keeps its shard: every rank of the mesh computes the whole.

    `repr(optimizer)` prints which parameters go where. There is one group of each role, with its
    settings: `param_groups[0]` has the matrices and `param_groups[1]` the rest, if there are both.

    Args:
        params: The model, whose parameters are chosen by `muon` and `adamw`, the type of their
            module, and their shape (see Note). Or what any optimizer takes: tensors, `(name,
            tensor)` pairs or groups, of which matrices are polarised, but in groups with a
            `"role"`, `"muon"` or `"adamw"`.
        lr: Of matrices.
        momentum: $b$, 0 to below 1.
        nesterov: Whether what is polarised looks one step ahead.
        momentum_form: `"sum"`, $b M + G$ from zero; or `"ema"`, the SUDA-Muon paper's
            $b M + (1 - b) G$ from the first gradient. A polar factor has no scale, so the two
            differ only in how much the first gradient counts.
        scale: `"original"`, $\sqrt{\max(1, rows / columns)}$; or `"match_rms_adamw"`,
            $0.2 \sqrt{\max(rows, columns)}$, with which learning rates of AdamW fit.
        weight_decay: Decoupled, of all parameters.
        polar: How to polarise: `"muon"`, `"polar-express"`, `"cans"`, `"deepseek"`, `"svd"`, or a
            sequence of coefficients, one triple a step.
        polar_dtype: What matrices are multiplied in; None: bf16 on CUDA, else fp32.
        adamw_lr: Of the rest; None: `lr` with `scale="match_rms_adamw"`, else 3e-4.
        betas: Of AdamW.
        eps: Of AdamW.
        muon: Patterns of names that are polarised whatever they are.
        adamw: Patterns of names that are AdamW's whatever they are.

    Raises:
        ValueError: For numbers outside their range, names that no parameter has, or nothing to
            train.

    Note:
        AdamW gets vectors and scalars, the weights of `nn.Embedding`, the last `nn.Linear` (unless
        the model has no other matrix), and tensors of more than two dimensions that no convolution
        owns. A head that is not the last linear layer, or an embedding of a type of its own, has to
        be named: `Muon(model, adamw=["lm_head.weight"])`.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        ... )
        >>> gg.Muon(model, lr=0.02)
        Muon (
          muon, lr 0.02: momentum 0.95, nesterov, sum, scale original, weight decay 0, 5 steps
            0.weight (8, 4)
          adamw, lr 0.0003: betas (0.9, 0.95), eps 1e-08, weight decay 0
            0.bias (8,)
            2.weight (2, 8)
            2.bias (2,)
        )

    References:
        Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/. Liu et al., Muon is
        Scalable for LLM Training, arXiv:2502.16982, for `match_rms_adamw`.
    """

    track: ClassVar[Track | None] = None
    """Called in `step()` with the parameters that have gradients and what each would be updated
    from: of a matrix what would be polarised, else the gradient, in fp32, by local shards. Returns
    what to use instead; it must not write into them. `suda()` sets it on the instance."""

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
        polar: str | Sequence[Sequence[float]] = "muon",
        polar_dtype: torch.dtype | None = None,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        muon: Sequence[str] = (),
        adamw: Sequence[str] = (),
    ) -> None:
        if adamw_lr is None:
            adamw_lr = lr if scale == "match_rms_adamw" else _ADAMW_LR
        self._settings = {
            MUON: {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "momentum_form": momentum_form,
                "scale": scale,
                "polar": resolve_polar(polar),
                "polar_dtype": None if polar_dtype is None else str(polar_dtype),
            },
            ADAMW: {"lr": adamw_lr, "betas": tuple(betas), "eps": eps},
        }
        if isinstance(params, nn.Module):
            roles = choose_roles(params, muon=muon, adamw=adamw)
            named = dict(params.named_parameters())
            groups: Any = [
                {"params": [(name, named[name]) for name in roles if roles[name] == role]}
                | {"role": role}
                for role in (MUON, ADAMW)
                if role in roles.values()
            ]
            if not roles:
                raise ValueError("the model has no parameter that is trained: all are frozen")
        elif muon or adamw:
            raise ValueError("muon= and adamw= name parameters of a model: pass the model itself")
        else:
            groups = [group for one in _as_groups(params) for group in _by_role(one)]
        super().__init__(groups, {"weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, of the role that it names, or by the shapes of its parameters.

        Raises:
            ValueError: For numbers outside their range, or if matrices and vectors are in one group
                without a role.
        """
        if "role" not in param_group:
            found = _by_role(param_group)
            if len(found) > 1:
                raise ValueError(
                    "a group has matrices and vectors: add one of each, or give it a 'role', "
                    f"{MUON!r} or {ADAMW!r}"
                )
            param_group = found[0]
        role = param_group["role"]
        if role not in (MUON, ADAMW):
            raise ValueError(f"role={role!r} is neither {MUON!r} nor {ADAMW!r}")
        settings = self.__dict__.get("_settings")
        if settings is None:  # after pickling: groups have all that they need
            alike = [group for group in self.param_groups if group["role"] == role]
            if not alike:
                raise ValueError(f"there is no group of role {role!r} whose settings to take")
            settings = {role: {k: v for k, v in alike[0].items() if k not in _OF_ONE_GROUP}}
        group = {**settings[role], **param_group}
        if role == MUON:
            group["polar"] = resolve_polar(group["polar"])
        _check(group, self.defaults)
        super().add_param_group(group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex() or (role == MUON and parameter.ndim < 2):
                del self.param_groups[-1]
                kind = "complex" if parameter.is_complex() else "no matrix"
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is {kind}: role {role!r} does "
                    "not take it"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have gradients; returns what the closure returned.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        sources = [
            self._momentum(group, parameters) if group["role"] == MUON else _gradients(parameters)
            for group, parameters in zip(self.param_groups, held, strict=True)
        ]
        if self.track is not None:
            tracked = iter(
                self.track([p for ps in held for p in ps], [s for ss in sources for s in ss])
            )
            sources = [[next(tracked) for _ in parameters] for parameters in held]
        for group, parameters, source in zip(self.param_groups, held, sources, strict=True):
            if parameters:
                update = self._muon if group["role"] == MUON else self._adamw
                update(group, parameters, source)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`; state stays in fp32."""
        super().load_state_dict(state_dict)  # casts it to the parameters' types
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for place, parameter in zip(places, parameters, strict=True):
            for key, value in state_dict["state"].get(place, {}).items():
                if isinstance(value, Tensor) and self.state[parameter][key].dtype != value.dtype:
                    self.state[parameter][key] = value.to(parameter.device, copy=True)

    def __repr__(self) -> str:
        lines = []
        for group in self.param_groups:
            lr, decay = group["lr"], f"weight decay {group['weight_decay']:g}"
            if group["role"] == MUON:
                steps = f"{len(group['polar'])} steps" if group["polar"] else "singular values"
                shown = [f"momentum {group['momentum']:g}", "nesterov" * group["nesterov"]]
                shown += [group["momentum_form"], f"scale {group['scale']}", decay, steps]
            else:
                shown = [f"betas {tuple(group['betas'])}", f"eps {group['eps']:g}", decay]
            lines.append(f"  {group['role']}, lr {lr:g}: {', '.join(filter(None, shown))}")
            lines += [f"    {each}" for each in _abridged(group)]
        return "\n".join([f"{type(self).__name__} (", *lines, ")"])

    def _momentum(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Takes the gradients in; what is to be polarised, by local shards, not to be written."""
        if not parameters:
            return []
        b, is_ema = group["momentum"], group["momentum_form"] == "ema"
        gradients = _gradients(parameters)
        buffers = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = _zeros(parameter)
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
        dtype = group["polar_dtype"]
        matrices = [
            _whole(p, source).flatten(1) for p, source in zip(parameters, sources, strict=True)
        ]
        factors = polarise(
            matrices,
            group["polar"],
            None if dtype is None else getattr(torch, dtype.removeprefix("torch.")),
        )
        lr, scale = float(group["lr"]), _SCALES[group["scale"]]
        for p, factor in zip(parameters, factors, strict=True):
            update = _part(p, factor.reshape(p.shape))
            _subtract(p, update, lr * scale(*factor.shape), lr * group["weight_decay"])

    def _adamw(
        self,
        group: dict[str, Any],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
    ) -> None:
        (b1, b2), lr = group["betas"], float(group["lr"])
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            if not state:
                state |= {"step": 0, "exp_avg": _zeros(p), "exp_avg_sq": _zeros(p)}
            state["step"] = int(state["step"]) + 1
        means = [local(state["exp_avg"]) for state in states]
        squares = [local(state["exp_avg_sq"]) for state in states]
        torch._foreach_lerp_(means, list(gradients), 1 - b1)
        torch._foreach_mul_(squares, b2)
        torch._foreach_addcmul_(squares, list(gradients), list(gradients), 1 - b2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(1 - b2 ** state["step"]) for state in states])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        for p, state, update in zip(parameters, states, updates, strict=True):
            _subtract(p, update, lr / (1 - b1 ** state["step"]), lr * group["weight_decay"])


_OF_ONE_GROUP = ("params", "param_names", "initial_lr")


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """What an optimizer takes, as groups."""
    if isinstance(params, Tensor):
        raise ValueError("params is one tensor: give the model, or a list of tensors or groups")
    params = list(params)
    return params if params and isinstance(params[0], Mapping) else [{"params": params}]


def _by_role(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A group as one of matrices and one of the rest, unless it has a role."""
    if "role" in group:
        return [dict(group)]
    held = group["params"]
    held = [held] if isinstance(held, Tensor) else list(held)
    shared = {key: value for key, value in group.items() if key != "params"}
    split: dict[str, list[Any]] = {MUON: [], ADAMW: []}
    for one in held:
        split[MUON if (one[1] if isinstance(one, tuple) else one).ndim == 2 else ADAMW].append(one)
    found = [{**shared, "params": each, "role": role} for role, each in split.items() if each]
    return found or [{**group, "role": MUON}]


def _check(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises `ValueError` for numbers outside their range."""
    decay = group.get("weight_decay", defaults["weight_decay"])
    for name, number in (("lr", group["lr"]), ("weight_decay", decay)):
        if not 0 <= float(number) < math.inf:
            raise ValueError(f"{name}={number!r} must be a finite number from 0")
    if group["role"] == ADAMW:
        if not all(0 <= b < 1 for b in group["betas"]) or len(group["betas"]) != 2:
            raise ValueError(f"betas={group['betas']!r} must be two numbers from 0 to below 1")
        if not group["eps"] > 0:
            raise ValueError(f"eps={group['eps']!r} must be positive: it keeps AdamW from 0 / 0")
        return
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum={group['momentum']!r} must be from 0 to below 1")
    for name, known in (("momentum_form", ("sum", "ema")), ("scale", tuple(_SCALES))):
        if group[name] not in known:
            raise ValueError(f"{name}={group[name]!r} must be one of {known}")


def _zeros(parameter: nn.Parameter) -> Tensor:
    """Zeros of a parameter's shape, placed as it is, in its own type or fp32 if that is wider."""
    return torch.zeros_like(
        parameter, dtype=widened(parameter.dtype), memory_format=torch.preserve_format
    )


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The local gradients, in fp32 where parameters are narrower; not to be written."""
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.grad.layout is not torch.strided:
            raise RuntimeError(
                "gg.Muon takes no sparse gradients: make the embedding with sparse=False"
            )
        gradients.append(local(parameter.grad).to(widened(parameter.dtype)))
    return gradients


def _whole(parameter: nn.Parameter, source: Tensor) -> Tensor:
    """All of a tensor of which this rank has a shard placed as the parameter; a collective then."""
    if not is_sharded(parameter):
        return source
    from torch.distributed.tensor import DTensor  # 0.6 s, where needed

    assert isinstance(parameter, DTensor)
    placed = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        source, *placed, run_check=False, shape=parameter.shape, stride=parameter.stride()
    ).full_tensor()


def _part(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's shard of it; local."""
    if not is_sharded(parameter):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    placed = parameter.device_mesh, parameter.placements
    return local(distribute_tensor(whole, *placed, src_data_rank=None))


def _subtract(parameter: nn.Parameter, update: Tensor, factor: float, decay: float) -> None:
    """`parameter -= decay * parameter + factor * update`, rounded once."""
    held = local(parameter)
    if held.dtype == update.dtype:
        if decay:
            held.mul_(1 - decay)
        held.add_(update, alpha=-factor)
        return
    wide = held.to(widened(held.dtype))
    if decay:
        wide = wide.mul(1 - decay)
    held.copy_(wide.add(update.to(wide.dtype), alpha=-factor))


def _abridged(group: Mapping[str, Any]) -> list[str]:
    """Names and shapes, one line for all that differ in numbers alone."""
    names = group.get("param_names", [f"parameter {i}" for i in range(len(group["params"]))])
    lines: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, parameter in zip(names, group["params"], strict=True):
        key = re.sub(r"(?<=\.)\d+(?=\.)|parameter \d+", "*", name), tuple(parameter.shape)
        lines.setdefault(key, []).append(name)
    return [
        f"{like} {shape} x {len(alike)}" if len(alike) > 1 else f"{alike[0]} {shape}"
        for (like, shape), alike in lines.items()
    ]
