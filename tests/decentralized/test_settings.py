"""Wrong settings, unequal ranks: one clear error, before anything is sent."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad import topology
from support.ranks import run_ranks
from support.replicas import network, sgd, transport_by_name


def begin(**settings):
    model = network()
    return gg.gossip(model, sgd(list(model.parameters())), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "eager"}, "'overlap', 'sync', 'stale', got 'eager'"),
        ({"mode": "lagged"}, "use mode='overlap'"),
        ({"payload": "weight"}, "'weights', 'weights\\+state'"),
        ({"payload": "gradients+weights", "mode": "sync"}, "leave mode='overlap'"),
        (
            {"payload": "gradients+weights", "scaler": torch.amp.GradScaler("cpu")},
            "use payload='weights'",
        ),
        ({"every": 0}, "at least 1, got 0"),
        ({"average_every": 0}, "'log_p' or None"),
        ({"average_every": True}, "positive number of steps"),
        ({"average_every": "often"}, "got 'often'"),
        ({"wire_dtype": torch.int8}, "got torch.int8"),
        ({"bucket_bytes": 0}, "positive, got 0"),
        ({"topology": "star"}, "'star'"),
        ({"topology": topology.dissemination(3)}, "is for 3 ranks, the group has 1"),
        ({"transport": "carrier pigeon"}, "'zeromq' or a function"),
        ({"transport": "gloo"}, "use transport='zeromq'"),
        ({"transport": print, "encrypt": True}, "is for transport='zeromq'"),
        # of mode stale: only symmetric pairs, and nothing that waits
        ({"mode": "stale", "topology": "dissemination"}, "matching"),
        ({"mode": "stale", "topology": topology.dissemination(3)}, "symmetric"),
        ({"mode": "stale", "average_every": 4}, "leave it out"),
        ({"mode": "stale", "payload": "gradients"}, "payload='weights'"),
        # of a shared mask
        ({"compress": "top-k:0.1"}, r"gg.SharedMask"),
        ({"compress": "shared-mask"}, r"such as 'shared-mask:0.1'"),
        ({"compress": "random:0.1"}, r"got 'random:0.1'"),
        ({"compress": "shared-mask:2"}, r"density"),
        ({"compress": "shared-mask:0.1", "payload": "weights+state"}, r"Use payload='weights'"),
        ({"compress": "shared-mask:0.1", "payload": "gradients"}, r"Use payload='weights'"),
        ({"compress": "shared-mask:0.1", "seed": -1}, r"from 0 to 2\*\*64 - 1, got -1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        begin(**settings)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: begin(every=True), "it is at least 1, got True: give a whole number, such as"),
        (lambda: begin(every=2.0), "it is at least 1, got 2.0: give a whole number"),
        (lambda: begin(bucket_bytes="x"), r"got 'x'"),
        (lambda: begin(mesh=3), "must be a DeviceMesh of one axis, such as .* got 3"),
        (lambda: begin(topology=3), "topology must be one of 'dissemination', .* got 3"),
        (lambda: begin(heartbeats=3), r"heartbeats must be gg.Heartbeats\(...\), or None"),
        (lambda: gg.gossip(network(), []), "no optimizer: give the one"),
        (lambda: gg.gossip(network(), [object()]), r"often its `\.optimizer`"),
        (lambda: gg.Overlap(deadline_seconds=0.0), r"got 0\.0"),
        (lambda: gg.Sync(floor_seconds=float("inf")), "got inf"),
        (lambda: gg.Overlap(deadline_seconds="3"), "got '3'"),
        (lambda: gg.WeightsAndState(every=0), "got 0"),
        (lambda: gg.WeightsAndState(every=1.5), r"got 1\.5"),
        (lambda: gg.Stale(max_staleness=-1), "max_staleness"),
        (lambda: gg.Stale(max_staleness=16), "max_staleness"),
        (lambda: gg.Stale(max_staleness=1.5), "max_staleness"),
        (lambda: gg.Stale(cut_every=4), r"take session\.state_dict\(\)"),
        (lambda: gg.Stale(replay=3), r"take session\.state_dict\(\)"),
    ],
)
def test_wrong_values(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_frozen_model_is_refused():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="train no parameter"):
        gg.gossip(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))


def test_a_seed_without_effect_warns():
    for schedule in (topology.dissemination(1), "ring"):
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


@pytest.mark.parametrize(
    ("build", "optimizer", "settings", "message"),
    [
        (lambda rank: nn.Linear(6, 4 if rank == 2 else 3), None, {}, r"'weight' is \(4, 6\)"),
        (
            lambda rank: network(dtype=torch.float64 if rank == 2 else torch.float32),
            None,
            {},
            "'0.weight' is .* torch.float64",
        ),
        (
            lambda rank: nn.Sequential(
                nn.Linear(6, 3), *([nn.BatchNorm1d(3, affine=False)] * (rank == 2))
            ),
            None,
            {},
            "buffer '1.running_mean' is .* missing on rank 0",
        ),
        (swapped, None, {}, "order of parameters and buffers"),
        (lambda rank: network(), sgd_or_adam, {}, "optimizer 0 is Adam of 4 .* SGD of 4"),
        (lambda rank: network(), with_a_stranger, {}, r"'optimizer 0, parameter 4' is \(3,\)"),
        (lambda rank: network(), None, {"every": 2}, "'every' is 2 on rank 2, but 1 on rank 0"),
        (lambda rank: network(), None, {"seed": 5}, "'topology' is .*'seed': 5"),
        (lambda rank: network(), None, {"mode": "sync"}, "'mode' is Sync"),
        (lambda rank: network(), None, {"payload": "weights+state"}, "'payload' is Weights"),
        (lambda rank: network(), None, {"heartbeats": None}, "'heartbeats' is None on rank 2"),
    ],
)
def test_ranks_that_differ_hear_so_at_once_on_every_rank(build, optimizer, settings, message):
    link = transport_by_name("in-process", 3)

    def rank_main(rank, group):
        model = build(rank)
        before = [p.detach().clone() for p in model.parameters()]
        made = optimizer(model, rank) if optimizer else sgd(list(model.parameters()))
        with pytest.raises(gg.AgreementError, match=message):
            gg.gossip(
                model,
                made,
                process_group=group,
                transport=link,
                **(settings if rank == 2 else {}),
            )
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    run_ranks(3, rank_main)


def test_parameters_of_the_optimizer_alone_start_equal():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model, scale = network(), nn.Parameter(torch.tensor(1.0 + 10 * rank))
        optimizer = sgd([*model.parameters(), scale])
        with gg.gossip(model, optimizer, process_group=group, transport=link):
            assert scale.item() == 1.0
            group.barrier()

    run_ranks(2, rank_main)


def test_a_rank_that_fails_before_the_start_fails_the_others_at_once():
    link = transport_by_name("in-process", 3)

    def rank_main(rank, group):
        error = ValueError if rank == 1 else gg.GossipError
        with pytest.raises(error):
            begin(process_group=group, transport=link, every=0 if rank == 1 else 1)

    run_ranks(3, rank_main)
