"""What a rank had sent and not mixed when its state was taken, and going on with it."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossipgrad.comm import Outcome, local, split
from gossipgrad.decentralized._rounds import TOGETHER_SECONDS, Rounds
from gossipgrad.decentralized._section import Delta, Section
from gossipgrad.decentralized._sections import Sections
from gossipgrad.decentralized._stale_rounds import StaleRounds
from gossipgrad.decentralized._transfer import Transfer
from gossipgrad.topology import Peers

__all__ = ["capture", "is_complete", "owe", "restore", "view_of"]

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
Views = Mapping[int, Mapping[str, Any]]


def capture(
    rounds: Rounds, sections: Sections, *, early: bool, owed: dict[str, Tensor], copy: bool = True
) -> list[Entry]:
    """The snapshots that are under way: of each round and section one entry.

    An exchange counts iff both ends had sent it when their states were taken. In the modes that
    wait both send their snapshots again. In mode stale one end may have mixed it already: what the
    other has mixed when it comes is written into its entry then, and into what it is `owed`. No
    tensor is written that was given out before: who has taken a list of them, in the thread that
    trains, has a state of one instant.

    Args:
        rounds: Of the session.
        sections: What travels.
        early: Whether a round's weights leave as it begins.
        owed: Deltas that came, by name of the parameter; added to.
        copy: False: snapshots in host memory themselves, which hold until their round is over.
    """
    entries = []
    for transfer in rounds.under_way:
        entry: Entry = {
            "round": transfer.round,
            "section": sections.all.index(transfer.section),
            "send_to": transfer.peers.send_to,
            "recv_from": transfer.peers.recv_from,
            "late": transfer.round < rounds.next_round - 1 or not early,
            "sent": {
                bucket: transfer.snapshot.flats[bucket].to("cpu", copy=copy)
                for bucket in sorted(transfer.exchanges)
                if bucket not in transfer.taken
            },
            "came": {},
            "void": [],
        }
        if isinstance(rounds, StaleRounds):
            _follow(rounds, transfer, entry, owed)
        entries.append(entry)
    return entries


def is_complete(entries: Sequence[Entry]) -> bool:
    """Whether it is known of all that was under way how it ended."""
    return all(len(e["came"]) + len(e["void"]) == len(e["sent"]) for e in entries)


def view_of(next_round: int, entries: Sequence[Entry], mixed: Sequence[Any]) -> dict[str, Any]:
    """What others need to know of a rank's state to go on with theirs."""
    return {
        "next_round": next_round,
        "sent": [entry["round"] for entry in entries],
        "awaits": [(e["round"], e["recv_from"]) for e in entries if not is_complete([e])],
        "mixed": [list(met) for met in mixed],
    }


def restore(rounds: Rounds, sections: Sections, entries: Sequence[Entry], views: Views) -> int:
    """Sends again what was under way, if its partner has that under way, too.

    What the partner had not come to yet stays under way: it will send its part, or void the round.
    What it had given up is void here as well.

    Args:
        rounds: New ones, which have posted nothing.
        sections: What travels.
        entries: Of this rank.
        views: Of all ranks that go on.

    Returns:
        Rounds that were mixed at one end alone and cannot be had at the other: the mean over ranks
        shifts by them.
    """
    me = rounds.channel.rank
    torn = {
        (round, other)
        for round, other in views[me]["mixed"]
        if other in views and views[other]["next_round"] <= round
    }
    for entry in sorted(entries, key=lambda entry: (entry["round"], entry["section"])):
        round, source = entry["round"], entry["recv_from"]
        peers = Peers(_wants(views, me, round, entry["send_to"]), _has(views, round, source))
        section = sections.all[entry["section"]]
        transfer = Transfer.begin(
            section, rounds.channel, round, Peers(entry["send_to"], source), TOGETHER_SECONDS
        )
        assert transfer is not None, "no snapshot is in use yet"
        anew = source in views and views[source]["next_round"] <= round
        lost = _send_again(rounds, transfer, entry, peers, anew=anew)
        if lost and source in views and _has_mixed(views, me, round, entry):
            torn.add((round, source))
        if transfer.exchanges:
            rounds.take_on([transfer], late=entry["late"])
        else:
            transfer.release()
    if isinstance(rounds, StaleRounds):
        rounds.forget_lost()
    for round, other in sorted(torn):
        logger.warning(
            "rank %d: round %d with rank %d was mixed at one end alone when the states were taken; "
            "the mean over ranks shifts by that",
            *(me, round, other),
        )
    return len(torn)


@torch.no_grad()
def owe(owed: dict[str, Tensor], section: Section, bucket: int, flat: Tensor, by: float) -> None:
    """Adds `by` times a bucket's values to what is owed to its parameters, in host memory."""
    if not section.measures_distance:  # no weights
        return
    layout = section.plan.buckets[bucket]
    for index, piece in zip(layout.indices, split(flat, section.plan, layout), strict=True):
        entry = section.entries[index]
        if entry.spec.name not in owed:
            whole = local(entry.parameter)
            owed[entry.spec.name] = torch.zeros(whole.shape, dtype=flat.dtype)
        place = owed[entry.spec.name]
        if entry.rows is not None:
            place = place.narrow(0, *entry.rows)
        place.add_(piece.to("cpu"), alpha=by)


def _follow(rounds: Rounds, transfer: Transfer, entry: Entry, owed: dict[str, Tensor]) -> None:
    def note(bucket: int, delta: Delta | None) -> None:
        if bucket not in entry["sent"] or bucket in entry["came"] or bucket in entry["void"]:
            return
        if delta is None:
            entry["void"].append(bucket)
            return
        entry["came"][bucket] = delta.flat.to("cpu", copy=True)
        # Into new tensors: a thread may be writing down those that there are.
        more: dict[str, Tensor] = {}
        section = transfer.section
        flat = delta.whole(section.plan.parts[bucket].numel)
        owe(more, section, bucket, flat, rounds.weight(transfer))
        for name, values in more.items():
            owed[name] = owed[name] + values if name in owed else values

    for bucket in entry["sent"]:
        if not transfer.exchanges[bucket].open:
            note(bucket, transfer.delta(bucket))
    transfer.told_of.append(note)


def _wants(views: Views, me: int, round: int, other: int | None) -> int | None:
    """The receiver, if it still needs this rank's part of a round, or may come to need it."""
    if other not in views:
        return None
    view = views[other]
    return other if (round, me) in view["awaits"] or view["next_round"] <= round else None


def _has(views: Views, round: int, other: int | None) -> int | None:
    """The sender, if it has its part of a round, or may come to send it."""
    if other not in views:
        return None
    return other if round in views[other]["sent"] or views[other]["next_round"] <= round else None


def _has_mixed(views: Views, me: int, round: int, entry: Entry) -> bool:
    """Whether the sender of a part has had its own use of the round, as far as that is known."""
    if entry["send_to"] != entry["recv_from"]:
        return True
    return (round, me) in views[entry["recv_from"]]["mixed"]


def _send_again(
    rounds: Rounds, transfer: Transfer, entry: Entry, peers: Peers, *, anew: bool
) -> bool:
    """Posts what the peers need or send of a round; whether something of it is lost.

    With `anew` what came of it, or was void, is not: the sender comes to that round again.
    """
    lost, planned = False, transfer.peers
    for bucket, flat in entry["sent"].items():
        if bucket in entry["void"] and not anew:
            continue
        came = None if anew else entry["came"].get(bucket)
        source = peers.recv_from if came is None else None
        if peers.send_to is not None or source is not None:
            transfer.peers = Peers(peers.send_to, source)
            transfer.refill(bucket, flat)
            transfer.post(bucket)
        if came is not None:
            transfer.bring(bucket, came)
        elif source is None and entry["recv_from"] is not None:
            lost = True
            rounds.outcomes[Outcome.VOID] += 1
            rounds.note_void(transfer.round)
    transfer.peers = planned
    return lost
