"""Ranks that share an epoch, as threads: they come, go and die by script."""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from gossipgrad.comm import Membership
from gossipgrad.data import ElasticBatches, TensorSamples
from support.waiting import HANG_SECONDS

__all__ = ["One", "Run", "let_go"]


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    """Ends every `Run` behind a test of the module that imports this."""
    yield
    Run.let_go()


class One:
    """A rank of a `Run`: what `ElasticBatches` see of a session."""

    def __init__(self, run: "Run", rank: int, membership: Membership) -> None:
        self.rank = rank
        self.membership = membership
        self.trained: dict[int, list[list[int]]] = {}  # samples in their order, by epoch
        self.has_left = False
        self.batches = ElasticBatches(
            samples=run.samples, member=self, store=run.store, **run.settings
        )
        self._iterators: dict[int, Iterator[Any]] = {}  # of the dead, too: they say nothing

    def step(self, epoch: int, *, start_batch: int = 0) -> bool:
        """One batch; whether there was one."""
        if epoch not in self._iterators:
            self._iterators[epoch] = self.batches.epoch(epoch, start_batch=start_batch)
        batch = next(self._iterators[epoch], None)
        if batch is not None:
            (of_epoch,) = batch[0].unique().tolist()
            self.trained.setdefault(of_epoch, []).append(batch[1].tolist())
        return batch is not None

    def finish(self, epoch: int) -> None:
        """The rest of an epoch."""
        while self.step(epoch):
            pass

    def leave(self) -> None:
        """In order: it tells what it has used."""
        self.has_left = True
        self._iterators.clear()
        self.batches.close()


class Run:
    """Ranks over one store."""

    made: ClassVar[list["Run"]] = []

    def __init__(
        self, samples: int, world_size: int, store: dist.Store | None = None, **settings: Any
    ) -> None:
        self.samples = TensorSamples(
            torch.zeros(samples, 1), torch.arange(samples), augmentation=_epoch_of
        )
        self.store = dist.HashStore() if store is None else store
        usual = {"batch_size": 2, "seed": 3, "chunk_batches": 2, "patience_seconds": HANG_SECONDS}
        self.settings = {**usual, **settings}
        self.settings["world_size"] = world_size
        self.membership = Membership(generation=0, living=tuple(range(world_size)))
        self.ranks: dict[int, One] = {}
        for rank in range(world_size):
            self.add(rank)
        Run.made.append(self)

    @classmethod
    def let_go(cls) -> None:
        """Ends what was made, the dead included: later their iterators would end at any time."""
        for run in cls.made:
            for one in run.ranks.values():
                one.leave()
        cls.made.clear()

    def add(self, rank: int) -> One:
        """A rank that takes part from now on, by what it knows itself."""
        self.ranks[rank] = One(self, rank, self.membership)
        return self.ranks[rank]

    def change(self, *living: int, known_to: tuple[int, ...] | None = None) -> None:
        """The next generation; all of them learn of it, or some, others by `learn`."""
        number = self.membership.generation + 1
        self.membership = Membership(generation=number, living=living)
        for rank in living:
            if rank not in self.ranks:
                self.add(rank)
        self.learn(*(living if known_to is None else known_to))

    def learn(self, *ranks: int) -> None:
        """Some ranks take up the newest generation."""
        for rank in ranks:
            self.ranks[rank].membership = self.membership

    def settle(self) -> None:
        """Waits until the store has what was reported and asked so far: it answers in order."""
        for one in self.ranks.values():
            if not one.has_left:
                one.batches.newest_epoch()

    def in_turn(self, *ranks: int, epoch: int, steps: int | None = None) -> dict[int, int]:
        """Some ranks make so many steps each, or all that there are, in step with each other."""
        made, left = dict.fromkeys(ranks, 0), list(ranks)
        while left:
            for rank in list(left):
                if made[rank] == steps or not self.ranks[rank].step(epoch):
                    left.remove(rank)
                else:
                    made[rank] += 1
        return made

    def together(self, *ranks: int, epoch: int, steps: int | None = None) -> None:
        """The same in threads, each at its own speed."""
        errors: list[BaseException] = []

        def train(one: One) -> None:
            made = 0
            try:
                while (steps is None or made < steps) and one.step(epoch):
                    made += 1
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=train, args=(self.ranks[rank],), daemon=True) for rank in ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"

    def times(self, epoch: int, *ranks: int) -> Counter[int]:
        """How often each sample of an epoch was trained on, by all ranks or some."""
        return Counter(
            sample
            for rank in ranks or self.ranks
            for batch in self.ranks[rank].trained.get(epoch, [])
            for sample in batch
        )

    def total(self, figure: str, *ranks: int) -> int:
        """A figure of `stats`, summed over all ranks or some."""
        return sum(
            getattr(self.ranks[rank].batches.stats(), figure) for rank in ranks or self.ranks
        )


def _epoch_of(rows: Any, indices: Any, draw: tuple[int, int]) -> Any:
    return rows + draw[1]
