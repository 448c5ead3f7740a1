"""Mode stale: states that ranks take as they pass a cut have the mean of the run, to the last part.

The truth is independent of all mixing: with SGD the mean over ranks is that of the start, less the
rate times the mean of the gradients of all steps.
"""

import random

import pytest
import torch

import gossipgrad as gg
from gossipgrad.decentralized import average_states
from support.replicas import flat, network, set_gradients
from support.stale import Scripted

RATE = 0.05
MODE = gg.Stale(max_staleness=2, cut_every=4)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def double():
    return network(dtype=torch.float64)


class Saving(Scripted):
    """Ranks that take their states as `cuts` rises, and the mean that these must have."""

    def __init__(self, world_size, **settings):
        self.states = {}  # of each cut: by rank the state, and how far its gradients have led
        self.descended = [torch.zeros_like(flat(double())) for _ in range(world_size)]
        super().__init__(world_size, optimizer=plain_sgd, make=double, mode=MODE, **settings)

    def step(self, rank, gradients=set_gradients, session=None):
        session = session or self.sessions[rank]
        before = session.cuts
        super().step(rank, gradients)
        self.descended[rank] += descent(self.models[rank])
        if session.cuts > before:
            state = session.state_dict()
            cut = self.states.setdefault(session.cuts, {})
            cut[rank] = state, self.descended[rank].clone()

    def saved(self):
        """The states of each cut that all ranks have taken, and their mean, by the gradients."""
        cuts = [cut for _, cut in sorted(self.states.items()) if len(cut) == len(self.models)]
        for _ in range(4):  # until they lack nothing
            self.wires.deliver_all()
            self.run([("step", rank) for rank in range(len(self.models))])
        saved = []
        for cut in cuts:
            states = [cut[rank][0] for rank in sorted(cut)]
            assert all(gg.GossipSession.is_complete(state) for state in states)
            saved.append((states, mean_of([descended for _, descended in cut.values()])))
        return saved


def descent(model):
    return -RATE * torch.cat([p.grad.flatten() for p in model.parameters()])


def mean_of(descended):
    return flat(double()) + sum(descended) / len(descended)


def as_vector(weights):
    return torch.cat([weights[name].flatten() for name, _ in double().named_parameters()])


def assert_mean(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def resumed(states):
    """Ranks that go on from their states."""
    return Scripted(
        len(states),
        optimizer=plain_sgd,
        make=double,
        mode=MODE,
        first=lambda _, session: session.load_state_dict(states[session.rank]),
    )


def assert_goes_on(states, mean, steps=3):
    """With other gradients than before, and the mean as it is saved."""
    world = resumed(states)
    further = [torch.zeros_like(mean) for _ in states]
    for _ in range(steps):
        for rank, model in enumerate(world.models):
            world.step(rank, lambda model, rank, step: set_gradients(model, rank, 500 + step))
            further[rank] += descent(model)
        world.wires.deliver_all()
    world.settle()
    assert [session.stats().torn_rounds for session in world.sessions] == [0] * len(states)
    assert_mean(sum(map(flat, world.models)) / len(states), mean + sum(further) / len(states))
    world.close()


def test_a_slow_rank_passes_the_cut_by_its_partners_own_message():
    """That message was sent after its sender's state, so it is in no state."""
    world = Saving(2)
    world.run([("step", 0), ("step", 1), ("deliver", 0, 1), ("deliver", 1, 0)] * 2)
    world.run([("step", 0)] * 3)  # to round 4, where it takes its state, and to 5
    world.run([("deliver", 0, 1), ("step", 1)])  # from 2 to 5
    (states, mean), *_ = world.saved()
    assert [state["session"]["rounds"]["next_round"] for state in states] == [5, 5]
    assert_mean(as_vector(average_states(states)["model"]), mean)
    assert_goes_on(states, mean)
    world.close()


@pytest.mark.parametrize("seed", range(4))
def test_states_of_a_cut_have_the_mean_whoever_is_slow(seed):
    """Ranks that step and hear in any order."""
    chance = random.Random(seed)
    world = Saving(4)
    slow = chance.randrange(4)
    for _ in range(100):
        sender, receiver = chance.sample(range(4), 2)
        world.wires.deliver(sender, receiver, chance.randint(1, 3))
        rank = chance.randrange(4)
        if rank != slow or chance.random() < 0.3:
            world.step(rank)
    saved = world.saved()
    assert len(saved) > 1
    for states, mean in saved:
        assert_mean(as_vector(average_states(states)["model"]), mean)
    assert_goes_on(*saved[0])
    world.close()


def test_a_slow_rank_mixes_however_often_states_are_taken():
    """It comes down on the cuts, not always one round behind them."""
    world = Scripted(4, optimizer=plain_sgd, make=double, mode=MODE)
    for step in range(1, 31):
        for rank in range(4) if step % 3 == 0 else range(3):
            world.step(rank)
        world.wires.deliver_all()
    outcomes = world.sessions[3].stats().outcomes
    assert outcomes["delivered"] >= 8, outcomes
    world.close()


def test_a_rank_that_others_have_taken_past_a_cut_sends_nothing_in_its_state():
    """As an evaluation does, after which ranks go on from the round of the furthest."""

    def to_the_consensus(world, session):
        steps = 4 - 2 * session.rank  # to round 4, where rank 0 takes its state, and to 2
        for _ in range(steps):
            world.step(session.rank, session=session)
        session.group.barrier()
        if session.rank == 0:
            world.wires.deliver_all()
        session.group.barrier()
        with session.consensus():
            pass

    world = Saving(2, first=to_the_consensus)
    assert [session._rounds.next_round for session in world.sessions] == [5, 5]
    world.run([("step", 0), ("deliver", 0, 1), ("step", 1)])
    (states, mean), *_ = world.saved()
    assert [state["session"]["rounds"]["next_round"] for state in states] == [5, 6]
    assert_mean(as_vector(average_states(states)["model"]), mean)
    assert_goes_on(states, mean)
    world.close()


def test_what_a_partner_sends_after_its_state_is_awaited_anew():
    """Of states that all take between the same steps, whatever their rounds."""
    world = Saving(2)
    world.run([("step", 0), ("step", 1), ("deliver", 0, 1), ("deliver", 1, 0)] * 2)
    world.step(0)
    states = [session.state_dict() for session in world.sessions]
    mean = mean_of(world.descended)
    world.run([("deliver", 0, 1), ("step", 1), ("deliver", 1, 0), ("step", 0)])
    (entry,) = states[0]["session"]["rounds"]["under_way"]
    assert len(entry["came"]) == 1, "the test is of a part that came later"
    assert_goes_on(states, mean)
    world.close()


def test_a_round_that_is_lost_is_looked_after_no_more():
    """Its partner had mixed it, and this rank was not to know."""
    world = Saving(2)
    world.run([("step", 0), ("step", 1), ("deliver", 1, 0), ("step", 0)])
    states = [session.state_dict() for session in world.sessions]
    world.close()
    again = resumed(states)
    assert again.sessions[1].stats().torn_rounds > 0
    for session in again.sessions:
        rounds = session._rounds
        assert set(rounds.place()["opened_at"]) == {t.round for t in rounds.under_way}
    again.close()


def tensors_in(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


def test_what_comes_late_is_written_into_no_tensor_that_was_given_out():
    """A state may be on its way to the disk, in another thread, while it lacks something."""
    world = Saving(2)
    world.run([("step", 0), ("step", 1)] * 2)
    world.run([("deliver", 0, 1), ("deliver", 1, 0)])
    world.run([("step", 0), ("step", 1)] * 2)  # to the cut; nothing arrives any more
    state, _ = world.states[1][1]
    world.wires.deliver(0, 1, 1)
    world.step(1)
    assert state["outstanding"], "a part has come"
    assert not gg.GossipSession.is_complete(state)
    given = [(tensor, tensor.clone()) for tensor in tensors_in(state)]
    owed = dict(state["outstanding"])
    world.saved()
    assert gg.GossipSession.is_complete(state)
    assert all(not torch.equal(owed[name], t) for name, t in state["outstanding"].items())
    for tensor, then in given:
        assert torch.equal(tensor, then)
    world.close()


def test_a_cut_that_all_pass_without_a_step_is_none():
    """As after an average, or where a run is resumed: ranks go on from there as they come."""

    def to_the_cut(world, session):
        for _ in range(3):
            world.step(session.rank, session=session)
        session.group.barrier()
        if session.rank == 0:
            world.wires.deliver_all()
        session.group.barrier()
        session.average_()
        assert session._rounds.next_round == 5

    world = Saving(2, first=to_the_cut)
    assert [session.cuts for session in world.sessions] == [0, 0]
    world.run([("step", 0), ("step", 0), ("deliver", 0, 1), ("step", 1)])
    assert not world.states
    while world.sessions[0].cuts < 2:
        world.step(0)
    world.run([("deliver", 0, 1), ("step", 1)])
    assert [session.cuts for session in world.sessions] == [2, 2]
    (states, mean), *_ = world.saved()
    assert_mean(as_vector(average_states(states)["model"]), mean)
    world.close()
