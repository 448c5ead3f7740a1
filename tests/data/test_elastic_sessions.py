"""Real sessions that share their epochs while ranks join and die: no sample is lost unsaid."""

from collections import Counter

import pytest
import torch

import gossipgrad as gg
from gossipgrad.data import ElasticBatches, TensorSamples
from support.joining import run_open
from support.waiting import HANG_SECONDS

SAMPLES, WORLD_SIZE, EPOCHS = 360, 3, 3


class Shares:
    """What ranks have trained on, the dead included.

    Attributes:
        trained: Of each epoch, how often each sample.
        batches: By rank.
        store: Of the run; kept for those who ask it until they are let go.
    """

    def __init__(self):
        self.trained = [Counter() for _ in range(EPOCHS)]
        self.batches = {}
        self.store = None
        self._iterators = []  # of the dead, too: let go, they would tell what they have used

    def of(self, session):
        """The batches of a rank."""
        samples = TensorSamples(
            torch.zeros(SAMPLES, 1),
            torch.arange(SAMPLES),
            augmentation=lambda rows, indices, draw: rows + draw[1],
        )
        self.batches[session.rank] = ElasticBatches(
            samples=samples,
            batch_size=2,
            member=session,
            store=session.group.store,
            world_size=WORLD_SIZE,
            seed=3,
            chunk_batches=4,
            patience_seconds=HANG_SECONDS,
        )
        return self.batches[session.rank]

    def train(self, me, epoch):
        """An epoch of a rank; gives how many batches it has trained on, after each."""
        self._iterators.append(self.batches[me.session.rank].epoch(epoch))
        for made, (x, y) in enumerate(self._iterators[-1], 1):
            me.train(1)
            (of_epoch,) = x.unique().int().tolist()
            self.trained[of_epoch].update(y.tolist())
            yield made

    def let_go(self):
        """Ends what the dead have left."""
        self._iterators.clear()
        for batches in self.batches.values():
            batches.close()


# Whoever is at the end of its last epoch trains no more, and is not awaited for long.
MODES = {"overlap": gg.Overlap(patience_seconds=1.0), "stale": gg.Stale()}


@pytest.mark.parametrize(
    "mode",
    [MODES["overlap"], pytest.param(MODES["stale"], marks=pytest.mark.slow)],
    ids=["overlap", "stale"],
)
def test_ranks_join_and_die_and_every_sample_is_used(mode):
    """Two join in the first epoch, one of the first dies in it, and one that joined in the next.

    Nobody waits for the news that one has died: an epoch may be over by then.
    """
    deaths, shares = {(1, 0): 20, (4, 1): 8}, Shares()

    def await_newcomers(me):
        me.train_until(lambda: {3, 4} <= me.session.membership.joined.keys())

    def life(me):
        rank, batches = me.session.rank, shares.of(me.session)
        if rank >= WORLD_SIZE:
            await_newcomers(me)
        for epoch in range(EPOCHS):
            if epoch == EPOCHS - 1:
                me.train_until(lambda: {1, 4} <= me.session.membership.lost.keys())
            for made in shares.train(me, epoch):
                if (epoch, made) == (0, 15) and rank < WORLD_SIZE:
                    await_newcomers(me)
                if made == deaths.get((rank, epoch)):
                    me.die()
        batches.close()
        me.session.group.barrier()
        return rank

    def member(me, run):
        shares.store = run.store
        if me.rank == 0:
            run.invite(me.session)
        return life(me)

    try:
        ended = run_open(WORLD_SIZE, member, lambda me, run: life(me), newcomers=2, mode=mode)
        assert {rank for rank in ended if rank is not None} == {0, 2, 3}
        for times in shares.trained:
            assert times.keys() == {*range(SAMPLES)}
        assert shares.trained[EPOCHS - 1] == Counter(range(SAMPLES)), "undisturbed by then"
    finally:
        shares.let_go()
