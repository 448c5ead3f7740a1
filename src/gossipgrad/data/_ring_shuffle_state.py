"""Whether a ring shuffle can go on from a state."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

# What a state holds beside what has to be the same.
_POSITION = (
    *("tensors", "held", "unplaced", "order", "order_place"),
    *("epoch", "next_epoch", "batches_left", "flow_step"),
)


def check_state(state: dict[str, Any], own: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Refuses a state that is another rank's, or of another shard.

    Args:
        state: What is to be loaded.
        own: What has to be the same in it.
        tensors: The shard.

    Raises:
        ValueError: With the first difference.
    """
    if not isinstance(state, dict):
        raise ValueError(
            f"the state is {state!r}, but must be what state_dict() of a RingShuffle gave"
        )
    if missing := sorted({*own, *_POSITION} - set(state)):
        raise ValueError(
            f"the state has no {missing[0]}: load what state_dict() of a RingShuffle gave"
        )
    for name, value in own.items():
        if state[name] != value:
            raise ValueError(
                f"the state has {name}={state[name]}, this shuffle has {value}: each rank loads "
                "its own, into a shuffle made alike"
            )
    for there, here in zip(state["tensors"], tensors, strict=True):
        if there.shape != here.shape or there.dtype != here.dtype:
            raise ValueError(
                f"the state has rows {tuple(there.shape)} of {there.dtype}, this shuffle "
                f"{tuple(here.shape)} of {here.dtype}: make it of a shard as large"
            )
