"""A worker of the laboratory: contestants that aggregate gradients, with selection slept."""

from typing import Any

import torch.distributed as dist

import gossipgrad as gg
from benchmarks.network._contestants import DDP, Alone, Contestant, Surroundings
from benchmarks.network._worker import Worker, main
from gossipgrad.planning import Plan
from gossipgrad.sparsification import _merged

from ._kinds import ALONE, KINDS, METHODS
from ._selection import Curve, ReplayedSelection, cost_of

_MOST_ROUNDS = 200


class Sparsified(Contestant):
    """A session of `gg.sparsify` whose selection is slept.

    Args:
        surroundings: The profile to replay.
        selection: Curve of its seconds at full size.
        time_factor: By how much the profile's times are longer.
        density: The share that is sent.
        plan: The groups, or `"optimal"` for a session that measures and plans itself.
        names: The tensors in the plan's order.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        *,
        selection: Curve,
        time_factor: float,
        density: float,
        plan: Plan | str,
        names: list[str] | None = None,
    ) -> None:
        super().__init__(surroundings)
        self._select = ReplayedSelection(
            self.device,
            cost_of(selection),
            time_factor=time_factor,
            size_factor=surroundings.size_factor,
        )
        self.session = gg.sparsify(
            self.model, self.optimizer, density=density, plan=plan, methods=METHODS
        )
        if isinstance(plan, Plan):
            self.session._aggregation.regroup(plan.groups, names=names)

    def step(self) -> None:
        _merged.top_k = self._select  # contestants take turns in one thread
        super().step()

    def clocks(self) -> dict[str, float]:
        stats = self.session.stats()
        return {
            "select": stats.select_seconds,
            "communicate": stats.communicate_seconds,
            "waiting": stats.exposed_seconds,
        }

    def told(self) -> dict[str, Any]:
        """Steps until the session has decided on a plan; that, and all that it was made of."""
        for _ in range(_MOST_ROUNDS):
            planner, aggregation = self.session._planner, self.session._aggregation
            if planner.decided:
                break
            self.step()
        assert self.session.plan is not None
        return {
            "plan": self.session.plan.to_json(),
            "backward_seconds": planner.backward_seconds,
            "sizes": aggregation.sizes,
            "names": aggregation.names,
            "costs": {
                method.name: {
                    "elements": method.select_seconds.sizes,
                    "select_seconds": method.select_seconds.seconds,
                    "communicate_seconds": method.communicate_seconds.seconds,
                }
                for method in planner.methods
            },
            "first_gradient_seconds": self.model.groups[0].seconds,
            "refused": planner.refused,
        }

    def close(self) -> None:
        self.session.close()


class SparseWorker(Worker):
    """Makes these contestants in the place of those of the laboratory of gossip."""

    def compete(
        self,
        name: str,
        surroundings: Surroundings,
        curves: dict[str, Curve],
        time_factor: float,
        density: float,
        planned: dict[str, Any] | None,
    ) -> Contestant:
        """A contestant; a plan is not needed by DDP and by the session that plans itself."""
        kind = KINDS[name]
        if name == ALONE:
            return Alone(surroundings)
        if kind.rule == "ddp":
            return DDP(surroundings, "fp16" if kind.methods == ("fp16",) else None)
        return Sparsified(
            surroundings,
            selection=curves[kind.selection],
            time_factor=time_factor,
            density=density,
            plan="optimal" if planned is None else Plan.from_json(planned["plan"]),
            names=None if planned is None else planned["names"],
        )

    def told(self, name: str) -> dict[str, Any] | None:
        """What `Sparsified.told` gives, of rank 0."""
        dist.barrier()
        contestant = self._held[name]
        assert isinstance(contestant, Sparsified)
        told = contestant.told()
        return told if dist.get_rank() == 0 else None


if __name__ == "__main__":
    main(SparseWorker)
