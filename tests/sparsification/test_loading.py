"""States that are loaded: which belong together, and what they bring with them."""

import pytest
import torch
from torch import nn

from gossipgrad.sparsification import deal_states
from support.ranks import run_ranks
from support.replicas import network
from support.sparse import assume_costs, backward_of, same_weights, start, states_after


def test_states_of_different_steps_do_not_belong_together():
    states = [states_after(3 + 2 * rank)[rank] for rank in range(2)]

    def rank_main(rank, group):
        model, _, session = start(group, model=network(1))
        with session:
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ValueError, match="saved after 3 and 5 rounds"):
                session.load_state_dict(states[rank])
            assert same_weights([list(model.parameters()), before])

    run_ranks(2, rank_main)
    with pytest.raises(ValueError, match="saved after 3 and 5 rounds"):
        deal_states(states, 3)


@pytest.mark.parametrize("kind", ["residuals", "velocities"])
def test_a_state_of_tensors_of_other_shapes_changes_nothing(kind):
    """On no rank; of one element, it would be spread over all."""
    states = states_after(3, momentum_correction=0.9)

    def rank_main(rank, group):
        model, optimizer, session = start(group, model=network(1), momentum_correction=0.9)
        with session:
            backward_of(model, rank, 0)
            optimizer.step()
            before = session.state_dict()["session"]
            for odd, said in (
                (torch.zeros(99), r"has the shape \(99,\), the parameter \(3,\)"),
                (torch.zeros(1), r"has the shape \(1,\), the parameter \(3,\)"),
                ([0.0] * 3, r"has no shape, the parameter \(3,\)"),
            ):
                state = states[rank]["session"]
                if rank:
                    state = {**state, kind: {**state[kind], "2.bias": odd}}
                with pytest.raises(ValueError, match=f"on rank 1: what is .* '2.bias' {said}"):
                    session.load_own_state(state)
                with pytest.raises(ValueError, match=f"on rank 1: what is .* '2.bias' {said}"):
                    session.load_state_dict({**states[rank], "session": state})
            after = session.state_dict()["session"]
            assert all(torch.equal(before[kind][name], now) for name, now in after[kind].items())
            session.load_state_dict(states[rank])
            session.group.barrier()

    run_ranks(2, rank_main)
    states[1]["session"][kind]["2.bias"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"'2.bias' has the shape \(1,\) on one rank and \(3,\)"):
        deal_states(states, 1)


def test_states_are_dealt_to_another_number_of_ranks_with_the_mean_they_carry():
    states = states_after(3, 4)
    weights = list(states[0]["model"].values())
    dealt = deal_states(states, 3)

    def second(rank, group):
        model, _, session = start(group, "single", model=network(1))
        with session:
            session.load_state_dict(dealt[rank])
            assert session.stats().rounds == 3
            assert len(session.stats().groups) == 1  # as asked for here
            assert same_weights([list(model.parameters()), weights])
            return session.state_dict()["session"]["residuals"]

    carried = run_ranks(3, second)
    names = states[0]["session"]["residuals"]
    assert names
    for name in names:
        old = torch.stack([states[r]["session"]["residuals"][name] for r in range(4)]).mean(0)
        new = torch.stack([each[name] for each in carried]).mean(0)
        torch.testing.assert_close(new, old)
    with pytest.raises(ValueError, match="states of the ranks"):
        deal_states([states[1], states[0]], 3)


def test_states_that_do_not_fit_are_refused_on_all_ranks():
    def rank_main(rank, group):
        model, optimizer, session = start(group)
        with session:
            backward_of(model, rank, 0)
            optimizer.step()
            state = session.state_dict()
            wrong = {**state, "session": {**state["session"], "rank": 0}}
            with pytest.raises(ValueError, match="on rank 1: it is the state of rank 0"):
                session.load_state_dict(wrong)
            with pytest.raises(ValueError, match="it is no state that state_dict"):
                session.load_state_dict({"model": {}})
            for odd in ({"counted": {}}, {"version": 2}, {"plan": 5}):
                with pytest.raises(ValueError, match="on rank 0: it is no state that a session"):
                    session.load_own_state({**state["session"], **odd})
            session.load_state_dict(state)

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("settings", "method"),
    [({}, "dense"), ({"methods": ("sparse",)}, "sparse"), ({"plan": "single"}, "sparse")],
)
def test_saved_groups_come_back_where_the_same_plan_is_asked_for(settings, method, monkeypatch):
    assume_costs(monkeypatch, sparse=1.0, dense=1e-3)
    states = states_after(20, plan="optimal")
    assert {made[2] for made in states[0]["session"]["plan"]["groups"]} == {"dense"}

    def rank_main(rank, group):
        model, optimizer, session = start(
            group, model=network(1), **{"plan": "optimal", **settings}
        )
        with session:
            session.load_state_dict(states[rank])
            assert {of.method for of in session.stats().groups} == {method}
            assert session.stats().residual_ratio is None
            for step in range(5):
                backward_of(model, rank, step)
                optimizer.step()
            assert {of.method for of in session.stats().groups} == {method}
            assert session.stats().rounds == 25
            session.group.barrier()

    run_ranks(2, rank_main)


def test_a_state_of_other_trained_parameters_changes_nothing():
    states = states_after(3)

    def rank_main(rank, group):
        model = network(1)
        model[0].bias.requires_grad_(False)
        _, _, session = start(group, model=model)
        with session:
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ValueError, match=r"'0\.bias' was trained .* and is not here"):
                session.load_state_dict(states[rank])
            assert same_weights([list(model.parameters()), before])

    run_ranks(2, rank_main)


@pytest.mark.parametrize("freezing", [{1}, {0, 1}])
def test_a_state_is_refused_where_what_is_trained_has_changed_since_the_start(freezing):
    """Also one of what is trained now; where one rank alone has frozen something, on all."""
    states = states_after(3)
    if len(freezing) == 2:
        for state in states:
            state["session"]["plan"]["names"].remove("0.bias")

    def rank_main(rank, group):
        model, _, session = start(group, model=network(1))
        with session:
            model[0].bias.requires_grad_(rank not in freezing)
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ValueError, match=r"rank .: '0\.bias' is not trained now, .*first"):
                session.load_state_dict(states[rank])
            assert same_weights([list(model.parameters()), before])

    run_ranks(2, rank_main)


def test_a_plan_measured_by_another_number_of_ranks_is_not_kept(monkeypatch):
    assume_costs(monkeypatch, sparse=1e-3)
    settings = {"plan": "optimal", "methods": ("sparse",)}
    dealt = deal_states(states_after(20, **settings), 3)

    def rank_main(rank, group):
        model, optimizer, session = start(group, model=network(1), **settings)
        with session:
            session.load_state_dict(dealt[rank])
            assert session.plan is None
            for step in range(20):
                backward_of(model, rank, step)
                optimizer.step()
            assert session.plan is not None
            session.group.barrier()

    run_ranks(3, rank_main)


class Normed(nn.Sequential):
    """With statistics that are each rank's own."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(6), nn.Linear(6, 3))


@pytest.mark.parametrize("deals", [False, True])
def test_statistics_of_batchnorm_stay_each_rank_s_own(deals):
    kept = {}

    def trained(rank, group):
        model, optimizer, session = start(group, model=Normed())
        with session:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(8, 6) + rank).sum().backward()
                optimizer.step()
            kept[rank] = model[0].running_mean.clone()
            group.barrier()
            return session.state_dict()

    states = run_ranks(2, trained)
    states = deal_states(states, 2) if deals else states

    def loaded(rank, group):
        model, _, session = start(group, model=Normed())
        with session:
            session.load_state_dict(states[rank])
            group.barrier()
        return model[0].running_mean

    for rank, mean in enumerate(run_ranks(2, loaded)):
        assert torch.equal(mean, kept[rank])
    assert not torch.equal(kept[0], kept[1])


def test_one_rank_counts_on_and_gives_up_what_several_carried_over():
    (state,) = deal_states(states_after(3), 1)
    model, optimizer, session = start(None)
    with session:
        with pytest.warns(UserWarning, match="given up"):
            session.load_state_dict(state)
        backward_of(model, 0, 3)
        own = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert same_weights([own, [p.grad for p in model.parameters()]])
        assert session.stats().rounds == 4
        states = deal_states([session.state_dict()], 2)

    def several(rank, group):
        with start(group)[-1] as session:
            session.load_state_dict(states[rank])
            assert session.stats().rounds == 4
            group.barrier()

    run_ranks(2, several)
