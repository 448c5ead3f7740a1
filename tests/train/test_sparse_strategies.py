"""Sparse gradients as strategies of the command: checkpoints, warm-ups, momentum."""

import pytest
import torch
import torch.distributed as dist

from gossipgrad.comm import load_replica, replica_state
from gossipgrad.train import SparseConfig, TrainConfig
from support.processes import one_by_one, run_processes
from support.replicas import flat, network
from support.strategies import STEPS, sgd, start, take_step

pytestmark = pytest.mark.process


def resume_sparse(rank, store):
    """The weights after all steps, without a break and with one after half of them."""
    options = {"options": {"sparse": SparseConfig(plan="layerwise", density=0.1)}}
    found = []
    for broken in (False, True):
        model = network()
        optimizer = sgd(model)
        strategy = start(rank, "sparse", model, optimizer, **options)
        for step in range(STEPS):
            if broken and step == STEPS // 2:
                state, place = replica_state(model, [optimizer]), strategy.state_dict()
                strategy.close()
                model = network(1)
                optimizer = sgd(model)
                strategy = start(rank, "sparse", model, optimizer, **options)
                strategy.load_state_dict(place)
                load_replica(model, [optimizer], state)
                assert strategy.traffic().bytes_sent > 0
            take_step(strategy, optimizer, rank, step)
        notes = strategy._plan_notes()
        dist.barrier()
        strategy.close()
        found.append(flat(model).tolist())
    return found, notes


def test_what_is_carried_over_is_part_of_a_checkpoint(on_two):
    for (whole, resumed), notes in on_two[resume_sparse]:
        assert whole == resumed
        assert notes[0] == "gradients travelled in 4 groups, 4 of them sparse"


def warm_up(rank, store):
    """The densities of all steps, with and without a warm-up."""
    found = []
    for stage_steps in (None, 0, 3):
        sparse = SparseConfig(plan="single", density=0.001, density_warmup_steps=stage_steps)
        model = network()
        optimizer = sgd(model)
        strategy = start(rank, "sparse", model, optimizer, epochs=1, options={"sparse": sparse})
        densities = []
        for step in range(STEPS):
            take_step(strategy, optimizer, rank, step)
            densities.append(strategy._session._aggregation.density)
        found.append(densities)
        assert strategy.against_divergence == "lower --lr, or give more --density-warmup-steps"
        dist.barrier()
        strategy.close()
    return found


def test_the_density_falls_over_the_first_half_of_a_run_of_one_epoch_unless_told_otherwise(on_two):
    for densities, constant, begun in on_two[warm_up]:
        assert densities == [0.25, 0.0625, 0.015625, 0.004] + 4 * [0.001]
        assert constant == STEPS * [0.001]
        assert begun == 3 * [0.25] + 3 * [0.0625] + 2 * [0.015625]


def corrected(rank, store):
    """Weights with momentum before selection, and what it is in the optimizer."""
    found = []
    for correction, momentum in ((True, 0.9), (False, 0.9), (True, 0.0)):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        sparse = SparseConfig(plan="single", density=0.1, momentum_correction=correction)
        strategy = start(
            rank,
            "sparse",
            model,
            optimizer,
            options={"sparse": sparse, "sgd": {"momentum": momentum}},
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
    calls = resume_sparse, warm_up, corrected
    found = run_processes(2, one_by_one, *((call,) for call in calls))
    return dict(zip(calls, zip(*found, strict=True), strict=True))


def alone_with_momentum(rank, store):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)  # as two ranks saved it
    strategy = start(
        rank,
        "sparse",
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
    for of_sgd, optimizer in (({"momentum": 0.0}, "sgd"), ({}, "adamw")):
        options = {"sparse": SparseConfig(momentum_correction=True), "sgd": of_sgd}
        config = TrainConfig(strategy="sparse", optimizer=optimizer, options=options)
        with pytest.warns(UserWarning, match="momentum_correction=True is not used"):
            config.warn_of_unused()
