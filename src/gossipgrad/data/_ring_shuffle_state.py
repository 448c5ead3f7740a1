"""Whether a ring shuffle can go on from a state."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def check_state(state: dict[str, Any], own: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Refuses a state that is another rank's, or of another shard.

    Args:
        state: What is to be loaded.
        own: What has to be the same in it.
        tensors: The shard.

    Raises:
        ValueError: With the first difference.
    """
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
