"""Replicas that shrink together: one plan, wherever they are, whoever is lost or joins."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from gossipgrad.comm import Hub
from support.deaths import run_mortals
from support.joining import run_open
from support.ranks import run_ranks
from support.replicas import adam, flat, sgd, transport_by_name
from support.sessions import run_sessions

SHRINK = {"every": 6, "batches": 4, "events": 2, "budget": 0.1, "round_to": 1}


def wide(seed=0, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        model[0].weight[10:] = model[0].weight[:10]
        model[0].bias[10:] = model[0].bias[:10]
    return model.to(dtype)


def backward(model, rank, number):
    """A batch that is large enough for moments."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    batch = torch.randn(32, 6, generator=generator)
    model.zero_grad()
    model(batch).square().mean().backward()


def shrink(session, **settings):
    optimizer = session.replica.optimizers
    settings = {**SHRINK, **settings}
    return gg.shrink(
        session.replica.model,
        optimizer,
        session=session,
        example_input=torch.ones(2, 6),
        **settings,
    )


def on_ranks(world_size, use, **settings):
    """What `use(session, shrinking, train)` returns on each rank."""

    def with_shrinking(me):
        with shrink(me.session) as shrinking:
            result = use(me.session, shrinking, me.train)
            me.group.barrier()
        return result

    models = {"make": lambda rank: wide(), "gradients": backward}
    return run_sessions(world_size, with_shrinking, **models, **settings)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "overlap"},
        {"mode": "sync", "payload": "weights+state"},
        {"mode": "stale"},
        {"mode": "overlap", "payload": "gradients+weights"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_all_ranks_make_one_plan_and_messages_shrink(settings, optimizer):
    def use(session, shrinking, train):
        def message_bytes():
            return sum(part.size_bytes for flow in session.flows for part in flow.parts)

        def sent_in_five_steps():
            session.wait()
            before, of_messages = session.stats().bytes_sent, message_bytes()
            train(5)
            session.wait()
            # otherwise what has left by now, and when events come, is a matter of time
            is_sync = settings["mode"] == "sync"
            return session.stats().bytes_sent - before if is_sync else of_messages

        wide_bytes = sent_in_five_steps()
        train(25)
        narrow_bytes = sent_in_five_steps()
        with session.consensus():
            shared = flat(session.replica.model)
        errors = [event.errors for event in shrinking.history]
        return shrinking.widths(), errors, shared, narrow_bytes / wide_bytes

    ended = on_ranks(3, use, optimizer=optimizer, **settings)
    widths, errors, shared, _ = ended[0]
    assert widths["0"] <= 10
    assert len(errors) == 2
    for other, told, mean, ratio in ended:
        assert (other, told) == (widths, errors)
        assert torch.equal(mean, shared)
        assert ratio < 0.75


def test_the_consensus_of_shrunk_replicas_is_the_shrunk_consensus():
    def use(session, shrinking, train):
        model = session.replica.model
        shrinking.look()
        train(4)
        plan = shrinking.plan(0.05)
        with session.consensus():
            mean = copy.deepcopy(model)
        plan.apply(mean)
        shrinking.apply(plan)
        with session.consensus():
            torch.testing.assert_close(flat(model), flat(mean), rtol=1e-5, atol=1e-6)
        return plan.digest()

    digests = on_ranks(3, use)
    assert len({*digests}) == 1


def test_ranks_with_unlike_plans_change_nothing():
    def use(session, shrinking, train):
        shrinking.look()
        train(4)
        plan = shrinking.plan(0.05)
        if session.rank == 1:
            plan = gg.ShrinkPlan(())
        before = flat(session.replica.model)
        with pytest.raises(gg.AgreementError):
            shrinking.apply(plan)
        assert torch.equal(flat(session.replica.model), before)
        train(10)
        return shrinking.widths()["0"]

    assert max(on_ranks(2, use)) <= 10


def die(me):
    """Ends this rank; one whose plan failed would call `rebuild` next."""
    me.session.rebuild = lambda *args, **named: die(me)
    me.die()


@pytest.mark.parametrize("place", ["mean_", "rebuild", "agree"])
def test_a_rank_that_dies_before_a_plan_is_applied_takes_nobody_along(place):
    def function(me):
        model, session = me.session.replica.model, me.session
        with shrink(session, events=3) as shrinking:
            if me.rank == 2:
                setattr(session, place, lambda *args, **named: die(me))
            me.train_without(2)
            me.train_until(lambda: shrinking.stats().events >= 1)
            me.train_until(lambda: len(shrinking.history) == 3)
            widths = shrinking.widths()
            with session.consensus():
                mean = flat(model)
            session.group.barrier()
        return widths, mean

    first, second, dead = run_mortals(3, function, make=wide)
    assert dead is None
    assert first[0] == second[0]
    assert first[0]["0"] <= 10
    assert torch.equal(first[1], second[1])


def test_a_joiner_becomes_as_narrow_as_the_run():
    def member(me, run):
        with shrink(me.session, events=1, start=0) as shrinking:
            me.train_until(lambda: shrinking.history)
            if me.rank == 0:
                run.invite(me.session)
            me.train_until(lambda: 2 in me.session.membership.living)
            return go_on(me)

    def joiner(me, run):
        with shrink(me.session, events=1, start=0) as shrinking:
            assert shrinking.widths()["0"] <= 10
            return go_on(me)

    def go_on(me):
        me.train(5)
        ended.add(me.session.rank)
        me.train_until(lambda: len(ended) == 3)
        mean = me.mean()
        me.session.group.barrier()
        return mean

    ended = set()
    means = run_open(2, member, joiner, gradients=backward, build=wide)
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_a_checkpoint_between_plan_and_apply():
    def whole(session, shrinking, train):
        shrinking.look()
        train(4)
        plan = shrinking.plan(0.05)
        saved = copy.deepcopy([session.state_dict(), shrinking.state_dict(), plan.state_dict()])
        shrinking.apply(plan)
        train(14)
        return saved, flat(session.replica.model), shrinking.widths()

    first = on_ranks(2, whole)
    link = transport_by_name("in-process", 2)

    def resumed(rank, group):
        (replica, course, plan), expected, widths = first[rank]
        model = gg.rebuild(wide(seed=7), replica)
        optimizer = sgd(list(model.parameters()))
        with (
            gg.gossip(model, optimizer, process_group=group, transport=link) as session,
            shrink(session) as shrinking,
        ):
            session.load_state_dict(replica)
            shrinking.load_state_dict(course)
            shrinking.apply(gg.ShrinkPlan.from_state_dict(plan))
            for number in range(4, 18):
                backward(model, rank, number)
                optimizer.step()
            torch.testing.assert_close(flat(model), expected, rtol=1e-5, atol=1e-7)
            assert shrinking.widths() == widths
            group.barrier()
        return widths

    assert run_ranks(2, resumed)[0]["0"] <= 10


def test_equal_replicas_stay_equal_without_gossip():
    def rank_main(rank, group):
        model = wide()
        optimizer = adam(list(model.parameters()))
        with gg.shrink(
            model, optimizer, process_group=group, example_input=torch.ones(2, 6), **SHRINK
        ) as session:
            for number in range(15):
                backward(model, rank, number)
                session.replicas.mean_([p.grad for p in model.parameters()])
                optimizer.step()
            group.barrier()
        return flat(model), session.widths()

    one, two = run_ranks(2, rank_main)
    assert one[1] == two[1]
    assert one[1]["0"] <= 10
    assert torch.equal(one[0], two[0])


@pytest.mark.parametrize("plan", ["single", 400, "optimal"])
def test_sparse_gradients_go_on_and_what_is_carried_over_shrinks(plan):
    def rank_main(rank, group):
        model = wide()
        optimizer = sgd(list(model.parameters()))
        with (
            gg.sparsify(model, optimizer, process_group=group, plan=plan, density=0.2) as session,
            shrink(session) as shrinking,
        ):
            for number in range(16):
                backward(model, rank, number)
                optimizer.step()
            residuals = session.state_dict()["session"]["residuals"]
            distance, widths = session.consensus_distance(), shrinking.widths()
            group.barrier()
        return flat(model), widths, distance, {n: tuple(r.shape) for n, r in residuals.items()}

    one, two = run_ranks(2, rank_main)
    assert one[1] == two[1]
    width = one[1]["0"]
    assert width <= 10
    assert one[2] == 0
    assert torch.equal(one[0], two[0])
    if plan != "optimal":  # which may find that dense is faster, and has no residuals then
        assert one[3]["0.weight"] == (width, 6)
    assert one[3].get("0.weight", (width, 6)) == (width, 6)


@pytest.mark.parametrize("backbone", ["ed", "semi-atc-gt"])
def test_decentralized_muon_restarts_with_narrower_trackers(backbone):
    hub = Hub(2)

    def rank_main(rank, group):
        model = wide()
        optimizer = gg.Muon(model, lr=0.02)
        links = {"process_group": group, "transport": lambda group: hub.transport(group.rank)}
        with (
            gg.suda(model, optimizer, backbone=backbone, **links) as session,
            shrink(session) as shrinking,
        ):
            for number in range(20):
                backward(model, rank, number)
                optimizer.step()
            with session.consensus():
                mean = flat(model)
            errors, widths = session.stats().tracker_error, shrinking.widths()
            group.barrier()
        return mean, errors, widths

    (one, error, widths), (two, _, others) = run_ranks(2, rank_main)
    assert widths == others
    assert widths["0"] <= 10
    assert torch.equal(one, two)
    assert error < 1e-3


def test_data_parallel_is_wrapped_anew():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = wide()
        optimizer = sgd(list(model.parameters()))
        session = gg.shrink(
            model,
            optimizer,
            example_input=torch.ones(2, 6),
            wrap=DistributedDataParallel,
            **SHRINK,
        )
        with session:
            wrapped = {id(session.model)}
            for number in range(15):
                backward(session.model, 0, number)
                optimizer.step()
                wrapped.add(id(session.model))
        assert len(wrapped) > 1
        assert session.widths()["0"] <= 10
    finally:
        dist.destroy_process_group()


def test_a_bad_batch_of_one_rank_stops_no_other():
    def use(session, shrinking, train):
        train(3)
        if session.rank == 1:
            with torch.no_grad():
                session.replica.model(torch.full((32, 6), torch.nan))
        train(5)
        return shrinking.widths(), len(shrinking.history)

    told = on_ranks(2, use, mode="sync")
    assert told[0] == told[1]
    assert told[0][1] == 1
    assert told[0][0]["0"] < 20
