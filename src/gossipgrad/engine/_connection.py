"""The connection of a rank with the others: links, channel, and the rounds of its mode."""

import secrets
from collections.abc import Callable, Sequence

from gossipgrad.comm import Channel, Group, Hub, Liveness, Recorder, Transport, all_parameters
from gossipgrad.engine._flow import Flow
from gossipgrad.engine._island import Island
from gossipgrad.engine._joiner import Joiner
from gossipgrad.engine._replica import Replica
from gossipgrad.engine._rounds import Rounds
from gossipgrad.engine._settings import RoundSettings
from gossipgrad.engine._tensors import largest_piece_bytes
from gossipgrad.errors import GossipError

__all__ = ["check_growth", "connect"]

_GROWTH = 4  # how much larger a later plan's messages may be; links are created for that


def connect(
    replica: Replica,
    settings: RoundSettings,
    flows: Sequence[Flow],
    *,
    group: Group,
    transport: Callable[[Group, int], Transport],
    liveness: Liveness,
    recorder: Recorder | None,
    joiner: Joiner | None,
    island: Island | None,
) -> Rounds:
    """Create the rounds of a session, over links to all ranks; a collective, but for a joiner."""
    run = (
        bytes.fromhex(group.broadcast_object(secrets.token_hex(16)))
        if joiner is None
        else joiner.run
    )
    living = None if joiner is None else joiner.membership.living
    if island is not None and not island.exchanges:
        transport, living = _no_links, group.members
    parts = [part for flow in flows for part in flow.parts]
    pieces = largest_piece_bytes(
        all_parameters(replica.model, replica.optimizers).values(),
        settings.bucket_bytes,
        settings.wire_dtype,
    )
    largest_bytes = max(*(part.size_bytes for part in parts), settings.bucket_bytes, pieces)
    channel = Channel(
        transport(group, _GROWTH * largest_bytes),
        run=run,
        plan=parts,
        window=settings.window,
        generation=0 if joiner is None else joiner.membership.generation,
        liveness=liveness,
        peers=living,
    )
    return Rounds(channel, settings.schedule, settings.mode, recorder=recorder, island=island)


def _no_links(group: Group, largest_bytes: int) -> Transport:
    """Return the links of a rank that exchanges nothing."""
    return Hub(group.world_size).transport(group.rank)


def check_growth(rounds: Rounds, flows: Sequence[Flow]) -> None:
    """Raise `GossipError` for flows whose messages are larger than the session's links allow."""
    most_bytes = rounds.channel.largest_bytes
    largest_bytes = max((part.size_bytes for flow in flows for part in flow.parts), default=0)
    if most_bytes is not None and largest_bytes > most_bytes:
        raise GossipError(
            f"a message of {largest_bytes} bytes is needed now, and links foresee {most_bytes}: "
            "they are made for all parameters of the model and its optimizers when a session "
            "starts, trained or not. Nothing was changed; close this one and start another"
        )
