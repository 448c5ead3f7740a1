"""close() in the middle of a backward pass: nobody hangs, and no gradient of one rank is taken."""

import threading

import pytest

import gossipgrad as gg
from support.ranks import run_ranks
from support.sparse import backward_of, same_weights, start

CLOSED = "the session was closed in the middle of a backward pass"


def in_a_hook(session):
    session.close()


def on_another_thread(session):
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


def close_at(tensor, close):
    """Calls it once, before the gradient is there."""

    def hook(grad):
        handle.remove()
        close()

    handle = tensor.register_hook(hook)


@pytest.mark.parametrize("plan", ["layerwise", "single"])
@pytest.mark.parametrize("close", [in_a_hook, on_another_thread])
def test_closed_in_the_middle_of_a_pass(close, plan):
    def rank_main(rank, group):
        model, optimizer, session = start(group, plan)
        for step in range(2):
            backward_of(model, rank, step)
            optimizer.step()
        weights = [p.detach().clone() for p in model.parameters()]
        if rank == 1:
            with pytest.raises(gg.GossipError, match=r"save session\.state_dict"):
                backward_of(model, rank, 2)
            session.close()
            return
        kept = session.stats()
        close_at(model[0].weight, lambda: close(session))
        with pytest.raises(gg.GossipError, match=CLOSED):
            backward_of(model, rank, 2)
        own = [p.grad.clone() for p in model.parameters()]
        assert same_weights([list(model.parameters()), weights])
        assert session.stats().rounds == kept.rounds
        backward_of(model, rank, 2)
        assert same_weights([[p.grad for p in model.parameters()], own])

    run_ranks(2, rank_main)
