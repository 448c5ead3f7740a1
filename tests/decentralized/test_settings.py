"""Wrong settings, unequal ranks: one clear error, before anything is sent."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from gossipgrad import topology
from gossipgrad.comm import check_optimizers
from support.ranks import run_ranks
from support.replicas import network, sgd, transport_by_name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "eager"}, "mode must be one of 'overlap', 'sync', 'stale', got 'eager'"),
        ({"mode": "lagged"}, "use mode='overlap'"),
        ({"payload": "weight"}, "payload must be one of 'weights', 'weights\\+state'"),
        ({"average_every": True}, "average_every must be a positive number of steps"),
        ({"every": 0}, "every counts steps in a round, so it is at least 1, got 0"),
        ({"average_every": 0}, "average_every must be a positive number of steps, 'log_p' or None"),
        ({"average_every": "often"}, "got 'often'"),
        ({"wire_dtype": torch.int8}, "wire_dtype must be one of .* got torch.int8"),
        ({"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
        ({"topology": "star"}, "'star'"),
        ({"topology": topology.dissemination(3)}, "is for 3 ranks, the group has 1"),
        ({"transport": "carrier pigeon"}, "transport must be 'zeromq' or a function"),
        ({"transport": "gloo"}, "Gloo links are gone: use transport='zeromq'"),
        ({"transport": print, "encrypt": True}, "encrypt=True is for transport='zeromq'"),
        ({"payload": "gradients+weights", "mode": "sync"}, "leave mode='overlap'"),
        (
            {"payload": "gradients+weights", "scaler": torch.amp.GradScaler("cpu")},
            "use payload='weights'",
        ),
    ],
)
def test_wrong_settings(settings, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        gg.gossip(model, sgd(list(model.parameters())), **settings)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": True}, "it is at least 1, got True: give a whole number, such as"),
        ({"every": 2.0}, "it is at least 1, got 2.0: give a whole number"),
        ({"bucket_bytes": "x"}, r"bucket_bytes is the size of a message, .* 2\*\*20, got 'x'"),
        ({"mesh": 3}, "mesh must be a DeviceMesh of one axis, such as .* got 3"),
        ({"topology": 3}, "topology must be one of 'dissemination', .* got 3"),
    ],
)
def test_wrong_types(settings, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        gg.gossip(model, sgd(list(model.parameters())), **settings)


@pytest.mark.usefixtures("unchecked_types")
def test_numbers_of_numpy_are_numbers():
    model = network()
    count = np.int64(3)
    with gg.gossip(
        model,
        sgd(list(model.parameters())),
        every=count,
        average_every=count,
        bucket_bytes=np.int64(2**20),
        mode=gg.Sync(deadline_seconds=np.int64(3)),
        payload=gg.WeightsAndState(every=count),
    ) as session:
        told = session.settings
    numbers = [told.every, told.average_every, told.bucket_bytes]
    numbers += [told.mode.deadline_seconds, told.payload.every]
    assert numbers == [3, 3, 2**20, 3, 3]
    assert {type(number) for number in numbers} == {int}
    assert type(gg.Overlap(deadline_seconds=np.float32(0.5)).deadline_seconds) is float
    assert type(gg.Stale(max_staleness=count).max_staleness) is int


def test_wrong_optimizers():
    model = network()
    with pytest.raises(ValueError, match="no optimizer: give the one"):
        gg.gossip(model, [])
    with pytest.raises(ValueError, match=r"often its `\.optimizer`"):
        check_optimizers([object()])
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="train no parameter"):
        gg.gossip(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "build",
    [
        lambda: gg.Overlap(deadline_seconds=0.0),
        lambda: gg.Sync(floor_seconds=float("inf")),
        lambda: gg.Overlap(deadline_seconds="3"),
        lambda: gg.WeightsAndState(every=0),
        lambda: gg.WeightsAndState(every=1.5),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_values_check_themselves(build):
    with pytest.raises(ValueError, match=r"got ('3'|0|0\.0|1\.5|inf)"):
        build()


def test_hypercube_names_what_works():
    def rank_main(rank, group):
        model = network()
        with pytest.raises(ValueError, match=r"dissemination.*matching|matching.*dissemination"):
            gg.gossip(
                model, sgd(list(model.parameters())), process_group=group, topology="hypercube"
            )

    run_ranks(3, rank_main)


def test_a_seed_without_effect_warns():
    model = network()
    with pytest.warns(UserWarning, match="seed=3 is ignored"):
        gg.gossip(
            model, sgd(list(model.parameters())), topology=topology.dissemination(1), seed=3
        ).close()
    with pytest.warns(UserWarning, match="the ring does not rotate"):
        gg.gossip(model, sgd(list(model.parameters())), topology="ring", seed=3).close()


def test_no_process_group_inside_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = network()
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 4, .* call .*init_process_group"):
        gg.gossip(model, sgd(list(model.parameters())))


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (
            lambda rank: nn.Linear(6, 4 if rank == 2 else 3),
            {},
            r"parameter 'weight' is \(4, 6\) torch.float32 on rank 2, but \(3, 6\) .* on rank 0",
        ),
        (
            lambda rank: network(dtype=torch.float64 if rank == 2 else torch.float32),
            {},
            r"parameter '0.weight' is \(8, 6\) torch.float64 on rank 2",
        ),
        (
            lambda rank: nn.Sequential(nn.Linear(6, 3), *([nn.Linear(3, 3)] * (rank == 2))),
            {},
            "parameter '1.weight' is .* on rank 2, but missing on rank 0",
        ),
        (
            lambda rank: nn.Sequential(
                nn.Linear(6, 3), *([nn.BatchNorm1d(3, affine=False)] * (rank == 2))
            ),
            {},
            "buffer '1.running_mean' is .* on rank 2, but missing on rank 0",
        ),
        (lambda rank: network(), {"every": 2}, "setting 'every' is 2 on rank 2, but 1 on rank 0"),
        (lambda rank: network(), {"seed": 5}, "setting 'topology' is .*'seed': 5"),
        (lambda rank: network(), {"mode": "sync"}, "setting 'mode' is Sync"),
        (
            lambda rank: network(),
            {"payload": "weights+state"},
            "setting 'payload' is WeightsAndState",
        ),
        (
            lambda rank: network(),
            {"heartbeats": gg.Heartbeats(lease_seconds=3.0)},
            r"'heartbeats' is .*lease_seconds=3.0\) on rank 2, but .*lease_seconds=2.0\) on rank 0",
        ),
        (lambda rank: network(), {"heartbeats": None}, "setting 'heartbeats' is None on rank 2"),
    ],
)
def test_ranks_that_differ_are_told_at_once_on_every_rank(build, settings, message):
    link = transport_by_name("in-process", 3)

    def rank_main(rank, group):
        model = build(rank)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(gg.AgreementError, match=message):
            gg.gossip(
                model,
                sgd(list(model.parameters())),
                process_group=group,
                transport=link,
                **(settings if rank == 2 else {}),
            )
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    run_ranks(3, rank_main)


def test_unequal_optimizers_are_named():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        make = torch.optim.Adam if rank else torch.optim.SGD
        with pytest.raises(gg.AgreementError, match=r"optimizer 0 is Adam of 4 .* SGD of 4"):
            gg.gossip(model, make(model.parameters(), lr=0.1), process_group=group, transport=link)

    run_ranks(2, rank_main)


def test_the_order_in_the_model_is_part_of_the_agreement():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = nn.Module()
        for name in ("ab", "ba")[rank]:
            model.register_parameter(name, nn.Parameter(torch.zeros(2)))
        with pytest.raises(gg.AgreementError, match="order of parameters and buffers is"):
            gg.gossip(
                model,
                torch.optim.SGD([model.a, model.b], lr=0.1),
                process_group=group,
                transport=link,
            )

    run_ranks(2, rank_main)


def test_parameters_of_the_optimizer_alone_start_equal_or_are_refused():
    """A temperature in the loss, say: trained, though the model does not know it."""
    links = [transport_by_name("in-process", 2) for _ in range(2)]

    def rank_main(rank, group):
        model, scale = network(), nn.Parameter(torch.tensor(1.0 + 10 * rank))
        own = gg.Group(dist.PrefixStore("same", group.store), rank, 2)
        with gg.gossip(
            model, sgd([*model.parameters(), scale]), process_group=own, transport=links[0]
        ):
            assert scale.item() == 1.0
            own.barrier()
        other = nn.Parameter(torch.zeros(2 + rank))
        with pytest.raises(gg.AgreementError, match=r"'optimizer 0, parameter 4' is \(3,\)"):
            gg.gossip(
                model,
                sgd([*model.parameters(), other]),
                process_group=group,
                transport=links[1],
            )

    run_ranks(2, rank_main)


def test_a_rank_that_fails_before_the_start_fails_the_others_at_once():
    link = transport_by_name("in-process", 3)

    def rank_main(rank, group):
        model = network()
        error = ValueError if rank == 1 else gg.GossipError
        with pytest.raises(error):
            gg.gossip(
                model,
                sgd(list(model.parameters())),
                process_group=group,
                transport=link,
                every=0 if rank == 1 else 1,
            )

    run_ranks(3, rank_main)
