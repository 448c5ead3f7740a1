"""States that do not fit, or were not taken together; replicas of another number of ranks."""

import threading

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Hub, load_replica, misfit
from gossipgrad.decentralized import average_states
from support.ranks import run_ranks
from support.replicas import adam, backward, flat, network, set_gradients, sgd
from support.resuming import run_on


def states_after(world_size, steps, **settings):
    states, _ = run_on(world_size, 0, steps + 1, saves_at=steps, **settings)
    return states


def on_sessions(world_size, function, *, optimizer=sgd, dtype=torch.float32, **settings):
    """What `function(session, model, optimizer, rank)` returns on fresh sessions."""
    hub = Hub(world_size)

    def main(rank, group):
        model = network(1, dtype=dtype)
        o = optimizer(list(model.parameters()))
        with gg.gossip(
            model,
            o,
            process_group=group,
            transport=lambda group: hub.transport(group.rank),
            bucket_bytes=100,
            **settings,
        ) as session:
            return function(session, model, o, rank)

    return run_ranks(world_size, main)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "sync"}, "mode was overlap, here it is sync: use the same"),
        ({"every": 2}, "every was 1, here it is 2"),
        ({"optimizer": adam}, "saved with the optimizers SGD, here are Adam"),
        ({"world_size": 3}, "it was saved by 2 ranks, here are 3: begin a session from the cons"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(change, message):
    states = states_after(2, 2)
    settings = {"world_size": 2, **change}

    def load(session, model, optimizer, rank):
        before = flat(model)
        with pytest.raises(ValueError, match=rf"cannot be loaded on rank 0: .*{message}"):
            session.load_state_dict(states[min(rank, 1)])
        assert torch.equal(flat(model), before)
        backward(model, rank, 0)
        optimizer.step()

    on_sessions(settings.pop("world_size"), load, **settings)


def test_the_state_of_another_rank_is_refused_on_all_ranks():
    states = states_after(2, 2)

    def load(session, model, optimizer, rank):
        with pytest.raises(ValueError, match="on rank 1: it is the state of rank 0: load each"):
            session.load_state_dict(states[0])
        with pytest.raises(ValueError, match="it is no state that state_dict"):
            session.load_state_dict({"model": {}})

    on_sessions(2, load)


def test_a_state_can_be_loaded_into_a_session_that_has_trained():
    states = states_after(2, 3)
    _, uninterrupted = run_on(2, 0, 6, saves_at=3)

    def train(session, model, optimizer, rank):
        for step in range(4):
            backward(model, rank, 50 + step)
            optimizer.step()
        session.load_state_dict(states[rank])
        for step in range(3, 6):
            backward(model, rank, step)
            optimizer.step()
        held = {name: p.detach().clone() for name, p in model.named_parameters()}
        session.group.barrier()
        return held, session.stats().refused_messages

    for rank, (held, refused) in enumerate(on_sessions(2, train)):
        for name, value in held.items():
            assert torch.equal(value, uninterrupted[rank][0]["model"][name]), name
        assert refused == 0


def test_a_state_of_an_older_version_is_refused():
    states = states_after(2, 2)
    for state in states:
        state["session"] = {"version": 1}

    def load(session, model, optimizer, rank):
        with pytest.raises(ValueError, match=r"is of version 1.*gg.load_replica"):
            session.load_state_dict(states[rank])

    on_sessions(2, load)


def test_states_taken_after_unequal_steps_are_told_and_nobody_waits_for_ever():
    states = [states_after(2, 6)[0], states_after(2, 5)[1]]

    def train(session, model, optimizer, rank):
        session.load_state_dict(states[rank])
        for step in range(6, 9):
            backward(model, rank, step)
            optimizer.step()
        session.group.barrier()
        return session.stats().outcomes

    with pytest.warns(UserWarning, match="unlike rounds, 5 to 6"):
        outcomes = on_sessions(2, train)
    assert all(counts["delivered"] > 0 == counts["late"] for counts in outcomes)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_what_is_late_is_given_up_with_a_warning_and_the_state_can_be_loaded(mode, caplog):
    """Rank 1 does not make its last two steps before rank 0 has saved."""
    saved = threading.Event()
    waits = {"overlap": gg.Overlap, "sync": gg.Sync}[mode]
    patient = waits(deadline_seconds=0.2, floor_seconds=0.2)

    def train(session, model, optimizer, rank):
        for step in range(5):
            if step == 3 and rank == 1:
                assert saved.wait(60.0)
            set_gradients(model, rank, step)
            optimizer.step()
        state = session.state_dict()
        if rank == 0:
            saved.set()
        session.group.barrier()
        with session.consensus():
            shown = flat(model)
        return state, shown

    found = on_sessions(2, train, mode=patient, topology="matching")
    assert "gave up round" in caplog.text
    states = [state for state, _ in found]
    assert torch.equal(found[0][1], found[1][1])

    def go_on(session, model, optimizer, rank):
        session.load_state_dict(states[rank])
        for step in range(5, 9):
            set_gradients(model, rank, step)
            optimizer.step()
        session.group.barrier()
        return session.stats().outcomes

    for counts in on_sessions(2, go_on, mode=mode, topology="matching"):
        assert counts["delivered"] > 0


def test_ranks_that_end_after_unequal_steps_settle_first():
    def train(session, model, optimizer, rank):
        for step in range(4 - rank):
            set_gradients(model, rank, step)
            optimizer.step()
        return session.state_dict(settle=True)

    states = on_sessions(2, train, dtype=torch.float64)
    assert [state["session"]["steps"] for state in states] == [4, 3]
    mean = average_states(states)["model"]

    def go_on(session, model, optimizer, rank):
        session.load_state_dict(states[rank])
        with session.consensus():
            shown = {name: p.detach().clone() for name, p in model.named_parameters()}
        set_gradients(model, rank, 9)
        optimizer.step()
        session.group.barrier()
        return shown

    for shown in on_sessions(2, go_on, dtype=torch.float64):
        for name, value in shown.items():
            torch.testing.assert_close(value, mean[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_of_all_states_is_the_consensus(dtype):
    """With what rounding took from narrow weights."""

    def train(session, model, optimizer, rank):
        for step in range(5):
            set_gradients(model, rank, step)
            optimizer.step()
        state = session.state_dict()
        with session.consensus():
            return state, {name: p.detach().clone() for name, p in model.named_parameters()}

    told = on_sessions(4, train, dtype=dtype, optimizer=adam)
    mean = average_states([state for state, _ in told])
    for name, shown in told[0][1].items():
        torch.testing.assert_close(
            mean["model"][name], shown, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-6
        )

    # And as many ranks as one likes begin with it.
    model = network(dtype=dtype)
    optimizer = adam(list(model.parameters()))
    assert misfit(model, [optimizer], mean) is None
    load_replica(model, [optimizer], mean)
    for parameter in model.parameters():
        held = optimizer.state[parameter]
        assert held["step"] == 5
        assert (held["exp_avg_sq"] >= 0).all()


def test_a_state_is_taken_between_two_steps():
    hub = Hub(2)

    def main(rank, group):
        model = network()
        first, second = (sgd(list(part.parameters())) for part in (model[0], model[2]))
        with gg.gossip(
            model,
            [first, second],
            process_group=group,
            transport=lambda group: hub.transport(group.rank),
        ) as session:
            backward(model, rank, 0)
            first.step()
            with pytest.raises(gg.GossipError, match="in the middle of a step"):
                session.state_dict()
            second.step()
            assert session.state_dict()["session"]["steps"] == 1
            with session.consensus(), pytest.raises(gg.GossipError, match="inside consensus"):
                session.state_dict()

    run_ranks(2, main)
