"""What a session has done so far, in numbers."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from gossipgrad.sparsification._aggregation import Aggregation
from gossipgrad.sparsification._planner import Planner

__all__ = ["GroupStats", "SparseStats", "collect"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStats:
    """One group of the present plan, and what its last round took on this rank.

    Attributes:
        tensors: How many there are in it.
        elements: Of all of them.
        method: `"sparse"`, `"dense"`, `"fp16"` or `"bf16"`.
        chosen: Coordinates that are sent of it.
        bytes_sent: Of one round.
        select_seconds: From its last gradient until its message was handed over.
        gather_seconds: The collective, waiting for slower ranks included.
        add_seconds: Adding up what came.
    """

    tensors: int
    elements: int
    method: str
    chosen: int
    bytes_sent: int
    select_seconds: float
    gather_seconds: float
    add_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseStats:
    """What one rank's session has done and holds; one of a single rank has only counted its steps.

    Attributes:
        rounds: How often gradients were aggregated; of one rank alone, its steps.
        bytes_sent: To the other ranks, by way of rings: `p - 1` times each sparse message,
            `2 (p - 1) / p` of what is all-reduced. Computed, and not counted on the wire.
        all_reduce_bytes: What a ring all-reduce of all gradients would have sent in as many rounds.
        exposed_seconds: Time that steps were blocked at the end of backward: not hidden by compute.
        select_seconds: Time spent on residuals, selection and packing, in backward.
        communicate_seconds: Time of collectives and of adding up what came, beside backward.
        nonfinite_rounds: Rounds in which the gradient of some rank was NaN or infinite; one rank
            alone does not look.
        starved_tensors: Tensors of which this rank has sent nothing for `starved_after` rounds.
        starved_share: The elements of these, as a share of all.
        starved_after: Rounds after which a tensor counts as starved: thrice those in which each
            coordinate would be chosen once at this density, 100 at least.
        longest_wait_rounds: Rounds since a coordinate of that tensor was sent that waits longest.
        residual_ratio: Norm of what is carried over by that of the last mean gradient; None where
            there is none yet, with these groups, and where it is 0. Grows without bound where
            training diverges.
        extra_memory_bytes: Held beside the model and its gradients.
        groups: Of the plan in use, in the order of backward.
        predicted_seconds: From the first gradient until all groups have come, by the plan; None
            while there is none with times.
        measured_seconds: The same as it was, the median of the last rounds; None before the first.
        alternatives: What was predicted for the rules, by name and method.
        compared_seconds: What a step took with the plan, as `"plan"`, and with gradients sent
            whole, as `"dense"`; empty before they were compared, and without `"dense"` where that
            is predicted to be far slower.
        refused: Why nothing is compressed though it may be; None if something is.
    """

    rounds: int
    bytes_sent: int = 0
    all_reduce_bytes: int = 0
    exposed_seconds: float = 0.0
    select_seconds: float = 0.0
    communicate_seconds: float = 0.0
    nonfinite_rounds: int = 0
    starved_tensors: int = 0
    starved_share: float = 0.0
    starved_after: int = 100
    longest_wait_rounds: int = 0
    residual_ratio: float | None = None
    extra_memory_bytes: int = 0
    groups: tuple[GroupStats, ...] = ()
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    alternatives: dict[str, float] = field(default_factory=dict)
    compared_seconds: dict[str, float] = field(default_factory=dict)
    refused: str | None = None

    def __str__(self) -> str:
        """The figures to look at first, in words.

        Example:
            >>> import torch, gossipgrad as gg
            >>> model = torch.nn.Linear(2, 1)
            >>> with gg.sparsify(model, torch.optim.SGD(model.parameters())) as session:
            ...     print(session.stats())
            0 groups, 0 of them sparse
            sent 0 bytes, ring all-reduce would have sent 0
            blocked on communication for 0.00 s
        """
        sparse = sum(group.method == "sparse" for group in self.groups)
        starved = (
            f"\n{self.starved_tensors} tensors starved, {self.starved_share:.1%} of all elements"
            if self.starved_tensors
            else ""
        )
        refused = "" if self.refused is None else f"\n{self.refused}"
        return (
            f"{len(self.groups)} groups, {sparse} of them sparse\n"
            f"sent {self.bytes_sent:,} bytes, ring all-reduce would have sent "
            f"{self.all_reduce_bytes:,}\n"
            f"blocked on communication for {self.exposed_seconds:.2f} s{starved}{refused}"
        )


def collect(aggregation: Aggregation, planner: Planner) -> SparseStats:
    """The figures of a session of several ranks."""
    groups = tuple(
        GroupStats(
            tensors=len(made.sizes),
            elements=made.numel,
            method=made.method,
            chosen=sum(made.counts) if made.sparse else made.numel,
            bytes_sent=made.bytes_sent,
            select_seconds=made.timing.select_seconds,
            gather_seconds=made.timing.gather_seconds,
            add_seconds=made.timing.add_seconds,
        )
        for made in aggregation.groups
    )
    elements = sum(group.elements for group in groups)
    chosen = sum(group.chosen for group in groups)
    waits = torch.cat([made.rounds_without for made in aggregation.groups])
    after = max(100, math.ceil(3 * elements / max(1, chosen)))
    starved = waits >= after
    sizes = torch.tensor(aggregation.sizes)
    counted: dict[str, Any] = asdict(aggregation.counters)
    del counted["scale"]
    return SparseStats(
        **counted,
        starved_tensors=int(starved.sum()),
        starved_share=float(sizes[starved].sum()) / max(1, elements),
        starved_after=after,
        longest_wait_rounds=int(waits.max()) if len(waits) else 0,
        residual_ratio=_ratio(aggregation),
        extra_memory_bytes=sum(made.memory_bytes for made in aggregation.groups),
        groups=groups,
        predicted_seconds=None if planner.plan is None else planner.plan.finish_seconds,
        measured_seconds=aggregation.median_seconds,
        alternatives=dict(planner.alternatives),
        compared_seconds=dict(planner.compared_seconds),
        refused=planner.refused,
    )


def _ratio(aggregation: Aggregation) -> float | None:
    if aggregation.passes.began:
        return None
    carried = math.hypot(
        *(float(made.residual.norm()) for made in aggregation.groups if made.residual is not None)
    )
    mean = math.hypot(*(float(made.total.norm()) for made in aggregation.groups))
    return carried / mean if mean else None
