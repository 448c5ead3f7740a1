"""A mailbox: the latest version of a tensor by key, published over a channel's links."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gossipgrad.comm._channel import Channel
from gossipgrad.comm._transport import Ticket
from gossipgrad.comm._wire import Header, Part, WireError

__all__ = ["Mail", "Mailbox"]


@dataclass(frozen=True, slots=True, eq=False)
class Mail:
    """One version of a tensor.

    Attributes:
        version: Its number, as its sender counts.
        sender: Who published it.
        values: Flat, in host memory.
    """

    version: int
    sender: int
    values: Tensor


class Mailbox:
    """Publishes tensors to peers without waiting, and keeps the latest version of each by key.

    For tensors that one rank computes and others use when they arrive: inverse roots of a
    second-order optimizer, batches. It shares the links of a channel, but not its rounds: nothing
    is voided, and no collective or generation ends it. A late peer delays nothing; a dead peer is
    sent nothing. An older version never replaces a newer one of the same sender and key. Across
    senders the higher version wins, and for equal versions the lower rank.

    Args:
        channel: The channel whose links are used; a channel has at most one mailbox.
        plan: dtype and number of elements of each key, equal on all ranks. Any other message is
            dropped and counted in the channel's `refused`.

    Example:
        >>> import torch
        >>> from gossipgrad.comm import Channel, Hub, Mailbox, Part
        >>> hub, run, plan = Hub(2), bytes(16), [Part(torch.float32, 3)]
        >>> a, b = (Channel(hub.transport(rank), run=run, plan=[]) for rank in (0, 1))
        >>> boxes = Mailbox(a, plan), Mailbox(b, plan)
        >>> _ = boxes[0].publish(0, torch.ones(3), version=7, peers=[1])
        >>> b.poll(1.0)
        >>> boxes[1].latest(0).version
        7
    """

    def __init__(self, channel: Channel, plan: Sequence[Part]) -> None:
        self.plan = tuple(plan)
        self._channel = channel
        self._lock = threading.Lock()
        self._latest: dict[int, Mail] = {}
        channel.attach(self._accept)

    def publish(
        self, key: int, values: Tensor, *, version: int, peers: Iterable[int]
    ) -> list[Ticket]:
        """Send a version to peers, and keep it here too; return immediately.

        Args:
            key: Index into the plan.
            values: Flat, contiguous, in host memory, as the plan says. Must not be written before
                all tickets are done.
            version: Its number, from 0.
            peers: The ranks to send it to.

        Raises:
            ValueError: If it does not fit the plan.
        """
        self.plan[key].check(values, key)
        if version < 0:
            raise ValueError(f"version must be at least 0, got {version}")
        self._keep(key, Mail(version, self._channel.rank, values))
        return self._channel.send_mail(key, version, values, peers)

    def latest(self, key: int) -> Mail | None:
        """Return the latest version that has arrived, or None; does not wait."""
        with self._lock:
            mail = self._latest.get(key)
            return mail if mail is None or mail.values.numel() else None

    def take(self, key: int, version: int) -> Mail | None:
        """Return the latest version if it is at least `version`, and hand over its memory.

        `latest` and `take` then return None for the key until a later version arrives.
        """
        with self._lock:
            mail = self._latest.get(key)
            if mail is None or mail.version < version or not mail.values.numel():
                return None
            self._latest[key] = Mail(mail.version, mail.sender, mail.values.new_empty(0))
            return mail

    def _accept(self, header: Header, payload: Tensor | None) -> None:
        """Keep a peer's version; raises `WireError` if it does not fit."""
        if header.bucket >= len(self.plan) or header.round < 0:
            raise WireError(f"version {header.round} of key {header.bucket} is not in the plan")
        values = self.plan[header.bucket].read(header, payload)
        self._keep(header.bucket, Mail(header.round, header.sender, values))

    def _keep(self, key: int, mail: Mail) -> None:
        with self._lock:
            held = self._latest.get(key)
            if held is None or (mail.version, -mail.sender) >= (held.version, -held.sender):
                self._latest[key] = mail
