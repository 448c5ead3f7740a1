"""Wrong settings, unequal ranks: one clear error, before anything is sent."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.topology import dissemination
from support.ranks import run_ranks
from support.replicas import network, sgd, transport_by_name


def begin(**settings):
    model = network()
    return gg.gossip(model, sgd(list(model.parameters())), **settings)


MASK = {"compress": "shared-mask:0.1"}
MOMENTUM = gg.Sync(momentum=0.9)
OVERLAP = gg.Sync(overlap=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "eager"},
        {"payload": "weight"},
        {"payload": "gradients+weights", "mode": "sync"},
        {"payload": "gradients+weights", "scaler": torch.amp.GradScaler("cpu")},
        *({"every": every} for every in (0, True, 2.0)),
        *({"average_every": every} for every in (0, True, "often")),
        {"wire_dtype": torch.int8},
        *({"bucket_bytes": size} for size in (0, "x", 2**33)),
        *({"topology": topology} for topology in ("star", dissemination(3), 3)),
        *({"transport": transport} for transport in ("carrier pigeon", "gloo")),
        {"mesh": 3},
        {"heartbeats": 3},
        # of mode stale: only symmetric pairs, and nothing that waits
        {"mode": "stale", "topology": "dissemination"},
        {"mode": "stale", "topology": dissemination(3)},
        {"mode": "stale", "average_every": 4},
        {"mode": "stale", "payload": "gradients"},
        *({"compress": mask} for mask in ("shared-mask", "random:0.1")),
        {"compress": "shared-mask:2"},
        {**MASK, "payload": "weights+state"},
        {**MASK, "payload": "gradients"},
        {**MASK, "seed": -1},
        # of mode sync with a momentum: all weights, every step, and nothing else
        *({"mode": MOMENTUM, **other} for other in (MASK, {"payload": "weights+momentum"})),
        {"mode": MOMENTUM, "local_steps": 4},
        {"mode": OVERLAP},
        *({"mode": OVERLAP, "exchanges": 2, **other} for other in ({"every": 2}, MASK)),
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_wrong_settings_are_refused_by_name(settings):
    values = "SharedMask", "density", "'star'", "3 ranks"  # where the value names the setting
    with pytest.raises(ValueError, match="|".join([*settings, *values])):
        begin(**settings)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: gg.gossip(network(), []), "optimizer"),
        (lambda: gg.gossip(network(), [object()]), "optimizer"),
        (lambda: gg.Overlap(patience_seconds=0.0), "patience_seconds"),
        (lambda: gg.Overlap(patience_seconds="3"), "patience_seconds"),
        (lambda: gg.Sync(patience_seconds=True), "patience_seconds"),
        (lambda: gg.Sync(momentum=1.0), "momentum"),
        (lambda: gg.Sync(momentum=0.9, gain=0.0), "gain"),
        (lambda: gg.Sync(overlap=1), "overlap"),
        (lambda: gg.Sync(momentum=0.9, gain="1"), "gain"),
        (lambda: gg.WeightsAndState(every=0), "every"),
        (lambda: gg.WeightsAndState(every=1.5), "every"),
        (lambda: gg.Stale(max_staleness=-1), "max_staleness"),
        (lambda: gg.Stale(max_staleness=16), "max_staleness"),
        (lambda: gg.Stale(max_staleness=1.5), "max_staleness"),
    ],
)
def test_wrong_values_are_refused_by_name(build, named):
    with pytest.raises(ValueError, match=named):
        build()


def test_a_frozen_model_is_refused():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="train no parameter"):
        gg.gossip(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))


def test_a_seed_without_effect_warns():
    for schedule in (dissemination(1), "ring"):
        with pytest.warns(UserWarning, match=r"ignored|does not rotate"):
            begin(topology=schedule, seed=3).close()


def test_no_process_group_inside_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 4, .* call .*init_process_group"):
        begin()


def swapped(rank):
    model = nn.Module()
    for name in ("ab", "ba")[rank == 2]:
        model.register_parameter(name, nn.Parameter(torch.zeros(2)))
    return model


def sgd_or_adam(model, rank):
    return (torch.optim.Adam if rank == 2 else torch.optim.SGD)(model.parameters(), lr=0.1)


def with_a_stranger(model, rank):
    """A temperature in the loss, say: trained, though the model does not know it."""
    return sgd([*model.parameters(), nn.Parameter(torch.zeros(2 + rank // 2))])


def normed(rank):
    norm = [nn.BatchNorm1d(3, affine=False)] * (rank == 2)
    return nn.Sequential(nn.Linear(6, 3), *norm)


@pytest.mark.parametrize(
    ("build", "optimizer", "settings", "named"),
    [
        (lambda rank: nn.Linear(6, 4 if rank == 2 else 3), None, {}, "'weight'"),
        (
            lambda rank: network(dtype=(torch.float32, torch.float64)[rank // 2]),
            None,
            {},
            "float64",
        ),
        (normed, None, {}, r"'1\.running_mean'"),
        (swapped, None, {}, "order"),
        (lambda rank: network(), sgd_or_adam, {}, "Adam"),
        (lambda rank: network(), with_a_stranger, {}, "parameter 4"),
        (lambda rank: network(), None, {"every": 2}, "'every'"),
        (lambda rank: network(), None, {"seed": 5}, "'topology'"),
        (lambda rank: network(), None, {"mode": "sync"}, "'mode'"),
        (lambda rank: network(), None, {"payload": "weights+state"}, "'payload'"),
        (lambda rank: network(), None, {"heartbeats": None}, "'heartbeats'"),
    ],
)
def test_ranks_that_differ_hear_so_at_once_on_every_rank(build, optimizer, settings, named):
    link = transport_by_name("in-process", 3)

    def rank_main(rank, group):
        model = build(rank)
        before = [p.detach().clone() for p in model.parameters()]
        made = optimizer(model, rank) if optimizer else sgd(list(model.parameters()))
        more = settings if rank == 2 else {}
        with pytest.raises(gg.AgreementError, match=named):
            gg.gossip(model, made, process_group=group, transport=link, **more)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    run_ranks(3, rank_main)


def test_a_rank_that_fails_before_the_start_fails_the_others_at_once():
    link = transport_by_name("in-process", 3)

    def rank_main(rank, group):
        error = ValueError if rank == 1 else gg.GossipError
        with pytest.raises(error):
            begin(process_group=group, transport=link, every=0 if rank == 1 else 1)

    run_ranks(3, rank_main)
