"""A session in which ranks that die are left behind, as the loop sees it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

import gossipgrad as gg
from gossipgrad.engine import Session
from gossipgrad.errors import EvictedError, GossipError
from gossipgrad.train._evaluate import Evaluation, TestPart, mean_of
from gossipgrad.train._result import PeerLostError

from ._island import IslandRanks
from ._stopping import RoundStop, StopFlag, first_beyond
from ._strategy import Replica, RunningStrategy, Traffic, alone, ring_bytes

TRIES = 3  # one that dies in the middle of each is not to be expected


class MissedError(GossipError):
    """The others are at a later evaluation: this one came about for them, and broke here."""

    def __init__(self, message: str, *, latest: float = 0) -> None:
        super().__init__(message)
        self.latest = latest


class Gossip(RunningStrategy):
    """A gossip session: one partner a step, in the background.

    When a rank dies the others train on, and the consensus is theirs. A rank that hung for so long
    that the others gave it up ends with an `EvictedError`.
    """

    replicas_differ = True

    def __init__(
        self,
        replica: Replica,
        session: Session,
        *,
        every: int,
        checkpoint_every: int | None = None,
        measures_disagreement: bool = False,
    ) -> None:
        super().__init__()
        self.model, self._session, self._joiner = replica.model, session, replica.joiner
        self.session, self.is_stale = session, isinstance(session.mode, gg.Stale)
        self._ranks = IslandRanks(replica)
        self._every, self._checkpoint_every = every, checkpoint_every
        self._measures_disagreement = measures_disagreement
        self._ahead = 0
        self._has_met = self._joiner is None
        self._reported: set[str] = set()
        self._stopper: RoundStop | None = None
        if checkpoint_every is not None and not self.is_stale:
            self._stopper = RoundStop(
                session.group, lambda: self._alive, lambda: session.round_number, self._beyond
            )
        self._flag: StopFlag | None = None
        self.membership_changes()  # of one that joins, what was before

    def agree(self, value: Any) -> list[Any]:
        values = self._ranks.agree(value)
        for _ in range(TRIES - 1):
            with suppress(GossipError):
                return [*chain(*self._session.agree(values))]
        return [*chain(*self._session.agree(values))]

    def no_sync(self) -> AbstractContextManager[None]:
        return self._session.no_sync()

    def traffic(self) -> Traffic:
        """What the session has counted, and what its exact averages have cost."""
        stats, world_size = self._session.stats(), self._session.world_size
        return Traffic(
            bytes_sent=stats.bytes_sent
            + ring_bytes(stats.averaged_bytes // self._ranks.size, world_size),
            exposed_seconds=stats.exposed_seconds + stats.averaging_seconds,
            mixing_seconds=stats.mixing_seconds,
            extra_memory_bytes=stats.extra_memory_bytes,
            consensus_distance_estimate=stats.consensus_distance_estimate,
            outcomes=dict(stats.outcomes),
            late_rounds=stats.late_rounds,
            void_rounds=stats.void_rounds,
        )

    def evaluate(self, test: TestPart, *, epoch: float, final: bool) -> Evaluation | None:
        """Evaluate the consensus of the living; this rank's replica if it leaves, or there is none.

        1. A rank that dies in the middle makes the others try again.
        2. One that joined as the others had come together already waits until they train on, and
           gets None; if this is its last evaluation, it waits for the one they come to next.
        """
        if self._joiner is not None and self._leaves:
            self.has_left = True
            self._joiner.flush()
            self._session.close()  # or the others' steps would wait
            return alone(self.model, test, final=True, is_consensus=False)
        problem = ""
        # In mode stale each of the others may come to save before it comes here.
        for _ in range(TRIES + self.is_stale * len(self._alive)):
            try:
                if not self._has_met and not final:
                    self._session.group.unless = self._train_on
                evaluation = self._evaluate_consensus(test, epoch=epoch, final=final)
                self._has_met = True
                return replace(evaluation, disagreement=self._disagreement(test))
            except (EvictedError, PeerLostError):
                raise
            except MissedError as error:
                problem = str(error)
                if self._has_met:
                    break
                if not final:
                    return None
                epoch = error.latest
            except GossipError as error:
                problem = str(error)
                self._ranks.agree(problem)  # raises if this island has ended
            finally:
                self._session.group.unless = lambda: None
        self.notes.append(f"no consensus: {problem}")
        return alone(self.model, test, final=final, is_consensus=False)

    def _evaluate_consensus(self, test: TestPart, *, epoch: float, final: bool) -> Evaluation:
        """Evaluate the consensus, shared out over the living ranks; a collective of these.

        Ranks may come here after unequal steps, some for the last time and some not: all then take
        it for the last. One at an earlier evaluation than others gets a `MissedError`, and these
        wait until it comes for theirs.
        """
        session, together = self._session, self._ranks.together
        while True:
            with session.consensus():
                group = session.group
                came = together(partial(group.all_gather_object, [epoch, final]))
                latest = max(other for other, _ in came)
                if epoch < latest:
                    raise MissedError(
                        f"the evaluation after {epoch:g} epochs broke on rank {group.rank}; others "
                        f"are at that after {latest:g}",
                        latest=latest,
                    )
                if any(other < latest for other, _ in came):
                    continue
                # The evaluation's sum is the last collective: where it comes about on some ranks
                # and breaks on others, none of the former waits in another one for the latter.
                distance = session.consensus_distance()
                share = test.sum_share(self.model, self._ranks.of(group.members))
                share = together(partial(group.all_reduce_, share))
                accuracy = mean_of(self._ranks.sum_(share))
                last = any(wanted for _, wanted in came)
                return Evaluation(
                    accuracy=accuracy,
                    is_consensus=True,
                    consensus_distance=distance,
                    final=last,
                    weights=test.weights(self.model, accuracy, final=last),
                )

    def _disagreement(self, test: TestPart) -> float | None:
        """That of predictions for the first samples; None if a rank is lost in it."""
        if not self._measures_disagreement:
            return None
        try:
            return self._session.disagreement(test.probe())
        except EvictedError:
            raise
        except GossipError as error:
            self.notes.append(f"no disagreement: {error}")
            return None

    def _train_on(self) -> None:
        """Ends the wait for others who have evaluated without this rank, and train on."""
        if self._joiner is not None and self._joiner.is_behind():
            raise MissedError(f"the others began without rank {self._session.rank}, and train on")

    @property
    def _leaves(self) -> bool:
        """Whether this rank leaves a run that others continue; the last one ends it."""
        if self._joiner is None or not self._joiner.leaves or self._joiner.is_over:
            return False
        return bool({*self._alive} - {self._session.rank} - self._session.unreachable.keys())

    @property
    def living(self) -> tuple[int, ...]:
        return self._ranks.of(self._alive)

    @property
    def _alive(self) -> tuple[int, ...]:
        """The replicas that live, by their numbers in the session."""
        return self._session.membership.living

    def checkpoint_label(self, steps: int) -> int:
        """The steps of the rounds up to here; in mode stale to where all come together to save."""
        if self.is_stale:
            every = self._checkpoint_every or 1
            return self.position(steps) // every * every
        if self._session.world_size == 1:
            return steps
        # Ranks that were stopped after unequal steps are in the same round when they continue.
        own = steps - self._ahead
        rounds = self._session.round_number // self._session.settings.exchanges
        return self._ahead + rounds * self._every + own % self._every

    def checkpoint_due(self, steps: int, every: int) -> bool:
        return self.is_stale or super().checkpoint_due(steps, every)

    def state_dict(self) -> dict[str, Any]:
        return {"ahead": self._ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ahead = state["ahead"]

    def skip_steps(self, steps: int) -> None:
        self._ahead = steps

    def should_stop(self, step: int, *, is_asked: bool) -> bool:
        """At once, or where there are checkpoints after as many steps as the others."""
        if not self._ranks.is_asked_to_stop(step, is_asked=is_asked):
            return False
        if self._leaves:
            return True
        if self._joiner is None and self._session.world_size > 1 and self._flag is None:
            self._flag = StopFlag(self._session.group.store)
            self._flag.set()  # nobody else tells those who joined
        if self._stopper is None:
            return True
        return any(self._ranks.agree(self._stopper.should_stop()))

    def position(self, steps: int) -> int:
        return self._ahead + self._session.position

    def _beyond(self, here: int) -> int:
        schedule = gg.topology.among(self._session.schedule, self._alive)
        return first_beyond(schedule, self._alive, here)

    def backward(self, loss: Tensor) -> None:
        self._ranks.guard(loss.backward)

    def lost_ranks(self) -> dict[str, dict[str, Any]]:
        """Who was lost, by the membership, or by this rank's own links if no store answers."""
        generation = self._session.membership.generation
        found = {
            replica: {"why": why, "generation": generation, "when_seconds": None}
            for replica, why in self._session.unreachable.items()
            if why != "left"
        }
        found |= {each: asdict(loss) for each, loss in self._session.membership.lost.items()}
        return {str(rank): how for one, how in found.items() for rank in self._ranks.of([one])}

    def joined_ranks(self) -> dict[str, dict[str, Any]]:
        return {
            str(rank): {
                "from_rank": how.donor,
                "generation": how.generation,
                "when_seconds": how.when_seconds,
            }
            for rank, how in self._session.membership.joined.items()
        }

    def membership_changes(self) -> list[str]:
        """Who has joined since this was last asked, and who of these has left or was lost."""
        of = self._session.membership
        said = [
            f"rank {rank} has joined, with the weights of rank {how.donor}"
            for rank, how in of.joined.items()
        ]
        said += [
            f"rank {rank} {'has left' if loss.left else f'is lost ({loss.why})'}"
            for rank, loss in of.gone.items()
            if rank in of.joined
        ]
        fresh = [text for text in said if text not in self._reported]
        self._reported |= {*fresh}
        return fresh

    def close(self) -> None:
        """Leave the session; partners skip this rank from now on."""
        for one in (self._stopper, self._flag, self._session):
            if one is not None:
                one.close()
