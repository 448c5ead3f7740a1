"""What the two ends of a link know of each other, the same on both to the last bit."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from gossipgrad.compression import SparseFormat

__all__ = ["LinkCopies"]


class LinkCopies:
    """Of one bucket and link: this rank as its partner knows it, and the partner as this rank does.

    They begin as zeros, and are the same on both ends as long as both count the same exchanges.

    Args:
        numel: Elements of the bucket.
        dtype: Of the copies, at least fp32.
        device: Where they are.

    Attributes:
        mine: What the partner knows of this rank, shape `(numel,)`.
        theirs: What this rank knows of the partner.
        known: So many elements, from the first on, have been sent since the copies were zeros.
        tag: Of all exchanges that have counted, a number of 64 bits.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.mine = torch.zeros(numel, dtype=dtype, device=device)
        self.theirs = torch.zeros(numel, dtype=dtype, device=device)
        self.known = 0
        self.tag = 0

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return self.mine.nbytes + self.theirs.nbytes

    def become(self, total: Tensor, occasion: int) -> None:
        """Both ends have these weights, and know it; `occasion` is a number that they share."""
        self.mine.copy_(total)
        self.theirs.copy_(total)
        self.known = len(total)
        self.tag = _next(0, f"equal {occasion}".encode())

    def begin_anew(self, occasion: bytes) -> None:
        """Forgets everything; `occasion` is the same at both ends, and another each time.

        So is the tag: no message that is still under way is taken for one of these copies.
        """
        self.mine.zero_()
        self.theirs.zero_()
        self.known, self.tag = 0, _next(0, b"anew " + occasion)

    def next_slice(self, count: int) -> Tensor | None:
        """The elements to send next, as long as some have never been; None once all have."""
        if self.known == len(self.mine):
            return None
        start = min(self.known, len(self.mine) - count)
        return torch.arange(start, start + count, device=self.mine.device)

    def difference_after(self, form: SparseFormat, sent: Tensor, received: Tensor) -> Tensor:
        """`theirs - mine` as they will be, zero where they are not known yet; changes nothing.

        Opposite at the two ends, to the last bit.

        Raises:
            ValueError: If `received` is no message of this format.
        """
        flat = self.theirs.clone()
        form.add_to(received, flat)
        at, values = form.unpack(sent)
        where_sent = flat[at] - (self.mine[at] + values.to(flat.dtype))
        flat.sub_(self.mine)
        flat[at] = where_sent
        flat[self._known_after(form) :] = 0
        return flat

    def count(self, form: SparseFormat, sent: Tensor, received: Tensor) -> None:
        """An exchange counts: both copies take in what was sent."""
        form.add_to(sent, self.mine)
        form.add_to(received, self.theirs)
        self.known = self._known_after(form)
        ends = sorted(bytes(part.cpu().numpy()) for part in (sent, received))
        self.tag = _next(self.tag, b"".join(ends))

    def state(self, *, copy: bool) -> dict[str, Any]:
        """As plain values."""
        return {
            "mine": self.mine.to("cpu", copy=copy),
            "theirs": self.theirs.to("cpu", copy=copy),
            "known": self.known,
            "tag": self.tag,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes up what `state` gave."""
        self.mine.copy_(state["mine"])
        self.theirs.copy_(state["theirs"])
        self.known, self.tag = state["known"], state["tag"]

    def _known_after(self, form: SparseFormat) -> int:
        return min(self.known + form.count, len(self.mine))


def _next(tag: int, counted: bytes) -> int:
    """The tag behind another, when something has counted: a hash, the same on both ends."""
    told = tag.to_bytes(8, "big") + counted
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") | 1
