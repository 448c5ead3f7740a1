"""A session against the reference, and what it does around its steps."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Hub
from gossipgrad.muon import BACKBONES, ROTATING, resolve_settings, suda
from gossipgrad.muon._reference import Reference
from gossipgrad.simulate import SudaRanks
from support.ranks import run_ranks
from support.replicas import network
from support.waiting import until

STATIC = tuple(BACKBONES)
B = 0.8


class Quadratic(nn.Module):
    """f_i(X) = 1/2 tr (X - T_i)' A_i (X - T_i) on rank i, with minima far apart."""

    def __init__(self, rank):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
        generator = torch.Generator().manual_seed(rank)
        q = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        self.a = q @ q.T / 3 + 0.1 * torch.eye(3, dtype=torch.float64)
        self.t = 3 * torch.randn(3, 5, generator=generator, dtype=torch.float64)

    def forward(self):
        d = self.x - self.t
        return 0.5 * (d * (self.a @ d)).sum()


def step_size(k):
    return 0.3 / (1 + k) ** 0.75


def exact_muon(model, **options):
    return gg.Muon(model, polar="svd", momentum_form="ema", momentum=B, nesterov=False, **options)


def train(model, optimizer, steps, start=0):
    for k in range(start, start + steps):
        for group in optimizer.param_groups:
            group["lr"] = step_size(k)
        model().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(p, rank_main, *, make=Quadratic, optimizer=exact_muon, together=True, **settings):
    """Runs `rank_main(rank, model, optimizer, session)` on p ranks, by default of a quadratic."""
    hub = Hub(p)

    def start(rank, group):
        model = make(rank)
        made = optimizer(model)
        links = {"process_group": group, "transport": lambda group: hub.transport(group.rank)}
        with suda(model, made, **links, **{"bucket_bytes": 64, **settings}) as session:
            found = rank_main(rank, model, made, session)
            if together:
                session.group.barrier()
        return found

    return run_ranks(p, start)


def perceptron(rank, dtype=torch.float32):
    return network(dtype=dtype)


def weights(p, topology, lazy, k):
    """What `W` of step k is, by hand."""
    if topology == "ring":
        W = np.zeros((p, p))
        for i in range(p):
            for j in ((i + 1) % p, (i - 1) % p):
                W[i, j] = 0.25
        W += np.diag(1 - W.sum(1))
    else:
        W = gg.topology.by_name(topology, p).mixing_matrix(k)
    return torch.from_numpy((np.eye(p) + W) / 2 if lazy else W)


def reference_of(p, backbone, topology, lazy, steps):
    models = [Quadratic(rank) for rank in range(p)]
    X = torch.zeros(p, 3, 5, dtype=torch.float64)
    reference = Reference(backbone, X, B)
    for k in range(steps):
        G = torch.stack([m.a @ (x - m.t) for m, x in zip(models, X, strict=True)])
        X = reference.step(G, step_size(k), weights(p, topology, lazy, k))
    return X


@pytest.mark.parametrize(
    ("backbone", "topology", "options"),
    [
        *((name, "ring", {}) for name in STATIC),
        *((name, "dissemination", {}) for name in ROTATING),
        ("extra", "ring", {"mode": "sync", "lazy": True}),
        ("non-atc-gt", "hypercube", {"mode": "sync"}),
        ("semi-atc-gt", "matching", {"mode": "sync", "lazy": True}),
    ],
)
def test_a_session_equals_the_reference(backbone, topology, options):
    def rank_main(rank, model, optimizer, session):
        train(model, optimizer, 6)
        return model.x.detach().clone()

    found = on_ranks(4, rank_main, backbone=backbone, topology=topology, **options)
    expected = reference_of(4, backbone, topology, options.get("lazy", False), 6)
    torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("backbone", "topology"),
    [("semi-atc-gt", "dissemination"), ("ed", "ring"), ("extra", "ring")],
)
def test_it_resumes_bit_for_bit_and_keeps_its_identities(backbone, topology):
    states = {}

    def whole(rank, model, optimizer, session):
        train(model, optimizer, 5)
        states[rank] = session.state_dict()
        train(model, optimizer, 4, start=5)
        with session.consensus():
            pass
        return model.x.detach().clone(), session.stats()

    def resumed(rank, model, optimizer, session):
        train(model, optimizer, 2)
        session.load_state_dict(states[rank])
        train(model, optimizer, 4, start=5)
        return model.x.detach().clone()

    settings = {"backbone": backbone, "topology": topology}
    first = on_ranks(4, whole, **settings)
    for (expected, stats), found in zip(first, on_ranks(4, resumed, **settings), strict=True):
        assert torch.equal(expected, found)
        assert stats.tracker_error < 1e-12
        assert stats.dual_error < 1e-12
        assert stats.rounds == 9
        assert stats.outcomes["late"] == stats.outcomes["void"] == 0


def test_all_kinds_of_parameters_in_narrow_types():
    """bf16 weights: what rounding takes away is kept, and ranks come together."""

    def rank_main(rank, model, optimizer, session):
        def step(x):
            (model(x.bfloat16()) - rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(8):
            step(torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * number + rank)))
        session.average_()
        distance = session.consensus_distance()
        family = session.state_dict()["session"]["family"]
        trackers = [family["trackers"][n] + family["sources"][n] for n in family["trackers"]]
        step(torch.ones(8, 6))
        return distance, trackers

    narrow = {"make": partial(perceptron, dtype=torch.bfloat16), "wire_dtype": torch.bfloat16}
    (*distances,), (of_one, of_other) = zip(
        *on_ranks(2, rank_main, optimizer=gg.Muon, **narrow), strict=True
    )
    assert max(distances) < 1e-6
    for a, b in zip(of_one, of_other, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backbone": "ed", "topology": "dissemination"}, "semi-atc-gt.*ring"),
        ({"backbone": "extra", "topology": "matching"}, "semi-atc-gt.*ring"),
        ({"backbone": "ed", "topology": gg.topology.ring(4, rotate=True)}, "semi-atc-gt"),
        ({"backbone": "ed", "topology": "one third"}, "-1/3.*-0.3333.*lazy=True"),
        ({"backbone": "extra", "topology": "strong"}, "-1/3.*lazy=True.*semi-atc-gt"),
        ({"backbone": "semi-atc-gt", "topology": "unmixed"}, "lazy=True"),
        ({"backbone": "ed", "topology": "apart"}, "components"),
        ({"backbone": "ed", "topology": np.array([[0.5, 0.5], [0.2, 0.8]])}, "symmetric"),
        ({"backbone": "dgd"}, "backbone"),
        ({"backbone": "paper-ed", "topology": "ring"}, "backbone.*extra"),
        ({"mode": "stale"}, "stale"),
        ({"backbone": "ed", "topology": "ring", "mode": "overlap"}, "sync"),
        ({"topology": gg.topology.matching(8)}, "8 ranks"),
    ],
)
def test_what_would_diverge_is_refused(options, says):
    named = {"one third": (1 / 3, 1 / 3), "strong": (0.45, 0.45), "unmixed": (0.5, 0.5)}
    topology = options.get("topology")
    if isinstance(topology, str) and topology in named:
        left, right = named[topology]
        shift = np.roll(np.eye(4), 1, axis=1)
        options = options | {
            "topology": left * shift + right * shift.T + (1 - left - right) * np.eye(4)
        }
    if isinstance(topology, str) and topology == "apart":
        options = options | {"topology": np.kron(np.eye(2), np.full((2, 2), 0.5))}
    with pytest.raises(ValueError, match=f"(?s){says}"):
        resolve_settings(4, **options)


def test_lazy_weights_are_let_through():
    shift = np.roll(np.eye(4), 1, axis=1)
    strong = 0.45 * (shift + shift.T) + 0.1 * np.eye(4)
    assert resolve_settings(4, backbone="ed", topology=strong, lazy=True).graph.rounds == 2


def test_a_rank_that_leaves_takes_its_share_along():
    """The living begin trackers anew from their own momentum, and stay together."""

    def rank_main(rank, model, optimizer, session):
        if rank == 3:
            train(model, optimizer, 6)
            session.close()
            return None
        train(model, optimizer, 6)
        steps = 6
        while len(session.membership.living) == 4:
            train(model, optimizer, 1, start=steps)
            steps += 1
        target = max(session.agree(steps)) + 30
        train(model, optimizer, target - steps, start=steps)
        with session.consensus():
            pass
        return session.consensus_distance(), session.stats(), model.x.detach().clone()

    found = on_ranks(
        4,
        rank_main,
        together=False,
        heartbeats=gg.Heartbeats(interval_seconds=0.1, silent_seconds=60.0),
        topology="matching",
    )
    for distance, stats, _ in found[:3]:
        assert distance < 0.1
        assert stats.tracker_error < 1e-9
        assert stats.dual_error < 1e-9


@pytest.mark.parametrize("backbone", ["semi-atc-gt", "ed"])
def test_sums_that_late_ranks_have_broken_are_mended_at_a_consensus(backbone):
    """A rank that is late for longer than snapshots last leaves one end without its share."""

    sessions = {}

    def late_rounds():
        return sum(each.stats().late_rounds for rank, each in sessions.items() if rank != 1)

    def rank_main(rank, model, optimizer, session):
        sessions[rank] = session
        for k in range(6):
            if k in (2, 4) and rank == 1:
                until(lambda k=k: late_rounds() >= k / 2)
            train(model, optimizer, 1, start=k)
        errors = []
        for _ in range(2):
            session.state_dict(drain=True)
            with session.consensus():
                pass
            errors.append(session.stats().tracker_error)
        train(model, optimizer, 1, start=6)
        return errors, session.stats()

    waits = {"patience_seconds": 0.1}
    mode = gg.Sync(**waits) if backbone == "ed" else gg.Overlap(**waits)
    found = on_ranks(4, rank_main, backbone=backbone, topology="ring", mode=mode)
    assert sum(stats.outcomes["late"] for _, stats in found) > 0
    for (before, after), _ in found:
        assert after < 0.01
        assert after < 1e-9 or before < 0.01


def test_weights_of_one_rank_are_written_and_broadcast():
    def rank_main(rank, model, optimizer, session):
        with torch.no_grad():
            model.x += rank
        session.broadcast_()
        train(model, optimizer, 3)
        return session.consensus_distance()

    assert max(on_ranks(2, rank_main)) < 1.0


@pytest.mark.parametrize(("backbone", "topology"), [("semi-atc-gt", "matching"), ("extra", "ring")])
def test_virtual_ranks_equal_sessions(backbone, topology):
    """All kinds of parameters, at the defaults of gg.Muon."""
    steps, settings = 4, {"backbone": backbone, "topology": topology}

    def batch(rank, step):
        generator = torch.Generator().manual_seed(10 * rank + step)
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        return x, x[:, :3].argmax(1)

    def rank_main(rank, model, optimizer, session):
        for step in range(steps):
            x, y = batch(rank, step)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with session.consensus():
            return [p.detach().clone() for p in model.parameters()]

    doubles = partial(perceptron, dtype=torch.float64)
    found = on_ranks(4, rank_main, make=doubles, optimizer=gg.Muon, **settings)[0]
    virtual = SudaRanks(doubles(0), 4, **settings)
    for step in range(steps):
        batches = [batch(rank, step) for rank in range(4)]
        virtual.step(*(torch.stack(each) for each in zip(*batches, strict=True)))
    for a, b in zip(found, virtual.consensus_model().parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("make", [gg.Muon, lambda m: torch.optim.SGD(m.parameters(), lr=0.02)])
@pytest.mark.parametrize("backbone", ["semi-atc-gt", "ed"])
def test_a_gradient_of_one_rank_that_is_not_finite_spoils_no_rank(backbone, make):

    def rank_main(rank, model, optimizer, session):
        losses = []
        for step in range(60):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + rank))
            loss = (model(x) - rank).square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            (loss * (torch.nan if rank == 1 and step in (3, 20) else 1)).backward()
            optimizer.step()
        with session.consensus():
            errors = session.stats().tracker_error, session.stats().dual_error
        assert all(p.isfinite().all() for p in model.parameters())
        assert all(error is None or error < 1e-4 for error in errors)
        return np.mean(losses[:10]), np.mean(losses[-10:])

    settings = {"topology": "ring" if backbone == "ed" else "dissemination", "mode": "sync"}
    settings |= {"make": perceptron, "optimizer": make}
    told = on_ranks(2, rank_main, backbone=backbone, **settings)
    assert sum(last for _, last in told) < sum(first for first, _ in told)


@pytest.mark.parametrize(
    ("backbone", "topology", "dtype"),
    [
        ("ed", "ring", torch.float32),
        ("ed", "ring", torch.bfloat16),
        ("extra", "ring", torch.bfloat16),
        ("semi-atc-gt", "dissemination", torch.float32),
        ("non-atc-gt", "ring", torch.bfloat16),
    ],
)
def test_at_rate_0_the_mean_keeps_to_rounding(backbone, topology, dtype):
    """A dual that is not zero in the sum moves it in every step; that of ed moved 8e-7 a step."""

    def rank_main(rank, model, optimizer, session):
        for step in range(160):
            if step == 60:
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
            if step == 100:  # they have come together
                before = total(model, session)
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(4 * step + rank))
            optimizer.zero_grad()
            (model(x.to(dtype)) - rank).square().mean().backward()
            optimizer.step()
        with session.consensus():
            pass
        return before, total(model, session), session.stats()

    def total(model, session):
        state = session.state_dict()
        held = {name: p.detach().double() for name, p in model.named_parameters()}
        return torch.cat([(p + state["residuals"].get(n, 0)).flatten() for n, p in held.items()])

    settings = {"backbone": backbone, "topology": topology, "optimizer": gg.Muon, "mode": "sync"}
    found = on_ranks(4, rank_main, make=partial(perceptron, dtype=dtype), **settings)
    before, after = (torch.stack([each[k] for each in found]).double().mean(0) for k in (0, 1))
    assert (before - after).abs().max() < 1e-6
    assert all(stats.dual_error < 1e-9 and stats.tracker_error < 1e-9 for *_, stats in found)


@pytest.mark.parametrize(("backbone", "topology"), [("ed", "ring"), ("semi-atc-gt", "matching")])
def test_duals_that_do_not_sum_to_zero_are_warned_of_and_restart(backbone, topology):
    def rank_main(rank, model, optimizer, session):
        train(model, optimizer, 4)
        state = session.state_dict()
        for dual in state["session"]["family"]["held"]["dual"]:
            dual += rank == 0  # as if a message had arrived at one end alone
        session.load_state_dict(state)
        errors = []
        for start in (4, 6):
            with session.consensus():
                pass
            errors.append(session.stats().dual_error)
            train(model, optimizer, 2, start=start)
        return errors

    with pytest.warns(UserWarning, match="sum of the duals"):
        found = on_ranks(4, rank_main, backbone=backbone, topology=topology)
    for before, after in found:
        assert before > 0.01
        assert after < 1e-9
