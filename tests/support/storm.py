"""Faults between ranks that are threads: a script by seed, and the transport it befalls."""

import math
import random
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from gossipgrad.comm import Header, Kind, Lost, Received, Ticket, Transport

__all__ = ["DeadError", "Fault", "Storm", "StormyTransport", "draw_storm"]

STEPS = 24
_MOMENTS = ("between", "exchange")
_DEADLINES_SECONDS = (0.04, 30.0)
_LOOK_SECONDS = 0.05  # how often one that waits looks whether it is dead


class DeadError(Exception):
    """The script has killed this rank."""


@dataclass(frozen=True)
class Fault:
    """Befalls `ranks` when the first of them is at its step or exchange of this number.

    `kill` ends all of them at once, `pause` holds everything of them up, `cut` holds up what goes
    between two of them, in order, as TCP does.
    """

    kind: str
    ranks: tuple[int, ...]
    moment: str
    step: int
    seconds: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.seconds} s" if self.seconds else ""
        where = "before step" if self.moment == "between" else "in exchange"
        return f"{self.kind} {self.ranks}{lasts} {where} {self.step}"


@dataclass
class Storm:
    """A script, the same object for all ranks, and where it stands."""

    world_size: int
    topology: str
    mode: str
    patience_seconds: float
    faults: tuple[Fault, ...]
    dead: set[int] = field(default_factory=set)
    _begun: set[Fault] = field(default_factory=set)
    _held: dict[frozenset[int], float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        what = "; ".join(map(str, self.faults))
        mode = f"{self.mode} up to {self.patience_seconds} s"
        return f"{self.world_size} ranks, {self.topology}, {mode}: {what}"

    @property
    def killed(self) -> set[int]:
        """Ranks that are to die."""
        return {r for fault in self.faults if fault.kind == "kill" for r in fault.ranks}

    def reach(self, rank: int, moment: str, step: int) -> None:
        """`rank` is at a moment; what is to happen there happens."""
        for fault in self.faults:
            if fault.ranks[0] != rank or fault.moment != moment or step < fault.step:
                continue
            with self._lock:
                if fault in self._begun:
                    continue
                self._begun.add(fault)
                if fault.kind == "kill":
                    self.dead.update(fault.ranks)
                else:
                    held = [{r} for r in fault.ranks] if fault.kind == "pause" else [fault.ranks]
                    for ranks in held:
                        self._held[frozenset(ranks)] = time.monotonic() + fault.seconds
        self.wait_while_paused(rank)

    def wait_while_paused(self, rank: int) -> None:
        """Returns when nothing holds `rank` up."""
        while (left := self.held_seconds(rank)) > 0 and rank not in self.dead:
            time.sleep(left)
        if rank in self.dead:
            raise DeadError(f"rank {rank}")

    def part(self, one: Collection[int], other: Collection[int]) -> None:
        """From now on, until `heal`, nothing passes between two groups of ranks."""
        for a in one:
            for b in other:
                self._held[frozenset((a, b))] = math.inf

    def heal(self) -> None:
        """What was held up passes, in order."""
        self._held.clear()

    def held_seconds(self, *ranks: int) -> float:
        """How long a rank, or what goes between two, is held up from now on."""
        return self._held.get(frozenset(ranks), 0.0) - time.monotonic()


def draw_storm(seed: int, modes: tuple[str, ...]) -> Storm:
    """The storm of a seed: one to three faults."""
    rng = random.Random(seed)
    p = rng.choice((3, 4, 5, 6))
    mode = modes[seed % len(modes)]
    topologies = ["matching"] + ["hypercube"] * (p == 4)
    faults = [_draw_fault(rng, p) for _ in range(rng.choice((1, 2, 3)))]
    if mode != "stale" and not any(fault.kind == "kill" for fault in faults):
        topologies.append("dissemination")  # keeps the mean as long as all live and nobody is late
    topology = rng.choice(topologies)
    patience_seconds = 30.0 if topology == "dissemination" else rng.choice(_DEADLINES_SECONDS)
    return Storm(p, topology, mode, patience_seconds, tuple(faults))


def _draw_fault(rng: random.Random, world_size: int) -> Fault:
    kind = rng.choice(("kill", "kill", "pause", "cut"))
    count = {"kill": rng.choice((1, 1, 2, world_size // 2, world_size - 1)), "cut": 2}.get(kind, 1)
    return Fault(
        kind=kind,
        ranks=tuple(rng.sample(range(world_size), count)),
        moment=rng.choice(_MOMENTS),
        step=rng.randrange(2, STEPS - 4),
        seconds=0.0 if kind == "kill" else round(rng.uniform(0.02, 0.25), 3),
    )


class StormyTransport:
    """One rank's transport in a storm."""

    def __init__(self, inner: Transport, storm: Storm) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self._inner = inner
        self._storm = storm
        self._late: list[Received | Lost] = []
        self._receiving = threading.Lock()
        self._ended = False
        self._told: set[int] = set()  # threads that have heard of this rank's death

    def open(self, peer: int) -> None:
        if not self._ended:
            self._inner.open(peer)

    def send(
        self,
        peer: int,
        header: bytes,
        payload: Tensor | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        what = Header.unpack(header)
        if what.kind is Kind.DATA and not self._ended:
            self.reach("exchange", what.round)
        elif not self._alive():
            if ticket is not None:
                ticket.done = True
            return
        self._inner.send(peer, header, payload, ticket)

    def receive(self, timeout_seconds: float) -> list[Received | Lost]:
        """What has come; of a link that is cut, when it is no more."""
        deadline = time.monotonic() + timeout_seconds
        with self._receiving:
            while self._alive():
                wait = min(
                    [deadline - time.monotonic(), _LOOK_SECONDS, *map(self._held, self._late)]
                )
                self._late += self._inner.receive(max(0.0, wait))
                # Looked at once a link: what came later must not overtake.
                held = {_peer(event) for event in self._late if self._held(event) > 0}
                ready = [event for event in self._late if _peer(event) not in held]
                self._late = [event for event in self._late if _peer(event) in held]
                if ready or time.monotonic() >= deadline:
                    return ready
        time.sleep(min(timeout_seconds, _LOOK_SECONDS))
        return []

    def forget(self, peer: int) -> None:
        if not self._ended:
            self._inner.forget(peer)

    def close(self, linger_seconds: float = 0.0) -> None:
        if not self._ended:
            self._inner.close(linger_seconds)

    def reach(self, moment: str, step: int) -> None:
        """This rank is at a moment; see `Storm.reach`."""
        try:
            self._storm.reach(self.rank, moment, step)
        except DeadError:
            self.die()
            self._told.add(threading.get_ident())
            raise

    def die(self) -> None:
        """Ends without a word, as a process that is killed; what it sends from now on is not."""
        self._ended = True
        self._inner.close(0.0)

    def _alive(self) -> bool:
        """Whether this rank lives, once nothing holds it up."""
        try:
            self._storm.wait_while_paused(self.rank)
        except DeadError:
            self.die()
            if threading.get_ident() not in self._told:
                self._told.add(threading.get_ident())
                raise
        return not self._ended

    def _held(self, event: Received | Lost) -> float:
        return self._storm.held_seconds(self.rank, _peer(event))


def _peer(event: Received | Lost) -> int:
    return event.peer if isinstance(event, Lost) else Header.unpack(event.header).sender
