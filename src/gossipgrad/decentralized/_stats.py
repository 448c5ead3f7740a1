"""What a session has done so far, in numbers."""

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What one rank's session has done and holds; read without communication.

    Attributes:
        rounds: Rounds that this rank has closed.
        bytes_sent: Payload bytes sent to partners (collectives not counted).
        bytes_received: Payload bytes that came from partners.
        exposed_seconds: Time that steps were blocked on partners: not hidden by compute.
        mixing_seconds: Time spent on snapshots and mixing.
        outcomes: How many exchanges, counted by bucket, ended as `delivered`, `late`, `dead_peer`
            and `void`.
        extra_memory_bytes: Snapshots, residuals and parts that came early, held beside the model.
        clamps: Elements of non-negative optimizer state that mixing would have left below zero.
        refused_messages: Messages dropped because they did not fit the plan.
        consensus_distance_estimate: From the differences to this rank's own partners in the last
            period; None before the first round and where no weights travel. It costs no traffic.
            Partners that met recently are closer than any two ranks, so it tends to read low.
        consensus_distance: The exact one, as of the last collective that computed it.
    """

    rounds: int
    bytes_sent: int
    bytes_received: int
    exposed_seconds: float
    mixing_seconds: float
    outcomes: dict[str, int]
    extra_memory_bytes: int
    clamps: int
    refused_messages: int
    consensus_distance_estimate: float | None
    consensus_distance: float | None
