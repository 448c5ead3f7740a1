"""Steps: no optimizer takes one with a gradient of its rank alone, or of other units."""

import pytest
import torch

import gossipgrad as gg
from support.ranks import run_ranks
from support.replicas import network
from support.sparse import backward_of, same_weights, start


def begin(group, model=None, **settings):
    return start(group, model=model, **{"plan": "single", "density": 1.0, **settings})


def by_hand(session, model, rank):
    for p in model.parameters():
        p.grad = torch.full_like(p, float(rank))


def inside_no_sync(session, model, rank):
    with session.no_sync():
        backward_of(model, rank, 9)


def test_gradients_that_came_after_a_round_meet_before_the_step():
    """The mean of both passes, also where one rank left out a part of the model in the second."""

    def rank_main(rank, group):
        model, optimizer, session = begin(group)
        with session:
            sum((rank + 1) * p.sum() for p in model.parameters()).backward()
            with session.no_sync():
                of = model.parameters() if rank else model[0].parameters()
                sum(10 * p.sum() for p in of).backward()
            optimizer.step()
            assert session.stats().rounds == 2
        return [p.grad for p in model.parameters()]

    told = run_ranks(2, rank_main)
    assert same_weights(told)
    assert [set(g.flatten().tolist()) for g in told[0]] == [{11.5}, {11.5}, {6.5}, {6.5}]


def test_a_step_in_the_middle_of_a_backward_pass_is_refused():
    def rank_main(rank, group):
        model, optimizer, session = begin(group, plan="layerwise")
        with session:
            model[0].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
            with pytest.raises(gg.GossipError, match="in the middle of a backward pass"):
                backward_of(model, rank, 0)

    run_ranks(2, rank_main)


def test_a_pass_that_breaks_after_a_round_leaves_no_step():
    """The first of two passes has met: that makes no step with what the second left behind."""

    def rank_main(rank, group):
        model, optimizer, session = begin(group)
        with session:
            backward_of(model, rank, 0)
            if rank:
                return
            with pytest.raises(gg.GossipError):
                model(torch.ones(1, 6)).sum().backward()
            with pytest.raises(gg.GossipError, match="not aggregated any more"):
                optimizer.step()

    run_ranks(2, rank_main)


def test_a_scaler_needs_the_last_pass_of_a_step_to_be_a_round():
    def rank_main(rank, group):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model, optimizer, session = begin(group, scaler=scaler)
        with session:
            loss = model(torch.ones(4, 6)).square().mean()
            with session.no_sync():
                scaler.scale(loss).backward(retain_graph=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            with session.no_sync():
                scaler.scale(model(torch.ones(4, 6)).square().mean()).backward()
            with pytest.raises(gg.GossipError, match=r"outside no_sync\(\)"):
                scaler.step(optimizer)

    run_ranks(2, rank_main)


def test_a_parameter_that_was_not_trained_at_the_start_is_not_stepped_alone():
    def rank_main(rank, group):
        model = network()
        model[0].requires_grad_(False)
        model, optimizer, session = begin(group, model)
        with session:
            backward_of(model, rank, 0)
            optimizer.step()
            model[0].requires_grad_(True)
            backward_of(model, rank, 1)
            with pytest.raises(gg.ReplicaChangedError, match=r"'0\.weight' .*broadcast_\(\)"):
                optimizer.step()
            session.broadcast_()
            backward_of(model, rank, 1)
            optimizer.step()
            session.group.barrier()
        return [p.detach() for p in model.parameters()]

    assert same_weights(run_ranks(2, rank_main))


@pytest.mark.parametrize("plan", ["single", "optimal"])
def test_a_parameter_that_is_frozen_behind_the_session_is_not_stepped(plan):
    """Also where the plan is made meanwhile: in the seventh round."""

    def rank_main(rank, group):
        model, optimizer, session = begin(group, plan=plan)
        with session:
            for step in range(6):
                backward_of(model, rank, step)
                optimizer.step()
            model[0].bias.requires_grad_(False)
            frozen = model[0].bias.detach().clone()
            backward_of(model, rank, 6)
            with pytest.raises(gg.ReplicaChangedError, match=r"'0\.bias' .*broadcast_\(\)"):
                optimizer.step()
            session.broadcast_()
            for step in range(6, 8):
                backward_of(model, rank, step)
                optimizer.step()
            assert torch.equal(model[0].bias, frozen)
            session.group.barrier()
        return [p.detach() for p in model.parameters()]

    assert same_weights(run_ranks(2, rank_main))


@pytest.mark.parametrize("methods", [("sparse",), ("dense",)])
@pytest.mark.parametrize("nothing", [None, 0.0])
def test_a_rank_without_gradients_gets_those_of_the_others_and_sends_nothing(methods, nothing):
    def rank_main(rank, group):
        model, optimizer, session = begin(group, density=0.1, methods=methods)
        with session:
            backward_of(model, rank, 0)
            optimizer.step()
            kept = session.state_dict()["session"]["residuals"]
            optimizer.zero_grad()
            if rank:
                for p in model.parameters():
                    p.grad = None if nothing is None else torch.zeros_like(p)
            else:
                backward_of(model, rank, 1)
            optimizer.step()
            now = session.state_dict()["session"]["residuals"]
            same = all(torch.equal(kept[name], now[name]) for name in kept)
            assert same == (rank == 1 or methods == ("dense",))
            assert session.stats().rounds == 2
            session.group.barrier()
        return [p.detach() for p in model.parameters()] + [p.grad for p in model.parameters()]

    told = run_ranks(2, rank_main)
    assert same_weights(told)
    assert any(bool(g.any()) for g in told[1][4:])


def test_what_has_not_met_when_a_closure_returns_does_so_then():
    def rank_main(rank, group):
        model, optimizer, session = begin(group)

        def closure():
            inside_no_sync(session, model, rank)
            return 1.0

        with session:
            inside_no_sync(session, model, rank)
            assert optimizer.step(lambda: 7.0) == 7.0
            assert session.stats().rounds == 1
            assert optimizer.step(closure=closure) == 1.0
            assert session.stats().rounds == 2
            backward_of(model, rank, 2)
            optimizer.step(lambda: 7.0)
            assert session.stats().rounds == 3
            optimizer.step(closure if rank else lambda: backward_of(model, rank, 3))
            assert session.stats().rounds == 4
            session.group.barrier()
        return [p.detach() for p in model.parameters()]

    assert same_weights(run_ranks(2, rank_main))


class Deaf(torch.optim.Optimizer):
    """Takes a closure, as the signature demands, and does not call it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        pass


def test_an_optimizer_that_does_not_call_its_closure_does_not_train_on_alone():
    def rank_main(rank, group):
        model = network()
        optimizer = Deaf(model.parameters())
        with gg.sparsify(model, optimizer, process_group=group, plan="single") as session:
            backward_of(model, rank, 0)
            optimizer.step(lambda: None)
            with session.no_sync():
                backward_of(model, rank, 1)
            for _ in range(2):
                with pytest.raises(gg.GossipError, match="did not call the closure"):
                    optimizer.step(lambda: None)

    run_ranks(2, rank_main)


def test_a_step_that_no_scaler_saw_takes_nothing_that_is_scaled():
    """The other rank's `.grad` is to be divided by the scale, which this one has missed."""

    def rank_main(rank, group):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model, optimizer, session = begin(group, density=0.1, scaler=scaler)
        with session:
            scaler.scale(model(torch.ones(4, 6)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]
            if rank:
                with pytest.raises(gg.GossipError, match="others had some, scaled"):
                    optimizer.step()
                assert same_weights([before, list(model.parameters())])
            else:
                scaler.scale(model(torch.ones(4, 6)).square().mean()).backward()

    run_ranks(2, rank_main)


def test_gradients_by_hand_after_a_step_that_a_scaler_left_out_are_no_round_gone_by():
    def rank_main(rank, group):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model, optimizer, session = begin(group, scaler=scaler)
        with session:
            scaler.scale(model(torch.full((4, 6), float("inf"))).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.state_dict()["state"] == {}
            by_hand(session, model, rank + 1)
            with pytest.raises(gg.GossipError, match="write none by hand"):
                optimizer.step()

    run_ranks(2, rank_main)


def test_a_step_without_gradients_on_any_rank_sends_nothing():
    """It goes by zeros, and nothing that is carried over is spent on it."""

    def rank_main(rank, group):
        model, optimizer, session = begin(group, density=0.1)
        with session:
            backward_of(model, rank, 0)
            optimizer.step()
            optimizer.zero_grad()
            kept = session.state_dict()["session"]["residuals"]
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            now = session.state_dict()["session"]["residuals"]
            assert all(torch.equal(kept[name], now[name]) for name in kept)
            assert same_weights([before, list(model.parameters())])
            session.group.barrier()

    run_ranks(2, rank_main)
