"""A replica's state is all that training changes, wherever it is kept, or is refused."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import load_replica, misfit, replica_state
from gossipgrad.decentralized import average_states
from support.replicas import backward, flat, network, sgd
from support.trees import assert_same


class Counting(torch.optim.SGD):
    """Keeps a counter and a list of tensors under names, as several published optimizers do."""

    def step(self, closure=None):
        kept = self.state["kept"]
        kept["count"] = kept.get("count", 0) + 1
        kept.setdefault("norms", []).append(self.param_groups[0]["params"][0].norm())
        self.param_groups[0]["lr"] = 0.1 / kept["count"]
        return super().step(closure)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, history_size=3)


def counting(parameters):
    return Counting(parameters, lr=0.1, momentum=0.9)


def train(model, optimizer, steps):
    for step in steps:

        def closure(step=step):
            backward(model, 0, step)
            return model(torch.ones(1, 6)).square().mean()

        optimizer.step(closure)


def replica(make, seed=0):
    model = network(seed)
    return model, make(list(model.parameters()))


@pytest.mark.parametrize("make", [lbfgs, counting])
def test_goes_on_with_lists_and_with_what_stands_under_names(make):
    model, optimizer = replica(make)
    train(model, optimizer, range(4))
    state = replica_state(model, [optimizer])
    train(model, optimizer, range(4, 7))
    again, theirs = replica(make, seed=1)
    train(again, theirs, range(2))
    assert misfit(again, [theirs], state) is None
    load_replica(again, [theirs], state)
    train(again, theirs, range(4, 7))
    assert torch.equal(flat(model), flat(again))
    assert_same(replica_state(again, [theirs]), replica_state(model, [optimizer]))


@pytest.mark.parametrize(("key", "value"), [("set", {1}), (7, 1)])
def test_what_cannot_be_saved_is_refused_by_name(key, value):
    model, optimizer = replica(sgd)
    optimizer.state[key] = value
    with pytest.raises(gg.GossipError, match=f"of optimizer 0 .SGD. state .*{key}"):
        replica_state(model, [optimizer])


def test_an_optimizer_that_keeps_more_elsewhere_is_told():
    class Elsewhere(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "clock": 3}

    model, optimizer = replica(lambda parameters: Elsewhere(parameters, lr=0.1))
    with pytest.warns(
        UserWarning, match=r"Elsewhere has a state_dict\(\) of its own: what it keep"
    ):
        replica_state(model, [optimizer])


class Scaled(nn.Linear):
    scale: object = 1.0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_extra_states_of_modules_are_part_of_it():
    model, other = Scaled(2, 2), Scaled(2, 2)
    optimizers = [[sgd(list(m.parameters()))] for m in (model, other)]
    model.scale = torch.full((), 2.0)
    state = replica_state(model, optimizers[0])
    model.scale.fill_(3.0)
    load_replica(other, optimizers[1], average_states([state, state]))
    assert other.scale == 2.0
    plain = nn.Linear(2, 2)
    why = misfit(plain, [sgd(list(plain.parameters()))], state)
    assert why == "the module '' has no extra state here"
    model.scale = object()
    with pytest.raises(gg.GossipError, match="the extra state of module '' is a object, which"):
        replica_state(model, optimizers[0])


@pytest.mark.parametrize("other", [counting, lambda parameters: sgd(parameters[:2])])
def test_states_of_unlike_optimizers_have_no_mean(other):
    states = []
    for make in (sgd, other):
        model = network()
        optimizer = make(list(model.parameters()))
        states.append(replica_state(model, [optimizer]))
    with pytest.raises(ValueError, match="state 1 is of other optimizers than state 0"):
        average_states(states)


def test_tensors_in_lists_lie_beside_their_parameter_again():
    """A parameter without storage stands for one on an accelerator."""
    model, optimizer = replica(sgd)
    held = {"past": [torch.ones(8, 6)], "step": torch.ones(())}
    optimizer.state[model[0].weight] = held
    state = replica_state(model, [optimizer])
    there = network().to("meta")
    theirs = sgd(list(there.parameters()))
    load_replica(there, [theirs], state)
    loaded = theirs.state[there[0].weight]
    assert loaded["past"][0].device.type == "meta"
    theirs.stays_on_host = lambda name: name == "past"
    load_replica(there, [theirs], state)
    assert theirs.state[there[0].weight]["past"][0].device.type == "cpu"
    assert loaded["step"].device.type == "cpu"
