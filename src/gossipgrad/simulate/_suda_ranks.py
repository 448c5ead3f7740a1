"""p ranks of decentralized Muon in one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossipgrad.muon import Muon, make_backbone, resolve_settings

from ._replicas import Batches, Loss, Losses, Ranks, Replicas

__all__ = ["SudaRanks"]


class SudaRanks(Ranks):
    """Trains p replicas as p workers of `gossipgrad.suda` would, in this process.

    Replicas are stacked, an exchange is a product with the matrix of weights, and matrices of all
    ranks are polarised together. Each rank computes what it would compute in the distributed run,
    to rounding; no exchange is late.

    Args:
        model: The first state of every replica, parameters in float32 or float64. It is copied.
        world_size: How many ranks, p.
        backbone: As of `gossipgrad.suda`.
        topology: As of `gossipgrad.suda`.
        lazy: As of `gossipgrad.suda`.
        loss: Takes the outputs and targets of one rank, returns a scalar.
        seed: Of the rotation of partners.
        **options: Of `gossipgrad.Muon`: `lr`, `momentum`, `scale` and the rest.

    Attributes:
        world_size: How many ranks, p.
        optimizer: The one of all replicas: give it to a scheduler.
        steps: How many steps were taken.

    Raises:
        ValueError: As `gossipgrad.suda` and `gossipgrad.Muon`, or for a model that cannot be
            stacked.

    Example:
        >>> import torch
        >>> from gossipgrad.simulate import SudaRanks
        >>> ranks = SudaRanks(torch.nn.Linear(8, 3), 4, backbone="ed", topology="ring", lr=0.01)
        >>> x, y = torch.randn(4, 16, 8), torch.randint(3, (4, 16))
        >>> ranks.step(x, y).shape  # the loss of each rank
        torch.Size([4])
        >>> ranks.consensus_model()
        Linear(in_features=8, out_features=3, bias=True)
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        *,
        backbone: str = "semi-atc-gt",
        topology: Any = "dissemination",
        lazy: bool = False,
        loss: Loss = F.cross_entropy,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._graph = resolve_settings(
            world_size, backbone=backbone, topology=topology, lazy=lazy, seed=seed
        ).graph
        super().__init__(Replicas(model, world_size, loss=loss))
        self._stacked = list(self._replicas.parameters.values())
        self._rows = {
            name: [nn.Parameter(row) for row in stacked.detach()]
            for name, stacked in self._replicas.parameters.items()
        }
        chosen = Muon(model, **options)
        groups = []
        for group in chosen.param_groups:
            names = [name for name in group["param_names"] if name in self._rows]
            found = {"params": [row for name in names for row in self._rows[name]]}
            if "layouts" in group:
                layout_of = dict(zip(group["param_names"], group["layouts"], strict=True))
                found["layouts"] = [layout_of[name] for name in names for _ in self._rows[name]]
            groups += [{**found, "role": group["role"]}] if names else []
        for of_names in ("muon", "adamw", "split"):
            options.pop(of_names, None)
        self.optimizer = Muon(groups, **options)
        self.optimizer.track = self._track  # type: ignore[misc]
        self._trackers = [torch.zeros_like(each, dtype=torch.float64) for each in self._stacked]
        self._backbone = make_backbone(backbone, self._now())
        self._backbone.begin(self._now())

    def step(self, x: Batches, y: Batches) -> Losses:
        """One step of every rank.

        Args:
            x: The batch of each rank, shape `(p, b, ...)`.
            y: The targets of each, shape `(p, b, ...)`.

        Returns:
            The loss of each rank before the update, shape `(p,)`.

        Raises:
            ValueError: There is not one batch a rank.
        """
        losses = self._backward(x, y)
        for rows, stacked in zip(self._rows.values(), self._stacked, strict=True):
            assert stacked.grad is not None
            for row, gradient in zip(rows, stacked.grad, strict=True):
                row.grad = gradient
        self._update()
        self.steps += 1
        return losses

    @torch.no_grad()
    def _update(self) -> None:
        x, rule = self._now(), self._backbone
        self._exchange(rule.before(x))
        self.optimizer.step()
        steps = rule.after(x, self._now())
        while True:
            try:
                self._exchange(next(steps))
            except StopIteration as end:
                torch._foreach_copy_([each.detach() for each in self._stacked], end.value)
                return

    def _track(self, parameters: Sequence[nn.Parameter], sources: Sequence[Tensor]) -> list[Tensor]:
        """Trackers of all ranks, in the order of the optimizer's parameters."""
        found = {id(p): source for p, source in zip(parameters, sources, strict=True)}
        now = [torch.stack([found[id(row)] for row in rows]) for rows in self._rows.values()]
        torch._foreach_add_(self._trackers, now)
        self._mix(self._trackers)
        pairs = zip(self._trackers, now, strict=True)
        of_all = [tracker.to(each.dtype, copy=True) for tracker, each in pairs]
        torch._foreach_sub_(self._trackers, now)
        tracked = {
            id(row): tracker
            for rows, stacked in zip(self._rows.values(), of_all, strict=True)
            for row, tracker in zip(rows, stacked, strict=True)
        }
        return [tracked[id(p)] for p in parameters]

    def _exchange(self, names: Sequence[str]) -> None:
        for name in names:
            self._mix(self._backbone.held[name])

    def _mix(self, stacked: Sequence[Tensor]) -> None:
        weights = torch.from_numpy(self._graph.matrix(self.steps)).to(stacked[0].device)
        for each in stacked:
            each.copy_((weights @ each.flatten(1).double()).view_as(each))

    def _now(self) -> list[Tensor]:
        return [each.detach().clone() for each in self._stacked]
