"""Replicas of one model, stacked: row r of every tensor is rank r's."""

import copy
from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from gossipgrad.comm import statistics

Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Shaped[Tensor, "rank batch ..."]
Losses = Float[Tensor, " rank"]


class Replicas:
    """The weights and buffers of p replicas, and their gradients on p batches."""

    def __init__(self, model: nn.Module, world_size: int, *, loss: Loss) -> None:
        _check_model(model)
        self.world_size = world_size
        self._loss = loss
        self._model = copy.deepcopy(model)
        self.parameters = {
            name: nn.Parameter(_stacked(value, world_size))
            for name, value in model.named_parameters()
            if value.requires_grad
        }
        self.buffers = {name: _stacked(value, world_size) for name, value in model.named_buffers()}
        self._modules = [self._module_of(rank) for rank in range(world_size)]

    def backward(self, x: Batches, y: Batches) -> Losses:
        """Sets `.grad` of all parameters; the losses, one a rank."""
        stacks, losses = self.parameters.values(), []
        for stacked in stacks:
            if stacked.grad is None:
                stacked.grad = torch.empty_like(stacked)
        for rank, module in enumerate(self._modules):
            loss = self._loss(module(x[rank]), y[rank])
            weights = [p for p in module.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
            for stacked, gradient in zip(stacks, gradients, strict=True):
                assert stacked.grad is not None
                stacked.grad[rank] = gradient
            losses.append(loss.detach())
        return torch.stack(losses)

    def statistics(self) -> list[Tensor]:
        """Running statistics, stacked."""
        return [self.buffers[name] for name in statistics(self._model)]

    @torch.no_grad()
    def build_model(self, row: int | None) -> nn.Module:
        """A new model with the weights and buffers of one replica, or for None the mean of all."""
        model = copy.deepcopy(self._model)
        averaged = self.parameters.keys() | statistics(model).keys()
        own = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, stacked in (self.parameters | self.buffers).items():
            if row is not None:
                value = stacked.detach()[row]
            elif name in averaged:
                value = mean_of(stacked.detach())
            else:
                value = stacked[0]
            own[name].detach().copy_(value)
        return model

    @torch.no_grad()
    def distance(self) -> float:
        """Root mean square over the ranks of the distance to the mean weights."""
        square = torch.zeros((), dtype=torch.float64)
        for stacked in self.parameters.values():
            mean = mean_of(stacked.detach())
            square += (stacked.detach() - mean).square_().sum(dtype=torch.float64).cpu()
        return (float(square) / self.world_size) ** 0.5

    def _module_of(self, rank: int) -> nn.Module:
        """A copy of the model that lives in row `rank`; tied parameters stay tied in it."""
        module = copy.deepcopy(self._model)
        for name, parameter in module.named_parameters():
            if name in self.parameters:
                parameter.data = self.parameters[name].detach()[rank]
        for name, buffer in module.named_buffers():
            buffer.data = self.buffers[name][rank]
        return module


def mean_of(stacked: Shaped[Tensor, "rank ..."]) -> Shaped[Tensor, "..."]:
    """The mean over ranks, summed in a type that many ranks cannot exhaust."""
    return stacked.mean(0, dtype=torch.promote_types(stacked.dtype, torch.float32))


def _stacked(value: Tensor, copies: int) -> Tensor:
    return value.detach().unsqueeze(0).repeat(copies, *[1] * value.ndim)


def _check_model(model: nn.Module) -> None:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no parameters that are trained: nothing to simulate")
    for name, parameter in trained.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, but virtual ranks keep weights in "
                "float32 or float64: use model.float(); wire_dtype narrows what travels"
            )


class Ranks:
    """What virtual ranks of any family show of their replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.world_size = replicas.world_size
        self.steps = 0

    def consensus_distance(self) -> float:
        """Root mean square over ranks of the L2 distance to the mean weights, summed in float64."""
        return self._replicas.distance()

    def consensus_model(self) -> nn.Module:
        """A new model with the mean weights and the mean of floating buffers; changes nothing."""
        return self._replicas.build_model(None)

    def replica(self, rank: int) -> nn.Module:
        """A new model with the weights and buffers of one rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is none of 0 to {self.world_size - 1}")
        return self._replicas.build_model(rank)

    def _backward(self, x: Batches, y: Batches) -> Losses:
        """Gradients of every rank, and the losses."""
        for name, batches in (("x", x), ("y", y)):
            if batches.ndim < 1 or len(batches) != self.world_size:
                raise ValueError(
                    f"{name} has shape {tuple(batches.shape)}, but its first size must be the "
                    f"{self.world_size} ranks: stack their batches"
                )
        return self._replicas.backward(x, y)
