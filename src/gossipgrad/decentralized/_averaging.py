"""The exact average over all ranks: collectives that gossip does not need, but users do."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from gossipgrad.comm import Group, Recorder, distance_to_mean, mean_buffers
from gossipgrad.decentralized._members import Members
from gossipgrad.decentralized._rounds import TOGETHER_SECONDS, Rounds
from gossipgrad.decentralized._section import Section
from gossipgrad.decentralized._sections import Sections
from gossipgrad.errors import EvictedError, GossipError, ReplicaChangedError

__all__ = ["Averaging"]

logger = logging.getLogger(__name__)

Kind = Literal[
    "consensus", "average", "distance", "broadcast", "periodic", "settle", "load", "agree"
]
_TRIES = 4  # what breaks on one rank alone it may do again before it comes where the others are


class CameForOtherError(GossipError):
    """The ranks came together for different things."""


class Averaging:
    """Brings all ranks together and averages sections.

    Ranks may come with unequal step counts. Each says what it came for; a rank that came for the
    periodic average while another is already at a collective of the user's goes on training
    instead of waiting, and the other one waits on.

    All ranks are those that live. When one is lost on the way to a collective, the others meet
    again without it; when it is lost in the middle, they get an error, and may call again.

    Args:
        group: Where the collectives run.
        members: Which generation that is among.
        rounds: Whose rounds are brought to the same number; None if there are no partners.
        joins: Whether this rank has joined others, who may have come to collectives before.

    Attributes:
        last_distance: The consensus distance when it was last computed, None before.
        averages: How often all replicas were made the average.
        averaged_bytes: What was averaged then, all times together.
        seconds: Spent in periodic averages, the wait for other ranks included.
    """

    def __init__(
        self, group: Group, members: Members, rounds: Rounds | None, *, joins: bool = False
    ) -> None:
        self.last_distance: float | None = None
        self.averages = 0
        self.averaged_bytes = 0
        self.seconds = 0.0
        self._group = group
        self._members = members
        self._rounds = rounds
        self._joins = joins
        self._failed_in: int | None = None
        self._number = 0  # of the collective of the user's that this rank is at

    def meet(self, kind: Kind, changed: str | None = None) -> bool:
        """Waits for all ranks; False if the others came for something that this one must not.

        Args:
            kind: What this rank came for.
            changed: The message if this rank's replica was changed behind the session's back.

        Raises:
            GossipError: If a rank has gone that is not known to be lost, the ranks came for
                different things, or others are at a later collective: this one broke there.
            EvictedError: If the others have given this rank up.
            ReplicaChangedError: On every rank, if one's replica was changed.
        """
        rounds = self._rounds
        if rounds is None:
            return True
        if kind != "periodic":
            self._number += 1
        while True:
            self._members.take_up(rounds)
            mine = [kind, rounds.next_round, rounds.channel.settle(), changed, self._number]
            try:
                views = self._group.all_gather_object(mine, meets=True)
            except GossipError:
                rounds.channel.unsettle()
                if self._group.broken is not None and self._members.changed():
                    continue  # nothing was done yet: the living meet again
                raise
            except BaseException:  # Ctrl-C too must not leave partners waiting for us
                rounds.channel.unsettle()
                raise
            rounds.next_round = max(view[1] for view in views)
            came = dict(zip(self._group.members, views, strict=True))
            settled = {rank: view[2] for rank, view in came.items()}
            rounds.channel.resume(settled, rounds.next_round)
            kinds = [view[0] for view in views]
            if kind == "periodic":
                return set(kinds) == {"periodic"}
            if "periodic" in kinds:
                continue  # those train on, and come for the same as this rank in the end
            ahead = max(came, key=lambda rank: came[rank][4])
            behind = sorted(rank for rank in came if came[rank][4] < came[ahead][4])
            if self._joins and self._number < came[ahead][4]:
                self._number = came[ahead][4]
                continue  # and the others, who see that this rank is behind, come again
            self._joins = False
            if self._number < came[ahead][4]:
                missed, self._number = self._number, came[ahead][4] - 1
                raise GossipError(
                    f"rank {ahead} is at collective {came[ahead][4]} of the session and rank "
                    f"{self._group.rank} at {missed}: it broke there. Nothing was changed; call "
                    "it again, or go on: ranks that are ahead wait for the next one"
                )
            if behind:
                continue  # they are told so, and come again
            for rank, view in came.items():
                if view[3] is not None:
                    raise ReplicaChangedError(f"on rank {rank}: {view[3]}")
            if len(set(kinds)) > 1:
                said = ", ".join(f"rank {rank} for {view[0]}" for rank, view in came.items())
                raise CameForOtherError(
                    f"the ranks came together for different things: {said}. Call the same "
                    "collective of the session on every rank, in the same order"
                )
            return True

    def periodically(self, sections: Sections, step: int, recorder: Recorder | None) -> bool:
        """The average that is due in a step, if it can be had; whether it was made.

        Once it failed there is none any more, until another generation is taken up.
        """
        if self._failed_in == self._members.current.generation:
            return False
        start, made = time.perf_counter(), False
        try:
            made = self.meet("periodic")
            if made:
                self.average(sections)
        except EvictedError:
            raise
        except GossipError as error:
            self._failed_in = self._members.current.generation
            rank = self._group.rank
            logger.warning(
                "rank %d: no periodic average before the membership changes: %s", rank, error
            )
        end = time.perf_counter()
        self.seconds += end - start
        if recorder is not None:
            recorder.span("average", start, end, step=step)
        return made

    def agree(self, value: Any) -> list[Any]:
        """What every rank that lives brings, by rank; see `meet` for what is raised.

        A rank whose last collective broke on it alone, and which does that again, is awaited.
        """
        json.dumps(value)  # before others are told to come
        for left in reversed(range(_TRIES)):
            try:
                self.meet("agree")
                break
            except CameForOtherError:
                if left == 0:
                    raise
        return self._group.all_gather_object(value)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, all ranks do the same: one that cannot finish breaks it for all, at once."""
        try:
            yield
        except GossipError:
            raise
        except BaseException:
            self._group.abandon()
            raise

    def average(self, sections: Sections) -> None:
        """Mixes what is outstanding, then makes weights and state the exact average everywhere."""
        averaged = [*sections.weights, *sections.state]
        with self.together():
            if self._rounds is not None:
                self._rounds.settle(TOGETHER_SECONDS)  # what is late, too
            means = [self._mean(section.totals()) for section in averaged]
            self._measure(sections.weights, means[: len(sections.weights)])
        for section, flats in zip(averaged, means, strict=True):
            section.load(flats)
        self.averages += 1
        self.averaged_bytes += sum(flat.nbytes for flats in means for flat in flats)

    def consensus(self, weights: Sequence[Section]) -> list[list[Tensor]]:
        """The exact average of the weights, flat, a list a section; changes nothing."""
        with self.together():
            means = [self._mean(self._settled(section)) for section in weights]
            self._measure(weights, means)
        return means

    @contextmanager
    def mean_buffers(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's floating buffers (BatchNorm's statistics) are their mean."""
        with ExitStack() as shown:
            with self.together():
                shown.enter_context(mean_buffers(model, self._group.mean_))
            yield

    def _mean(self, flats: list[Tensor]) -> list[Tensor]:
        return [self._group.mean_(flat) for flat in flats]

    def _settled(self, section: Section) -> list[Tensor]:
        """A section's totals with what is outstanding added, and nothing changed."""
        flats = section.totals()
        for transfer in self._rounds.under_way if self._rounds is not None else ():
            if transfer.section is not section or self._rounds is None:
                continue
            transfer.await_parts(time.perf_counter() + TOGETHER_SECONDS)
            for bucket in transfer.exchanges:
                if bucket not in transfer.taken:
                    delta = transfer.delta(bucket)
                    if delta is not None:
                        delta.add_to(flats[bucket], self._rounds.weight(transfer))
        return flats

    def _measure(self, weights: Sequence[Section], means: Sequence[Sequence[Tensor]]) -> None:
        """Root mean square over the ranks of the distance between weights and their mean."""
        pairs = (
            pair
            for section, flats in zip(weights, means, strict=True)
            for pair in zip(section.totals(), flats, strict=True)
        )
        self.last_distance = distance_to_mean(pairs, self._group.mean_)
