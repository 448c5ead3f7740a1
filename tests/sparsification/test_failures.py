"""Ranks that die, leave, raise or disagree: nobody hangs, and nothing trained is lost."""

import threading

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.ranks import run_ranks
from support.replicas import network, sgd
from support.sparse import backward_of, same_weights, start
from support.unchecked import types_unchecked


def copies(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_rank_that_is_gone_breaks_the_step_of_the_others_and_nothing_else(momentum):
    def rank_main(rank, group):
        model, optimizer, session = start(group, momentum_correction=momentum)
        for step in range(3):
            backward_of(model, rank, step)
            optimizer.step()
        if rank == 2:
            session.close()
            return
        weights, state = copies(model), session.state_dict()["session"]
        model.zero_grad()
        with pytest.raises(gg.GossipError, match=r"save session\.state_dict"):
            backward_of(model, rank, 3)
        own = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(gg.GossipError, match="not aggregated any more"):
            optimizer.step()
        assert same_weights([list(model.parameters()), weights])
        after = session.state_dict()["session"]
        assert len(after["velocities"]) == (0 if momentum is None else 4)
        for kind in ("residuals", "velocities"):
            torch.testing.assert_close(after[kind], state[kind], rtol=1e-4, atol=1e-6)
        session.close()
        backward_of(model, rank, 3)
        assert same_weights([[p.grad for p in model.parameters()], own])

    run_ranks(3, rank_main)


def test_an_exception_inside_backward_is_told_to_the_others_at_once():
    told = threading.Event()

    def rank_main(rank, group):
        model, optimizer, session = start(group)
        with session:
            backward_of(model, rank, 0)
            optimizer.step()
            kept = session.state_dict()["session"]["residuals"]
            if rank == 0:

                def fail(grad):
                    raise ZeroDivisionError

                handle = model[0].weight.register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    backward_of(model, rank, 1)
                handle.remove()
            else:
                with pytest.raises(gg.GossipError, match="the collective did not come about"):
                    backward_of(model, rank, 1)
                told.set()
            torch.testing.assert_close(session.state_dict()["session"]["residuals"], kept)
            with pytest.raises(gg.GossipError, match="not aggregated any more"):
                backward_of(model, rank, 2)
            assert told.wait(20)  # leaving would tell it, too

    run_ranks(2, rank_main)


def test_unequal_step_counts_end_without_a_hang():
    def rank_main(rank, group):
        model, optimizer, session = start(group)
        with session:
            for step in range(3 + rank):
                try:
                    backward_of(model, rank, step)
                except gg.GossipError:
                    assert step == 3
                    return
                optimizer.step()
            assert rank == 0

    run_ranks(2, rank_main)


def test_ranks_that_differ_are_told_what_in():
    def settings(rank, group):
        model = network()
        with pytest.raises(gg.AgreementError, match=r"'density' is 0\.1 on rank 1, but 0\.2"):
            gg.sparsify(
                model, sgd(list(model.parameters())), process_group=group, density=0.2 - rank / 10
            )

    run_ranks(2, settings)


@pytest.mark.parametrize("late", [lambda: 1 / 0, lambda: 2], ids=["raises", "none"])
def test_a_course_of_the_density_that_goes_wrong_is_told_on_all(late):
    """It is that of rank 0 for all; those of others are not asked for."""

    def rank_main(rank, group):
        def density(step):
            return 0.5 if step < 102 and (rank == 0 or step == 0) else late()

        model, optimizer, session = start(group, "single", density=density)
        with session:
            for _ in range(102):
                optimizer.step()
            for _ in range(2):
                with pytest.raises(gg.GossipError, match="asked about round 102"):
                    backward_of(model, rank, 2)
            group.barrier()

    run_ranks(2, rank_main)


def freeze(model, session):
    model[0].requires_grad_(False)


def leave(model, session):
    session.close()


@pytest.mark.parametrize(
    ("change", "error"), [(freeze, gg.AgreementError), (leave, gg.GossipError)]
)
def test_replicas_that_cannot_be_made_equal_do_not_train_on_alone(change, error):
    def rank_main(rank, group):
        model, optimizer, session = start(group)
        backward_of(model, rank, 0)
        optimizer.step()
        if rank:
            change(model, session)
        weights = copies(model)
        with pytest.raises(error):
            session.broadcast_()
        if rank and change is leave:
            return
        residuals = session.state_dict()["session"]["residuals"]
        assert residuals.keys() == {name for name, _ in model.named_parameters()}
        for use in (
            lambda: backward_of(model, rank, 1),
            optimizer.step,
            session.broadcast_,
            session.consensus().__enter__,
        ):
            with pytest.raises(gg.GossipError, match=r"the session is over.* Close it"):
                use()
        assert same_weights([list(model.parameters()), weights])
        session.close()
        backward_of(model, rank, 1)
        optimizer.step()

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.0}, r"density is 0.0: it is the share .* such as 0.001"),
        ({"density": {"*.weight": 0.1}}, r'needs an entry "\*"'),
        ({"density": {"nothing": 0.1, "*": 0.1}}, r"'nothing' never counts"),
        ({"density": {"*": 0.1, "*.bias": 0.1}}, r"'\*.bias' never counts"),
        (
            {"density": {"0.*": 0.1, "2.*": 0.1, "*.bias": 0.1, "*": 0.1}},
            r"'\*.bias' never counts: .* Put narrow patterns before wide",
        ),
        ({"density": lambda step: 2}, "density at step 0 is 2"),
        ({"plan": "best"}, "there is no plan 'best': it is one of 'optimal', .* a threshold"),
        ({"plan": 0}, "plan=0 is a threshold in bytes"),
        ({"select": "all"}, "select must be one of 'per_group', 'per_tensor', got 'all'"),
        ({"methods": ("sparse", "sparse")}, r"methods must be some of .*, each once"),
        ({"methods": ()}, "methods must be some of"),
        ({"value_dtype": torch.int8}, "value_dtype must be one of torch.float32"),
        ({"momentum_correction": 1.0}, "momentum_correction is 1.0: it is the momentum itself"),
        ({"momentum_correction": 0.9}, "has one of its own: use torch.optim.SGD.*momentum=0"),
        ({"scaler": 3}, "scaler must be the torch.amp.GradScaler .*, got 3"),
        ({"recorder": 3}, r"a method span\(name, .*got 3"),
    ],
)
def test_wrong_settings(settings, message):
    model = network()
    with types_unchecked(), pytest.raises(ValueError, match=message):
        gg.sparsify(model, sgd(list(model.parameters())), **settings)


def test_sparse_gradients_are_refused_with_the_way_out():
    def rank_main(rank, group):
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            gg.sparsify(model, optimizer, process_group=group, plan="single", density=0.5),
            pytest.raises(gg.GossipError, match="sparse=False"),
        ):
            model(torch.tensor([1, 2])).sum().backward()

    run_ranks(2, rank_main)


def test_a_step_whose_round_is_refused_ends_the_session_on_all_ranks():
    told = threading.Event()

    def rank_main(rank, group):
        model = nn.Embedding(5, 3, sparse=rank == 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gg.sparsify(
            model, optimizer, process_group=group, plan="single", density=0.5
        ) as session:
            with session.no_sync():
                model(torch.tensor([1, 2])).sum().backward()
            message = "the collective did not come about" if rank else "sparse=False"
            with pytest.raises(gg.GossipError, match=message):
                optimizer.step()
            if rank:
                told.set()
            with pytest.raises(gg.GossipError, match="not aggregated any more"):
                optimizer.step()
            assert told.wait(20)  # leaving would tell it, too

    run_ranks(2, rank_main)


@pytest.mark.parametrize("density", [0.01, 0.001, gg.sparsification.Warmup(then=0.005)])
def test_a_density_that_costs_accuracy_is_warned_of(density):
    def rank_main(rank, group):
        with start(group, "single", density=density)[-1]:
            group.barrier()

    with pytest.warns(UserWarning, match="Leave density out") as warned:
        run_ranks(2, rank_main)
    assert len(warned) == 2  # one a rank


def test_the_default_density_falls_by_steps_to_a_hundredth():
    def rank_main(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gg.sparsify(model, optimizer, process_group=group, plan="single") as session:
            backward_of(model, rank, 0)
            optimizer.step()
            group.barrier()
            assert session.stats().groups[0].chosen == 83
            state = session.state_dict()
            state["session"]["counted"]["rounds"] = 1000
            session.load_state_dict(state)
            backward_of(model, rank, 1)
            optimizer.step()
            group.barrier()
            return session.stats().groups[0].chosen

    assert run_ranks(2, rank_main) == [1, 1]  # of 83, rounded up
