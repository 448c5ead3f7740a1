"""States that do not fit, or were not taken together; replicas of another number of ranks."""

import threading
import weakref

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Hub, load_replica, misfit, replica_state
from gossipgrad.decentralized import average_states
from support.ranks import run_ranks
from support.replicas import adam, backward, network, sgd
from support.resuming import run_on
from support.sessions import run_sessions
from support.waiting import HANG_SECONDS


def states_after(world_size, steps, **settings):
    states, _ = run_on(world_size, 0, steps + 1, saves_at=steps, **settings)
    return states


def on_sessions(world_size, use, *, dtype=torch.float32, **settings):
    """What `use(me)` returns on fresh sessions."""
    make = lambda rank: network(1, dtype=dtype)  # noqa: E731
    return run_sessions(world_size, use, make=make, bucket_bytes=100, **settings)


def named(me):
    return {name: p.detach().clone() for name, p in me.model.named_parameters()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "sync"}, "mode was overlap, here it is sync"),
        ({"optimizer": adam}, "saved with the optimizers SGD, here are Adam"),
        ({"world_size": 3}, "it was saved by 2 ranks, here are 3: begin a session from the cons"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(change, message):
    states = states_after(2, 2)
    settings = {"world_size": 2, **change}

    def load(me):
        before = me.weights()
        with pytest.raises(ValueError, match=rf"cannot be loaded on rank 0: .*{message}"):
            me.session.load_state_dict(states[min(me.rank, 1)])
        assert torch.equal(me.weights(), before)
        me.train()

    on_sessions(settings.pop("world_size"), load, **settings)


def test_foreign_states_are_refused_on_all_ranks():
    states = states_after(2, 2)

    def load(me):
        with pytest.raises(ValueError, match="on rank 1: it is the state of rank 0"):
            me.session.load_state_dict(states[0])
        with pytest.raises(ValueError, match="it is no state"):
            me.session.load_state_dict({"model": {}})
        states[me.rank]["session"] = {"version": 1}
        with pytest.raises(ValueError, match="it is no state"):
            me.session.load_state_dict(states[me.rank])

    on_sessions(2, load)


def test_states_taken_after_unequal_steps_are_warned_of_and_nobody_waits_for_ever():
    states = [states_after(2, 6)[0], states_after(2, 5)[1]]

    def train(me):
        me.session.load_state_dict(states[me.rank])
        me.train(3)
        me.group.barrier()
        return me.outcomes

    with pytest.warns(UserWarning, match="unlike rounds, 5 to 6"):
        outcomes = on_sessions(2, train)
    assert all(counts["delivered"] > 0 == counts["late"] for counts in outcomes)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_what_is_late_is_given_up_with_a_warning_and_the_state_can_be_loaded(mode, caplog):
    """Rank 1 does not make its last two steps before rank 0 has saved."""
    saved = threading.Event()
    waits = {"overlap": gg.Overlap, "sync": gg.Sync}[mode]
    patient = waits(patience_seconds=0.2)

    def train(me):
        me.train(3)
        if me.rank == 1:
            assert saved.wait(HANG_SECONDS)
        me.train(2)
        state = me.session.state_dict()
        if me.rank == 0:
            saved.set()
        me.group.barrier()
        return state, me.mean()

    found = on_sessions(2, train, mode=patient, topology="matching")
    assert "gave up round" in caplog.text
    assert torch.equal(found[0][1], found[1][1])

    def go_on(me):
        me.session.load_state_dict(found[me.rank][0])
        me.train(4)
        me.group.barrier()
        return me.outcomes["delivered"]

    assert min(on_sessions(2, go_on, mode=mode, topology="matching")) > 0


def test_ranks_that_end_after_unequal_steps_drain_first():
    def train(me):
        me.train(4 - me.rank)
        return me.session.state_dict(drain=True)

    states = on_sessions(2, train, dtype=torch.float64, leaves_together=False)
    assert [state["session"]["steps"] for state in states] == [4, 3]
    mean = average_states(states)["model"]

    def go_on(me):
        me.session.load_state_dict(states[me.rank])
        with me.session.consensus():
            shown = named(me)
        me.train()
        return shown

    for shown in on_sessions(2, go_on, dtype=torch.float64):
        for name, value in shown.items():
            torch.testing.assert_close(value, mean[name], rtol=0, atol=1e-12)


def test_states_that_are_read_one_by_one_are_not_kept():
    """A resumed rank reads those of all others: memory holds the first and one more."""
    model = network(dtype=torch.float64)
    optimizer = adam(list(model.parameters()))
    alive: list[weakref.ref] = []
    most = 0

    def read():
        nonlocal most
        for _ in range(6):
            state = replica_state(model, [optimizer])
            alive.append(weakref.ref(next(iter(state["model"].values()))))
            most = max(most, sum(one() is not None for one in alive))
            yield state
            del state

    mean = average_states(read())["model"]
    assert most == 2
    for name, value in model.state_dict().items():
        torch.testing.assert_close(mean[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_of_all_states_is_the_consensus(dtype):
    """With what rounding took from narrow weights."""

    def train(me):
        me.train(5)
        state = me.session.state_dict()
        with me.session.consensus():
            return state, named(me)

    found = on_sessions(4, train, dtype=dtype, optimizer=adam)
    mean = average_states([state for state, _ in found])
    for name, shown in found[0][1].items():
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
