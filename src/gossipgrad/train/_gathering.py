"""How the ranks of a given world come together, and do not wait for those who do not come."""

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.comm import AskedStore, Heartbeats, Loss, Membership, MemberWatch
from gossipgrad.errors import EvictedError, GossipError

T = TypeVar("T")

# One that lives may fetch a data set first.
_LIVING_SECONDS = 1800.0
_POLL_SECONDS = 0.05
# By when it is known that somebody has died whom others miss.
_KNOWN_SECONDS = 15.0


class StartAgainError(GossipError):
    """Another rank has gone back to the start, because one was lost on the way."""


class Gathering:
    """The start of a run: who comes, who opens it, and who is not awaited any more.

    From when it is made until the first step this rank shows signs of life, and watches the others.
    One that has shown some and falls silent is dead, or stands still, and is given up after
    `heartbeats.silent_seconds`; one that never has may be late, and is awaited for `start_seconds`
    first. All learn of it from one record in the store, so that those who are left start with the
    same members: a generation of them. One that is lost between that and the first step makes the
    others start again, in the next generation.

    Args:
        store: The store of the world.
        rank: This rank.
        world_size: How many ranks were started.
        start_seconds: How long one is awaited that was never heard of.
        heartbeats: How ranks watch over each other.

    Raises:
        GossipError: The store cannot be reached.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        start_seconds: float,
        heartbeats: Heartbeats,
    ) -> None:
        self._rank = rank
        self._known_seconds = _KNOWN_SECONDS + heartbeats.silent_seconds
        self._asked = AskedStore(store)
        coming = _Coming(store, time.monotonic() + start_seconds)
        self._over = False

        def watch(_: dist.Store) -> MemberWatch:
            made = MemberWatch(
                coming.connect(),
                rank,
                Membership.first(world_size),
                heartbeats,
                reconnect=coming.connect,
            )
            made.beat()  # one who comes late knows from the outset who has been given up
            return made

        self._watch: MemberWatch = self._ask(watch)
        self._watch.start()

    def close(self) -> None:
        """Show no more signs of life here; whoever still waits for this rank gives it up."""
        self._over = True
        self._watch.stop()

    def gone(self) -> Mapping[int, Loss]:
        """Who was given up before the first step, and why; local, nobody after that."""
        return {} if self._over else self._watch.latest.gone

    def open(self, make: Callable[[bool], Any]) -> Any:
        """What the opener says of the run: the lowest rank, or the next one if that is lost.

        Args:
            make: Called on the opener, with whether another had begun to open the run; its plain
                value is what all get, None if it raises.

        Raises:
            GossipError: Nobody opens it, or this rank was given up meanwhile.
        """
        deadline = time.monotonic() + _LIVING_SECONDS
        while not self._ask(lambda store: store.check(["run"])):
            living = self._living()
            if self._rank == min(living) and (before := self._opens(living)) is not None:
                said = json.dumps(None)
                try:
                    said = json.dumps(make(before != ""))
                finally:
                    # One that was given up over this does not undo what its successor opened.
                    self._ask(lambda store, said=said: store.compare_set("run", "", said))
                self._living()
                break
            if time.monotonic() > deadline:
                raise GossipError(
                    f"rank {self._rank} waited {_LIVING_SECONDS:g} s for rank {min(living)} to "
                    "say what is run; look there for what went wrong"
                )
            time.sleep(_POLL_SECONDS)
        return json.loads(self._ask(lambda store: store.get("run")))

    def meet(self) -> Membership:
        """Wait until every rank that lives is here, having loaded its data.

        Raises:
            GossipError: A rank has failed, or one that lives is missing for too long; the message
                names it.
            EvictedError: The others have given this rank up.
        """
        self._ask(lambda store: store.set(f"here{self._rank}", ""))
        deadline = time.monotonic() + _LIVING_SECONDS
        while True:
            if self._ask(lambda store: store.check(["failed"])):
                raise GossipError(self._ask(lambda store: store.get("failed")).decode())
            self._living()
            latest = self._watch.latest
            if self._all_here(latest.living):
                return latest
            if time.monotonic() > deadline:
                missing = [rank for rank in latest.living if not self._all_here((rank,))]
                which = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                raise GossipError(
                    f"rank {self._rank} waited {_LIVING_SECONDS:g} s for {which} to be ready to "
                    "train; look there for what went wrong"
                )
            time.sleep(_POLL_SECONDS)

    def fail(self, cause: str) -> None:
        """Tell those who are still at the start that this rank has failed, so that they end."""
        with contextlib.suppress(GossipError):
            self._ask(lambda store: store.set("failed", f"rank {self._rank} {cause}"))

    def begin(self, generation: int) -> None:
        """Begin to train with the members of a generation; the start is over then.

        Raises:
            StartAgainError: Another of them has gone back to the start.
        """
        if self._settle(generation, "begun") != "begun":
            raise StartAgainError("another rank has gone back to the start")
        self.close()

    def starts_again(self, generation: int) -> bool:
        """Whether those who are left of a generation start again, without one that was lost.

        Else the start has failed for another reason, or others have begun to train.
        """
        deadline = time.monotonic() + self._known_seconds
        while self._watch.latest.generation == generation:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return self._settle(generation, "again") == "again"

    def _settle(self, generation: int, word: str) -> str:
        """How the start of a generation has ended: whoever says it first decides."""
        key = f"start{generation}"
        return self._ask(lambda store: store.compare_set(key, "", word)).decode()

    def _all_here(self, ranks: Collection[int]) -> bool:
        return self._ask(lambda store: store.check([f"here{rank}" for rank in ranks]))

    def _opens(self, living: Collection[int]) -> str | None:
        """Whom this rank takes the place of in opening the run, "" for none; None if it may not."""
        before = ""
        while True:
            said = self._ask(
                lambda store, before=before: store.compare_set("opener", before, str(self._rank))
            ).decode()
            if said == str(self._rank):
                return before
            if said == before or int(said) in living:
                return None
            before = said

    def _living(self) -> tuple[int, ...]:
        """Who is not given up, this rank among them."""
        latest = self._watch.latest
        if (loss := latest.gone.get(self._rank)) is not None:
            raise EvictedError(
                f"rank {self._rank} was given up by rank {loss.by} before the start ({loss.why}): "
                "the others start without it"
            )
        return latest.living

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        try:
            return self._asked.ask(question)
        except RuntimeError as error:
            raise GossipError(
                f"rank {self._rank} cannot reach the rendezvous store any more: has the process "
                f"that holds it failed, rank 0 by default? ({first_line(error)})"
            ) from error


class _Coming:
    """The store as a watch at the start sees it: one never heard of may be on its way."""

    def __init__(self, store: dist.Store, until_seconds: float) -> None:
        self._store = store
        self._until_seconds = until_seconds
        self._looks = 0

    def connect(self) -> "_Coming":
        """The same over a new connection."""
        store = dist.PrefixStore("start", self._store.clone())  # pyrefly: ignore[missing-attribute]
        return _Coming(store, self._until_seconds)

    def set(self, key: str, value: str) -> object:
        """Writes."""
        return self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Reads; for what nobody has written yet, another answer each time until it is time."""
        if self._store.check([key]):
            return self._store.get(key)
        self._looks += time.monotonic() < self._until_seconds
        return f"not come {self._looks}".encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes if what is there is as expected; returns what is there then."""
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Forgets a key."""
        return self._store.delete_key(key)
