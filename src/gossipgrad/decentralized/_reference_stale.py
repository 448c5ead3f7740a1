r"""Mode stale beside the design: p replicas in one process, and a network with scripted delays.

Letters are those of `_reference`; in addition
    d            max_staleness
    t_r          the next round of rank r
    h_r          the highest round that r has received, from any rank
    X_r          r's unanswered messages: of each round t, partner s and snapshot x

Rules
    R10 Rounds. After a step t_r <- max(own + 1, h_r); the rounds between are void.
    R11 Void. A rank voids a round only before it says READY, and notifies the partner. It does so
        if the partner has voided it already, if |X_r| = d + 1, or if a round of the same partner
        has been in X_r for more than d of r's own rounds.
    R12 Exchange. x_r = q(w_r) is put into X_r, and r says READY. When s says READY, too, now or
        before, x_r is sent. When y_s of the same round arrives, however late:
        w_r <- w_r + a (y_s - x_r), once, and the round leaves X_r. When the partner voids the
        round, it leaves X_r and nothing is mixed.
    R13 Links. Messages of one rank to another arrive in order, of rising rounds: when READY or a
        notice of a later round arrives, every earlier round that s was not ready for is void.
    R14 Weight. a = min(1/2, 0.65 sin(pi / (4 d + 2))), whatever the delay, so that both ends take
        the same; of a matrix at most that.
So the sum over ranks of w plus the differences still to be mixed is that of the local updates.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossipgrad.decentralized._reference import NON_NEGATIVE, Values, add, residual
from gossipgrad.topology import Schedule

__all__ = ["StaleReference"]


@dataclass(frozen=True)
class Message:
    """READY, a part, or a notice that the round is void."""

    t: int
    x: Values | None = None
    is_void: bool = False


@dataclass
class Sent:
    """One round in X_r."""

    s: int
    x: Values
    at: int  # the number of r's own rounds when it was sent
    agreed: bool = False  # s has said READY
    y: Values | None = None


@dataclass
class Rank:
    """The state of one rank."""

    t: int = 0
    h: int = -1
    own: int = 0
    sent: dict[int, Sent] = field(default_factory=dict)  # X_r
    ready: set[tuple[int, int]] = field(default_factory=set)  # (s, t)
    void: set[tuple[int, int]] = field(default_factory=set)  # (s, t)
    inbox: list[tuple[int, Message]] = field(default_factory=list)


class StaleReference:
    """Stale gossip on p replicas in one process, which step independently.

    Set `.grad` on a replica and call `step(r)`; its message waits on its link until `deliver`.

    Args:
        models: One replica per rank, equal at the start.
        optimizers: The optimizer of each.
        schedule: A schedule of symmetric pairs.
        max_staleness: d.
        payload: "weights" or "weights+state" (R7).
        state_every: Rounds from one exchange of the optimizer's state to the next.
        wire_dtype: The dtype on the wire; None sends each tensor in its own.

    Example:
        >>> import torch
        >>> from gossipgrad.topology import matching
        >>> models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        >>> for model, value in zip(models, (0.0, 8.0)):
        ...     model.weight = torch.nn.Parameter(torch.full((1, 1), value))
        ...     model.weight.grad = torch.zeros(1, 1)
        >>> optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        >>> reference = StaleReference(models, optimizers, matching(2), max_staleness=0)
        >>> reference.deliver(0, 1)
        >>> reference.step(1)  # rank 1 hears READY, and sends its part
        >>> reference.deliver(1, 0)
        >>> reference.step(0)  # rank 0 has it and moves half way; it has heard READY, too
        >>> reference.deliver(0, 1)
        >>> reference.step(1)
        >>> [model.weight.item() for model in models]
        [4.0, 4.0]
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        *,
        max_staleness: int,
        payload: str = "weights",
        state_every: int = 1,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        if not schedule.symmetric:
            raise ValueError(f"schedule {schedule} is directed: take one of symmetric pairs.")
        self.w = [[w for w in model.parameters() if w.requires_grad] for model in models]
        self.e = [[residual(w) for w in replica] for replica in self.w]
        self.optimizers = list(optimizers)
        self.schedule = schedule
        self.d = max_staleness
        self.a = min(0.5, 0.65 * math.sin(math.pi / (4 * max_staleness + 2)))  # R14
        self.payload = payload
        self.state_every = state_every
        self.wire_dtype = wire_dtype
        self.clamps = 0
        self.ranks = [Rank() for _ in models]
        self.links: dict[tuple[int, int], list[Message]] = defaultdict(list)
        for r in range(len(models)):
            self._open(r)

    @torch.no_grad()
    def step(self, r: int) -> None:
        """Make one step of rank r: its update, received messages, its next round."""
        self.optimizers[r].step()  # w_r <- w_r + dw_r
        self._read(r)
        self._mix(r)
        rank = self.ranks[r]
        while rank.t < rank.h:  # R10
            self._void(r, rank.t)
            rank.t += 1
        self._open(r)

    def deliver(self, s: int, r: int) -> None:
        """Move all messages from s to r into r's inbox, which r reads in its next step."""
        self.ranks[r].inbox += [(s, message) for message in self.links.pop((s, r), [])]

    @torch.no_grad()
    def settle(self) -> None:
        """Deliver all messages, and let every rank mix them."""
        while self.links or any(rank.inbox for rank in self.ranks):
            for s, r in list(self.links):
                self.deliver(s, r)
            for r in range(len(self.ranks)):
                self._read(r)
        for r in range(len(self.ranks)):
            self._mix(r)

    def _read(self, r: int) -> None:
        rank = self.ranks[r]
        for s, message in rank.inbox:
            if message.x is not None:
                rank.sent[message.t].y = message.x
                continue
            rank.h = max(rank.h, message.t)
            last = message.t if message.is_void else message.t - 1
            for t, sent in list(rank.sent.items()):
                if sent.s == s and not sent.agreed and t <= last:
                    del rank.sent[t]  # R12, R13
            if message.is_void:
                rank.void.add((s, message.t))
            elif message.t in rank.sent:
                self._agree(r, message.t)
            elif message.t >= rank.t:
                rank.ready.add((s, message.t))
        rank.inbox = []

    def _mix(self, r: int) -> None:
        """Apply R12, w_r <- w_r + a (y_s - x_r), to complete exchanges."""
        rank = self.ranks[r]
        for t, sent in sorted(rank.sent.items()):
            if sent.y is None:
                continue
            a = min(self.a, self.schedule.weight(t, r, default=self.a))
            for (i, key), v in self._values(r, t).items():
                y, x = (m.get((i, key), torch.zeros_like(v)) for m in (sent.y, sent.x))
                wide = torch.promote_types(v.dtype, torch.float32)
                add(v, y.to(wide) - x.to(wide), a, self.e[r][i] if key == "w" else None)
                if key in NON_NEGATIVE:  # R7
                    self.clamps += int((v < 0).sum())
                    v.clamp_(min=0)
            del rank.sent[t]

    def _open(self, r: int) -> None:
        rank = self.ranks[r]
        t, s = rank.t, self.schedule.peers(rank.t, r).send_to
        rank.t += 1
        rank.own += 1
        if s is None:
            return
        owes = any(sent.s == s and rank.own - sent.at > self.d for sent in rank.sent.values())
        if (s, t) in rank.void or len(rank.sent) > self.d or owes:  # R11
            self._void(r, t)
            return
        x = {
            key: v.to(self.wire_dtype or v.dtype, copy=True)
            for key, v in self._values(r, t).items()
        }
        rank.sent[t] = Sent(s, x, rank.own)
        self.links[r, s].append(Message(t))
        if (s, t) in rank.ready:
            self._agree(r, t)

    def _agree(self, r: int, t: int) -> None:
        sent = self.ranks[r].sent[t]
        sent.agreed = True
        self.links[r, sent.s].append(Message(t, sent.x))

    def _void(self, r: int, t: int) -> None:
        s = self.schedule.peers(t, r).send_to
        if s is not None:
            self.ranks[r].ready.discard((s, t))
            self.links[r, s].append(Message(t, is_void=True))

    def _values(self, r: int, t: int) -> Values:
        """Return the live tensors that rank r mixes in round t."""
        values: Values = {(i, "w"): w for i, w in enumerate(self.w[r])}
        if self.payload == "weights+state" and t % self.state_every == 0:  # R7
            values |= {
                (i, key): v
                for i, w in enumerate(self.w[r])
                for key, v in self.optimizers[r].state.get(w, {}).items()
                if key != "step" and isinstance(v, Tensor) and v.shape == w.shape
            }
        return values
