import threading

import pytest
import torch

from gossipgrad.comm import Channel, FaultyTransport, GlooTransport, Hub, Part, ZeroMQTransport
from support.ranks import _where, run_ranks
from support.waiting import until

RUN = bytes(range(16))


def make_transports(kind, world_size):
    if kind == "in-process":
        hub = Hub(world_size)
        return [hub.transport(rank) for rank in range(world_size)]
    made = {"zeromq": ZeroMQTransport, "gloo": GlooTransport}[kind]
    ends = run_ranks(world_size, lambda rank, group: made(group))
    if kind == "gloo":  # a Gloo link is there once both ends have opened it
        for end in ends:
            for peer in set(range(world_size)) - {end.rank}:
                end.open(peer)
    return ends


def ours():
    """Threads of gossipgrad; pyzmq's collector of garbage is the process's own."""
    return [t for t in threading.enumerate() if t.name.startswith("gossipgrad")]


@pytest.fixture(params=["in-process", "zeromq", "gloo"])
def kind(request):
    return request.param


@pytest.fixture
def transports(kind):
    made = []

    def make(world_size=2):
        made.extend(make_transports(kind, world_size))
        return made[-world_size:]

    yield make
    for transport in made:
        transport.close()
    try:
        until(lambda: not ours(), 1.0)
    except AssertionError:
        pytest.fail("left behind: " + "".join(map(_where, ours())))


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
