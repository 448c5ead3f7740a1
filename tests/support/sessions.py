"""Sessions of gossip, a thread a rank: what most tests of them begin with."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gossipgrad as gg
from gossipgrad.comm import Group, Transport
from support.ranks import run_ranks
from support.replicas import OptimizerFactory, flat, network, set_gradients, sgd, transport_by_name
from support.waiting import until

__all__ = ["Trainer", "no_gradients", "run_sessions"]


class Trainer:
    """One rank in its session.

    Attributes:
        rank: Its number.
        group: Of all ranks.
        model: Its replica.
        optimizer: What steps it.
        session: The session, inside the context.
        steps: How many it has begun.
    """

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
    transport: str = "in-process",
    wrap: Callable[[Transport], Transport] | None = None,
    leaves_together: bool = True,
    **settings: Any,
) -> list[Any]:
    """What `use(me)` returns on each rank.

    Links are those of `transport`, each end in a `wrap` if there is one. Ranks leave together, or
    as soon as each is done.
    """
    link = transport_by_name(transport, world_size)
    wrapped = link if wrap is None else lambda group: wrap(link(group))

    def rank_main(rank: int, group: Group) -> Any:
        model = make(rank)
        made = optimizer(list(model.parameters()))
        with gg.gossip(model, made, process_group=group, transport=wrapped, **settings) as session:
            result = use(Trainer(group, model, made, session, gradients))
            if leaves_together:
                group.barrier()
        return result

    return run_ranks(world_size, rank_main)


def no_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Steps that change nothing by themselves."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
