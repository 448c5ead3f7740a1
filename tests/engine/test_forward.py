"""Mode sync: what is sent after the update is mixed as the next forward pass reads it."""

import copy
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gossipgrad as gg
from support.ranks import run_ranks

STEPS = 6


class Block(nn.Module):
    """Attention, whose output layer is read and never called, and a tied pair of layers."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.down.weight = self.up.weight
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x + self.attention(x, x, x)[0]
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, checkpoints=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)
        self.checkpoints = checkpoints

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return F.linear(x.mean(1), self.head.weight, self.head.bias)


def plain(model, x, y, session):
    F.cross_entropy(model(x), y).backward()


def two_passes(model, x, y, session):
    (F.cross_entropy(model(x), y) + F.cross_entropy(model(x.flip(1)), y)).backward()


def accumulated(model, x, y, session):
    F.cross_entropy(model(x[:2]), y[:2]).backward()
    F.cross_entropy(model(x[2:]), y[2:]).backward()


def evaluated(model, x, y, session):
    with torch.no_grad():
        model(x)
    with session.consensus():
        model(x)
    F.cross_entropy(model(x), y).backward()


def in_parts(model, x, y, session):
    for block in model.blocks:
        x = block(x)
    F.cross_entropy(model.head(x.mean(1)), y).backward()


def saved(model, x, y, session):
    session.load_state_dict(copy.deepcopy(session.state_dict()))
    plain(model, x, y, session)


def compiled(model, x, y, session):
    torch.compile(model, backend="eager")(x)  # again in each step, as it is in the first
    F.cross_entropy(torch.compile(model, backend="eager")(x), y).backward()


def train(way, waits, **settings):
    """Final weights of each rank; `waits`: they are mixed at once in each step."""
    turn = threading.Lock()  # torch.compile is not for several threads at once
    torch.manual_seed(0)
    start = Model(checkpoints=way == "checkpoints")

    def rank_main(rank, group):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        draw = torch.Generator().manual_seed(rank)
        run = WAYS[way]
        with gg.gossip(
            model, optimizer, process_group=group, mode="sync", bucket_bytes=256, **settings
        ) as session:
            for _ in range(STEPS):
                x, y = torch.randn(4, 5, 8, generator=draw), torch.arange(4) % 3
                if "compiled" in way:
                    with turn:
                        run(model, x, y, session)
                else:
                    run(model, x, y, session)
                optimizer.step()
                optimizer.zero_grad()
                if waits:
                    session.wait()
            session.wait()
            found = [p.detach().clone() for p in model.parameters()]
            session.agree("read")
        return found

    return run_ranks(3 if "payload" in settings else 2, rank_main)


WAYS = {
    "plain": plain,
    "two passes": two_passes,
    "checkpoints": plain,
    "accumulated": accumulated,
    "evaluated": evaluated,
    "in parts": in_parts,
    "saved and loaded": saved,
    "compiled": compiled,
}


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        *((way, {}) for way in WAYS if way != "compiled"),
        ("plain", {"payload": "weights+state"}),
        ("plain", {"wire_dtype": torch.bfloat16}),
        ("plain", {"compress": "shared-mask:0.3"}),
        ("plain", {"every": 2}),
        ("plain", {"average_every": 3}),
    ],
)
def test_hiding_the_exchange_changes_no_bit(way, settings):
    hidden, at_once = train(way, False, **settings), train(way, True, **settings)
    for one, other in zip(hidden, at_once, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_compiled_model_is_mixed_before_it_reads_weights():
    hidden, at_once = train("compiled", False), train("compiled", True)
    for one, other in zip(hidden, at_once, strict=True):
        assert all(map(torch.equal, one, other))


def test_the_update_does_not_wait_and_the_forward_pass_does():
    released = threading.Event()

    def rank_main(rank, group):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
        x = torch.ones(2, 4)
        with gg.gossip(model, optimizer, process_group=group, mode="sync") as session:
            model(x).sum().backward()
            if rank == 1:
                assert released.wait(60)  # until rank 0 has stepped
            optimizer.step()
            own = model[0].weight.detach().clone()
            if rank == 0:
                released.set()
            model(x)
            mixed = model[0].weight.detach().clone()
            session.agree("done")
        return own, mixed

    (own, mixed), (other, also_mixed) = run_ranks(2, rank_main)
    assert not torch.equal(own, other)
    torch.testing.assert_close(mixed, (own + other) / 2)
    torch.testing.assert_close(also_mixed, mixed)


def test_a_late_partner_holds_the_forward_pass_up_to_the_deadline_and_is_mixed_later():
    released = threading.Event()
    mode = gg.Sync(deadline_seconds=0.2, floor_seconds=0.1)

    def rank_main(rank, group):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
        x = torch.ones(2, 4)
        with gg.gossip(model, optimizer, process_group=group, mode=mode) as session:
            model(x).sum().backward()
            optimizer.step()  # learns the modules
            model(x).sum().backward()
            if rank == 1:
                assert released.wait(60)
            start = time.perf_counter()
            optimizer.step()
            model(x).sum().backward()
            seconds = time.perf_counter() - start
            released.set()
            session.agree("all have sent")
            session.average_()
            return seconds, model.weight.detach().clone(), session.stats().late_rounds

    (seconds, weight, late), (_, other, _) = run_ranks(2, rank_main)
    assert seconds < 5
    assert late >= 1
    torch.testing.assert_close(weight, other)
