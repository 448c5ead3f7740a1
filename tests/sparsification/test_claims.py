"""Two sessions on the same parameters: refused, whichever begins second."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.sparsification import _aggregation
from support.ranks import run_ranks
from support.replicas import network, sgd
from support.sparse import backward_of, same_weights, start

SECOND = {
    "sparsify": lambda model: gg.sparsify(model, torch.optim.SGD(model.parameters()), density=0.2),
    "gossip": lambda model: gg.gossip(model, torch.optim.SGD(model.parameters())),
    "CommHook": lambda model: gg.sparsification.CommHook(model, density=0.2),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sparsify", "sparsify"),
        ("sparsify", "gossip"),
        ("gossip", "sparsify"),
        ("sparsify", "CommHook"),
        ("CommHook", "sparsify"),
    ],
)
def test_a_second_session_is_refused_until_the_first_is_closed(first, second):
    model = network()
    message = rf"'0\.weight' is in a session of {first}\(\).* close\(\) the other session first"
    with SECOND[first](model), pytest.raises(ValueError, match=message):
        SECOND[second](model)
    with SECOND[second](model):
        pass


def test_a_session_goes_on_after_a_second_was_refused():
    def rank_main(rank, group):
        model, optimizer, session = start(group)
        with session:
            backward_of(model, rank, 0)
            optimizer.step()
            with pytest.raises(ValueError, match="give both optimizers to one session"):
                gg.sparsify(model, sgd(list(model[2].parameters())))
            backward_of(model, rank, 1)
            optimizer.step()
            session.group.barrier()
        return [p.detach().clone() for p in model.parameters()]

    assert same_weights(run_ranks(2, rank_main))


def test_sessions_of_other_parameters_go_together_until_they_have_the_same():
    model = network()
    frozen = model[0].requires_grad_(False)
    one, other = sgd([*model[0].parameters()]), sgd([*model[2].parameters()])
    with gg.sparsify(model, other) as session:
        frozen.requires_grad_(True)
        with gg.sparsify(model[0], one):
            other.add_param_group({"params": [*model[0].parameters()]})
            with pytest.raises(ValueError, match=r"'0\.weight' is in a session"):
                session.broadcast_()


def test_a_session_that_failed_to_begin_leaves_no_mark():
    model = network()
    optimizer = sgd(list(model.parameters()))

    def rank_main(rank, group):
        own = network()
        with pytest.raises(gg.AgreementError) as kept:
            start(group, model=own, density=0.1 + rank / 10)
        with gg.sparsify(own, sgd(list(own.parameters()))):
            return kept

    run_ranks(2, rank_main)
    with pytest.raises(ValueError, match="density is 0") as kept:
        gg.sparsification.CommHook(model, density=0.0)
    with gg.sparsify(model, optimizer):
        pass
    del kept


@pytest.mark.parametrize("kind", ["sparsify", "CommHook"])
def test_what_nobody_kept_leaves_no_mark(kind):
    model = network()
    SECOND[kind](model)
    with SECOND["sparsify"](model):
        pass


@pytest.mark.parametrize("again", [False, True], ids=["at the start", "in broadcast_"])
def test_a_session_without_memory_for_its_groups_leaves_no_hook(again, monkeypatch):
    def fail(*args, **kwargs):
        raise MemoryError("no room")

    def rank_main(rank, group):
        model = network()
        if again:
            session = start(group, model=model)[2]
            group.barrier()
            monkeypatch.setattr(_aggregation, "MergedGroup", fail)
            group.barrier()
            with pytest.raises(MemoryError) as kept:
                session.broadcast_()
            session.close()
        else:
            monkeypatch.setattr(_aggregation, "MergedGroup", fail)
            with pytest.raises(MemoryError) as kept:
                start(group, model=model)
        backward_of(model, rank, 0)
        with gg.sparsify(model, sgd(list(model.parameters()))):
            return kept

    run_ranks(2, rank_main)
