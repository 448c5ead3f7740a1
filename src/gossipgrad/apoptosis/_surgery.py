"""Surgery: parameters that lose rows or columns in place, with their optimizer state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import is_sharded
from gossipgrad.engine import NON_NEGATIVE

__all__ = ["Resize", "Shift", "Surgery", "check_resizable", "check_surgery", "operate"]


@dataclass(frozen=True, slots=True, eq=False)
class Resize:
    """How one dimension of a tensor shrinks: `new = old[kept] + fold @ old[removed]`.

    Attributes:
        dim: The dimension.
        kept: Indices that stay, ascending, shape `(k,)`; the others are removed.
        weight_fold: Shape `(k, removed)`, the share of removed weights and buffers that is added to
            those kept; None: nothing.
        gradient_fold: The same for gradients and optimizer state that is linear in them.
        block: Number of consecutive elements per index: the positions of a channel in a flattened
            image.
    """

    dim: int
    kept: Tensor
    weight_fold: Tensor | None = None
    gradient_fold: Tensor | None = None
    block: int = 1

    def misfit(self, tensor: Tensor) -> str | None:
        """Return why it does not fit a tensor, None if it does."""
        if not 0 <= self.dim < tensor.ndim:
            return f"it has no dimension {self.dim}, its shape is {tuple(tensor.shape)}"
        size, rest = divmod(tensor.shape[self.dim], self.block)
        if rest:
            return f"dimension {self.dim} has no whole number of blocks of {self.block}"
        kept = self.kept.tolist()
        if not kept or kept != sorted({*kept}) or kept[0] < 0 or kept[-1] >= size:
            return f"kept must be rising indices below {size} of dimension {self.dim}, got {kept}"
        for fold in (self.weight_fold, self.gradient_fold):
            if fold is not None and tuple(fold.shape) != (len(kept), size - len(kept)):
                return f"fold must have the shape {(len(kept), size - len(kept))}"
        return None

    def apply(self, tensor: Tensor, fold: Tensor | None) -> Tensor:
        """Return the smaller tensor."""
        kept = self.kept.to(tensor.device)
        blocks = tensor.unflatten(self.dim, (-1, self.block))
        small = blocks.index_select(self.dim, kept)
        if fold is not None and fold.numel():
            is_removed = torch.ones(blocks.shape[self.dim], dtype=torch.bool, device=tensor.device)
            is_removed[kept] = False
            removed = blocks.index_select(self.dim, is_removed.nonzero().flatten())
            added = torch.tensordot(fold.to(removed), removed, dims=([1], [self.dim]))
            small = small + added.movedim(0, self.dim)
        return small.flatten(self.dim, self.dim + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Shift:
    """An addition to a vector from an unshrunk matrix: `new = old + source @ coefficients`.

    Attributes:
        source: The name of a parameter of shape `(n, ...)`, where the vector has shape `(n,)`.
        coefficients: Shape `(...)`.
    """

    source: str
    coefficients: Tensor

    def amount(self, source: Tensor) -> Tensor:
        """Return the addition."""
        return source.flatten(1) @ self.coefficients.to(source).flatten()


@dataclass(frozen=True, slots=True, eq=False)
class Surgery:
    """A change of shapes that is linear in the weights, so that it commutes with averaging.

    Attributes:
        resizes: By the name of a parameter or buffer, one entry for each dimension that shrinks.
        attributes: By the name of a module, integers that describe it, such as `out_features`.
        shifts: By the name of a bias or buffer, its addition from a weight before that shrinks.

    References:
        Own derivation: momentum and gradients follow the map of gradients, second moments its
        Minkowski bound `(sqrt(v_i) + |a| sqrt(v_j))^2`, which never under-estimates.
    """

    resizes: Mapping[str, Sequence[Resize]]
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    shifts: Mapping[str, Sequence[Shift]] = field(default_factory=dict)

    @torch.no_grad()
    def of_gradient(self, name: str, tensor: Tensor) -> Tensor:
        """Apply it to a tensor that is linear in the gradients of that parameter."""
        return _state(tensor, self.resizes.get(name, ()), non_negative=False)


def check_resizable(optimizers: Sequence[Optimizer]) -> None:
    """Raise `ValueError` for optimizers whose state cannot lose rows and columns."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS keeps its state in one vector of all parameters, which cannot lose rows and "
                "columns with the weights: shrink with another optimizer, such as AdamW"
            )
        if not getattr(optimizer, "can_resize", True):
            raise ValueError(
                f"the factors and bases of {type(optimizer).__name__} cannot lose rows and columns "
                "with the weights: shrink with another optimizer, such as gg.Muon or AdamW"
            )


def check_surgery(model: nn.Module, surgery: Surgery, optimizers: Sequence[Optimizer] = ()) -> None:
    """Raise `ValueError` if a surgery does not fit a model, or the state of its optimizers."""
    check_resizable(optimizers)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, resizes in surgery.resizes.items():
        tensor = parameters.get(name, buffers.get(name))
        if tensor is None:
            raise ValueError(f"the surgery names {name!r}, which the model does not have")
        if is_sharded(tensor):
            raise ValueError(
                f"{name!r} is sharded, and surgery needs whole tensors: do not use FSDP"
            )
        for resize in resizes:
            if (why := resize.misfit(tensor)) is not None:
                raise ValueError(f"the surgery does not fit {name!r}: {why}")
        for optimizer in optimizers:
            for key, value in optimizer.state.get(tensor, {}).items():
                if isinstance(value, Tensor) and value.ndim and not _fits(value, tensor):
                    raise ValueError(
                        f"the surgery does not fit {key!r}, which {type(optimizer).__name__} keeps "
                        f"for {name!r}: its shape is {tuple(value.shape)}, not that of the "
                        "parameter. Use another optimizer, such as AdamW"
                    )
    for name, shifts in surgery.shifts.items():
        target = parameters.get(name, buffers.get(name))
        for shift in shifts:
            source = parameters.get(shift.source)
            if target is None or source is None:
                raise ValueError(
                    f"the surgery shifts {name!r} by {shift.source!r}; the model does not have both"
                )
            shape = tuple(target.shape), tuple(shift.coefficients.shape)
            if shape != ((source.shape[0],), tuple(source.shape[1:])):
                raise ValueError(f"the surgery does not fit {name!r}: a shift has shapes {shape}")
    modules = dict(model.named_modules())
    for path, values in surgery.attributes.items():
        for attribute in values:
            if not isinstance(getattr(modules.get(path), attribute, None), int):
                raise ValueError(
                    f"the surgery names {path}.{attribute}, which is not a number here"
                )


@torch.no_grad()
def operate(model: nn.Module, optimizers: Sequence[Optimizer], surgery: Surgery) -> None:
    """Apply a surgery in place: parameters stay the same objects.

    Gradients, buffers and optimizer state also change: state of a parameter's shape, and factors
    with one row or one column. Hooks on parameters, param groups and schedulers keep working.
    DistributedDataParallel has to be created again.

    Raises:
        ValueError: If it does not fit; nothing is changed then.
    """
    check_surgery(model, surgery, optimizers)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    amounts = [
        (name, shift.amount(parameters[shift.source]))
        for name, shifts in surgery.shifts.items()
        for shift in shifts
    ]
    for name, amount in amounts:
        (buffers[name] if name in buffers else parameters[name]).add_(amount)
    for name, resizes in surgery.resizes.items():
        if name in buffers:
            _replace(buffers[name], _weight(buffers[name], resizes))
            continue
        parameter = parameters[name]
        for optimizer in optimizers:
            held = optimizer.state.get(parameter, {})
            for key, value in held.items():
                if isinstance(value, Tensor) and value.ndim:
                    fitting = [r for r in resizes if value.shape[r.dim] > 1]
                    held[key] = _state(value, fitting, non_negative=key in NON_NEGATIVE)
        grad = parameter.grad
        parameter.grad = None  # torch refuses a gradient of another shape
        _replace(parameter, _weight(parameter, resizes))
        if grad is not None:
            parameter.grad = _state(grad, resizes, non_negative=False)
    for path, values in surgery.attributes.items():
        for attribute, value in values.items():
            setattr(model.get_submodule(path), attribute, value)


def _fits(state: Tensor, parameter: Tensor) -> bool:
    return state.ndim == parameter.ndim and all(
        size in (1, whole) for size, whole in zip(state.shape, parameter.shape, strict=True)
    )


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
