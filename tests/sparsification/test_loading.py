"""States that are loaded: which belong together, and what they bring with them."""

import pytest
import torch

from support.replicas import network
from support.sparse import assume_costs, on_ranks, same_weights, start, states_after


def another():
    """Weights that a state takes the place of."""
    return network(1)


def refuses(states, match, prepare=lambda me: None, **settings):
    """No rank loads its state, and none of its weights changes."""

    def use(me):
        prepare(me)
        before = me.weights()
        with pytest.raises(ValueError, match=match):
            me.session.load_state_dict(states[me.rank])
        assert same_weights([me.weights(), before])

    on_ranks(use, **{"make": another, **settings})


def test_states_of_different_steps_do_not_belong_together():
    states = [states_after(3 + 2 * rank)[rank] for rank in range(2)]
    refuses(states, "3 and 5 rounds")


def test_states_of_two_runs_do_not_belong_together(monkeypatch):
    """What planners know of a run decides when they call collectives: ranks would wait."""
    assume_costs(monkeypatch, sparse=1e-3, dense=1.0)
    states = states_after(20, plan="optimal")
    whole = states[1]["session"]
    states[1]["session"] = {**whole, "planner": {**whole["planner"], "refused": "another"}}
    refuses(states, "ranks 0 and 1", plan="optimal")


@pytest.mark.parametrize("kind", ["residuals", "velocities"])
def test_a_state_of_tensors_of_other_shapes_changes_nothing(kind):
    """On no rank; of one element, it would be spread over all."""
    states = states_after(3, momentum_correction=0.9)

    def use(me):
        me.train()
        before = me.carried(kind)
        for odd in (torch.zeros(99), torch.zeros(1), [0.0] * 3):
            state = states[me.rank]["session"]
            if me.rank:
                state = {**state, kind: {**state[kind], "2.bias": odd}}
            for load in (
                lambda state=state: me.session.load_own_state(state),
                lambda state=state: me.session.load_state_dict(
                    {**states[me.rank], "session": state}
                ),
            ):
                with pytest.raises(ValueError, match=r"on rank 1: .* '2\.bias'"):
                    load()
        assert all(torch.equal(before[name], now) for name, now in me.carried(kind).items())
        me.session.load_state_dict(states[me.rank])

    on_ranks(use, make=another, momentum_correction=0.9)


def test_states_of_another_number_of_ranks_bring_all_but_what_is_not_sent_yet():
    states = states_after(3, 4)

    def second(me):
        me.session.load_state_dict(states[me.rank])
        assert me.session.stats().rounds == 3
        assert same_weights([me.weights(), list(states[0]["model"].values())])
        assert not any(bool(each.any()) for each in me.carried().values())
        me.train(2)
        return me.weights()

    with pytest.warns(UserWarning, match="4 ranks"):
        assert same_weights(on_ranks(second, "single", world_size=3, make=another))


def test_states_that_do_not_fit_are_refused_on_all_ranks():
    def use(me):
        me.train()
        state = me.session.state_dict()
        wrong = {**state, "session": {**state["session"], "rank": 0}}
        with pytest.raises(ValueError, match=r"rank 1: .*rank 0"):
            me.session.load_state_dict(wrong)
        with pytest.raises(ValueError, match="state"):
            me.session.load_state_dict({"model": {}})
        for odd in ({"counted": {}}, {"plan": 5}):
            with pytest.raises(ValueError, match="state"):
                me.session.load_own_state({**state["session"], **odd})
        me.session.load_state_dict(state)

    on_ranks(use)


def test_a_state_of_other_trained_parameters_changes_nothing():
    def half_frozen():
        model = another()
        model[0].bias.requires_grad_(False)
        return model

    refuses(states_after(3), r"'0\.bias'", make=half_frozen)


def test_one_rank_counts_on_and_so_do_several_after_it():
    model, optimizer, session = start(None)
    with session:
        with pytest.warns(UserWarning, match="2 ranks"):
            session.load_state_dict(states_after(3)[0])
        model(torch.ones(2, 6)).sum().backward()
        own = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert same_weights([own, [p.grad for p in model.parameters()]])
        state = session.state_dict()

    def several(me):
        me.session.load_state_dict(state)
        return me.session.stats().rounds

    assert on_ranks(several) == [4, 4]
