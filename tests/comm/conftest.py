import pytest
import torch

from gossipgrad.comm import Channel, FaultyTransport, Part
from support.links import RUN, make_transports, ours, until_none_but
from support.watches import Clock, make_watches


@pytest.fixture(params=["in-process", "zeromq", "gloo"])
def kind(request):
    return request.param


@pytest.fixture
def transports(kind):
    made, before = [], set(ours())

    def make(world_size=2):
        made.extend(make_transports(kind, world_size))
        return made[-world_size:]

    yield make
    for transport in made:
        transport.close()
    until_none_but(before, 1.0)


@pytest.fixture
def channels(transports):
    """Makes channels, one a rank; tests drive all of them from one thread."""
    made = []

    def make(world_size=2, *, sizes=(4,), credits=1, faults=None, **options):
        ends = transports(world_size)
        if faults is not None:
            ends = [FaultyTransport(end, faults) for end in ends]
        plan = [Part(torch.float32, size) for size in sizes]
        made.extend(Channel(end, run=RUN, plan=plan, credits=credits, **options) for end in ends)
        return made[-world_size:]

    yield make
    for channel in made:
        channel.close(linger_seconds=0.0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watches(clock):
    """Makes the watches of a world; tests beat for them, second by second."""
    return lambda world_size: make_watches(clock, world_size)
