"""Sparse gradients as strategies of the command: checkpoints, warm-ups, momentum."""

import pytest
import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import load_replica, replica_state
from gossipgrad.train import SparseConfig, TrainConfig
from support.processes import one_by_one, run_processes
from support.ranks import run_ranks
from support.replicas import flat, network
from support.strategies import STEPS, loss_of, sgd, start, take_step

pytestmark = pytest.mark.process


def resume_sparse(rank, store):
    """The weights after all steps, without a break and with one after half of them."""
    options = {"options": {"sparse": SparseConfig(density=0.1)}}
    found = []
    for broken in (False, True):
        model = network()
        optimizer = sgd(model)
        strategy = start(rank, "lags", model, optimizer, **options)
        for step in range(STEPS):
            if broken and step == STEPS // 2:
                state, place = replica_state(model, [optimizer]), strategy.state_dict()
                strategy.close()
                model = network(1)
                optimizer = sgd(model)
                strategy = start(rank, "lags", model, optimizer, **options)
                strategy.load_state_dict(place)
                load_replica(model, [optimizer], state)
                assert strategy.traffic().bytes_sent > 0
            take_step(strategy, optimizer, rank, step)
        notes = strategy._told()
        dist.barrier()
        strategy.close()
        found.append(flat(model).tolist())
    return found, notes


def test_what_is_carried_over_is_part_of_a_checkpoint(on_two):
    for (whole, resumed), notes in on_two[resume_sparse]:
        assert whole == resumed
        assert notes[0] == "gradients travelled in 4 groups, 4 of them sparse"


def warm_up(rank, store):
    """The densities of all steps, and what is told of them, with and without a warm-up."""
    found = []
    for stage_steps in (None, 0, 3):
        sparse = SparseConfig(density=0.001, density_warmup_steps=stage_steps)
        model = network()
        optimizer = sgd(model)
        strategy = start(rank, "topk", model, optimizer, epochs=1, options={"sparse": sparse})
        densities = []
        for step in range(STEPS):
            take_step(strategy, optimizer, rank, step)
            densities.append(strategy._session._aggregation.density)
        found.append((densities, strategy._told()[1:2]))
        assert strategy.against_divergence == "lower --lr, or give more --density-warmup-steps"
        dist.barrier()
        strategy.close()
    return found


def test_the_density_falls_over_the_first_half_of_a_run_of_one_epoch_unless_told_otherwise(on_two):
    for (densities, told), (constant, none), (_, begun) in on_two[warm_up]:
        assert densities == [0.25, 0.0625, 0.015625, 0.004] + 4 * [0.001]
        assert told == ["the density fell to 0.001 over the first 4 steps"]
        assert constant == STEPS * [0.001]
        assert none == []
        assert begun == ["the density was 0.015625 at the end, in a warm-up of 12 steps"]


def carried_over(rank, group):
    model = network()
    optimizer = sgd(model)
    with gg.sparsify(
        model, optimizer, process_group=group, plan="layerwise", density=0.1
    ) as session:
        for step in range(5):
            loss_of(model, rank, step).backward()
            optimizer.step()
        session.group.barrier()
        return {"session": session.own_state()}


def go_on_from_three(rank, store):
    former = run_ranks(3, carried_over)
    model = network()
    options = SparseConfig(density=0.01, density_warmup_steps=3)
    strategy = start(rank, "omgs", model, sgd(model), options={"sparse": options})
    strategy.load_former_states(7, former)
    taken = strategy.state_dict()["session"]
    take_step(strategy, sgd(model), rank, 0)
    density = strategy._session._aggregation.density
    dist.barrier()
    strategy.close()

    def mean(places, ranks):
        held = [place["session"]["residuals"] for place in places]
        return {name: (sum(each[name] for each in held) / ranks).tolist() for name in held[0]}

    dist.all_gather_object(told := [None, None], mean([{"session": taken}], 2))
    return mean(former, 3), told, taken["counted"]["rounds"], density


def test_another_number_of_ranks_shares_out_what_was_carried_over_and_warms_up_on(on_two):
    for before, after, rounds, density in on_two[go_on_from_three]:
        assert rounds == 5
        assert density == 0.0625
        for name, mean in before.items():
            shares = [torch.tensor(each[name]) for each in after]
            torch.testing.assert_close(sum(shares), torch.tensor(mean))


def corrected(rank, store):
    """Weights with momentum before selection, and what it is in the optimizer."""
    found = []
    for correction, momentum in ((True, 0.9), (False, 0.9), (True, 0.0)):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        sparse = SparseConfig(density=0.1, momentum_correction=correction)
        strategy = start(
            rank, "topk", model, optimizer, momentum=momentum, options={"sparse": sparse}
        )
        for step in range(STEPS):
            take_step(strategy, optimizer, rank, step)
        dist.barrier()
        settings = strategy._session.settings.momentum_correction
        strategy.close()
        found.append((flat(model).tolist(), settings, optimizer.param_groups[0]["momentum"]))
    return found


def test_momentum_is_applied_before_selection_or_after(on_two):
    for before, after, none in on_two[corrected]:
        assert before[1:] == (0.9, 0.0)
        assert after[1:] == (None, 0.9)
        assert none[1:] == (None, 0.0)
        assert before[0] != after[0]


@pytest.fixture(scope="module")
def on_two():
    """What each of these returned, by rank."""
    calls = resume_sparse, warm_up, go_on_from_three, corrected
    found = run_processes(2, one_by_one, *((call,) for call in calls))
    return dict(zip(calls, zip(*found, strict=True), strict=True))


def alone_with_momentum(rank, store):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)  # as two ranks saved it
    strategy = start(
        rank,
        "omgs",
        model,
        optimizer,
        options={"sparse": SparseConfig(momentum_correction=True)},
    )
    strategy.close()
    settings = strategy._session.settings
    return settings.momentum_correction, optimizer.param_groups[0]["momentum"]


def test_one_rank_alone_corrects_no_momentum_and_keeps_it():
    (found,) = run_processes(1, alone_with_momentum)
    assert found == (None, 0.9)


def test_a_correction_of_no_momentum_warns():
    for options in ({"momentum": 0.0}, {"optimizer": "adamw"}):
        sparse = SparseConfig(momentum_correction=True)
        config = TrainConfig(strategy="omgs", options={"sparse": sparse}, **options)
        with pytest.warns(UserWarning, match="momentum_correction=True is not used"):
            config.warn_of_unused()
