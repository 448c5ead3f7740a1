"""Samples that are assigned again when ranks come or go: none is lost, and few are repeated."""

import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from gossipgrad.comm import Membership
from gossipgrad.data import ElasticBatches, ShardedBatches, TensorSamples
from gossipgrad.errors import EvictedError
from support.hanging_store import Hanging
from support.waiting import HANG_SECONDS, until


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


def tcp_store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))


def sharded(run, rank, epoch, **kwargs):
    settings = {name: run.settings[name] for name in ("batch_size", "seed", "world_size")}
    batches = ShardedBatches(samples=run.samples, rank=rank, **settings)
    return [y.tolist() for _, y in batches.epoch(epoch, **kwargs)]


def once(samples):
    return dict.fromkeys(range(samples), 1)


def check_whole(run, epoch, samples, *, repeated):
    """Every sample of an epoch was used, and so many at most were repeated."""
    times = run.times(epoch)
    assert len(times) == samples
    assert times.total() - samples <= repeated


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("samples", [64, 67])
def test_undisturbed_they_are_those_of_sharded_batches(samples, threads):
    run = Run(samples, 3, threads=threads)
    for epoch in range(3):
        run.in_turn(0, 1, 2, epoch=epoch)
        for rank, one in run.ranks.items():
            assert one.trained[epoch] == sharded(run, rank, epoch)
            assert one.batches.position == (epoch + 1) * len(one.batches)
            assert len(one.trained[epoch]) == len(one.batches)
    assert run.total("samples_of_other_shares") == run.total("disturbed_epochs") == 0
    assert run.total("samples") == 3 * 3 * (samples // 3)


def test_an_undisturbed_epoch_is_entered_at_any_batch():
    run = Run(64, 2)
    for rank, one in run.ranks.items():
        assert one.step(1, start_batch=5)
        assert one.batches.position == 1 * 16 + 6
        one.finish(1)
        assert one.trained[1] == sharded(run, rank, 1, start_batch=5)


def test_what_was_used_before_a_resumption_is_given_to_nobody():
    run = Run(96, 2)
    for rank in (0, 1):
        for _ in range(3):
            run.ranks[rank].step(0, start_batch=9)
    run.settle()
    run.change(0, 1, 2)
    run.in_turn(0, 1, 2, epoch=0)
    rest = [s for rank in (0, 1) for batch in sharded(run, rank, 0, start_batch=9) for s in batch]
    assert set(run.times(0)) == set(rest)
    assert run.ranks[2].trained[0], "the newcomer had its part"


@pytest.mark.parametrize("make_store", [dist.HashStore, tcp_store])
def test_three_ranks_become_six_and_then_two_in_one_epoch(make_store):
    run = Run(602, 3, make_store(), chunk_batches=4)
    run.together(0, 1, 2, epoch=0, steps=20)
    run.change(0, 1, 2, 3, 4, 5)
    run.settle()
    run.together(0, 1, 2, 3, 4, 5, epoch=0, steps=12)
    run.change(1, 4)  # the others are dead without a word
    run.together(1, 4, epoch=0)
    check_whole(run, 0, 600, repeated=4 * 4 * 2)  # a chunk of each of the dead
    for rank in (1, 4):
        batches = run.ranks[rank].batches
        assert batches.is_disturbed(0)
        assert batches.position == len(batches)


def test_who_leaves_in_order_has_told_all_and_nothing_is_used_twice():
    run = Run(300, 3)
    run.in_turn(0, 1, 2, epoch=0, steps=11)
    run.ranks[2].leave()
    run.change(0, 1)
    run.in_turn(0, 1, epoch=0)
    assert run.times(0) == once(300)


@pytest.mark.parametrize("later", [1, 2])
def test_what_a_dead_rank_left_of_an_epoch_is_used_in_the_next(later):
    """The others had come to the end of theirs when it died, or when they heard of it."""
    run = Run(120, 3)
    run.in_turn(0, 1, 2, epoch=0, steps=7)
    for epoch in range(later):
        run.in_turn(0, 1, epoch=epoch)
    assert len(run.times(0)) == 120 - 20 * 2 + 7 * 2
    run.change(0, 1)
    run.settle()
    run.in_turn(0, 1, epoch=later)
    assert len(run.times(later)) == 120
    for epoch in range(later + 1):
        check_whole(run, epoch, 120, repeated=2 * 2)


def test_a_newcomer_that_is_too_late_for_an_epoch_goes_on_with_the_next():
    run = Run(60, 2)
    assert run.ranks[0].batches.newest_epoch() is None
    run.in_turn(0, 1, epoch=0)
    run.change(0, 1, 2)
    assert run.ranks[2].batches.newest_epoch() == 0
    run.in_turn(2, epoch=0)
    assert not run.ranks[2].batches.is_behind()
    run.ranks[0].step(1)
    assert run.ranks[2].batches.is_behind()
    drawn = run.ranks[2].batches.epoch(1)
    assert not run.ranks[2].batches.is_behind(), "though it has no batch of it yet"
    del drawn
    run.in_turn(0, 1, 2, epoch=1)
    assert {one.batches.newest_epoch() for one in run.ranks.values()} == {1}
    assert len(run.times(0)) == 60
    assert run.times(1) == once(60)
    assert len(run.ranks[2].trained[1]) > 5


def test_a_rank_that_was_given_up_gets_no_samples():
    run = Run(60, 2)
    run.ranks[1].step(0)
    run.ranks[1].membership = Membership(generation=1, living=(0,))
    with pytest.raises(EvictedError, match="rank 1"):
        run.ranks[1].finish(0)
    run.ranks[1].leave()


def test_who_breaks_an_epoch_off_skips_the_rest_of_its_part():
    run = Run(120, 2)
    for _ in range(5):
        run.ranks[0].step(0)
    run.ranks[0]._iterators.clear()
    run.in_turn(0, 1, epoch=1)
    assert len(run.ranks[0].trained[0]) == 5
    assert run.times(1) == once(120)


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_comings_and_goings(seed):
    """Ranks come, leave or die, and hear of it at unlike times, or when their epoch is over."""
    draw = random.Random(seed)
    run = Run(200, 3, chunk_batches=draw.choice([1, 2, 3]))
    alive, after, orderly = [0, 1, 2], 3, seed % 2 == 0
    for _ in range(8):
        event = draw.choice(["come", "go", "learn"])
        if event == "come":
            run.change(*alive, after, known_to=(*draw.sample(alive, len(alive) // 2), after))
            alive, after = [*alive, after], after + 1
        elif event == "go" and len(alive) > 2:
            gone = alive.pop(draw.randrange(len(alive)))
            if orderly:
                run.ranks[gone].leave()
            run.change(*alive, known_to=tuple(draw.sample(alive, len(alive) // 2)))
        else:
            run.learn(*alive)
        run.together(*alive, epoch=0, steps=draw.randrange(5))
    run.together(*alive, epoch=0)  # by what some of them know
    run.learn(*alive)
    run.settle()
    run.together(*alive, epoch=1)
    assert len(run.times(0)) == 198


def be_patient(run, seconds):
    """How long batches wait for the store from now on."""
    for one in run.ranks.values():
        one.batches._patience_seconds = one.batches._limit_seconds = seconds


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_lost_store_ends_no_epoch_and_is_awaited_once(caplog, hangs):
    store = Hanging(answers=True)
    run = Run(60, 2, store)
    run.in_turn(0, 1, epoch=0, steps=4)
    run.settle()
    be_patient(run, 0.2)
    if hangs:
        store.answers.clear()
    else:
        store.error = dist.DistNetworkError("Connection reset by peer")
    for epoch in (0, 1, 2):
        run.in_turn(0, 1, epoch=epoch)
        assert run.times(epoch) == once(60)
    assert len(warnings_of(caplog)) == 2, "each rank says it once"
    store.answers.set()
    for one in run.ranks.values():
        one.leave()


def test_samples_are_assigned_again_when_the_store_answers_again():
    store = Hanging(answers=True)
    run = Run(240, 2, store)
    run.in_turn(0, 1, epoch=0, steps=2)
    run.settle()
    be_patient(run, 0.1)
    store.answers.clear()
    run.in_turn(0, 1, epoch=0, steps=10)
    store.answers.set()
    for one in run.ranks.values():
        until(lambda one=one: one.batches.newest_epoch() == 0)
    be_patient(run, HANG_SECONDS)
    run.change(0, 1, 2)
    run.in_turn(0, 1, 2, epoch=0)
    check_whole(run, 0, 240, repeated=0)
    assert run.times(0, 2)


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"world_size": 61}, {"chunk_batches": 0}, {"patience_seconds": -1.0}],
)
def test_settings_that_cannot_be_are_refused(wrong):
    run = Run(60, 1)
    settings = {**run.settings, **wrong}
    with pytest.raises(ValueError, match=str(*wrong.values())):
        ElasticBatches(samples=run.samples, member=run.ranks[0], store=run.store, **settings)
