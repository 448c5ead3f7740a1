"""Roots in pinned host memory, fetched ahead of their use."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gossipgrad.second_order._blocks import Unit
from gossipgrad.second_order._streams import SideStream, to_host

__all__ = ["HostRoots", "Tiers"]


@dataclass(frozen=True)
class Tiers:
    """Where roots or bases are between steps.

    Each step reads them, and one in `every` writes them. In host memory they take none of a device,
    and each step copies them there: the first unit during the backward pass, each other one during
    the update of the unit before it. Factors and moments change in every step, and stay.

    A step then copies 8 bytes a parameter (4 with `root_dtype=torch.bfloat16`) over the bus, so it
    pays where steps take seconds. On CPUs it only costs copies.

    Args:
        host: `"pinned"`: in pinned host memory.

    Raises:
        ValueError: For another value.
    """

    host: Literal["pinned"] = "pinned"

    def __post_init__(self) -> None:
        if self.host != "pinned":
            raise ValueError(f'host={self.host!r} must be "pinned"')


class HostRoots:
    """Roots of units in host memory, with the copies on devices that are in use."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Tensor]] = {}
        self._there: dict[int, tuple[list[Tensor], Any]] = {}
        self._sides: dict[torch.device, SideStream] = {}
        self._hooks: list[Any] = []

    def hold(self, unit: Unit, names: Sequence[str]) -> dict[str, Tensor]:
        """Keep these tensors of a unit; return them in host memory, where they may be written."""
        held = {name: to_host(unit.tensors[name], copy=True) for name in names}
        self._kept[unit.index] = list(held.values())
        return held

    def fetch(self, unit: Unit) -> None:
        """Begin to copy a unit's roots to its device."""
        if unit.index in self._there:
            return
        side = self._sides.setdefault(unit.device, SideStream(unit.device))
        with side.behind():  # behind the copy to the host of roots that have changed
            kept = self._kept[unit.index]
            roots = [root.to(unit.device, non_blocking=True, copy=True) for root in kept]
            self._there[unit.index] = roots, side.mark()

    def take(self, unit: Unit) -> list[Tensor]:
        """Return a unit's roots on its device."""
        self.fetch(unit)
        roots, mark = self._there[unit.index]
        self._sides[unit.device].wait(mark)
        return roots

    def forget(self, unit: Unit) -> None:
        """Free the copies on the device."""
        self._there.pop(unit.index, None)

    def watch(self, units: Sequence[Unit]) -> None:
        """Fetch these units when the backward pass has a gradient of theirs."""
        for hook in self._hooks:
            hook.remove()
        reference = weakref.ref(self)

        def fetch(unit: Unit) -> None:
            if (roots := reference()) is not None:
                roots.fetch(unit)

        self._hooks = [
            block.parameter.register_post_accumulate_grad_hook(lambda _, unit=unit: fetch(unit))
            for unit in units
            for block in unit.blocks
        ]
