"""What strategies with a session of their own share: evaluating the consensus, counting bytes."""

from torch import nn

import gossipgrad as gg
from gossipgrad.train._evaluate import Evaluation, TestPart, copy_of
from gossipgrad.train._ring_clock import ring_bytes

from ._strategy import Traffic


def consensus_evaluation(
    session: gg.GossipSession, model: nn.Module, test: TestPart, *, final: bool
) -> Evaluation:
    """Evaluate the consensus, shared out over the living ranks; a collective of these.

    Ranks may come here after unequal steps, some for the last time and some not: all then take it
    for the last.

    Raises:
        GossipError: A rank has died in the middle, and the living may try again.
    """
    with session.consensus():
        group = session.group
        final = any(group.all_gather_object(final))
        correct = group.all_reduce_(test.count_share(model, group.members))
        return Evaluation(
            accuracy=int(correct) / test.num_labels,
            is_consensus=True,
            consensus_distance=session.stats().consensus_distance,
            final=final,
            weights=copy_of(model) if final else {},
        )


def session_traffic(session: gg.GossipSession) -> Traffic:
    """What a session has counted, and what its exact averages have cost."""
    stats = session.stats()
    return Traffic(
        bytes_sent=stats.bytes_sent + ring_bytes(stats.averaged_bytes, session.world_size),
        exposed_seconds=stats.exposed_seconds + stats.averaging_seconds,
        mixing_seconds=stats.mixing_seconds,
        extra_memory_bytes=stats.extra_memory_bytes,
        consensus_distance_estimate=stats.consensus_distance_estimate,
        outcomes=dict(stats.outcomes),
        late_rounds=stats.late_rounds,
        void_rounds=stats.void_rounds,
    )
