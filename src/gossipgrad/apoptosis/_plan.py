"""A plan of merges, which can be printed, saved and applied."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from gossipgrad.apoptosis._neurons import Neurons, block_of, weight_of
from gossipgrad.apoptosis._surgery import Resize, Shift, Surgery, operate

__all__ = ["Merging", "ShrinkPlan", "removed_of", "surgery_of"]


@dataclass(frozen=True, eq=False)
class Merging:
    """The merges of one layer's neurons: `h_removed = folds^T h_kept + shifts`, approximately.

    Attributes:
        neurons: The neurons.
        width: Their number.
        kept: Indices of kept neurons, ascending, shape `(k,)`.
        folds: By consumer, the shares of removed weights to add to kept ones, `(k, removed)`.
        shifts: By consumer that can absorb a constant, the constants, `(taps or 1, removed)`.
        state_fold: The same for gradients and optimizer state, `(k, removed)`.
        error: The joint mean square error of a consumer's outputs over their variance; for several
            consumers the largest. On a sample, or a worst-case bound.
    """

    neurons: Neurons
    width: int
    kept: Tensor
    folds: Mapping[str, Tensor] = field(default_factory=dict)
    shifts: Mapping[str, Tensor] = field(default_factory=dict)
    state_fold: Tensor | None = None
    error: float = 0.0


def removed_of(width: int, kept: Tensor) -> Tensor:
    """Return the indices that are not kept."""
    is_removed = torch.ones(width, dtype=torch.bool)
    is_removed[kept.cpu()] = False
    return is_removed.nonzero().flatten()


@dataclass(frozen=True, eq=False)
class ShrinkPlan:
    """Merges of several layers; made by `ShrinkSession.plan()`, applied now, later or elsewhere.

    Attributes:
        mergings: One per layer that loses neurons.
        bound: `"sample"` or `"worst-case"`: the kind of the errors.
    """

    mergings: tuple[Merging, ...]
    bound: str = "sample"

    def __len__(self) -> int:
        return sum(each.width - len(each.kept) for each in self.mergings)

    def __str__(self) -> str:
        if not self.mergings:
            return "no neuron can be removed"
        rows = [("layer", "neurons", "stay", f"error ({self.bound})")]
        for each in self.mergings:
            error = f"{100 * each.error:.3g} %"
            rows.append((each.neurons.name, str(each.width), str(len(each.kept)), error))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def surgery(self, model: nn.Module) -> Surgery:
        """Return the surgery for a model; linear in its weights.

        Raises:
            ValueError: The plan is for other neurons, or another number of them.
        """
        for each in self.mergings:
            why = each.neurons.misfit(model)
            if why is None and (width := each.neurons.width(model)) != each.width:
                why = f"{each.neurons.name} has {width} neurons, the plan is for {each.width}"
            if why is not None:
                raise ValueError(f"the plan does not fit the model: {why}")
        return surgery_of(model, self.mergings)

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        """Change a model in place, outside of a session; local.

        For copies of a model, such as an exponential average of its weights. Apply plans in the
        order in which they were made.

        Raises:
            ValueError: If it does not fit; nothing is changed then.
        """
        operate(model, optimizers, self.surgery(model))

    def state_dict(self) -> dict[str, Any]:
        """Return the plan as tensors and plain values."""
        return {
            "bound": self.bound,
            "mergings": [
                {
                    **{name: getattr(each, name) for name in ("width", "kept", "error")},
                    "neurons": asdict(each.neurons),
                    "folds": dict(each.folds),
                    "shifts": dict(each.shifts),
                    "state_fold": each.state_fold,
                }
                for each in self.mergings
            ],
        }

    def digest(self) -> str:
        """Return a digest that is equal iff two plans are, bit for bit."""
        found = hashlib.sha256()
        for leaf in tree_leaves(self.state_dict()):
            if isinstance(leaf, Tensor):
                leaf = leaf.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            found.update(leaf if isinstance(leaf, bytes) else f"{leaf};".encode())
        return found.hexdigest()

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "ShrinkPlan":
        """Create a plan from its `state_dict`."""
        mergings = [
            Merging(**(dict[str, Any](each) | {"neurons": Neurons(**each["neurons"])}))
            for each in state["mergings"]
        ]
        return cls(tuple(mergings), state["bound"])


def surgery_of(model: nn.Module, mergings: Sequence[Merging]) -> Surgery:
    """Return the surgery of a model's tensors for the engine."""
    resizes: dict[str, list[Resize]] = {}
    attributes: dict[str, dict[str, int]] = {}
    shifts: dict[str, list[Shift]] = {}
    for each in mergings:
        neurons, kept, left = each.neurons, each.kept, len(each.kept)
        if left == each.width:
            continue
        for path in (*neurons.producers, *neurons.companions):
            module = model.get_submodule(path)
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in own:
                if tensor.ndim and tensor.shape[0] == each.width:
                    fold = each.state_fold if isinstance(tensor, nn.Parameter) else None
                    resize = Resize(0, kept, gradient_fold=fold)
                    resizes.setdefault(f"{path}.{name}", []).append(resize)
            is_companion = path in neurons.companions
            attributes.setdefault(path, {}).update(_sizes(module, left, passes=is_companion))
        for path in neurons.consumers:
            module = model.get_submodule(path)
            block = block_of(module, each.width)
            resize = Resize(1, kept, weight_fold=each.folds.get(path), block=block)
            resizes.setdefault(f"{path}.weight", []).append(resize)
            inputs = "in_features" if isinstance(module, nn.Linear) else "in_channels"
            attributes.setdefault(path, {})[inputs] = left * block
            absorber = neurons.absorber(model, path)
            if path in each.shifts and absorber is not None:
                name, sign = absorber
                constants = each.shifts[path]
                shape = weight_of(module).shape[1:]
                full = constants.new_zeros(each.width, shape.numel() // each.width)
                full[removed_of(each.width, kept).to(full.device)] = sign * constants.T
                shifts.setdefault(name, []).append(Shift(f"{path}.weight", full.reshape(shape)))
    return Surgery(resizes, attributes, shifts)


def _sizes(module: nn.Module, width: int, *, passes: bool) -> dict[str, int]:
    """Return size attributes of a producer or a companion at another width."""
    if isinstance(module, nn.Linear):
        return {"out_features": width}
    if isinstance(module, _ConvNd):
        sizes = {"out_channels": width}
        return {**sizes, "in_channels": width, "groups": width} if passes else sizes
    if isinstance(module, _BatchNorm):
        return {"num_features": width}
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        return {"num_parameters": width}
    return {}
