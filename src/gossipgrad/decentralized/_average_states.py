"""The mean of the saved states of several replicas."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["average_states"]


@torch.no_grad()
def average_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of saved replicas, to start with any number of ranks; local.

    The mean is computed in float64; it does not continue any replica bit for bit. Load it into a
    model and optimizers with `load_replica`, before `gossip()`.

    Args:
        states: The result of `GossipSession.state_dict()` or `replica_state`, of every rank.

    Returns:
        `"model"`: the mean of the weights and floating buffers, with their residuals;
        others, and extra states of modules, are those of the first. `"optimizers"`: the mean of
        each floating state of a parameter's shape (momentum, moments), over the states that have
        it; everything else, including step counters and hyper-parameters, is that of the first. For
        `gg.SOAP`, `gg.KLShampoo` and `gg.Shampoo` it is the mean of the factors. Bases, and moments
        in them, are those of the first, since a mean of bases is not a basis.

    Raises:
        ValueError: There are none, or their models or optimizers differ.
    """
    if not states:
        raise ValueError("no states: give those of all ranks that were saved")
    for number, state in enumerate(states):
        if state["model"].keys() != states[0]["model"].keys():
            raise ValueError(f"state {number} is of another model than state 0")
        if _kinds(state) != _kinds(states[0]):
            raise ValueError(f"state {number} is of other optimizers than state 0")
        if state["shard"] != states[0]["shard"]:
            raise ValueError(
                f"state {number} is of another shard than state 0: average those of one shard"
            )
    first = states[0]
    return {
        "extra": first["extra"],
        "shard": first["shard"],
        "model": {
            name: _mean(
                [state["model"][name] for state in states],
                [state.get("residuals", {}).get(name) for state in states],
            )
            for name in first["model"]
        },
        "optimizers": [
            {**one, "state": _mean_state([state["optimizers"][number] for state in states])}
            for number, one in enumerate(first["optimizers"])
        ],
    }


def _kinds(state: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Return each optimizer's kind, and its groups' numbers of parameters."""
    return [(each["kind"], list(each["sizes"])) for each in state["optimizers"]]


def _mean(values: Sequence[Tensor], residuals: Sequence[Tensor | None]) -> Tensor:
    if not values[0].is_floating_point():
        return values[0].clone()
    total = torch.zeros(values[0].shape, dtype=torch.float64)
    for value, residual in zip(values, residuals, strict=True):
        total += value
        if residual is not None:
            total += residual
    return (total / len(values)).to(values[0].dtype)


def _mean_state(optimizers: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    held: dict[int, list[list[Any]]] = {}
    for optimizer in optimizers:
        for entry in optimizer["state"]:
            held.setdefault(entry[0], []).append(entry)
    mean = []
    for place, entries in sorted(held.items()):
        _, values, on_host = entries[0]
        merged = {
            key: _mean(tensors, [None] * len(tensors)) if tensors is not None else value
            for key, value in values.items()
            for tensors in [_alike(key, entries)]
        }
        mean.append([place, merged, on_host])
    return mean


def _alike(key: str, entries: Sequence[Sequence[Any]]) -> list[Tensor] | None:
    """Return the replicas' tensors of `key`, None if they are not to be averaged (counters)."""
    found = [values[key] for _, values, _ in entries if key in values]
    is_second_order = "cohort" in entries[0][1]
    if is_second_order and key.partition(".")[0] not in ("left", "right"):
        return None
    if key == "step" or not all(isinstance(v, Tensor) and v.ndim for v in found):
        return None
    return found if len({v.shape for v in found}) == 1 else None
