"""Ways to aggregate gradients, sparse or not: their plans, and selection slept at full size's cost.

A session of `gg.sparsify` measures and plans on the links themselves; the plans of the published
rules are made of the costs that it has measured.
"""

import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gossipgrad as gg
from gossipgrad.compression import SparseFormat, top_k
from gossipgrad.planning import (
    Method,
    PiecewiseCost,
    Plan,
    mg_wfbp,
    omgs_greedy,
    single,
    threshold,
    wfbp,
)
from gossipgrad.sparsification import _merged

from ._contestants import Contestant, Surroundings
from ._replay import Device

OPTIMAL = "ours"
METHODS = ("sparse", "dense", "fp16")
DDP_BYTES = (1 << 20, 25 << 20)  # torch's first bucket, and the others, at full size
_FIRST_ELEMENTS, _GROWTH = 256, 4
_REPEATS, _MOST_SECONDS = 5, 4.0  # of one size
_MOST_ROUNDS = 200
_RULES = {"wfbp": wfbp, "mg_wfbp": mg_wfbp, "omgs_greedy": omgs_greedy, "single": single}

Curve = dict[str, list[float]]


class Rival(NamedTuple):
    """How a plan is made.

    Attributes:
        rule: Of `gossipgrad.planning`; `"ddp"` for DistributedDataParallel.
        methods: What the rule may use.
    """

    rule: str
    methods: tuple[str, ...] = ("sparse",)


RIVALS: dict[str, Rival] = {
    "wfbp": Rival("wfbp", ("dense",)),
    "mg-wfbp": Rival("mg_wfbp", ("dense",)),
    "topk": Rival("single"),
    "lags": Rival("wfbp"),
    "greedy": Rival("omgs_greedy"),
    OPTIMAL: Rival("optimal", METHODS),
}


def measure_selection(most_elements: int, density: float, seed: int = 0) -> Curve:
    """Processor seconds by elements of choosing the largest, on one thread of this machine.

    Normal values; taking them out and packing the message is part of it.
    """
    sizes = [_FIRST_ELEMENTS]
    while sizes[-1] < most_elements:
        sizes.append(min(most_elements, _GROWTH * sizes[-1]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values = torch.randn(most_elements, generator=torch.Generator().manual_seed(seed))
        seconds = [_seconds(values[:size], density) for size in sizes]
    finally:
        torch.set_num_threads(threads)
    return {"elements": [float(size) for size in sizes], "seconds": seconds}


def _seconds(values: Tensor, density: float) -> float:
    count = max(1, int(density * len(values)))
    form = SparseFormat(len(values), count, values.dtype)
    message = torch.zeros(form.size_bytes, dtype=torch.uint8)

    def once() -> float:
        start = time.process_time()  # of one thread: what others take of the machine is not in it
        chosen = top_k(values, count)
        form.pack(chosen, values[chosen], message)
        return time.process_time() - start

    first = once()  # takes memory
    repeats = min(_REPEATS, max(1, int(_MOST_SECONDS / max(first, 1e-6))))
    return statistics.median(once() for _ in range(repeats))


def cost_of(curve: Curve) -> PiecewiseCost:
    """The seconds of any size."""
    return PiecewiseCost.fit(curve["elements"], curve["seconds"])


class ReplayedSelection:
    """In place of `top_k`: sleeps what it would take at full size, and chooses any elements.

    Args:
        device: The emulated GPU, of whose stream selection is a part.
        cost: Seconds by elements at full size.
        time_factor: By how much the times of the profile are longer.
        size_factor: By how much its sizes are smaller.
    """

    def __init__(
        self, device: Device, cost: PiecewiseCost, *, time_factor: float, size_factor: float
    ) -> None:
        self._device = device
        self._cost = cost
        self._time_factor = time_factor
        self._size_factor = size_factor
        self._chosen: dict[tuple[int, int], Tensor] = {}

    def __call__(self, values: Tensor, count: int) -> Tensor:
        """As `top_k`."""
        key = elements, _ = len(values), count
        if key not in self._chosen:
            self._chosen[key] = torch.arange(count) * (elements // count)
        self._device.run(self.seconds(elements))
        self._device.end()  # a message cannot leave before it is chosen
        return self._chosen[key]

    def seconds(self, elements: int) -> float:
        """What it sleeps for so many elements at the scaled size."""
        return self._time_factor * float(self._cost(elements / self._size_factor))


class Sparsified(Contestant):
    """A session of `gg.sparsify` whose selection is slept.

    `surroundings.sparse` holds the `curve` of its seconds at full size, `time_factor`, `density`,
    and `plan` with `names` (the tensors in its order), or None for a session that measures and
    plans itself.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        sparse = surroundings.sparse
        self._select = ReplayedSelection(
            self.device,
            cost_of(sparse["curve"]),
            time_factor=sparse["time_factor"],
            size_factor=surroundings.size_factor,
        )
        fixed = None if sparse["plan"] is None else Plan.from_json(sparse["plan"])
        self.session = gg.sparsify(
            self.model,
            self.optimizer,
            density=sparse["density"],
            plan=fixed or "optimal",
            methods=METHODS,
        )
        if fixed is not None:
            self.session._aggregation.regroup(fixed.groups, names=sparse["names"])

    def step(self) -> None:
        _merged.top_k = self._select  # contestants take turns in one thread
        super().step()

    def measured(self) -> dict[str, Any]:
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
        }

    def close(self) -> None:
        self.session.close()


def plan_of(rival: Rival, measured: dict[str, Any], buckets_bytes: tuple[int, int]) -> Plan:
    """A rival's groups, and when they are predicted to have arrived.

    Args:
        rival: Whose.
        measured: What `Sparsified.measured` gave.
        buckets_bytes: Of DistributedDataParallel: the first, and the others.
    """
    if rival.rule == "optimal":
        return Plan.from_json(measured["plan"])
    costs = measured["costs"][rival.methods[0]]
    method = Method(
        name=rival.methods[0],
        select_seconds=PiecewiseCost.fit(costs["elements"], costs["select_seconds"]),
        communicate_seconds=PiecewiseCost.fit(costs["elements"], costs["communicate_seconds"]),
    )
    backward, sizes = measured["backward_seconds"], measured["sizes"]
    if rival.rule == "ddp":
        first, others = buckets_bytes
        return threshold(backward, sizes, method, size_bytes=others, first_size_bytes=first)
    return _RULES[rival.rule](backward, sizes, method)
