"""The session does what the reference says: bit for bit where ranks mix in pairs."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.topology import by_name
from support.replicas import (
    adam,
    assert_same_bits,
    set_gradients,
    sgd,
    train,
    train_reference,
)

STEPS = 14

MODES = [
    ("overlap", "weights"),
    ("sync", "weights"),
    ("overlap", "weights+state"),
    ("sync", "weights+state"),
    ("overlap", "gradients"),
    ("overlap", "gradients+weights"),
]

pytestmark = pytest.mark.filterwarnings("ignore:payload='gradients' never mixes")


def compare(world_size, topology="dissemination", transport="in-process", **settings):
    optimizer = settings.pop("optimizer", sgd)
    reference_settings = dict(settings)
    payload = settings.get("payload", "weights")
    state_every = reference_settings.pop("state_every", 1)
    if "state_every" in settings:
        del settings["state_every"]
        settings["payload"] = gg.WeightsAndState(every=state_every)
    ours = train(
        world_size,
        STEPS,
        topology=topology,
        transport=transport,
        optimizer=optimizer,
        seed=0 if topology == "ring" else 3,
        **settings,
    )
    reference_settings["payload"] = payload
    theirs = train_reference(
        world_size,
        STEPS,
        schedule=by_name(topology, world_size, seed=0 if topology == "ring" else 3),
        optimizer=optimizer,
        state_every=state_every,
        **reference_settings,
    )
    return ours, theirs


@pytest.mark.parametrize(("mode", "payload"), MODES)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_every_mode_and_payload(world_size, mode, payload):
    ours, theirs = compare(world_size, mode=mode, payload=payload)
    assert_same_bits(ours, theirs.w)


@pytest.mark.parametrize(("mode", "payload"), MODES[:2])
@pytest.mark.parametrize("world_size", [6, 7, 9])
def test_more_world_sizes(world_size, mode, payload):
    """Schedules of their own; what modes do with a partner does not know how many others live."""
    ours, theirs = compare(world_size, mode=mode, payload=payload)
    assert_same_bits(ours, theirs.w)


@pytest.mark.parametrize("topology", ["hypercube", "matching", "ring", "complete"])
@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("world_size", [4, 5, 8])
def test_every_schedule(world_size, topology, mode):
    if topology == "hypercube" and world_size == 5:
        pytest.skip("hypercube takes powers of two")
    ours, theirs = compare(world_size, topology, mode=mode)
    assert_same_bits(ours, theirs.w)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_over_zeromq(world_size):
    ours, theirs = compare(world_size, transport="zeromq", payload="weights+state")
    assert_same_bits(ours, theirs.w)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_narrow_wire(mode):
    ours, theirs = compare(4, mode=mode, wire_dtype=torch.bfloat16)
    assert_same_bits(ours, theirs.w)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters(dtype, mode):
    settings = {"mode": mode, "dtype": dtype}
    ours = train(4, STEPS, gradients=set_gradients, **settings)
    theirs = train_reference(
        4, STEPS, schedule=by_name("dissemination", 4), gradients=set_gradients, **settings
    )
    assert_same_bits(ours, theirs.w)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_rounds_of_several_steps(mode):
    ours, theirs = compare(5, mode=mode, every=3)
    assert_same_bits(ours, theirs.w)


def test_state_in_every_third_round():
    ours, theirs = compare(4, payload="weights+state", state_every=3, optimizer=adam)
    assert_same_bits(ours, theirs.w)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("average_every", [5, "log_p"])
def test_periodic_average_to_tolerance(mode, average_every):
    ours, theirs = compare(
        4, mode=mode, average_every=average_every, payload="weights+state", optimizer=sgd
    )
    for mine, other in zip(ours, theirs.w, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=2e-5, atol=2e-6)
