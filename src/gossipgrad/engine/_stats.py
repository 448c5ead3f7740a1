"""The counters of a session."""

from collections.abc import Sequence
from dataclasses import dataclass

from gossipgrad.engine._averaging import Averaging
from gossipgrad.engine._flow import Flow
from gossipgrad.engine._members import Members
from gossipgrad.engine._rounds import Rounds

__all__ = ["Stats", "collect"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """The counters and memory of one rank's session; read without communication.

    Attributes:
        rounds: Rounds that this rank has closed.
        bytes_sent: Payload bytes sent to partners (collectives not counted), whatever the outcome.
        bytes_received: Payload bytes that arrived from partners, including those of void rounds,
            but not from a partner that was gone already.
        exposed_seconds: Time that steps were blocked on partners, not hidden by compute.
        mixing_seconds: Time spent on snapshots and mixing.
        outcomes: How many exchanges, counted by bucket, ended as `delivered`, `late`, `dead_peer`
            and `void`.
        late_rounds: Rounds whose partner's part had not arrived when the step stopped waiting;
            in mode stale, not within `max_staleness` further rounds.
        void_rounds: Rounds without an exchange, because one end voided them before it sent its
            part. In mode stale this includes rounds that a slow rank jumps over.
        extra_memory_bytes: Memory in addition to the model: snapshots, residuals, indices of a
            shared mask, and parts that arrived and are not mixed yet.
        snapshot_limit_bytes: The upper limit of snapshots: `max_staleness + 1` of all flows in mode
            stale, otherwise two. Early parts are not included: a rank that hangs may later hold
            those of `max_staleness + 1` rounds of each other rank, mostly of one.
        clamps: Elements of non-negative optimizer state that mixing would have left below zero.
        refused_messages: Messages dropped because they did not fit the plan.
        consensus_distance_estimate: From the differences to this rank's own partners in the last
            period; None before the first round and if no weights are sent. It costs no traffic.
            Of large buckets an eighth counts, another each round. Recent partners are closer than
            two arbitrary ranks, so it tends to be low.
        consensus_distance: The result of the last `consensus_distance()`; with a mesh, that of this
            rank's shards.
        averages: How often all replicas were set to their exact average.
        averaged_bytes: Total bytes of weights and state in these averages; a ring all-reduce sends
            2 (p - 1) / p of it.
        averaging_seconds: Time that steps were blocked on periodic averages.
        all_reduce_bytes: What a ring all-reduce of all trained parameters' gradients would have
            sent in as many steps: computed as 2 (p - 1) / p of them per step, not measured.
    """

    rounds: int
    bytes_sent: int
    bytes_received: int
    exposed_seconds: float
    mixing_seconds: float
    outcomes: dict[str, int]
    late_rounds: int
    void_rounds: int
    extra_memory_bytes: int
    snapshot_limit_bytes: int
    clamps: int
    refused_messages: int
    consensus_distance_estimate: float | None
    consensus_distance: float | None
    averages: int
    averaged_bytes: int
    averaging_seconds: float
    all_reduce_bytes: int

    def __str__(self) -> str:
        """Return the main figures as text.

        Example:
            >>> import torch, gossipgrad as gg
            >>> model = torch.nn.Linear(2, 1)
            >>> with gg.gossip(model, torch.optim.SGD(model.parameters())) as session:
            ...     print(session.stats())
            consensus distance n/a
            sent 0 bytes, ring all-reduce would have sent 0
            blocked on communication for 0.00 s
        """
        distance, kind = self.consensus_distance, ""
        if distance is None and self.consensus_distance_estimate is not None:
            distance, kind = self.consensus_distance_estimate, " (estimate)"
        averages = f"; {self.averages:,} averages come on top" if self.averages else ""
        return (
            f"consensus distance {'n/a' if distance is None else f'{distance:.4g}'}{kind}\n"
            f"sent {self.bytes_sent:,} bytes, ring all-reduce would have sent "
            f"{self.all_reduce_bytes:,}{averages}\n"
            f"blocked on communication for {self.exposed_seconds + self.averaging_seconds:.2f} s"
        )


def collect(
    rounds: Rounds | None,
    flows: Sequence[Flow],
    averaging: Averaging,
    members: Members,
    *,
    world_size: int,
    steps: int,
    gradient_bytes: int,
) -> Stats:
    """Collect the counters of a session; `rounds` is None without partners."""
    counted = {} if rounds is None else {o.value: n for o, n in rounds.outcomes.items()}
    in_flight = () if rounds is None else rounds.in_flight
    living = len(members.current.living)
    return Stats(
        rounds=0 if rounds is None else rounds.closed_rounds,
        bytes_sent=0 if rounds is None else rounds.count("bytes_sent"),
        bytes_received=0 if rounds is None else rounds.count("bytes_received"),
        exposed_seconds=0.0 if rounds is None else rounds.exposed_seconds,
        mixing_seconds=0.0 if rounds is None else rounds.mixing_seconds,
        outcomes={"delivered": 0, "late": 0, "dead_peer": 0, "void": 0, **counted},
        late_rounds=0 if rounds is None else rounds.late_rounds,
        void_rounds=0 if rounds is None else rounds.void_rounds,
        snapshot_limit_bytes=sum(flow.pool.limit_bytes for flow in flows),
        extra_memory_bytes=sum(flow.memory_bytes for flow in flows)
        + sum(transfer.received_bytes for transfer in in_flight),
        clamps=sum(int(bucket.clamped) for flow in flows for bucket in flow.buckets),
        refused_messages=0 if rounds is None else rounds.count("refused"),
        consensus_distance_estimate=(
            None if rounds is None else rounds.pair_distance.estimate(living)
        ),
        consensus_distance=averaging.last_distance,
        averages=averaging.averages,
        averaged_bytes=averaging.averaged_bytes,
        averaging_seconds=averaging.seconds,
        all_reduce_bytes=2 * (world_size - 1) * steps * gradient_bytes // world_size,
    )
