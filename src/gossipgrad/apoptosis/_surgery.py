"""Surgery: parameters that lose rows or columns in place, with their optimizer state."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.apoptosis._neurons import Entries, tensor_of
from gossipgrad.engine import fit_sizes

__all__ = [
    "Resize",
    "Shift",
    "Surgery",
    "amounts",
    "check_resizable",
    "check_surgery",
    "operate",
    "removed_of",
]


def removed_of(width: int, kept: Tensor) -> Tensor:
    """Return the indices that are not kept."""
    is_removed = torch.ones(width, dtype=torch.bool)
    is_removed[kept.cpu()] = False
    return is_removed.nonzero().flatten()


@dataclass(frozen=True, slots=True, eq=False)
class Resize:
    """How neurons leave one dimension of a tensor: `new = old[kept] + fold @ old[removed]`.

    Attributes:
        dim: The dimension.
        entries: The neurons' entries of it.
        kept: Indices of neurons that stay, ascending, shape `(k,)`; the others are removed.
        fold: Shape `(k, removed)`, the share of removed weights that is added to those kept,
            or `(taps, k, taps, removed)` of a convolution or a neuron with several entries; None:
            nothing.
        scale: A factor of the weights that stay.
    """

    dim: int
    entries: Entries
    kept: Tensor
    fold: Tensor | None = None
    scale: float = 1.0

    @property
    def removed(self) -> Tensor:
        """The indices of neurons that leave."""
        return removed_of(len(self.entries.indices), self.kept)

    @property
    def gone(self) -> Tensor:
        """The entries of the dimension that leave."""
        return self.entries.indices[self.removed].flatten()

    def add(self, tensor: Tensor) -> None:
        """Add the shares of those removed to those kept, in place."""
        fold = self.fold
        if fold is None or not len(self.removed):
            return
        kept, removed = (
            self.entries.indices[chosen].to(tensor.device)
            for chosen in (self.kept.cpu(), self.removed)
        )
        moved = tensor.movedim(self.dim, 0)
        if fold.ndim == 2:
            share = torch.tensordot(fold.to(moved), moved[removed], dims=([1], [0]))
            moved.index_add_(0, kept.flatten(), share.flatten(0, 1))
            return
        entries, kernel = kept.shape[1], len(fold) // kept.shape[1]
        gone = moved[removed].flatten(2).unflatten(2, (-1, kernel))  # neuron, entry, output, tap
        gone = gone.transpose(2, 3).flatten(1, 2)
        share = torch.tensordot(fold.to(moved), gone, dims=([2, 3], [1, 0])).transpose(0, 1)
        share = share.unflatten(1, (entries, kernel)).transpose(2, 3)
        moved.index_add_(0, kept.flatten(), share.reshape(-1, *moved.shape[1:]))


@dataclass(frozen=True, slots=True, eq=False)
class Shift:
    """An addition to a vector from an unshrunk weight: `new = old + source @ coefficients`.

    Attributes:
        source: The name of a parameter.
        dim: Its dimension of inputs, 0 or 1; the other is that of outputs.
        coefficients: Shape of the parameter without its outputs.
    """

    source: str
    dim: int
    coefficients: Tensor

    def amount(self, source: Tensor) -> Tensor:
        """Return the addition."""
        rows = source.movedim(1 - self.dim, 0).flatten(1)
        return rows @ self.coefficients.to(source).flatten()


@dataclass(frozen=True, slots=True, eq=False)
class Surgery:
    """A change of shapes that is linear in the weights, so that it commutes with averaging.

    Attributes:
        resizes: By the name of a parameter or buffer, how neurons leave it.
        shifts: By the name of a bias or buffer, its addition from a weight before that shrinks.
    """

    resizes: Mapping[str, Sequence[Resize]]
    shifts: Mapping[str, Sequence[Shift]] = field(default_factory=dict)

    @torch.no_grad()
    def of_gradient(self, name: str, tensor: Tensor) -> Tensor:
        """Apply it to a tensor that is linear in the gradients of that parameter."""
        return _rest(tensor, self.resizes.get(name, ()))

    def stays(self) -> dict[str, Tensor]:
        """Return the entries that stay of each dimension that shrinks, by `"name dim"`."""
        found: dict[str, list[Resize]] = {}
        for name, resizes in self.resizes.items():
            for resize in resizes:
                found.setdefault(f"{name} {resize.dim}", []).append(resize)
        return {key: _stay(resizes) for key, resizes in found.items()}


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
    for name, resizes in surgery.resizes.items():
        tensor = tensor_of(model, name)
        if tensor is None:
            raise ValueError(f"the surgery names {name!r}, which the model does not have")
        for resize in resizes:
            size = tensor.shape[resize.dim] if resize.dim < tensor.ndim else 0
            if size != resize.entries.size:
                raise ValueError(
                    f"the surgery does not fit {name!r}, whose shape is {tuple(tensor.shape)}: it "
                    f"is for {resize.entries.size} entries along dimension {resize.dim}"
                )
        for optimizer in optimizers:
            for key, value in optimizer.state.get(tensor, {}).items():
                if isinstance(value, Tensor) and value.ndim and not _fits(value, tensor):
                    raise ValueError(
                        f"the surgery does not fit {key!r}, which {type(optimizer).__name__} keeps "
                        f"for {name!r}: its shape is {tuple(value.shape)}, not that of the "
                        "parameter. Use another optimizer, such as AdamW"
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
    for target, amount in amounts(model, surgery):
        target.add_(amount)
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    for name, resizes in surgery.resizes.items():
        tensor = tensor_of(model, name)
        assert tensor is not None
        for optimizer in optimizers:
            held = optimizer.state.get(tensor, {})
            for key, value in held.items():
                if isinstance(value, Tensor) and value.ndim:
                    fitting = [r for r in resizes if value.shape[r.dim] > 1]
                    held[key] = _rest(value, fitting)
        grad, tensor.grad = tensor.grad, None  # torch refuses a gradient of another shape
        small = tensor.detach().clone()
        for resize in resizes:
            resize.add(small)
        small = _rest(small, resizes) * prod(resize.scale for resize in resizes)
        tensor.set_(small)  # pyrefly: ignore[bad-argument-type]
        if grad is not None:
            tensor.grad = _rest(grad, resizes)
    fit_sizes(model, shapes)


def amounts(model: nn.Module, surgery: Surgery) -> Iterable[tuple[Tensor, Tensor]]:
    """Return each tensor that a surgery shifts, and by how much."""
    found = []
    for name, shifts in surgery.shifts.items():
        for shift in shifts:
            target, source = tensor_of(model, name), tensor_of(model, shift.source)
            assert target is not None
            assert source is not None
            found.append((target, shift.amount(source)))
    return found


def _fits(state: Tensor, parameter: Tensor) -> bool:
    return state.ndim == parameter.ndim and all(
        size in (1, whole) for size, whole in zip(state.shape, parameter.shape, strict=True)
    )


def _stay(resizes: Sequence[Resize]) -> Tensor:
    stays = torch.ones(resizes[0].entries.size, dtype=torch.bool)
    for resize in resizes:
        stays[resize.gone] = False
    return stays.nonzero().flatten()


def _rest(tensor: Tensor, resizes: Sequence[Resize]) -> Tensor:
    """Return what stays of a tensor."""
    for dim in {resize.dim for resize in resizes}:
        stays = _stay([resize for resize in resizes if resize.dim == dim])
        tensor = tensor.detach().index_select(dim, stays.to(tensor.device))
    return tensor.contiguous()
