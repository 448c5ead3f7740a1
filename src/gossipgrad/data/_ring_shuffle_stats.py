"""What a ring shuffle has done so far, in numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShuffleStats:
    """What one rank's shuffle has done and holds; read without communication.

    Attributes:
        steps: Batches handed out.
        rows_held: Rows that are this rank's.
        rows_sent: Rows given away, less those that came back from a rank that left.
        rows_received: Rows taken in from other ranks.
        rows_in_flight: Rows given away that nobody has said to have taken.
        rows_lost: Rows sent to a rank that died before it said that it had them.
        rows_stale: Rows handed out a second time because their successors had not come.
        late_rounds: Steps whose rows stayed because a neighbour was late.
        bytes_sent: Bytes of rows sent to the neighbour.
        bytes_received: Bytes of rows that came from the neighbour.
        exposed_seconds: Time that steps were blocked on neighbours.
        moving_seconds: Time spent on packing and placing rows.
        extra_memory_bytes: Rows on their way or without a slot, held beside the shard.
        refused_messages: Messages dropped because they were not of this ring, and connections
            refused because they did not know the secret of the run.
        ranks_gone: Ranks that left or died, as far as this rank had to do with them.
    """

    steps: int
    rows_held: int
    rows_sent: int
    rows_received: int
    rows_in_flight: int
    rows_lost: int
    rows_stale: int
    late_rounds: int
    bytes_sent: int
    bytes_received: int
    exposed_seconds: float
    moving_seconds: float
    extra_memory_bytes: int
    refused_messages: int
    ranks_gone: tuple[int, ...]
