"""Two sessions on the same parameters: refused, whichever begins second."""

import pytest
import torch

import gossipgrad as gg
from support.ranks import run_ranks
from support.replicas import network, sgd
from support.sparse import start

SECOND = {
    "sparsify": lambda model: gg.sparsify(model, torch.optim.SGD(model.parameters()), density=0.2),
    "gossip": lambda model: gg.gossip(model, torch.optim.SGD(model.parameters())),
    "CommHook": lambda model: gg.sparsification.CommHook(model, density=0.2),
}


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
