"""A session of mode stale does what its reference says, bit for bit, whatever arrives when."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossipgrad as gg
from gossipgrad.topology import by_name
from support.replicas import adam, assert_same_bits, network, sgd
from support.stale import Scripted, reference


def actions(world_size, count):
    ranks = st.integers(0, world_size - 1)
    links = st.tuples(ranks, ranks).filter(lambda link: link[0] != link[1])
    step = ranks.map(lambda rank: ("step", rank))
    deliver = links.map(lambda link: ("deliver", *link))
    return st.lists(st.one_of(step, deliver), min_size=count, max_size=count)


def compare(world_size, script, d, topology="matching", **options):
    payload, state_every = options.get("payload", "weights"), options.pop("state_every", 1)
    if payload == "weights+state":
        options["payload"] = gg.WeightsAndState(every=state_every)
    ours = Scripted(
        world_size, topology=topology, mode=gg.Stale(max_staleness=d), seed=3, **options
    )
    try:
        ours.run(script)
        theirs = reference(
            world_size,
            script,
            by_name(topology, world_size, seed=3),
            max_staleness=d,
            **{**options, "payload": payload, "state_every": state_every},
        )
        assert_same_bits([list(m.parameters()) for m in ours.models], theirs.w)
        assert [s._rounds.next_round for s in ours.sessions] == [r.t for r in theirs.ranks]
        assert sum(s.stats().clamps for s in ours.sessions) == theirs.clamps
        ours.drain()
        theirs.settle()
        assert_same_bits([list(m.parameters()) for m in ours.models], theirs.w)
    finally:
        ours.close()


@settings(max_examples=8)
@given(st.data())
def test_random_steps_and_arrivals(data):
    world_size = data.draw(st.integers(2, 5))
    d = data.draw(st.integers(0, 4))
    compare(world_size, data.draw(actions(world_size, 40)), d)


@settings(max_examples=4)
@given(script=actions(4, 50), d=st.integers(0, 3), state_every=st.integers(1, 3))
def test_with_the_moments_of_adam(script, d, state_every):
    options = {"optimizer": adam, "payload": "weights+state", "state_every": state_every}
    compare(4, script, d, "hypercube", **options)


@pytest.mark.parametrize(
    ("wire_dtype", "dtype"), [(torch.bfloat16, torch.float32), (None, torch.bfloat16)]
)
def test_narrow_wires_and_weights(wire_dtype, dtype):
    generator = torch.Generator().manual_seed(5)
    script = []
    for _ in range(70):
        kind, s, r = torch.randint(0, 4, (3,), generator=generator).tolist()
        script.append(("step", s) if kind < 2 or s == r else ("deliver", s, r))
    compare(4, script, 2, wire_dtype=wire_dtype, make=lambda: network(dtype=dtype), optimizer=sgd)
