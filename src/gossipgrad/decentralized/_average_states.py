"""The mean of the saved states of several replicas."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["average_states"]


@torch.no_grad()
def average_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of saved replicas, to start with any number of ranks; local.

    The mean is computed in float64; it does not continue any replica bit for bit. Load it into a
    model and optimizers with `load_replica`, before `gossip()`.

    Args:
        states: The result of `GossipSession.state_dict()` or `replica_state`, of every rank. An
            iterator is read one by one: beside the mean memory holds the first and one other.

    Returns:
        `"model"`: the mean of the weights, with their residuals, and of running statistics; other
        buffers, and extra states of modules, are those of the first. `"optimizers"`: the mean of
        each floating state of a parameter's shape (momentum, moments), over the states that have
        it; everything else, including step counters and hyper-parameters, is that of the first. For
        `gg.SOAP`, `gg.KLShampoo` and `gg.Shampoo` it is the mean of the factors. Bases, and moments
        in them, are those of the first, since a mean of bases is not a basis.

    Raises:
        ValueError: There are none, or their models or optimizers differ.
    """
    first: Mapping[str, Any] | None = None
    weights: dict[str, _Mean] = {}
    optimizers: list[dict[int, _Entry]] = []
    number = -1
    for state in states:
        number += 1
        if first is None:
            first, optimizers = state, [{} for _ in state["optimizers"]]
        _check_alike(number, state, first)
        for name, tensor in state["model"].items():
            has_mean = name not in first.get("model_own", ())
            mean = weights.setdefault(name, _Mean(tensor, has_mean=has_mean))
            mean.add(tensor, state.get("residuals", {}).get(name))
        for entries, optimizer in zip(optimizers, state["optimizers"], strict=True):
            for key, values in optimizer["state"]:
                if not isinstance(key, str):
                    entries.setdefault(key, _Entry(values)).add(values)
        del state  # an iterator may read the next one
    if first is None:
        raise ValueError("no states: give those of all ranks that were saved")
    return {
        "extra": first["extra"],
        "shard": first["shard"],
        "model": {name: mean.result() for name, mean in weights.items()},
        "optimizers": [
            {
                **one,
                "state": [
                    *([index, entry.result()] for index, entry in sorted(entries.items())),
                    *(entry for entry in one["state"] if isinstance(entry[0], str)),
                ],
            }
            for one, entries in zip(first["optimizers"], optimizers, strict=True)
        ],
    }


def _check_alike(number: int, state: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    if state["model"].keys() != first["model"].keys():
        raise ValueError(f"state {number} is of another model than state 0")
    if _kinds(state) != _kinds(first):
        raise ValueError(f"state {number} is of other optimizers than state 0")
    if state["shard"] != first["shard"]:
        raise ValueError(
            f"state {number} is of another shard than state 0: average those of one shard"
        )


def _kinds(state: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Return each optimizer's kind, and its groups' numbers of parameters."""
    return [(each["kind"], list(each["sizes"])) for each in state["optimizers"]]


class _Mean:
    """The mean of one tensor over replicas, in float64; of others the first."""

    def __init__(self, first: Tensor, *, has_mean: bool = True) -> None:
        self.first = first
        self._total: Tensor | None = None
        if has_mean and first.is_floating_point():
            self._total = torch.zeros(first.shape, dtype=torch.float64, device="cpu")
        self._count = 0

    def add(self, value: Tensor, residual: Tensor | None = None) -> None:
        if self._total is None:
            return
        self._count += 1
        self._total += value
        if residual is not None:
            self._total += residual

    def result(self) -> Tensor:
        if self._total is None:
            return self.first.clone()
        return (self._total / self._count).to(self.first.dtype)


class _Entry:
    """The optimizer state of one parameter over replicas."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._first = first
        self._means = {
            key: _Mean(value)
            for key, value in first.items()
            if isinstance(value, Tensor) and _is_averaged(key, value, first)
        }

    def add(self, values: Mapping[str, Any]) -> None:
        for key in [*self._means]:
            if (value := values.get(key)) is None:
                continue
            if not isinstance(value, Tensor) or value.shape != self._means[key].first.shape:
                del self._means[key]  # replicas differ in shape: the first's
            else:
                self._means[key].add(value)

    def result(self) -> dict[str, Any]:
        means = {key: mean.result() for key, mean in self._means.items()}
        return {key: means.get(key, value) for key, value in self._first.items()}


def _is_averaged(key: str, value: Tensor, entry: Mapping[str, Any]) -> bool:
    """Whether replicas' values are averaged: moments and factors, but no counters or bases."""
    if "cohort" in entry and key.partition(".")[0] not in ("left", "right"):
        return False
    return key != "step" and value.ndim > 0
