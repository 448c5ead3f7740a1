"""Making the rounds of a session: its run, its channel, and the rounds of its mode."""

import secrets
from collections.abc import Callable

from gossipgrad.comm import Channel, Group, News, Recorder, Transport
from gossipgrad.decentralized._arrival import Arrival
from gossipgrad.decentralized._deadlines import Deadlines
from gossipgrad.decentralized._modes import Stale
from gossipgrad.decentralized._rounds import Rounds
from gossipgrad.decentralized._sections import Sections
from gossipgrad.decentralized._settings import Settings
from gossipgrad.decentralized._stale_rounds import StaleRounds
from gossipgrad.errors import GossipError

__all__ = ["check_growth", "make_rounds"]

_GROWTH = 4  # what a plan of later may have in one message, for which links are not made anew


def check_growth(rounds: Rounds, sections: Sections) -> None:
    """Refuses a plan with larger messages than the links of a session foresee.

    Raises:
        GossipError: It has.
    """
    most_bytes = rounds.channel.largest_bytes
    largest_bytes = max(part.size_bytes for part in sections.parts)
    if most_bytes is not None and largest_bytes > most_bytes:
        raise GossipError(
            f"a message of {largest_bytes} bytes is needed now, and links foresee {most_bytes}: "
            "they look at all parameters that the model and its optimizers have as a session "
            "begins, trained or not. Nothing was changed; close this one and start another"
        )


def make_rounds(
    group: Group,
    transport: Callable[[Group, int], Transport],
    sections: Sections,
    settings: Settings,
    recorder: Recorder | None,
    news: News | None = None,
    arrival: Arrival | None = None,
) -> Rounds:
    """The rounds of a session among the ranks of `group`; a collective.

    Local where this rank joins others: `arrival` says which run that is, and who lives in it.
    """
    run = (
        bytes.fromhex(group.broadcast_object(secrets.token_hex(16)))
        if arrival is None
        else arrival.run
    )
    mode = settings.mode
    credits = mode.snapshots if isinstance(mode, Stale) else 1
    planned = max(part.size_bytes for part in sections.parts)
    largest_bytes = max(planned, settings.bucket_bytes, sections.largest_piece_bytes)
    links = transport(group, _GROWTH * largest_bytes)
    channel = Channel(
        links,
        run=run,
        plan=sections.parts,
        credits=credits,
        generation=0 if arrival is None else arrival.membership.generation,
        news=news,
        peers=None if arrival is None else arrival.membership.living,
    )
    if isinstance(mode, Stale):
        return StaleRounds(channel, settings.schedule, mode=mode, recorder=recorder)
    return Rounds(
        channel,
        settings.schedule,
        deadlines=Deadlines(
            floor_seconds=mode.floor_seconds,
            ceiling_seconds=mode.deadline_seconds,
            deviations=mode.deviations,
        ),
        recorder=recorder,
    )
