"""p ranks of sparsified synchronous SGD in one process: one replica, p residuals."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.compression import top_k

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Density = Callable[[int], float]


class SparsifiedRanks:
    """Trains as p workers of `gossipgrad.sparsify` would whose selection is of the whole model.

    All replicas are equal in every step, so there is one; what differs from rank to rank is the
    batch and the residual. The arithmetic is that of `gossipgrad.sparsification._reference`, rules
    R1 to R6 and R8. BatchNorm's running statistics see the batches of all ranks in turn.

    Args:
        model: The one replica.
        optimizer: Of its parameters.
        world_size: How many ranks, p.
        loss: Of the model on a batch, a scalar.
        density: The share that is sent, a function of the step; None: gradients are averaged.
        per_tensor: Whether each tensor has a number of coordinates of its own.
        momentum: Factor of momentum correction; None: none.
        clip: Largest norm of the aggregated gradient; None: any.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        world_size: int,
        *,
        loss: Loss,
        density: Density | None,
        per_tensor: bool = False,
        momentum: float | None = None,
        clip: float | None = None,
    ) -> None:
        self.steps = 0
        self.world_size = world_size
        self.residuals: Tensor | None = None
        self.velocities: Tensor | None = None
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._density, self._momentum, self._clip = density, momentum, clip
        self._parameters = list(reversed([p for p in model.parameters() if p.requires_grad]))
        sizes = [p.numel() for p in self._parameters]
        self._sizes, self._selected_from = sizes, sizes if per_tensor else [sum(sizes)]
        if density is not None:
            self.residuals = torch.zeros(world_size, sum(sizes))
        if momentum is not None:
            self.velocities = torch.zeros(world_size, sum(sizes))

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """One step on a batch a rank; the mean loss."""
        total = torch.zeros(sum(self._sizes))
        losses = []
        for rank, (x, y) in enumerate(batches):
            self._optimizer.zero_grad()
            loss = self._loss(self._model, x, y)
            loss.backward()
            losses.append(float(loss.detach()))
            gradient = torch.cat([_gradient(p) for p in self._parameters])
            self._add(rank, gradient, total)
        total.div_(self.world_size)
        for parameter, mean in zip(self._parameters, total.split(self._sizes), strict=True):
            parameter.grad = mean.view_as(parameter)
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self.steps += 1
        return sum(losses) / len(losses)

    def _add(self, rank: int, gradient: Shaped[Tensor, " n"], total: Shaped[Tensor, " n"]) -> None:
        """Adds what a rank sends to the sum, and keeps the rest."""
        if self._density is None or self.residuals is None:
            total += gradient
            return
        if self.velocities is not None:
            gradient = self.velocities[rank].mul_(self._momentum).add_(gradient)
        wanted = self.residuals[rank].add_(gradient)
        density, start = self._density(self.steps), 0
        for size in self._selected_from:
            count = max(int(density * size), 1)
            chosen = start + top_k(wanted[start : start + size], count)
            total[chosen] += wanted[chosen]
            wanted[chosen] = 0
            if self.velocities is not None:
                self.velocities[rank, chosen] = 0
            start += size


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel())
    return parameter.grad.flatten()
