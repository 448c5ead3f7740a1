"""The base of optimizers with their own rule for matrices and AdamW for the rest."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossipgrad._messages import warn
from gossipgrad.comm import local, widened
from gossipgrad.optim._finite import parameters_to_update
from gossipgrad.optim._roles import ADAMW, choose_roles, is_named_hidden

__all__ = ["MatrixOptimizer", "Parameters", "is_number", "unwrapped"]

Parameters = nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]] | Iterable[tuple[str, Any]]
_ALL: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
"""No flags: all gradients are known to be finite."""


class MatrixOptimizer(Optimizer):
    """Groups by role with their settings, and AdamW for everything except matrices.

    A subclass names its `role`, checks and describes the settings of its groups, and updates
    matrices in `step()`. There is one group per role, unless groups are given.

    A parameter whose gradient is not finite (NaN, Inf, or too large to be squared) keeps its
    weights and its state in that step.

    Args:
        params: The model, whose parameters are chosen by the patterns, the type of their module and
            their shape; or the usual tensors, `(name, tensor)` pairs or groups, of which matrices
            have the subclass's role, except in groups with a `"role"`.
        settings: Settings of groups with the subclass's role.
        adamw_settings: Settings of groups of the rest.
        weight_decay: Weight decay of all groups without their own.
        matrices: Patterns of names that get the subclass's role.
        adamw: Patterns of names that AdamW updates.
        with_head: Whether the last linear layer counts as a matrix.
        argument: The public name of `matrices`.

    Attributes:
        nonfinite_steps: Number of steps that left out a parameter, because its gradient was not
            finite; the first one warns.

    Raises:
        ValueError: If a number is out of range, no parameter has a name, or there is nothing to
            train.
    """

    role: ClassVar[str]
    nonfinite_steps: int = 0
    with_head: bool = False
    squares_matrices: ClassVar[bool] = True
    """Whether it squares the gradients of matrices, so that huge ones overflow."""
    with_stacks: ClassVar[bool] = False
    """Whether 3-D parameters are stacks of matrices."""
    can_resize: ClassVar[bool] = True
    """Whether its state can lose rows and columns with its parameters, as in `gg.shrink()`."""

    def __init__(
        self,
        params: Parameters,
        *,
        settings: dict[str, Any],
        adamw_settings: dict[str, Any],
        weight_decay: float,
        matrices: Sequence[str] = (),
        adamw: Sequence[str] = (),
        with_head: bool = False,
        argument: str = "matrices",
    ) -> None:
        self.with_head = with_head
        self._settings = {self.role: settings, ADAMW: adamw_settings}
        params = unwrapped(params)
        if isinstance(params, nn.Module):
            roles = choose_roles(
                params,
                self.role,
                matrices=matrices,
                adamw=adamw,
                with_head=with_head,
                with_stacks=self.with_stacks,
                argument=argument,
            )
            named = dict(params.named_parameters())
            groups: Any = [
                {"params": [(name, named[name]) for name in roles if roles[name] == role]}
                | {"role": role}
                for role in (self.role, ADAMW)
                if role in roles.values()
            ]
            if not roles:
                raise ValueError("the model has no parameters: there is nothing to train")
        elif matrices or adamw:
            raise ValueError(
                f"{argument}= and adamw= name parameters of a model: pass the model itself"
            )
        else:
            groups = [group for one in _as_groups(params) for group in self._by_role(one)]
        # Schedulers look in the defaults for what they change: "lr", "momentum" or "betas".
        super().__init__(groups, settings | {"weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with the role that it names, or by the shapes of its parameters.

        Raises:
            ValueError: If a number is out of range, or matrices and vectors are in one group
                without a role.
        """
        if "role" not in param_group:
            found = self._by_role(param_group)
            if len(found) > 1:
                raise ValueError(
                    "a group has matrices and vectors: add one of each, or give it a 'role', "
                    f"{self.role!r} or {ADAMW!r}"
                )
            param_group = found[0]
        role = param_group["role"]
        if role not in (self.role, ADAMW):
            raise ValueError(f"role={role!r} is neither {self.role!r} nor {ADAMW!r}")
        decay = {"weight_decay": self.defaults["weight_decay"]}
        group = {**self._settings[role], **decay, **param_group}
        numbers = ("lr", group["lr"]), ("weight_decay", group["weight_decay"])
        for name, number in numbers:
            if not (isinstance(number, Real | Tensor) and 0 <= float(number) < math.inf):
                raise ValueError(f"{name}={number!r} must be a finite number from 0")
        _check_adam(group)
        if role != ADAMW:
            self.check_group(group)
        others = self.defaults.keys() - group.keys()  # settings of the other role
        super().add_param_group(group)
        for name in others:
            del self.param_groups[-1][name]
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex() or (role == self.role and parameter.ndim < 2):
                del self.param_groups[-1]
                kind = "complex" if parameter.is_complex() else "no matrix"
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is {kind}: role {role!r} does "
                    "not support it"
                )

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for matrix settings out of range; may complete them."""

    def describe_group(self, group: Mapping[str, Any]) -> list[str]:
        """Return the settings of a group of matrices, except rates, as text."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`; state stays in fp32.

        Raises:
            ValueError: It is the state of another kind of optimizer, or of other groups.
        """
        ours = [group["role"] for group in self.param_groups]
        theirs = [group.get("role") for group in state_dict["param_groups"]]
        if ours != theirs:
            raise ValueError(
                f"the state has groups of the roles {theirs} and this optimizer {ours}: load it "
                "into the same kind of optimizer, made for the same model with the same patterns"
            )
        super().load_state_dict(state_dict)  # casts it to the parameters' types
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and self.state[parameter][key].dtype != value.dtype:
                    self.state[parameter][key] = value.to(parameter.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_settings": self._settings}

    def __repr__(self) -> str:
        lines = []
        for group in self.param_groups:
            decay = f"weight decay {group['weight_decay']:g}"
            if group["role"] == ADAMW:
                shown = [f"betas {tuple(group['betas'])}", f"eps {group['eps']:g}"]
            else:
                shown = self.describe_group(group)
            lines.append(f"  {group['role']}, lr {group['lr']:g}: {', '.join([*shown, decay])}")
            lines += [f"    {each}" for each in _abridged(group)]
        return "\n".join([f"{type(self).__name__} (", *lines, ")"])

    def gradients(
        self, parameters: Sequence[nn.Parameter], finite: Mapping[nn.Parameter, Tensor] = _ALL
    ) -> list[Tensor]:
        """Return local gradients, at least in fp32; do not write to them.

        Zeros for those that are not finite by flags on a device.
        """
        found = [local(p.grad).to(widened(p.dtype)) for p in parameters if p.grad is not None]
        if not finite:
            return found
        pairs = zip(parameters, found, strict=True)
        return [torch.where(finite[p], gradient, 0) for p, gradient in pairs]

    def parameters_to_update(self) -> list[list[nn.Parameter]]:
        """Return for each group the parameters that this step updates: gradients are finite.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        self.check_layouts()
        unsquared = set()
        if not self.squares_matrices:
            matrices = [group for group in self.param_groups if group["role"] != ADAMW]
            unsquared = {id(p) for group in matrices for p in group["params"]}
        return parameters_to_update(self, unsquared=unsquared)

    def check_layouts(self) -> None:
        """Raise `RuntimeError` for a sparse gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"gg.{type(self).__name__} takes no sparse gradients: make the embedding "
                        "with sparse=False"
                    )

    def adamw(
        self,
        group: dict[str, Any],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        finite: Mapping[nn.Parameter, Tensor] = _ALL,
    ) -> None:
        """Make one step of AdamW; weights without a finite gradient, by flags, stay."""
        (b1, b2), lr = group["betas"], float(group["lr"])
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            if not state:
                state |= {
                    "step": torch.tensor(0.0, device="cpu"),
                    "exp_avg": self.zeros(p),
                    "exp_avg_sq": self.zeros(p),
                }
            state["step"] += 1
        steps = [int(state["step"]) for state in states]
        means = [local(state["exp_avg"]) for state in states]
        squares = [local(state["exp_avg_sq"]) for state in states]
        torch._foreach_lerp_(means, list(gradients), 1 - b1)
        torch._foreach_mul_(squares, b2)
        torch._foreach_addcmul_(squares, list(gradients), list(gradients), 1 - b2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(1 - b2**step) for step in steps])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        for p, step, update in zip(parameters, steps, updates, strict=True):
            decay = lr * group["weight_decay"]
            self.subtract(local(p), update, lr / (1 - b1**step), decay, finite.get(p))

    @staticmethod
    def subtract(
        tensor: Tensor, update: Tensor, factor: float, decay: float, finite: Tensor | None = None
    ) -> None:
        """`tensor -= decay * tensor + factor * update`, rounded once; nothing unless finite."""
        if finite is not None:
            wide = tensor.to(widened(tensor.dtype))
            new = wide.mul(1 - decay).add_(update.to(wide.dtype), alpha=-factor)
            tensor.copy_(torch.where(finite, new, wide))
            return
        if tensor.dtype == update.dtype:
            if decay:
                tensor.mul_(1 - decay)
            tensor.add_(update, alpha=-factor)
            return
        wide = tensor.to(widened(tensor.dtype))
        if decay:
            wide = wide.mul(1 - decay)
        tensor.copy_(wide.add(update.to(wide.dtype), alpha=-factor))

    @staticmethod
    def zeros(parameter: nn.Parameter) -> Tensor:
        """Return zeros of its shape and sharding, in its own type or fp32 if that is wider."""
        return torch.zeros_like(
            parameter, dtype=widened(parameter.dtype), memory_format=torch.preserve_format
        )

    def _by_role(self, group: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Split a group without a role into matrices and the rest."""
        if "role" in group:
            return [dict(group)]
        held = group["params"]
        held = [held] if isinstance(held, Tensor) else list(held)
        shared = {key: value for key, value in group.items() if key != "params"}
        split: dict[str, list[Any]] = {self.role: [], ADAMW: []}
        for one in held:
            tensor = one[1] if isinstance(one, tuple) else one
            is_matrix = isinstance(tensor, Tensor) and tensor.ndim == 2  # torch refuses the rest
            if is_matrix and isinstance(one, tuple):
                is_matrix = is_named_hidden(one[0], with_head=self.with_head)
            split[self.role if is_matrix else ADAMW].append(one)
        has_names = any(isinstance(one, tuple) for one in held)
        if all(split.values()) and not has_names:
            warn(
                f"gg.{type(self).__name__} cannot tell embeddings and heads among tensors without "
                f"names: all {len(split[self.role])} matrices get the role {self.role!r}. Give the "
                "model itself, model.named_parameters(), or groups with a 'role'"
            )
        others = [one[1] if isinstance(one, tuple) else one for one in split[ADAMW]]
        tensors = [each for each in others if isinstance(each, Tensor)]
        kernels = sum(each.ndim > 2 and min(each.shape[:2]) > 1 for each in tensors)
        if kernels and self.with_head:
            warn(
                f"gg.{type(self).__name__} cannot tell kernels of convolutions without the model: "
                f"AdamW updates {kernels} tensors of more than two dimensions. Give the model "
                "itself, or groups with a 'role'"
            )
        found = [{**shared, "params": each, "role": role} for role, each in split.items() if each]
        return found or [{**group, "role": self.role}]


def unwrapped(params: Parameters) -> Parameters:
    """Return the module in a DistributedDataParallel, whose names have no prefix; or `params`."""
    return params.module if isinstance(params, DistributedDataParallel) else params


def is_number(value: object) -> bool:
    """Whether a setting is a number, of Python."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """Return an optimizer's `params` as groups."""
    if isinstance(params, Tensor):
        raise ValueError("params is one tensor: give the model, or a list of tensors or groups")
    params = list(params)
    if not params:
        raise ValueError(
            "params is empty: give the model itself; an iterator such as model.parameters() can "
            "be read only once"
        )
    return params if params and isinstance(params[0], Mapping) else [{"params": params}]


def _check_adam(group: Mapping[str, Any]) -> None:
    betas, eps = group.get("betas", (0.0, 0.0)), group.get("eps", 1.0)
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not (is_pair and all(is_number(b) and 0 <= b < 1 for b in betas)):
        raise ValueError(f"betas={betas!r} must be two numbers from 0 to below 1")
    if not (is_number(eps) and 0 < eps < math.inf):
        raise ValueError(f"eps={eps!r} must be a positive number: it keeps AdamW from 0 / 0")


def _abridged(group: Mapping[str, Any]) -> list[str]:
    """Return names and shapes, one line for all that differ only in numbers."""
    names = group.get("param_names", [f"parameter {i}" for i in range(len(group["params"]))])
    lines: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, parameter in zip(names, group["params"], strict=True):
        key = re.sub(r"(?<=\.)\d+(?=\.)|parameter \d+", "*", name), tuple(parameter.shape)
        lines.setdefault(key, []).append(name)
    return [
        f"{like} {shape} x {len(alike)}" if len(alike) > 1 else f"{alike[0]} {shape}"
        for (like, shape), alike in lines.items()
    ]
