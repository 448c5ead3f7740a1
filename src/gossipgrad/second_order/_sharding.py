"""State and update of each unit on one rank, for replicas that are equal."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gossipgrad.comm import local
from gossipgrad.engine import is_claimed
from gossipgrad.errors import AgreementError, GossipError
from gossipgrad.optim import distribute
from gossipgrad.second_order._blocks import Unit

if TYPE_CHECKING:
    from gossipgrad.second_order._optimizer import SecondOrder

__all__ = ["Sharding", "check_alike"]

_TOGETHER = 8
"""Broadcasts under way at a time: more hide more, and need the memory of as many units."""


class Sharding:
    """The owners of units, which `gg.share_roots(optimizer, shard=True)` returns.

    Attributes:
        rank: This rank in the process group.
    """

    def __init__(self, optimizer: "SecondOrder", group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "shard=True needs torch.distributed: call init_process_group() first, or leave it "
                "out on a single process"
            )
        if optimizer.state or optimizer.refresher.share is not None:
            raise GossipError(
                "shard=True comes before the first step and load_state_dict(), and in place of "
                "other sharing: call gg.share_roots(optimizer, shard=True) right after the "
                "optimizer is made"
            )
        if any(is_claimed(p) for each in optimizer.param_groups for p in each["params"]):
            raise GossipError(
                "shard=True sends one rank's weights to all, so it is for DistributedDataParallel, "
                "and these parameters are in an open session, such as gg.gossip(): close() the "
                "session first, or call share_roots(optimizer) without shard=True"
            )
        self._group, self._optimizer = group, weakref.ref(optimizer)
        self.rank = dist.get_rank(group)
        said: list[str] = [""] * dist.get_world_size(group)
        described = f"{type(optimizer).__name__} of {[u.shape for u in optimizer.plan()]}"
        dist.all_gather_object(said, f"{described}, {optimizer.refresh}", group=group)
        check_alike(said)
        optimizer.sharding = self

    @property
    def owners(self) -> list[int]:
        """The rank that has the state of each unit so far."""
        optimizer = self._optimizer()
        units = [] if optimizer is None else optimizer.plan()
        return [unit.owner for unit in units if unit.owner is not None]

    def assign(self, units: Sequence[Unit], held: Sequence[Unit]) -> None:
        """Choose the owners of new units beside those held so far, the same on all ranks."""
        loads = [0.0] * dist.get_world_size(self._group)
        for unit in held:
            assert unit.owner is not None
            loads[unit.owner] += sum(unit.costs)
        owners = distribute([sum(unit.costs) for unit in units], loads)
        for unit, owner in zip(units, owners, strict=True):
            unit.owner = owner

    def broadcast(self, units: Sequence[Unit]) -> None:
        """Send the weights of this rank's units to all ranks, and receive theirs."""
        for first in range(0, len(units), _TOGETHER):
            some = units[first : first + _TOGETHER]
            stacks = []
            for unit in some:
                parts = [block.of(local(block.parameter)) for block in unit.blocks]
                stack = parts[0].new_empty(len(parts), *unit.shape)
                if unit.owner == self.rank:
                    torch.stack(parts, out=stack)
                stacks.append(stack)
            works = [
                dist.broadcast(stack, group=self._group, group_src=unit.owner, async_op=True)
                for unit, stack in zip(some, stacks, strict=True)
            ]
            for unit, stack, work in zip(some, stacks, works, strict=True):
                assert work is not None
                work.wait()
                if unit.owner != self.rank:
                    for block, new in zip(unit.blocks, stack, strict=True):
                        with block.open() as weights:
                            weights.copy_(new)


def check_alike(said: Sequence[str]) -> None:
    """Raise `AgreementError` if ranks describe different optimizers."""
    for rank, each in enumerate(said):
        if each != said[0]:
            raise AgreementError(
                f"rank {rank} shares {each}, and rank 0 {said[0]}: build the same optimizer and "
                "settings on every rank"
            )
