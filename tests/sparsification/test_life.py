"""How long a session lives: as its optimizer does, kept by the user or not."""

import gc
import threading
import weakref

import pytest

import gossipgrad as gg
from support.ranks import run_ranks
from support.sparse import backward_of, same_weights, start


def all_dropped(ranks: int) -> threading.Barrier:
    """Collects once all ranks wait for it: while one thread does, no other can."""
    return threading.Barrier(ranks, action=gc.collect, timeout=20)


def test_a_session_that_nobody_keeps_goes_on():
    dropped = all_dropped(2)

    def rank_main(rank, group):
        model, optimizer = start(group)[:2]
        dropped.wait()
        for step in range(3):
            backward_of(model, rank, step)
            optimizer.step()
        group.barrier()
        return [p.detach().clone() for p in model.parameters()]

    assert same_weights(run_ranks(2, rank_main))


def test_a_session_ends_with_its_model_and_optimizer():
    dropped = all_dropped(2)

    def trained(rank, group):
        model, optimizer, session = start(group)
        backward_of(model, rank, 0)
        optimizer.step()
        group.barrier()
        thread = session._aggregation.queue._thread
        return [weakref.ref(each) for each in (session, model[0].weight)], thread

    def rank_main(rank, group):
        gone, thread = trained(rank, group)
        dropped.wait()
        assert [each() for each in gone] == [None, None]
        thread.join(20)
        assert not thread.is_alive()
        with pytest.raises(gg.GossipError, match="closed its session"):
            group.barrier()

    run_ranks(2, rank_main)
