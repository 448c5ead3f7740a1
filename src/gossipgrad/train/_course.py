"""Where a run is: what its length, its epochs and its learning rate go by."""

from collections.abc import Mapping
from typing import Any

from gossipgrad.data import ElasticBatches

from ._batches import Batches
from .strategies import RunningStrategy


class Course:
    """The position of a run, in steps of a rank had nobody come or gone.

    It is that of the strategy: this rank's steps, or in mode stale those of all rounds. In epochs
    in which ranks came or went it is the share of the epoch that all together have done; such an
    epoch ends for a rank when there is nothing left of it to train on.

    Args:
        strategy: Counts steps, or rounds.
        batches: Know what is done of an epoch, if they are dealt anew.
        resumed: The metrics of the place where the run goes on, if it is resumed.
    """

    def __init__(
        self, strategy: RunningStrategy, batches: Batches, resumed: Mapping[str, Any] | None = None
    ) -> None:
        self._strategy = strategy
        self._batches = batches
        self._epoch = self._last = self._ahead = 0
        if resumed is not None:
            position = strategy.position(resumed["steps"])
            self._last = resumed.get("position", position)
            self._ahead = self._last - position

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins, or what is left of it."""
        self._epoch = epoch

    def position(self, steps: int) -> int:
        """Where the run is, for a rank that has made so many steps."""
        if (elastic := self._disturbed(self._epoch)) is not None:
            position = elastic.position
        else:
            position = self._strategy.position(steps) + self._ahead
        self._last = max(self._last, position)
        return self._last

    def is_over(self, steps: int) -> bool:
        """Whether the epoch is known to be over without a look at its batches."""
        if self._disturbed(self._epoch) is not None:
            return False
        return self.position(steps) >= (self._epoch + 1) * len(self._batches)

    def end_epoch(self, steps: int) -> None:
        """The epoch is over, after however many steps of this rank."""
        end = (self._epoch + 1) * len(self._batches)
        if self._disturbed(self._epoch) is not None:
            self._ahead = end - self._strategy.position(steps)
            self._last = max(self._last, end)

    def batch(self, epoch: int, batch: int) -> int:
        """How far an epoch is, in batches of a share, where this rank has made `batch` of it."""
        if (elastic := self._disturbed(epoch)) is None:
            return batch
        return max(0, elastic.position - epoch * len(self._batches))

    def _disturbed(self, epoch: int) -> ElasticBatches | None:
        """The batches, where ranks came or went in an epoch."""
        batches = self._batches
        if isinstance(batches, ElasticBatches) and batches.is_disturbed(epoch):
            return batches
        return None
