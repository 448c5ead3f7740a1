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

    For what is computed somewhere and used elsewhere when it is there: inverse roots of a
    second-order optimizer, batches. It shares the links of a channel, but not its rounds: nothing
    is voided, and no collective or generation ends it. A peer that is late delays nothing; to one
    that is gone nothing is sent. An older version never replaces a newer one of the same sender
    and key; across senders the higher version wins, and of equal ones that of the lower rank.

    Args:
        channel: Whose links are used; a channel has at most one mailbox.
        plan: dtype and number of elements of each key, equal on all ranks. What does not fit is
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
        """Sends a version to peers, and keeps it here too; returns at once.

        Args:
            key: Index into the plan.
            values: Flat, contiguous, in host memory, as the plan says. Must not be written before
                all tickets are done.
            version: Its number, from 0.
            peers: Who gets it.

        Raises:
            ValueError: If it does not fit the plan.
        """
        self.plan[key].check(values, key)
        if version < 0:
            raise ValueError(f"version must be at least 0, got {version}")
        self._keep(key, Mail(version, self._channel.rank, values))
        return self._channel.send_mail(key, version, values, peers)

    def latest(self, key: int) -> Mail | None:
        """The latest version that is here, None if none has arrived; does not wait."""
        with self._lock:
            mail = self._latest.get(key)
            return mail if mail is None or mail.values.numel() else None

    def take(self, key: int, version: int) -> Mail | None:
        """The latest version, if it is at least this one; its memory is the caller's from now on.

        `latest` and `take` then have nothing for the key until a later version comes.
        """
        with self._lock:
            mail = self._latest.get(key)
            if mail is None or mail.version < version or not mail.values.numel():
                return None
            self._latest[key] = Mail(mail.version, mail.sender, mail.values.new_empty(0))
            return mail

    def _accept(self, header: Header, payload: Tensor | None) -> None:
        """Keeps what a peer has published.

        Raises:
            WireError: It does not fit.
        """
        if header.bucket >= len(self.plan) or header.round < 0:
            raise WireError(f"version {header.round} of key {header.bucket} is not in the plan")
        values = self.plan[header.bucket].read(header, payload)
        self._keep(header.bucket, Mail(header.round, header.sender, values))

    def _keep(self, key: int, mail: Mail) -> None:
        with self._lock:
            held = self._latest.get(key)
            if held is None or (mail.version, -mail.sender) >= (held.version, -held.sender):
                self._latest[key] = mail
