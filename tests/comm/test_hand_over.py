"""Links that outlive a run: the next channel over them hears nothing of the one before."""

import secrets

import torch

from gossipgrad.comm import Channel, Hub, Outcome, Part, is_joinable

PLAN = (Part(torch.float32, 2),)


def channels(transports):
    run = secrets.token_bytes(16)
    return [Channel(transport, run=run, plan=PLAN) for transport in transports]


def exchange(a, b, round):
    sent = [torch.full((2,), float(10 * round + channel.rank)) for channel in (a, b)]
    posted = [
        channel.post(round, 0, payload, send_to=1 - channel.rank, recv_from=1 - channel.rank)
        for channel, payload in zip((a, b), sent, strict=True)
    ]
    taken = [channel.take(one, 30.0) for channel, one in zip((a, b), posted, strict=True)]
    return taken, [one.received.tolist() for one in posted]


def test_rounds_begin_anew_and_what_was_under_way_is_dropped_uncounted():
    hub = Hub(2)
    a, b = channels([hub.transport(0), hub.transport(1)])
    exchange(a, b, round=7)
    left = a.post(8, 0, torch.zeros(2), send_to=1, recv_from=1)  # arrives after the hand-over
    a, b = channels([a.hand_over(), b.hand_over()])
    assert left.outcome is Outcome.VOID
    taken, received = exchange(a, b, round=0)
    assert taken == [Outcome.DELIVERED] * 2
    assert received == [[1.0, 1.0], [0.0, 0.0]]
    assert a.refused == b.refused == 0
    assert not a.gone
    assert not b.gone

    again = a.hand_over()  # and once more
    (c,) = channels([again])
    assert c.post(0, 0, torch.zeros(2), send_to=None, recv_from=None).outcome is Outcome.DELIVERED
    for channel in (c, b):
        channel.close(0.0)


def test_what_a_stranger_sends_is_still_refused():
    hub = Hub(2)
    a, b = channels([hub.transport(0), hub.transport(1)])
    stranger = hub.transport(1)
    a, b = channels([a.hand_over(), b.hand_over()])
    stranger.send(0, b"no header")
    a.poll()
    assert a.refused == 1
    for channel in (a, b):
        channel.close(0.0)


def test_links_that_were_handed_over_can_be_joined_as_before():
    hub = Hub(2)
    plain, joinable = hub.transport(0), hub.transport(1)
    joinable.take_in = lambda rank, introduction: None
    a, b = channels([plain, joinable])
    assert [is_joinable(channel.hand_over()) for channel in (a, b)] == [False, True]
