"""A plan of merges, which can be printed, saved and applied."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from gossipgrad.apoptosis._neurons import Entries, Neurons, weight_of
from gossipgrad.apoptosis._surgery import Resize, Shift, Surgery, operate, removed_of

__all__ = ["Merging", "ShrinkPlan", "surgery_of"]


@dataclass(frozen=True, eq=False)
class Merging:
    """The merges of one layer's neurons: `h_removed = folds^T h_kept + shifts`, approximately.

    Attributes:
        neurons: The neurons.
        kept: Indices of kept neurons, ascending, shape `(k,)`.
        folds: By consumer, the shares of removed weights to add to kept ones, `(k, removed)`.
        shifts: By consumer that can absorb a constant, the constants, `(taps or 1, removed)`.
        scales: By norm over a residual stream, the factor of its gains.
        error: The joint mean square error of a consumer's outputs over their variance, on the
            measured batches; for several consumers the largest.
    """

    neurons: Neurons
    kept: Tensor
    folds: Mapping[str, Tensor] = field(default_factory=dict)
    shifts: Mapping[str, Tensor] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    error: float = 0.0

    @property
    def width(self) -> int:
        """The number of neurons."""
        return self.neurons.width


@dataclass(frozen=True, eq=False)
class ShrinkPlan:
    """Merges of several layers; made by `ShrinkSession.plan()`, applied now, later or elsewhere.

    Attributes:
        mergings: One per layer that loses neurons.
    """

    mergings: tuple[Merging, ...]

    def __len__(self) -> int:
        return sum(each.width - len(each.kept) for each in self.mergings)

    def __str__(self) -> str:
        if not self.mergings:
            return "no neuron can be removed"
        rows = [("layer", "neurons", "stay", "error")]
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
            if (why := each.neurons.misfit(model)) is not None:
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
            "mergings": [
                {
                    **{name: getattr(each, name) for name in ("kept", "error")},
                    "neurons": asdict(each.neurons),
                    "folds": dict(each.folds),
                    "shifts": dict(each.shifts),
                    "scales": dict(each.scales),
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
            Merging(**(dict[str, Any](each) | {"neurons": _neurons(each["neurons"])}))
            for each in state["mergings"]
        ]
        return cls(tuple(mergings))


def _neurons(state: Mapping[str, Any]) -> Neurons:
    entries = {key: Entries(**held) for key, held in state["entries"].items()}
    return Neurons(**(dict(state) | {"entries": entries}))


def surgery_of(model: nn.Module, mergings: Sequence[Merging]) -> Surgery:
    """Return the surgery of a model's tensors."""
    resizes: dict[str, list[Resize]] = {}
    shifts: dict[str, list[Shift]] = {}
    for each in mergings:
        neurons, kept = each.neurons, each.kept
        if len(kept) == each.width:
            continue
        inputs = {path: neurons.input_of(model, path) for path in neurons.consumers}
        readers = {f"{path}.weight {dim}": path for path, (dim, _) in inputs.items()}
        for key, held in neurons.entries.items():
            name, dim = key.rpartition(" ")[0], int(key.rpartition(" ")[2])
            fold = each.folds.get(readers[key]) if key in readers else None
            scale = (
                each.scales.get(name.rpartition(".")[0], 1.0) if name.endswith("weight") else 1.0
            )
            resizes.setdefault(name, []).append(Resize(dim, held, kept, fold, scale))
        for path, (dim, held) in inputs.items():
            absorber = neurons.absorber(model, path)
            if path not in each.shifts or absorber is None:
                continue
            name, sign = absorber
            constants = each.shifts[path]  # (taps or 1, removed)
            weight = weight_of(model.get_submodule(path)).movedim(dim, 1)
            full = constants.new_zeros(weight.shape[1], weight[0, 0].numel())
            gone = held.indices[removed_of(each.width, kept)].to(full.device)
            shape = gone.shape[1], full.shape[1], constants.shape[1]
            of_entries = constants.expand(shape[0] * shape[1], -1).reshape(shape)
            full[gone] = sign * of_entries.permute(2, 0, 1)
            made = Shift(f"{path}.weight", dim, full.reshape(weight.shape[1:]))
            shifts.setdefault(name, []).append(made)
    return Surgery(resizes, shifts)
