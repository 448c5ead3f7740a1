"""What a rank hands in at its end, made up."""

from gossipgrad.train._result import RankResult

__all__ = ["result"]


def result(rank: int, **changes: object) -> RankResult:
    """The result of a rank; any field changed."""
    values: dict = {
        "rank": rank,
        "steps": 10,
        "steps_counted": 10,
        "epochs": 1,
        "samples": 1000,
        "seconds": 3.0 + rank,
        "train_seconds": 2.0,
        "accuracy": 0.9,
        "own_accuracy": 0.5 + rank / 8,
        "is_consensus": True,
        "consensus_distance": 0.5,
        "stopped": False,
        "parameters": 25,
        "gradient_bytes": 100,
        "bytes_sent": 1000 * (rank + 1),
        "exposed_seconds": 0.1,
        "mixing_seconds": 0.2,
        "extra_memory_bytes": 200,
        "outcomes": {"delivered": 9, "late": rank},
        "notes": (f"note {rank}",),
    }
    return RankResult(**{**values, **changes})
