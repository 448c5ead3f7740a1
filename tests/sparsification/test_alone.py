"""One rank alone, between others: what it counts, and what becomes of what they carried over."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.sparsification import deal_states
from support.replicas import network
from support.sparse import backward_of, start, states_after


@pytest.fixture(scope="module")
def dealt():
    """The state of two ranks after three steps, for one."""
    (state,) = deal_states(states_after(3), 1)
    assert state["session"]["residuals"]
    return state


def test_rounds_are_counted_on_through_a_time_alone(dealt):
    alone = states_after(4, 1, states=[dealt])
    told = states_after(2, states=deal_states(alone, 2))
    assert [each["session"]["counted"]["rounds"] for each in told] == [9, 9]


def test_a_step_of_several_optimizers_is_one_round_and_figures_go_on(dealt):
    model = network()
    both = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    with gg.sparsify(model, both) as session:
        session.load_own_state(dealt["session"])
        for step in range(2):
            backward_of(model, 0, step)
            for optimizer in both:
                optimizer.step()
        stats = session.stats()
        assert stats.rounds == 5
        assert stats.bytes_sent == dealt["session"]["counted"]["bytes_sent"] > 0
        assert stats.all_reduce_bytes == dealt["session"]["counted"]["all_reduce_bytes"] > 0
        session.broadcast_()
        assert session.stats().rounds == 5


def test_what_was_carried_over_is_in_the_first_gradients_and_no_others(dealt):
    """Until a step has taken it, it is part of the state."""
    model, optimizer, session = start(None)
    with session:
        session.load_state_dict(dealt)
        carried = session.state_dict()["session"]["residuals"]
        assert carried.keys() == dealt["session"]["residuals"].keys()
        assert all(torch.equal(carried[n], r) for n, r in dealt["session"]["residuals"].items())
        for step in range(2):
            backward_of(model, 0, step)
            found = {name: p.grad.clone() for name, p in model.named_parameters()}
            with torch.no_grad():
                plain = network()
                plain.load_state_dict(model.state_dict())
            backward_of(plain, 0, step)
            for name, p in plain.named_parameters():
                due = 0 if step else carried[name]
                torch.testing.assert_close(found[name], p.grad + due)
            optimizer.step()
            assert not session.state_dict()["session"]["residuals"]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("create_graph", [False, True])
def test_passes_that_add_up_have_what_was_carried_over_once(dealt, create_graph):
    model, optimizer, session = start(None)
    with session:
        session.load_state_dict(dealt)
        for due in (1, 0):
            for _ in range(2):
                sum(p.sum() for p in model.parameters()).backward(create_graph=create_graph)
            for name, p in model.named_parameters():
                residual = dealt["session"]["residuals"][name]
                torch.testing.assert_close(p.grad.detach(), 2 + due * residual)
            optimizer.step()
            optimizer.zero_grad()


def test_momentum_is_corrected_on_both_sides_of_a_time_alone():
    alone = states_after(2, 1, states=deal_states(states_after(3, momentum_correction=0.9), 1))
    there = deal_states(alone, 2)
    assert not any(state["session"]["velocities"] for state in there)
    told = states_after(1, states=there, momentum_correction=0.9)
    assert [each["session"]["counted"]["rounds"] for each in told] == [6, 6]
    assert all(each["session"]["velocities"] for each in told)


def test_momentum_that_one_rank_does_not_correct_is_warned_of():
    with pytest.warns(UserWarning, match=r"momentum_correction=0.9 does nothing with one rank"):
        start(None, momentum_correction=0.9)[2].close()


def without_gradients(model):
    """A backward pass all of whose gradients are zeros."""
    return sum(0 * p.sum() for p in model.parameters())


def stepped_by_all_that_was_due(model, before, dealt):
    """Asserts that one step of nothing else has been made, with a rate of 0.1."""
    residuals = dealt["session"]["residuals"]
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), before[name] - 0.1 * residuals[name])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_was_carried_over_outlives_a_step_that_the_scaler_leaves_out(
    dealt, set_to_none, fused
):
    """In the units of the scale of the step that takes it, which is the first that counts."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = network()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with gg.sparsify(model, optimizer, scaler=scaler) as session:
        session.load_own_state(dealt["session"])
        for factor in (float("inf"), 1.0):
            optimizer.zero_grad(set_to_none)
            hook = model[2].bias.register_hook(lambda grad, by=factor: grad + by - 1)
            scaler.scale(without_gradients(model)).backward()
            hook.remove()
            scaler.step(optimizer)
            scaler.update()
            left = session.state_dict()["session"]["residuals"]
            assert bool(left) == (factor > 1)
            assert session.stats().rounds == (3 if left else 4)
        stepped_by_all_that_was_due(model, before, dealt)


def test_what_was_carried_over_is_in_one_step_where_gradients_are_replaced(dealt):
    model, optimizer, session = start(None)
    with session:
        session.load_state_dict(dealt)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for _ in range(3):
            optimizer.zero_grad()
            without_gradients(model).backward()
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 1.0
            optimizer.step()
            assert not session.state_dict()["session"]["residuals"]
        stepped_by_all_that_was_due(model, before, dealt)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_was_carried_over_is_due_until_a_step_has_a_gradient_with_it(dealt, set_to_none):
    model, optimizer, session = start(None)
    with session:
        session.load_state_dict(dealt)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        without_gradients(model).backward()
        optimizer.zero_grad(set_to_none)
        optimizer.step()
        assert session.state_dict()["session"]["residuals"].keys() == before.keys()
        torch.autograd.grad(without_gradients(model), list(model.parameters()))
        without_gradients(model).backward()
        optimizer.step()
        assert not session.state_dict()["session"]["residuals"]
        stepped_by_all_that_was_due(model, before, dealt)
