"""Every family on a GPU: as on the CPU, with the ranks of a test sharing one card."""

import json
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from torch import nn

import gossipgrad as gg
from benchmarks._tasks import GPT
from gossipgrad.comm import Hub
from support.families import FAMILIES, OPTIMIZERS, batches, on_ranks
from support.ranks import run_ranks
from support.replicas import network

pytestmark = pytest.mark.gpu

# Which rounds count depends on who is late.
TIMED = {"gossip, stale"}
# These wait for other ranks within backward, and torch runs the backward passes of all threads of a
# process in one thread a card: real ranks have processes of their own, as in the last test.
WAITS_IN_BACKWARD = {name for name in FAMILIES if name.startswith("sparsify")}


def loop(model, optimizer, rank, device, *, count=24, seed=0):
    for x, y in batches(rank, count, seed):
        (model(x.to(device)) - y.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(family, device, *, make=torch.optim.Adam, world_size=4, count=24):
    """The consensus of all ranks after training on a device, and how far apart they were."""

    def rank_main(rank, attach):
        model = network().to(device)
        optimizer = make(model.parameters(), lr=0.01)
        with attach(model, optimizer) as session:
            loop(model, optimizer, rank, device, count=count)
            distance = session.consensus_distance()
            with session.consensus():
                held = [p.detach().clone() for p in model.parameters()]
        assert all(p.device.type == device for p in model.parameters())
        return held, distance

    return on_ranks(family, rank_main, world_size)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - WAITS_IN_BACKWARD))
def test_a_family_trains_as_on_the_cpu(family):
    there = trained(FAMILIES[family], "cuda")
    here = trained(FAMILIES[family], "cpu")
    for (ours, distance), (theirs, _) in zip(there, here, strict=True):
        assert distance < 1.0
        for a, b in zip(ours, theirs, strict=True):
            assert torch.isfinite(a).all()
            # float32 sums in another order; a selection by magnitude may differ in a few entries
            tolerance = 0.2 if family in TIMED or "sparsify" in family else 2e-2
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - TIMED - WAITS_IN_BACKWARD))
def test_a_resumed_run_equals_one_that_was_not_interrupted(family):
    states = {}

    def rank_main(rank, attach, *, resumes):
        model = network(seed=int(resumes)).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with attach(model, optimizer) as session:
            if resumes:
                session.load_state_dict(states[rank])
            else:
                loop(model, optimizer, rank, "cuda", count=6)
                states[rank] = session.state_dict()
            session.group.barrier()
            loop(model, optimizer, rank, "cuda", count=6, seed=1)
            held = [p.detach().clone() for p in model.parameters()]
            session.group.barrier()
        return held

    straight = on_ranks(FAMILIES[family], partial(rank_main, resumes=False))
    resumed = on_ranks(FAMILIES[family], partial(rank_main, resumes=True))
    for mine, other in zip(straight, resumed, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_the_library_learn_as_on_the_cpu(name):
    """Late roots, too, computed beside training."""

    def rank_main(rank, attach, *, device):
        model = network().to(device)
        optimizer = OPTIMIZERS[name](model, lr=0.01)
        settings = {"payload": "weights+momentum"} if name == "GossipAdamW" else {}
        losses = []
        with attach(model, optimizer, **settings):
            for x, y in batches(rank, 60):
                loss = (model(x.to(device)) - y.to(device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if hasattr(optimizer, "close"):
            optimizer.close()
        return losses

    there = on_ranks(FAMILIES["gossip"], partial(rank_main, device="cuda"), 2)
    here = on_ranks(FAMILIES["gossip"], partial(rank_main, device="cpu"), 2)
    for ours, theirs in zip(there, here, strict=True):
        assert sum(ours) == pytest.approx(sum(theirs), rel=0.05)


@pytest.mark.parametrize("storage", [None, gg.Tiers()])
@pytest.mark.parametrize("kind", [gg.SOAP, gg.KLShampoo, gg.Shampoo])
def test_second_order_steps_never_wait_for_the_device(kind, storage):
    model = network().cuda()
    optimizer = kind(model, refresh=gg.Refresh(4, 2), storage=storage)
    for number, (x, y) in enumerate(batches(0, 100)):
        optimizer.zero_grad()
        (model(x.cuda()) - y.cuda()).square().mean().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.refresh_stats.failed == 0


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("kind", [gg.SOAP, gg.KLShampoo, gg.Shampoo])
def test_second_order_steps_repeat_bit_for_bit_with_roots_beside_training(kind, delay):
    runs = []
    for _ in range(2):
        model = network().cuda()
        optimizer = kind(model, refresh=gg.Refresh(4, delay))
        for x, y in batches(0, 40):
            optimizer.zero_grad()
            (model(x.cuda()) - y.cuda()).square().mean().backward()
            optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *runs))


def test_a_gradient_scaler_skips_a_step_on_one_rank():
    def rank_main(rank, attach):
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        with attach(model, optimizer, scaler=scaler) as session:
            for number, (x, y) in enumerate(batches(rank, 8)):
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = (model(x.cuda()) - y.cuda()).square().mean()
                scaler.scale(loss).backward()
                if rank == 0 and number == 3:
                    model[0].weight.grad.fill_(float("inf"))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scaler.get_scale() == 2.0 ** (9 if rank == 0 else 10)
            with session.consensus():
                return [p.detach().clone() for p in model.parameters()]

    first, second = on_ranks(FAMILIES["gossip"], rank_main, 2)
    for a, b in zip(first, second, strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


def test_replicas_shrink():
    hub = Hub(2)

    def rank_main(rank, group):
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).cuda()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
            model[0].weight[16:] = model[0].weight[:16]
            model[0].bias[16:] = model[0].bias[:16]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with (
            gg.gossip(
                model, optimizer, process_group=group, transport=lambda g: hub.transport(g.rank)
            ) as session,
            gg.shrink(
                model,
                optimizer,
                example_input=torch.zeros(2, 6, device="cuda"),
                session=session,
                budget=0.05,
                every=20,
                batches=10,
                events=2,
            ),
        ):
            loop(model, optimizer, rank, "cuda", count=60)
        assert model[0].weight.is_cuda
        assert optimizer.state[model[0].weight]["momentum_buffer"].shape == model[0].weight.shape
        return model[0].out_features

    first, second = run_ranks(2, rank_main)
    assert first == second < 32


def test_a_ring_shuffle_feeds_a_gpu():
    hub = Hub(2)

    def rank_main(rank, group):
        rows = torch.arange(24.0).reshape(-1, 2) + 100 * rank
        with gg.RingShuffle(
            rows,
            batch_size=4,
            process_group=group,
            transport=lambda group: hub.transport(group.rank),
        ) as shuffle:
            seen = [x.to("cuda", non_blocking=True).sum().item() for (x,) in shuffle]
        return sum(seen)

    sums = run_ranks(2, rank_main)
    assert sum(sums) == sum(range(24)) * 2 + 24 * 100


def test_the_step_does_not_wait_for_the_exchange():
    """Handing a snapshot over synchronises the compute stream with nothing."""

    def rank_main(rank, attach):
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with attach(model, optimizer):
            loop(model, optimizer, rank, "cuda", count=4)
            x, y = (t.cuda() for t in next(batches(rank, 1)))
            threading.Event().wait(0.2)
            if rank == 0:
                torch.cuda.set_sync_debug_mode("error")
            try:
                (model(x) - y).square().mean().backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    on_ranks(FAMILIES["gossip"], rank_main, 2)


def test_muon_learns_with_steps_in_bfloat16():
    torch.manual_seed(0)
    model = GPT(65, context=32, layers=2, width=64, heads=4).cuda()
    optimizer = gg.Muon(model, lr=0.01)
    x = torch.randint(65, (8, 32), device="cuda")
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "nproc"),
    [
        ("gossip", "2"),
        ("sparse", "2"),
        ("suda", "2"),
        ("allreduce", "1"),
        ("allreduce", "2"),
    ],
)
def test_the_command_trains_on_a_gpu(strategy, nproc, tmp_path):
    """Ranks of a baseline that share a card exchange by Gloo, one that has its own by NCCL."""
    out = tmp_path / "run"
    command = [
        sys.executable, "-m", "gossipgrad", "train", "--quiet", "--device", "cuda",
        "--nproc", nproc, "--strategy", strategy, "--epochs", "3", "--out", str(out),
        *(["--optimizer", "muon"] if strategy == "suda" else []),
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["accuracy"] > 0.7
    assert (out / "report.html").exists()
