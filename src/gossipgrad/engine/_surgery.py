"""Surgery: parameters that lose rows or columns in place, with their optimizer state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import is_sharded
from gossipgrad.engine._tensors import NON_NEGATIVE

__all__ = ["Resize", "Surgery", "check_surgery", "operate"]


@dataclass(frozen=True, slots=True, eq=False)
class Resize:
    """How one dimension of a tensor shrinks: `new = old[kept] + fold @ old[removed]`.

    Attributes:
        dim: The dimension.
        kept: Indices that stay, rising, shape `(k,)`; the others are removed.
        weight_fold: Shape `(k, removed)`, what weights and buffers that stay get of those removed;
            None: nothing.
        gradient_fold: The same for gradients and optimizer state that is linear in them.
    """

    dim: int
    kept: Tensor
    weight_fold: Tensor | None = None
    gradient_fold: Tensor | None = None

    def misfit(self, tensor: Tensor) -> str | None:
        """Why it does not fit a tensor, None if it does."""
        if not 0 <= self.dim < tensor.ndim:
            return f"it has no dimension {self.dim}, its shape is {tuple(tensor.shape)}"
        size = tensor.shape[self.dim]
        kept = self.kept.tolist()
        if not kept or kept != sorted({*kept}) or kept[0] < 0 or kept[-1] >= size:
            return f"kept must be rising indices below {size} of dimension {self.dim}, got {kept}"
        for fold in (self.weight_fold, self.gradient_fold):
            if fold is not None and tuple(fold.shape) != (len(kept), size - len(kept)):
                return f"fold must have the shape {(len(kept), size - len(kept))}"
        return None

    def apply(self, tensor: Tensor, fold: Tensor | None) -> Tensor:
        """The smaller tensor."""
        kept = self.kept.to(tensor.device)
        small = tensor.index_select(self.dim, kept)
        if fold is None:
            return small
        is_removed = torch.ones(tensor.shape[self.dim], dtype=torch.bool, device=tensor.device)
        is_removed[kept] = False
        removed = tensor.index_select(self.dim, is_removed.nonzero().flatten())
        added = torch.tensordot(fold.to(removed), removed, dims=([1], [self.dim]))
        return small + added.movedim(0, self.dim)


@dataclass(frozen=True, slots=True, eq=False)
class Surgery:
    """A change of shapes that is linear in the weights, so that it commutes with averaging.

    Attributes:
        resizes: By the name of a parameter or buffer, one entry for each dimension that shrinks.
        attributes: By the name of a module, integers that describe it, such as `out_features`.

    References:
        Own derivation: momentum and gradients follow the map of gradients, second moments its
        Minkowski bound `(sqrt(v_i) + |a| sqrt(v_j))^2`, which never under-estimates.
    """

    resizes: Mapping[str, Sequence[Resize]]
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def check_surgery(model: nn.Module, surgery: Surgery) -> None:
    """Raises `ValueError` if a surgery names what a model does not have, or does not fit it."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, resizes in surgery.resizes.items():
        tensor = parameters.get(name, buffers.get(name))
        if tensor is None:
            raise ValueError(f"the surgery names {name!r}, which the model does not have")
        if is_sharded(tensor):
            raise ValueError(f"{name!r} is sharded, and surgery needs whole tensors: use no FSDP")
        for resize in resizes:
            if (why := resize.misfit(tensor)) is not None:
                raise ValueError(f"the surgery does not fit {name!r}: {why}")
    modules = dict(model.named_modules())
    for path, values in surgery.attributes.items():
        for attribute in values:
            if not isinstance(getattr(modules.get(path), attribute, None), int):
                raise ValueError(f"the surgery names {path}.{attribute}, which is no number here")


@torch.no_grad()
def operate(model: nn.Module, optimizers: Sequence[Optimizer], surgery: Surgery) -> None:
    """Applies a surgery in place: the objects that are the parameters stay the same.

    Parameters, buffers, gradients and each optimizer state of a parameter's shape follow. Hooks on
    parameters, param groups and schedulers go on working. DistributedDataParallel has to be wrapped
    anew.

    Raises:
        ValueError: If it does not fit; nothing is changed then.
    """
    check_surgery(model, surgery)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, resizes in surgery.resizes.items():
        if name in buffers:
            _replace(buffers[name], _weight(buffers[name], resizes))
            continue
        parameter = parameters[name]
        shape = parameter.shape
        for optimizer in optimizers:
            held = optimizer.state.get(parameter, {})
            for key, value in held.items():
                if isinstance(value, Tensor) and value.shape == shape:
                    held[key] = _state(value, resizes, non_negative=key in NON_NEGATIVE)
        grad = parameter.grad
        parameter.grad = None  # torch refuses one of another shape
        _replace(parameter, _weight(parameter, resizes))
        if grad is not None:
            parameter.grad = _state(grad, resizes, non_negative=False)
    for path, values in surgery.attributes.items():
        for attribute, value in values.items():
            setattr(model.get_submodule(path), attribute, value)


def _replace(tensor: Tensor, value: Tensor) -> None:
    tensor.set_(value)  # pyrefly: ignore[bad-argument-type]


def _weight(tensor: Tensor, resizes: Sequence[Resize]) -> Tensor:
    for resize in resizes:
        tensor = resize.apply(tensor, resize.weight_fold)
    return tensor.contiguous()


def _state(tensor: Tensor, resizes: Sequence[Resize], *, non_negative: bool) -> Tensor:
    if non_negative:
        tensor = tensor.sqrt()
    for resize in resizes:
        fold = resize.gradient_fold
        tensor = resize.apply(
            tensor, None if fold is None else fold.abs() if non_negative else fold
        )
    return (tensor.square() if non_negative else tensor).contiguous()
