"""The session does what the reference says: bit for bit where ranks mix in pairs."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.topology import by_name
from support.replicas import (
    adam,
    assert_same_bits,
    gossip_adamw,
    network,
    set_gradients,
    train_reference,
)
from support.sessions import run_sessions, train

STEPS = 14

pytestmark = pytest.mark.filterwarnings("ignore:payload='gradients' never mixes")


def compare(world_size, topology="dissemination", transport="in-process", **settings):
    seed = 0 if topology == "ring" else 3
    state_every = settings.pop("state_every", 1)
    mixed = settings.get("payload", "weights")
    payload = gg.WeightsAndState(every=state_every) if mixed == "weights+state" else mixed
    ours = train(
        world_size,
        STEPS,
        topology=topology,
        transport=transport,
        seed=seed,
        **{**settings, "payload": payload},
    )
    theirs = train_reference(
        world_size,
        STEPS,
        schedule=by_name(topology, world_size, seed=seed),
        state_every=state_every,
        **settings,
    )
    return ours, theirs.w


@pytest.mark.parametrize(
    ("mode", "payload"),
    [
        ("overlap", "weights"),
        ("sync", "weights"),
        ("overlap", "weights+state"),
        ("sync", "weights+state"),
        ("overlap", "gradients"),
        ("overlap", "gradients+weights"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 5])
def test_every_mode_and_payload(world_size, mode, payload):
    assert_same_bits(*compare(world_size, mode=mode, payload=payload))


@pytest.mark.parametrize(
    ("world_size", "topology"),
    [
        *((world_size, "dissemination") for world_size in (4, 7, 9)),
        (8, "hypercube"),
        *((world_size, name) for name in ("matching", "ring", "complete") for world_size in (4, 5)),
    ],
)
def test_every_schedule(world_size, topology):
    """In a mode each: what modes do with a partner does not know how many others live."""
    mode = "sync" if world_size == 4 else "overlap"
    assert_same_bits(*compare(world_size, topology, mode=mode))


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (3, {"transport": "tcp", "payload": "weights+state"}),
        (4, {"mode": "overlap", "wire_dtype": torch.bfloat16}),
        (4, {"mode": "sync", "wire_dtype": torch.bfloat16}),
        (4, {"mode": "overlap", "dtype": torch.bfloat16, "gradients": set_gradients}),
        (4, {"mode": "sync", "dtype": torch.float16, "gradients": set_gradients}),
        (5, {"mode": "overlap", "every": 3}),
        (5, {"mode": "sync", "every": 3}),
        (5, {"mode": "sync", "exchanges": 2, "payload": "weights+state"}),
        (4, {"payload": "weights+state", "state_every": 3, "optimizer": adam}),
        (4, {"payload": "weights+momentum", "mode": "sync", "optimizer": gossip_adamw}),
    ],
)
def test_links_wires_and_rounds(world_size, settings):
    assert_same_bits(*compare(world_size, **settings))


@pytest.mark.parametrize(("mode", "average_every"), [("overlap", 5), ("sync", "log_p")])
def test_periodic_average_to_tolerance(mode, average_every):
    ours, theirs = compare(4, mode=mode, average_every=average_every, payload="weights+state")
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_consensus_counts_what_is_under_way_and_what_rounding_took(dtype):
    """In the middle of a round of three steps."""

    def use(me):
        me.train(STEPS)
        return me.mean().double()

    settings = {"every": 3, "mode": "overlap", "gradients": set_gradients}
    make = {"make": lambda rank: network(dtype=dtype), "topology": "dissemination"}
    found = run_sessions(4, use, **make, **settings)
    schedule = by_name("dissemination", 4)
    theirs = train_reference(4, STEPS, schedule=schedule, dtype=dtype, **settings)
    expected = torch.cat([mean.flatten() for mean in theirs.consensus()])
    rtol = 2**-8 if dtype is torch.bfloat16 else 1e-5
    for mean in found:
        torch.testing.assert_close(mean, expected, rtol=rtol, atol=1e-5)
