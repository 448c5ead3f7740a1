"""Mode sync hides its exchanges, in the next forward pass and in backward: no bit is another."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gossipgrad as gg
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS

STEPS = 6
OVERLAP = {"mode": gg.Sync(momentum=0.9, overlap=True), "exchanges": 2}


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
    """Blocks, one layer that no pass uses, and one that only some passes use."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.idle, self.rare, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.checkpoints, self.uses_rare = checkpoints, False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        x = self.rare(x) if self.uses_rare else x
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
    F.cross_entropy(torch.compile(model, backend="eager")(x), y).backward()


def penalised(model, x, y, session):
    """Autograd holds the first layers before any module is called."""
    penalty = model.blocks[0].up.weight.square().sum() + model.blocks[0].scale.square().sum()
    (F.cross_entropy(model(x), y) + 0.01 * penalty).backward()


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


def train(run, *, checkpoints=False, waits=False, **settings):
    """Final weights of each rank, and bytes; `waits`: they are mixed at once in each step."""
    turn = threading.Lock()  # torch.compile is not for several threads at once
    torch.manual_seed(0)
    start = Model(checkpoints)

    def rank_main(rank, group):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        draw = torch.Generator().manual_seed(rank)
        options = {"mode": "sync", "bucket_bytes": 256, **settings}
        with gg.gossip(model, optimizer, process_group=group, **options) as session:
            for step in range(STEPS):
                model.uses_rare = step % 3 == 1
                x, y = torch.randn(4, 5, 8, generator=draw), torch.arange(4) % 3
                with turn if run is compiled else threading.Lock():
                    run(model, x, y, session)
                optimizer.step()
                schedule.step()
                model.zero_grad()
                if waits:
                    session.wait()
            session.wait()
            found = [p.detach().clone() for p in model.parameters()]
            stats = session.stats()
            session.agree("read")
        return found, stats.bytes_sent

    return run_ranks(2, rank_main)


def assert_same(ours, theirs):
    for (one, sent), (other, also_sent) in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, one, other))
        assert sent == also_sent


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        *((way, {}) for way in WAYS),
        ("plain", {"payload": "weights+state"}),
        ("plain", {"compress": "shared-mask:0.3"}),
        ("plain", {"every": 2}),
        ("plain", {"average_every": 3}),
        *((way, OVERLAP) for way in WAYS),
        ("plain", {**OVERLAP, "exchanges": 3}),
        ("plain", {**OVERLAP, "average_every": 3}),
    ],
)
def test_hiding_the_exchange_changes_no_bit(way, settings):
    settings = {**settings, "checkpoints": way == "checkpoints"}
    assert_same(train(WAYS[way], **settings), train(WAYS[way], waits=True, **settings))


@pytest.mark.parametrize("settings", [{}, OVERLAP], ids=str)
def test_weights_that_autograd_holds_stay_until_backward_is_over(settings):
    found = train(penalised, **settings)
    for tensors, _ in found:
        assert all(tensor.isfinite().all() for tensor in tensors)


def test_the_update_does_not_wait_and_the_forward_pass_does():
    released = threading.Event()

    def rank_main(rank, group):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
        x = torch.ones(2, 4)
        with gg.gossip(model, optimizer, process_group=group, mode="sync") as session:
            model(x).sum().backward()
            if rank == 1:
                assert released.wait(HANG_SECONDS)  # until rank 0 has stepped
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
