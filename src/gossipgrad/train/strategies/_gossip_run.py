"""A gossip session, as the loop sees it."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import gossipgrad as gg
from gossipgrad.engine import Session
from gossipgrad.errors import EvictedError, GossipError
from gossipgrad.train._evaluate import Evaluation, TestPart

from ._consensus import TRIES, InSession, MissedError, consensus_evaluation
from ._stopping import RoundStop, StopFlag, first_beyond
from ._strategy import Replica, alone


class Gossip(InSession):
    """A gossip session: one partner a step, in the background.

    When a rank dies the others train on, and the consensus is theirs. One that dies in the middle
    of a consensus makes the others try again; if that fails, each evaluates its own replica, as
    does one whose evaluation came about on the others alone. A rank that joins while the others
    evaluate waits until they train on, and goes on with them. A rank that hung for so long
    that the others gave it up ends with an `EvictedError`.
    """

    def __init__(
        self,
        replica: Replica,
        session: Session,
        *,
        every: int,
        checkpoint_every: int | None = None,
        measures_disagreement: bool = False,
    ) -> None:
        super().__init__(replica.model, session)
        self._ahead = 0
        self._joiner = replica.joiner
        self._has_left = False
        self._measures_disagreement = measures_disagreement
        self._has_met = self._joiner is None
        self._reported: set[str] = set()
        self._every = every
        self._stopper: RoundStop | None = None
        self._checkpoint_every = checkpoint_every
        if checkpoint_every is not None and not self.is_stale:
            self._stopper = RoundStop(
                self._session.group,
                lambda: self.living,
                lambda: self._session.round_number,
                self._beyond,
            )
        self._word: StopFlag | None = None
        self.membership_changes()  # of one that joins, what was before

    def evaluate(self, test: TestPart, *, epoch: float, final: bool) -> Evaluation | None:
        """Evaluate the consensus of the living, shared out over them.

        One that leaves the run before its end evaluates its own replica, when it has left. One that
        joined as the others had come together already takes part in the evaluation that they come
        to next if this is to be the last; else it gets None once they train on, and does, too.
        """
        if self._joiner is not None and self._leaves:
            self._has_left = True
            self._joiner.flush()
            self._session.close()  # or the others' steps would wait
            return alone(self.model, test, final=True, is_consensus=False)
        problem = ""
        for _ in range(TRIES):
            try:
                if not self._has_met and not final:
                    self._session.group.unless = self._train_on
                evaluation = consensus_evaluation(
                    self._session, self.model, test, epoch=epoch, final=final
                )
                self._has_met = True
                return replace(evaluation, disagreement=self._disagreement(test))
            except EvictedError:
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
            finally:
                self._session.group.unless = lambda: None
        self.notes.append(f"no consensus: {problem}")
        return alone(self.model, test, final=final, is_consensus=False)

    def _disagreement(self, test: TestPart) -> float | None:
        """That of predictions for the first samples; None if a rank is lost meanwhile."""
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
    def is_stale(self) -> bool:
        """Whether the mode is stale."""
        return isinstance(self._session.mode, gg.Stale)

    @property
    def _leaves(self) -> bool:
        """Whether this rank leaves a run that others go on with; the last one ends it."""
        return self._joiner is not None and self._joiner.leaves and not self._is_alone()

    def _is_alone(self) -> bool:
        """Whether nobody else trains any more, as far as this rank knows."""
        others = {*self.living} - {self._session.rank} - self._session.unreachable.keys()
        return not others or (self._joiner is not None and self._joiner.is_over)

    @property
    def has_left(self) -> bool:
        """Whether this rank has left the run that it had joined, and the others go on."""
        return self._has_left

    @property
    def living(self) -> tuple[int, ...]:
        """The members of this rank's generation."""
        return self._session.membership.living

    def checkpoint_label(self, steps: int) -> int:
        """The steps of the rounds up to here; in mode stale to where all come together to save.

        Ranks that were stopped after unequal steps stand in the same round when they go on.
        """
        if self.is_stale:
            every = self._checkpoint_every or 1
            return self.position(steps) // every * every
        if self._session.world_size == 1:
            return steps
        own = steps - self._ahead
        return self._ahead + self._session.round_number * self._every + own % self._every

    def checkpoint_due(self, steps: int, every: int) -> bool:
        """After so many steps, or in mode stale as soon as there is a new label."""
        return self.is_stale or super().checkpoint_due(steps, every)

    def state_dict(self) -> dict[str, Any]:
        """Steps before this session."""
        return {"ahead": self._ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self._ahead = state["ahead"]

    def skip_steps(self, steps: int) -> None:
        """Count the steps that were made before this session."""
        self._ahead = steps

    def should_stop(self, step: int, *, is_asked: bool) -> bool:
        """At once, or where there are checkpoints after as many steps as the others.

        Those who joined the run have nobody else who tells them.
        """
        if not is_asked:
            return False
        if self._leaves:
            return True
        if self._joiner is None and self._session.world_size > 1 and self._word is None:
            self._word = StopFlag(self._session.group.store)
            self._word.set()
        return self._stopper is None or self._stopper.should_stop()

    def position(self, steps: int) -> int:
        """In mode stale the rounds of the session; see `RunningStrategy.position`."""
        return self._ahead + self._session.position

    def _beyond(self, here: int) -> int:
        schedule = gg.topology.among(self._session.schedule, self.living)
        return first_beyond(schedule, self.living, here)

    def lost_ranks(self) -> dict[str, dict[str, Any]]:
        """Who was lost, by the membership, or by this rank's own links if no store answers."""
        generation = self._session.membership.generation
        unreachable = {
            str(rank): {"why": why, "generation": generation, "when_seconds": None}
            for rank, why in self._session.unreachable.items()
            if why != "left"
        }
        lost = self._session.membership.lost
        return unreachable | {str(rank): asdict(loss) for rank, loss in lost.items()}

    def joined_ranks(self) -> dict[str, dict[str, Any]]:
        """Who has joined, by the membership."""
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
        for rank, loss in of.gone.items():
            if rank in of.joined:
                said.append(
                    f"rank {rank} " + ("has left" if loss.left else f"is lost ({loss.why})")
                )
        fresh = [text for text in said if text not in self._reported]
        self._reported |= {*fresh}
        return fresh

    def close(self) -> None:
        """Leave the session; partners skip this rank from now on."""
        if self._stopper is not None:
            self._stopper.close()
        if self._word is not None:
            self._word.close()
        super().close()
