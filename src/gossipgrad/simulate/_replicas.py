"""Replicas of one model, stacked: row r of every tensor is rank r's."""

import copy
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

Loss = Callable[[Tensor, Tensor], Tensor]
Batching = Literal["vmap", "loop"]

# Weights of the replicas that one vmap takes on a CPU: what they need at a time fits its cache.
_CHUNK_BYTES = 16 << 20


class Replicas:
    """The weights and buffers of p replicas, and their gradients on p batches.

    Args:
        model: What every replica starts as; it is copied, and stays as it is.
        world_size: How many replicas.
        loss: Takes outputs and targets of one rank, gives a scalar.
        batching: `"vmap"` runs the replicas as one batched operation, `"loop"` one after another.
        shared: Whether the ranks share one set of weights, whose gradient is the mean over ranks.

    Attributes:
        parameters: Trained parameters by name, each of shape `(p, ...)`, or `(1, ...)` if shared.
        buffers: Buffers by name, each of shape `(p, ...)`.
    """

    def __init__(
        self, model: nn.Module, world_size: int, *, loss: Loss, batching: Batching, shared: bool
    ) -> None:
        self.world_size = world_size
        self.shared = shared
        self.batching = batching
        self._loss = loss
        self._model = copy.deepcopy(model)
        copies = 1 if shared else world_size
        self.parameters = {
            name: nn.Parameter(_stacked(value, copies))
            for name, value in model.named_parameters()
            if value.requires_grad
        }
        self.buffers = {name: _stacked(value, world_size) for name, value in model.named_buffers()}
        self._chunk = self._ranks_at_once(copies)
        self._modules: list[nn.Module] = []
        if batching == "loop":
            self._modules = [self._module_of(rank) for rank in range(world_size)]
        if not shared:
            for parameter in self.parameters.values():
                parameter.grad = torch.zeros_like(parameter)

    def backward(
        self, x: Shaped[Tensor, "rank batch ..."], y: Shaped[Tensor, "rank batch ..."]
    ) -> Float[Tensor, " rank"]:
        """Sets `.grad` of all parameters; the losses, one a rank."""
        if self.batching == "loop":
            return self._backward_one_by_one(x, y)
        return self._backward_shared(x, y) if self.shared else self._backward_in_chunks(x, y)

    def mean_gradients(self) -> None:
        """Gives every replica the mean of all replicas' gradients."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.mean(0, keepdim=True))

    def copy_to(self, model: nn.Module, row: int | None) -> None:
        """Loads one replica into `model`, or for None the mean of all.

        The mean over ranks is taken of floating buffers, too; others are rank 0's.
        """
        own = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, stacked in (self.parameters | self.buffers).items():
            if row is not None:
                value = stacked.detach()[row if len(stacked) > 1 else 0]
            elif stacked.is_floating_point():
                value = mean_of(stacked.detach())
            else:
                value = stacked[0]
            own[name].detach().copy_(value)

    @torch.no_grad()
    def distance(self) -> float:
        """Root mean square over the ranks of the distance to the mean weights."""
        square = torch.zeros((), dtype=torch.float64)
        for stacked in self.parameters.values():
            mean = mean_of(stacked.detach())
            for rows in stacked.detach().split(self._chunk):
                square += (rows - mean).square_().sum(dtype=torch.float64).cpu()
        return (float(square) / len(next(iter(self.parameters.values())))) ** 0.5

    def template(self) -> nn.Module:
        """A model of the user's kind, in its first state and in no relation to the replicas."""
        return copy.deepcopy(self._model)

    def _ranks_at_once(self, copies: int) -> int:
        if any(value.is_cuda for value in self.parameters.values()):
            return copies
        row_bytes = sum(value.nbytes for value in self.parameters.values()) // copies
        return max(1, min(copies, _CHUNK_BYTES // row_bytes))

    def _one(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        return self._loss(functional_call(self._model, (parameters, buffers), (x,)), y)

    def _backward_in_chunks(
        self, x: Shaped[Tensor, "rank batch ..."], y: Shaped[Tensor, "rank batch ..."]
    ) -> Float[Tensor, " rank"]:
        gradients_and_losses = vmap(grad_and_value(self._one), randomness="different")
        losses = []
        for start in range(0, self.world_size, self._chunk):
            rows = slice(start, start + self._chunk)
            gradients, some = gradients_and_losses(
                {name: value.detach()[rows] for name, value in self.parameters.items()},
                {name: value[rows] for name, value in self.buffers.items()},
                x[rows],
                y[rows],
            )
            for name, gradient in gradients.items():
                self._gradient(name)[rows].copy_(gradient)
            losses.append(some.detach())
        return torch.cat(losses)

    def _backward_shared(
        self, x: Shaped[Tensor, "rank batch ..."], y: Shaped[Tensor, "rank batch ..."]
    ) -> Float[Tensor, " rank"]:
        every = vmap(self._one, in_dims=(None, 0, 0, 0), randomness="different")
        leaves = {n: v.detach()[0].requires_grad_() for n, v in self.parameters.items()}
        losses = every(leaves, self.buffers, x, y)
        gradients = torch.autograd.grad(losses.mean(), list(leaves.values()))
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient.unsqueeze(0)
        return losses.detach()

    def _backward_one_by_one(
        self, x: Shaped[Tensor, "rank batch ..."], y: Shaped[Tensor, "rank batch ..."]
    ) -> Float[Tensor, " rank"]:
        losses, gradients = [], []
        for rank, module in enumerate(self._modules):
            loss = self._loss(module(x[rank]), y[rank])
            weights = [p for p in module.parameters() if p.requires_grad]
            gradients.append(torch.autograd.grad(loss, weights))
            losses.append(loss.detach())
        for name, of_ranks in zip(self.parameters, zip(*gradients, strict=True), strict=True):
            if self.shared:
                self.parameters[name].grad = torch.stack(of_ranks).mean(0, keepdim=True)
            else:
                torch.stack(of_ranks, out=self._gradient(name))
        return torch.stack(losses)

    def _gradient(self, name: str) -> Tensor:
        """Where the gradients of all replicas go: made anew if the user set it to None."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _module_of(self, rank: int) -> nn.Module:
        """A copy of the model that lives in row `rank`; tied parameters stay tied in it."""
        module = copy.deepcopy(self._model)
        for name, parameter in module.named_parameters():
            if name in self.parameters:
                parameter.data = self.parameters[name].detach()[0 if self.shared else rank]
        for name, buffer in module.named_buffers():
            buffer.data = self.buffers[name][rank]
        return module


def mean_of(stacked: Shaped[Tensor, "rank ..."]) -> Shaped[Tensor, "..."]:
    """The mean over ranks, summed in a type that many ranks cannot exhaust."""
    return stacked.mean(0, dtype=torch.promote_types(stacked.dtype, torch.float32))


def _stacked(value: Tensor, copies: int) -> Tensor:
    return value.detach().unsqueeze(0).repeat(copies, *[1] * value.ndim)
