"""Weights of which a link carries the largest differences to what its other end knows."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossipgrad.comm import Part, Snapshot, widened
from gossipgrad.compression import SparseFormat, TopK, top_k
from gossipgrad.decentralized._link_copies import LinkCopies
from gossipgrad.decentralized._section import Delta, Meeting, Section, Sendable
from gossipgrad.decentralized._tensors import Entry

__all__ = ["DifferenceSection"]

logger = logging.getLogger(__name__)

_TAG_BYTES = 8
_UNLIKE = "its ends had not counted the same exchanges when they sent"
_OUTDATED = "the message was filled before an earlier exchange of the link had counted"


@dataclass(frozen=True, slots=True, eq=False)
class DifferenceDelta(Delta):
    """The difference of the two copies of a link, as they are once an exchange has counted.

    Attributes:
        partner: At the other end of the link.
        copies: Those of the link, still as before it.
        tag: That of the copies of which this is the difference.
        sent: The sparse message that this rank sent.
        received: That of its partner.
        why: The exchange cannot count, where that is known already; None: it can, as long as the
            copies are those of the tag.
        occasion: What both ends know of the exchange whether it counts or not.
    """

    partner: int
    copies: LinkCopies
    tag: int
    sent: Tensor
    received: Tensor
    why: str | None
    occasion: bytes


class DifferenceSection(Section):
    """A section of weights that sends its partner the largest differences to what that knows.

    Both ends of a link hold the same two copies: what each knows of the other. An exchange adds to
    both what was sent, and the weights move by a share of the difference of the copies: opposite at
    the ends, so that the mean over ranks is kept. Exchanges of a link count in the order of its
    rounds.

    A link between ranks that were equal begins with copies of that. Any other begins with zeros
    and is first sent the weights whole, a message's count of elements an exchange, and mixes those
    that were sent. So does one whose ends have not counted the same exchanges, since one of them
    broke off in the middle of one: each message tells its sender's, and both see it. A message that
    was filled while an earlier exchange of the link was late is of copies that are no more, once
    that has counted: it is not mixed at either end, and the link begins anew.

    Args:
        entries: As of `Section`.
        first_bucket: As of `Section`.
        bucket_bytes: Bytes of weights, not of messages, at which a bucket is full.
        wire_dtype: Of the differences; None: the weights' own type.
        snapshots: As of `Section`.
        largest: How much is sent, and how large a step is made by it.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        first_bucket: int,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None,
        snapshots: int,
        largest: TopK,
    ) -> None:
        super().__init__(
            entries,
            first_bucket=first_bucket,
            bucket_bytes=bucket_bytes,
            wire_dtype=wire_dtype,
            snapshots=snapshots,
            of_weights=True,
            wire=lambda plan: plan.sending(
                lambda part: Part(torch.uint8, _TAG_BYTES + _format(part, largest).size_bytes)
            ),
        )
        self.share = float(largest.step)
        self._formats = [_format(layout.part, largest) for layout in self.plan.buckets]
        self._links: dict[int, list[LinkCopies]] = {}

    @property
    def memory_bytes(self) -> int:
        """Snapshots, residuals and copies held."""
        links = list(self._links.values())
        return super().memory_bytes + sum(c.size_bytes for copies in links for c in copies)

    @torch.no_grad()
    def become_equal(self, partners: Collection[int], occasion: int) -> None:
        """Begins the links to these partners anew: all ranks have equal weights now.

        Args:
            partners: Whom this rank ever meets.
            occasion: The same number on all ranks, and another each time.
        """
        totals = self.totals()
        self.keep(partners)
        for partner in partners:
            for copies, total in zip(self._copies(partner), totals, strict=True):
                copies.become(total, occasion)

    def keep(self, partners: Collection[int]) -> None:
        """Forgets the links to all others."""
        for gone in self._links.keys() - set(partners):
            del self._links[gone]

    @torch.no_grad()
    def fill(self, snapshot: Snapshot, bucket: int, meeting: Meeting) -> Sendable:
        """Packs the largest differences to what the partner knows into a snapshot."""
        copies, form = self._copies(_partner(meeting))[bucket], self._formats[bucket]
        differences = self._total(bucket).sub_(copies.mine)
        at = copies.next_slice(form.count)
        if at is None:
            at = top_k(differences, form.count)
        message = torch.empty(
            self.parts[bucket].numel, dtype=torch.uint8, device=differences.device
        )
        tag = torch.frombuffer(bytearray(_as_bytes(copies.tag)), dtype=torch.uint8)
        message[:_TAG_BYTES] = tag.to(message.device)
        form.pack(at, differences[at], message[_TAG_BYTES:])
        return snapshot.put(bucket, message)

    @torch.no_grad()
    def receive(
        self,
        bucket: int,
        received: Tensor,
        sent: Tensor,
        meeting: Meeting,
        *,
        keep: bool,
        taken: bool,
    ) -> Delta:
        """The difference that the copies of the link will have, once this is mixed."""
        partner = _partner(meeting)
        copies, form = self._copies(partner)[bucket], self._formats[bucket]
        own, theirs = sent[_TAG_BYTES:], received[_TAG_BYTES:]
        tags = [bytes(message[:_TAG_BYTES].cpu().numpy()) for message in (sent, received)]
        flat, why = torch.zeros_like(copies.mine), None
        if tags[0] != tags[1]:
            why = _UNLIKE
        elif tags[0] != _as_bytes(copies.tag):
            why = _OUTDATED
        else:
            try:
                flat = copies.difference_after(form, own, theirs)
            except ValueError as error:
                why = str(error)
        plain = self.delta(bucket, flat, meeting.round)
        return DifferenceDelta(
            flat,
            plain.pieces,
            plain.square,
            partner,
            copies,
            copies.tag,
            own,
            theirs,
            why,
            b"".join(sorted(tags)) + meeting.round.to_bytes(8, "big"),
        )

    @torch.no_grad()
    def mix(self, bucket: int, delta: Delta, weight: float) -> None:
        """Adds `weight * delta` to a bucket's tensors; the exchange counts for the link then.

        Deltas of one link come here in the order of its rounds. One that was taken before the round
        before it counted is of copies that are no more.
        """
        assert isinstance(delta, DifferenceDelta)
        why = delta.why
        if why is None and delta.copies.tag != delta.tag:
            why = _OUTDATED
        if why is not None:
            logger.warning(
                "the link to rank %d begins anew, and is sent the weights whole: %s",
                *(delta.partner, why),
            )
            delta.copies.begin_anew(delta.occasion)
            return
        super().mix(bucket, delta, weight)
        delta.copies.count(self._formats[bucket], delta.sent, delta.received)

    def copies_state(self, *, copy: bool = True) -> dict[int, list[dict[str, Any]]]:
        """All links as plain values."""
        return {
            partner: [copies.state(copy=copy) for copies in links]
            for partner, links in self._links.items()
        }

    @torch.no_grad()
    def load_copies(self, state: dict[int, list[dict[str, Any]]]) -> None:
        """Takes up what `copies_state` gave."""
        self.keep(state)
        for partner, links in state.items():
            for copies, saved in zip(self._copies(partner), links, strict=True):
                copies.load(saved)

    def _copies(self, partner: int) -> list[LinkCopies]:
        """Those of a link, a bucket each; new ones if there are none."""
        if partner not in self._links:
            self._links[partner] = [
                LinkCopies(layout.part.numel, widened(layout.dtype), self.device)
                for layout in self.plan.buckets
            ]
        return self._links[partner]

    def _total(self, bucket: int) -> Tensor:
        """A bucket's weights with their residuals: a new flat tensor."""
        dtype = widened(self.plan.buckets[bucket].dtype)
        pieces = []
        for v, e in zip(self.tensors(bucket), self.residuals(bucket), strict=True):
            assert v is not None
            pieces.append((v if e is None else v.to(dtype) + e).detach().reshape(-1))
        flat = torch.cat(pieces)
        return flat.clone() if len(pieces) == 1 else flat


def _format(part: Part, largest: TopK) -> SparseFormat:
    return SparseFormat(part.numel, largest.count(part.numel), part.dtype)


def _partner(meeting: Meeting) -> int:
    partner = meeting.peers.send_to if meeting.peers.recv_from is None else meeting.peers.recv_from
    assert partner is not None
    return partner


def _as_bytes(tag: int) -> bytes:
    return tag.to_bytes(_TAG_BYTES, "big")
