"""The ranks that train one replica, as the loop asks them: an island, or one rank alone."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from gossipgrad.errors import GossipError

from ._stopping import LockstepStop, explain
from ._strategy import Replica

T = TypeVar("T")


class IslandRanks:
    """The ranks of an island: they take the same steps, and fail together.

    Each is in a group with the ranks of its number in other islands, and such a collective may fail
    for one of them alone. So they ask each other what it came to.
    """

    def __init__(self, replica: Replica) -> None:
        self.size = replica.island
        self._stopper = None if self.size == 1 else LockstepStop(replica.stop)
        self._is_asked = False

    def of(self, replicas: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that train these replicas."""
        return tuple(self.size * one + index for one in replicas for index in range(self.size))

    def agree(self, value: Any) -> list[Any]:
        """Return the value of each; a collective."""
        values = [value] * self.size
        if self.size > 1:
            self.guard(lambda: dist.all_gather_object(values, value))
        return values

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum; a collective."""
        if self.size > 1:
            self.guard(lambda: dist.all_reduce(tensor))
        return tensor

    def together(self, collective: Callable[[], T]) -> T:
        """Return what a collective with other islands gives; all raise if it fails for one."""
        if self.size == 1:
            return collective()
        failed, found = None, None
        try:
            found = collective()
        except GossipError as error:
            failed = error
        for why in self.agree(None if failed is None else str(failed)):
            if why is not None:
                raise failed or GossipError(why)
        return found  # type: ignore[return-value]  # it has not failed

    def is_asked_to_stop(self, step: int, *, is_asked: bool) -> bool:
        """Return whether one of them has got a signal, before the same step on all."""
        if (stopper := self._stopper) is None:
            return is_asked
        self._is_asked = self._is_asked or self.guard(lambda: stopper.should_stop(step))
        return self._is_asked

    def guard(self, collective: Callable[[], T]) -> T:
        """Return what a collective of theirs gives; that one of them is gone, in words."""
        try:
            return collective()
        except RuntimeError as error:
            if self.size == 1:
                raise
            raise explain(error, "a collective of an island") from error
