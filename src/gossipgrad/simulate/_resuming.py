"""Whether saved virtual ranks fit those that are to go on with them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ._plan import Plan


def kind_of(strategy: str, plan: Plan, optimizer: Optimizer, world_size: int) -> dict[str, Any]:
    """What must be alike, so that the run that goes on is the one that was saved."""
    return {
        "world_size": world_size,
        "strategy": strategy,
        "mode": type(plan.mode).__name__,
        "delay": plan.delay,
        "payload": str(plan.payload),
        "topology": None if plan.schedule is None else plan.schedule.describe(),
        "average_every": plan.average_every,
        "exchanges": plan.exchanges,
        "wire_dtype": None if plan.wire_dtype is None else str(plan.wire_dtype),
        "post_local_after": plan.reduced_steps,
        "optimizer": type(optimizer).__name__,
    }


def check_state(
    state: Mapping[str, Any],
    kind: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Raise unless the state was saved by ranks of that kind, with tensors of these shapes.

    Raises:
        ValueError: It was not; says what differs.
    """
    saved_kind = state.get("kind", {})
    for what, here in kind.items():
        if saved_kind.get(what) != here:
            raise ValueError(
                f"{what} was {saved_kind.get(what)} where the state was saved, but is {here} here: "
                f"build the ranks with the same {what}"
            )
    for part, own in tensors.items():
        saved = {name: tuple(value.shape) for name, value in state[part].items()}
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        if saved != shapes:
            name = min(n for n in saved | shapes if saved.get(n) != shapes.get(n))
            raise ValueError(
                f"{part}: {name} was saved with shape {saved.get(name)}, but has "
                f"{shapes.get(name)} here: build the ranks of the same model"
            )
