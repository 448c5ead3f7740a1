"""Weights that backward updates bucket by bucket are those of an ordinary step."""

import copy
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gossipgrad as gg
from support.ranks import run_ranks

STEPS = 6


class Model(nn.Module):
    """Tied layers, one layer that no pass uses, and one that only some passes use."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.down.weight = self.up.weight
        self.idle, self.rare, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, rare=False):
        x = checkpoint(self.up, x, use_reentrant=False)
        x = self.down(torch.relu(x))
        return self.head(self.rare(x) if rare else x)


def sgd(model):
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def adam(model):
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def two(model):
    head = list(model.head.parameters())
    others = [p for p in model.parameters() if all(p is not one for one in head)]
    return [
        torch.optim.SGD(others, lr=0.1, momentum=0.9),
        torch.optim.AdamW([{"params": head[:1], "lr": 0.02}, {"params": head[1:]}], lr=0.01),
    ]


def train(update, optimizers, *, accumulates=False, **settings):
    """Weights, rounds and bytes of each rank."""
    torch.manual_seed(0)
    start = Model()

    def rank_main(rank, group):
        model = copy.deepcopy(start)
        ours = optimizers(model)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in ours]
        draw = torch.Generator().manual_seed(rank)
        options = {"mode": "sync", "bucket_bytes": 256, "update": update, **settings}
        with gg.gossip(model, ours, process_group=group, **options) as session:
            for step in range(STEPS):
                if accumulates:
                    with session.no_sync():
                        model(torch.randn(4, 8, generator=draw)).sum().backward()
                x, y = torch.randn(4, 8, generator=draw), torch.arange(4) % 3
                F.cross_entropy(model(x, rare=step % 3 == 1), y).backward()
                for each in ours:
                    each.step()
                for each in ours:
                    each.zero_grad()
                for schedule in schedules:
                    schedule.step()
            session.wait()
            found = [p.detach().clone() for p in model.parameters()]
            stats = session.stats()
            session.agree("read")
        return found, stats.bytes_sent

    return run_ranks(3, rank_main)


@pytest.mark.parametrize(
    ("optimizers", "settings"),
    [
        (sgd, {}),
        (adam, {}),
        (two, {}),
        (sgd, {"accumulates": True}),
        (sgd, {"payload": "weights+momentum"}),
        (adam, {"payload": "weights+state"}),
        (sgd, {"wire_dtype": torch.bfloat16}),
        (sgd, {"compress": "shared-mask:0.3"}),
        (sgd, {"every": 2}),
        (sgd, {"average_every": 3}),
    ],
)
def test_an_update_in_backward_changes_no_bit(optimizers, settings):
    early = train("in-backward", optimizers, **settings)
    for (one, sent), (other, also_sent) in zip(
        early, train("in-step", optimizers, **settings), strict=True
    ):
        assert all(map(torch.equal, one, other))
        assert sent == also_sent


def test_a_bucket_leaves_while_backward_still_runs():
    """The partner has it before this rank's backward goes on."""

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, call):
            ctx.call = call
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.call()
            return gradient, None

    def rank_main(rank, group):
        first, last = nn.Linear(4, 4), nn.Linear(4, 1)
        model = nn.Sequential(first, last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        with gg.gossip(
            model, optimizer, process_group=group, mode="sync", update="in-backward", bucket_bytes=8
        ) as session:

            def look():
                seen.append((last.weight.grad is None, session.stats().bytes_sent > before))

            for _ in range(2):
                before = session.stats().bytes_sent
                last(Pause.apply(first(torch.ones(2, 4)), look)).sum().backward()
                optimizer.step()
            session.agree("done")
        return seen

    for seen in run_ranks(2, rank_main):
        assert seen == [(True, True)] * 2


def test_what_arrives_between_forward_and_backward_is_mixed_after_it():
    """Backward needs the weights that forward has read; the late delta is not lost."""
    has_read, has_sent = threading.Event(), threading.Event()

    def rank_main(rank, group):
        model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        mode = gg.Sync(floor_seconds=0.05, deadline_seconds=0.1)
        with gg.gossip(
            model, optimizer, process_group=group, mode=mode, update="in-backward", bucket_bytes=64
        ) as session:
            for step in range(5):
                if step == 3:  # hidden behind forward by now: rank 0 reads before rank 1 has sent
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.fill_(rank + 1.0)
                    session.accept_changes()
                if rank == 1 and step == 3:
                    has_read.wait(20)
                loss = model(torch.ones(1, 4)).sum()
                if rank == 0 and step == 4:
                    has_read.set()
                    has_sent.wait(20)
                    time.sleep(0.3)  # what was sent arrives
                loss.backward()
                optimizer.step()
                if rank == 1 and step == 3:
                    has_sent.set()
            session.wait()
            session.agree("done")
            with session.consensus():
                mean = model[0].weight.clone()
        return mean

    for mean in run_ranks(2, rank_main):
        assert torch.allclose(mean, torch.full((4, 4), 1.5))


@contextmanager
def updating(group):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gg.gossip(
        model, optimizer, process_group=group, mode="sync", update="in-backward"
    ) as session:
        yield model, optimizer, session


def consensus(session):
    with session.consensus():
        pass


@pytest.mark.parametrize(
    "call",
    [
        consensus,
        gg.GossipSession.average_,
        gg.GossipSession.state_dict,
        gg.GossipSession.broadcast_,
    ],
)
def test_collectives_between_backward_and_step_are_refused_and_training_goes_on(call):
    def rank_main(rank, group):
        with updating(group) as (model, optimizer, session):
            model(torch.ones(2, 4)).sum().backward()
            with pytest.raises(gg.GossipError, match="backward"):
                call(session)
            optimizer.step()
            session.average_()
        return model.weight.detach().clone()

    one, other = run_ranks(2, rank_main)
    assert torch.equal(one, other)


def test_a_second_backward_is_refused_and_the_step_can_be_ended():
    def rank_main(rank, group):
        with updating(group) as (model, optimizer, session):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                with pytest.raises(gg.GossipError, match="no_sync"):
                    model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            session.average_()
        return model.weight.detach().clone()

    one, other = run_ranks(2, rank_main)
    assert torch.equal(one, other)


def test_a_session_that_ends_between_backward_and_step_leaves_the_other_alone():
    def rank_main(rank, group):
        with updating(group) as (model, optimizer, session):
            model(torch.ones(2, 4)).sum().backward()
            if rank == 0:
                return None
            for _ in range(3):
                optimizer.step()
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            return session.position

    assert run_ranks(2, rank_main) == [None, 4]


def test_an_optimizer_that_counts_steps_in_its_groups_is_refused():
    class Decaying(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    def rank_main(rank, group):
        model = nn.Linear(4, 1)
        optimizer = Decaying(model.parameters(), lr=0.1)
        settings = {"process_group": group, "mode": "sync", "update": "in-backward"}
        with gg.gossip(model, optimizer, **settings), pytest.raises(gg.GossipError):
            model(torch.ones(2, 4)).sum().backward()

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    "settings",
    [
        {"update": "later"},
        {"mode": "overlap"},
        {"mode": "stale"},
        {"exchanges": 2},
        {"local_steps": 4},
        {"scaler": torch.amp.GradScaler("cpu")},
    ],
)
def test_what_does_not_go_with_it_is_refused(settings):
    model = nn.Linear(2, 1)
    options = {"mode": "sync", "update": "in-backward", **settings}
    with pytest.raises(ValueError, match="update"):
        gg.gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
