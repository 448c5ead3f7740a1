"""The same training twice: by virtual ranks, and by threads with real sessions."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.comm import Group, Hub
from gossipgrad.train import MLP, LeNet
from support.ranks import run_ranks

__all__ = ["INPUTS", "MODELS", "Residual", "batches", "distributed", "sgd"]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.inner_norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.inner_norm(self.inner(x)))
        return self.head(x.mean((2, 3)))


MODELS = {"mlp": lambda: MLP(64, 10, hidden_size=16), "lenet": lambda: LeNet(10), "res": Residual}
INPUTS = {"mlp": (1, 8, 8), "lenet": (1, 28, 28), "res": (1, 8, 8)}


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def batches(name: str, world_size: int, step: int) -> tuple[Tensor, Tensor]:
    """Of every rank in a step, stacked."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn((world_size, 4, *INPUTS[name]), generator=generator)
    return x, torch.randint(10, (world_size, 4), generator=generator)


def distributed(
    name: str,
    model: nn.Module,
    world_size: int,
    steps: int,
    *,
    optimizer: MakeOptimizer = sgd,
    allreduce: bool = False,
    **settings,
) -> list[dict[str, dict[str, Tensor]]]:
    """What each rank holds in the end, and the consensus, from ranks in threads."""
    hub = Hub(world_size)
    replicas = [MODELS[name]() for _ in range(world_size)]
    for replica in replicas:
        replica.load_state_dict(model.state_dict())

    def state(replica: nn.Module) -> dict[str, Tensor]:
        held = (*replica.named_parameters(), *replica.named_buffers())
        return {name: value.detach().clone() for name, value in held}

    def rank_main(rank: int, group: Group) -> dict[str, dict[str, Tensor]]:
        replica = replicas[rank]
        o = optimizer(list(replica.parameters()))
        with gg.gossip(
            replica,
            o,
            process_group=group,
            transport=lambda group: hub.transport(group.rank),
            **settings,
        ) as session:
            for step in range(steps):
                x, y = batches(name, world_size, step)
                o.zero_grad()
                F.cross_entropy(replica(x[rank]), y[rank]).backward()
                if allreduce:
                    for p in replica.parameters():
                        session.group.all_reduce_(p.grad).div_(world_size)
                o.step()
            session.wait()
            own = state(replica)
            session.group.barrier()
            with session.consensus():
                consensus = state(replica)
        return {"own": own, "consensus": consensus}

    return run_ranks(world_size, rank_main)
