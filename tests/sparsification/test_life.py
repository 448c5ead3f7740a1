"""How long a session lives, and what it leaves behind."""

import gc
import threading
import weakref

import pytest
import torch

import gossipgrad as gg
from gossipgrad.sparsification import _aggregation
from support.ranks import run_ranks
from support.replicas import network, sgd
from support.sparse import backward_of, on_ranks, same_weights, start
from support.waiting import HANG_SECONDS


def all_dropped(ranks: int) -> threading.Barrier:
    """Collects once all ranks wait for it: while one thread does, no other can."""
    return threading.Barrier(ranks, action=gc.collect, timeout=HANG_SECONDS)


def test_a_session_ends_with_its_model_and_optimizer():
    dropped = all_dropped(2)

    def trained(rank, group):
        model, optimizer, session = start(group)
        backward_of(model, rank, 0)
        optimizer.step()
        group.barrier()
        return [weakref.ref(each) for each in (session, model[0].weight)]

    def rank_main(rank, group):
        gone = trained(rank, group)
        dropped.wait()
        assert [each() for each in gone] == [None, None]
        with pytest.raises(gg.GossipError):
            group.barrier()

    run_ranks(2, rank_main)


def in_a_hook(session):
    session.close()


def on_another_thread(session):
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(HANG_SECONDS)
    assert not closing.is_alive()


@pytest.mark.parametrize("plan", ["layerwise", "single"])
@pytest.mark.parametrize("close", [in_a_hook, on_another_thread])
def test_closed_in_the_middle_of_a_pass(close, plan):
    """Nobody hangs, and no gradient of one rank is taken."""

    def use(me):
        me.train(2)
        weights = me.weights()
        if me.rank == 1:
            with pytest.raises(gg.GossipError, match=r"session\.state_dict"):
                me.backward()
            return

        def hook(grad):
            handle.remove()
            close(me.session)

        rounds, handle = me.session.stats().rounds, me.model[0].weight.register_hook(hook)
        with pytest.raises(gg.GossipError):
            me.backward()
        own = me.gradients()
        assert same_weights([me.weights(), weights])
        assert me.session.stats().rounds == rounds
        me.backward()
        assert same_weights([me.gradients(), own])

    on_ranks(use, plan, together=False)


def test_a_second_session_is_refused_until_the_first_is_closed():
    model = network()

    def start():
        return gg.sparsify(model, torch.optim.SGD(model.parameters()), density=0.2)

    with start(), pytest.raises(ValueError, match=r"'0\.weight'"):
        start()
    with start():
        pass


def test_sessions_of_other_parameters_go_together_until_they_have_the_same():
    model = network()
    frozen = model[0].requires_grad_(False)
    one, other = sgd([*model[0].parameters()]), sgd([*model[2].parameters()])
    with gg.sparsify(model, other) as session:
        frozen.requires_grad_(True)
        with gg.sparsify(model[0], one):
            other.add_param_group({"params": [*model[0].parameters()]})
            with pytest.raises(ValueError, match=r"'0\.weight'"):
                session.broadcast_()


@pytest.mark.parametrize("again", [False, True], ids=["at the start", "in broadcast_"])
def test_a_session_without_memory_for_its_groups_leaves_no_hook(again, monkeypatch):
    def fail(*args, **kwargs):
        raise MemoryError("no room")

    def rank_main(rank, group):
        model = network()
        session = start(group, model=model)[2] if again else None
        group.barrier()
        monkeypatch.setattr(_aggregation, "MergedGroup", fail)
        group.barrier()
        with pytest.raises(MemoryError) as kept:
            session.broadcast_() if again else start(group, model=model)
        if again:
            session.close()
        backward_of(model, rank, 0)
        with gg.sparsify(model, sgd(list(model.parameters()))):
            return kept

    run_ranks(2, rank_main)


def test_closed_in_a_step_that_is_a_round():
    def use(me):
        with me.session.no_sync():
            me.backward()
        weights = me.weights()
        if me.rank == 0:
            group, close = me.session._aggregation.groups[-1], me.session.close
            begin = group.begin
            group.begin = lambda *args: (begin(*args), close())
        with pytest.raises(gg.GossipError):
            me.optimizer.step()
        assert same_weights([me.weights(), weights])

    on_ranks(use, together=False)
