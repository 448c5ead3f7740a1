"""The counters of a session."""

from dataclasses import asdict, dataclass, field
from typing import Any

from gossipgrad.sparsification._aggregation import Aggregation
from gossipgrad.sparsification._planner import Planner

__all__ = ["GroupStats", "SparseStats", "collect"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStats:
    """One group of the current plan, and the times of its last round on this rank.

    Attributes:
        tensors: Number of tensors.
        elements: Total number of elements.
        method: `"sparse"`, `"dense"`, `"fp16"` or `"bf16"`.
        chosen: Number of coordinates to send.
        bytes_sent: Bytes of one round.
        select_seconds: From its last gradient until its message was queued.
        gather_seconds: The collective, waiting for slower ranks included.
        add_seconds: Adding up the received messages.
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
    """The counters and memory of one rank's session; a single rank counts only its steps.

    Attributes:
        rounds: How often gradients were aggregated; with one rank, its steps.
        bytes_sent: Bytes to the other ranks, through rings: `p - 1` times each sparse message, `2
            (p - 1) / p` of all-reduced bytes. Computed, not measured on the wire.
        all_reduce_bytes: Bytes of a ring all-reduce of all gradients in as many rounds.
        exposed_seconds: Time that steps were blocked at the end of backward, not hidden by compute.
        select_seconds: Time spent on residuals, selection and packing, in backward.
        communicate_seconds: Time of collectives and of adding up messages, in parallel to backward.
        nonfinite_rounds: Rounds in which the gradient of some rank was NaN or infinite; not counted
            with one rank.
        extra_memory_bytes: Memory in addition to the model and its gradients.
        groups: The groups of the current plan, in the order of backward.
        predicted_seconds: The plan's time from the first gradient to the end of all groups; None
            without a plan with times.
        compared_seconds: Step times with the plan, as `"plan"`, and with dense gradients, as
            `"dense"`; empty before the comparison.
        refused: Why nothing is compressed although it is allowed; None if something is.
    """

    rounds: int
    bytes_sent: int = 0
    all_reduce_bytes: int = 0
    exposed_seconds: float = 0.0
    select_seconds: float = 0.0
    communicate_seconds: float = 0.0
    nonfinite_rounds: int = 0
    extra_memory_bytes: int = 0
    groups: tuple[GroupStats, ...] = ()
    predicted_seconds: float | None = None
    compared_seconds: dict[str, float] = field(default_factory=dict)
    refused: str | None = None

    def __str__(self) -> str:
        """Return the main figures as text.

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
        refused = "" if self.refused is None else f"\n{self.refused}"
        return (
            f"{len(self.groups)} groups, {sparse} of them sparse\n"
            f"sent {self.bytes_sent:,} bytes, ring all-reduce would have sent "
            f"{self.all_reduce_bytes:,}\n"
            f"blocked on communication for {self.exposed_seconds:.2f} s{refused}"
        )


def collect(aggregation: Aggregation, planner: Planner) -> SparseStats:
    """Collect the counters of a session of several ranks."""
    groups = tuple(
        GroupStats(
            tensors=len(made.sizes),
            elements=made.numel,
            method=made.method,
            chosen=(made.count or 0) if made.sparse else made.numel,
            bytes_sent=made.bytes_sent,
            select_seconds=made.select_seconds,
            gather_seconds=made.gather_seconds,
            add_seconds=made.add_seconds,
        )
        for made in aggregation.groups
    )
    counted: dict[str, Any] = asdict(aggregation.counters)
    del counted["scale"]
    return SparseStats(
        **counted,
        extra_memory_bytes=sum(made.memory_bytes for made in aggregation.groups),
        groups=groups,
        predicted_seconds=None if planner.plan is None else planner.plan.finish_seconds,
        compared_seconds=dict(planner.compared_seconds),
        refused=planner.refused,
    )
