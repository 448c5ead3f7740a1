import threading

import pytest
import torch

from gossipgrad.comm import Channel, FaultyTransport, Part, _channel
from support.links import RUN, make_transports, ours, until_none_but
from support.waiting import HANG_SECONDS
from support.watches import Clock, make_watches


@pytest.fixture(params=["in-process", "tcp"])
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
    until_none_but(before)


@pytest.fixture
def channels(transports):
    """Makes channels, one a rank; tests drive all of them from one thread."""
    made = []

    def make(world_size=2, *, sizes=(4,), window=1, faults=None, **options):
        ends = transports(world_size)
        if faults is not None:
            ends = [FaultyTransport(end, faults) for end in ends]
        plan = [Part(torch.float32, size) for size in sizes]
        made.extend(Channel(end, run=RUN, plan=plan, window=window, **options) for end in ends)
        return made[-world_size:]

    yield make
    for channel in made:
        channel.close(linger_seconds=0.0)


@pytest.fixture
def leave(monkeypatch):
    """Closes a channel beside the test, with all the time that its last word may take."""
    monkeypatch.setattr(_channel, "_LEAVE_SECONDS", HANG_SECONDS)
    closing = []

    def close(channel):
        closing.append(threading.Thread(target=channel.close, args=(HANG_SECONDS,), daemon=True))
        closing[-1].start()

    yield close
    for thread in closing:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watches(clock):
    """Makes the watches of a world; tests beat for them, second by second."""
    return lambda world_size: make_watches(clock, world_size)
