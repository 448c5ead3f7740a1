"""Sessions of gossip, a thread a rank: what most tests of them begin with."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gossipgrad as gg
from gossipgrad.comm import Group, ScriptedDeathError, Transport
from support.ranks import run_ranks
from support.replicas import (
    Link,
    OptimizerFactory,
    backward,
    flat,
    network,
    set_gradients,
    sgd,
    transport_by_name,
)
from support.waiting import until

__all__ = ["Trainer", "no_gradients", "run_sessions", "train"]


class Trainer:
    """One rank in its session."""

    def __init__(self, group: Group, model: nn.Module, optimizer, session, gradients) -> None:
        self.rank, self.group = group.rank, group
        self.model, self.optimizer = model, optimizer
        self.session: gg.GossipSession = session
        self.steps = 0
        self._gradients = gradients

    def train(self, steps: int = 1) -> None:
        """Makes some steps."""
        for _ in range(steps):
            self.steps += 1
            self._gradients(self.model, self.rank, self.steps - 1)
            self.optimizer.step()

    def train_until(self, condition: Callable[[], Any]) -> None:
        """Makes steps until a condition holds; fails if it hangs."""

        def met() -> bool:
            self.train()
            time.sleep(0.002)  # ranks of one process share the interpreter
            return bool(condition())

        until(met)

    @property
    def outcomes(self) -> dict[str, int]:
        """Of all exchanges so far."""
        return self.session.stats().outcomes

    def weights(self) -> Tensor:
        """A copy of the replica, flat, with what the last step has sent."""
        self.session.wait()
        return flat(self.model)

    def mean(self) -> Tensor:
        """The consensus, flat."""
        with self.session.consensus():
            return flat(self.model)


def run_sessions(
    world_size: int,
    use: Callable[[Trainer], Any],
    *,
    make: Callable[[int], nn.Module] = lambda rank: network(),
    optimizer: OptimizerFactory = sgd,
    gradients: Callable[[Any, int, int], None] = set_gradients,
    transport: Link = "in-process",
    wrap: Callable[[Transport], Transport] | None = None,
    leaves_together: bool = True,
    kind: type[Trainer] = Trainer,
    **settings: Any,
) -> list[Any]:
    """What `use(me)` returns on each rank, `me` of a `kind`; None for those that die by script.

    Links are those of `transport`, each end in a `wrap` if there is one. Ranks leave together, or
    as soon as each is done.
    """
    link = transport_by_name(transport, world_size)
    wrapped = link if wrap is None else lambda group: wrap(link(group))

    def rank_main(rank: int, group: Group) -> Any:
        model = make(rank)
        made = optimizer(list(model.parameters()))
        with (
            contextlib.suppress(ScriptedDeathError),
            gg.gossip(model, made, process_group=group, transport=wrapped, **settings) as session,
        ):
            result = use(kind(group, model, made, session, gradients))
            if leaves_together:
                group.barrier()
            return result

    return run_ranks(world_size, rank_main)


def train(
    world_size: int,
    steps: int,
    *,
    make: Callable[..., nn.Module] = network,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> list[list[Tensor]]:
    """What the ranks hold after training by gossip, before the session ends."""

    def use(me: Trainer) -> list[Tensor]:
        me.train(steps)
        me.session.wait()
        return [p.detach().clone() for p in me.model.parameters()]

    # Without heartbeats: a lease that runs out on a busy machine would void a round.
    settings = {"gradients": backward, "bucket_bytes": 100, "heartbeats": None, **settings}
    return run_sessions(world_size, use, make=lambda rank: make(dtype=dtype), **settings)


def no_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Steps that change nothing by themselves."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
