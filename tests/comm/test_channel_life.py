"""Channels at their end and under load: close, forks, threads, memory, wrong arguments."""

import gc
import itertools
import threading
import time

import pytest
import torch

from gossipgrad.comm import Channel, Hub, Lost, Outcome, Part
from support.links import make_transports, ours, until_none_but
from support.waiting import quick, until

D, L, V, X = Outcome.DELIVERED, Outcome.LATE, Outcome.VOID, Outcome.DEAD_PEER


def part(value, size=4):
    return torch.full((size,), float(value))


def post(channel, peer, round=0, value=0.0, bucket=0, size=4, **options):
    return channel.post(round, bucket, part(value, size), send_to=peer, recv_from=peer, **options)


def test_post_and_take_after_close_are_void_and_quick(channels):
    a, _ = channels()
    before = post(a, 1)
    a.close()
    assert before.outcome is V
    after = post(a, 1, round=1)
    start = time.perf_counter()
    assert a.take(after, 60.0) is V
    assert a.take(before, 60.0) is V
    a.poll(60.0)
    a.void(2, 1)
    a.close(linger_seconds=60.0)
    assert time.perf_counter() - start < 30.0


def test_close_is_quick_while_peers_are_silent_dead_or_many(channels):
    def closed():
        ends = channels(6)
        for peer in range(1, 6):
            post(ends[0], peer, round=peer)
        ends[1].transport.close()
        ends[2].close()
        start = time.perf_counter()
        ends[0].close(linger_seconds=0.5)
        return time.perf_counter() - start

    quick(closed, 1.5)


@pytest.mark.parametrize("kind", ["in-process"])
def test_a_post_that_does_not_fit_the_plan_is_refused(channels):
    a, _ = channels()
    with pytest.raises(
        ValueError, match=r"bucket 0 is planned as 4 x torch.float32, got 5 x torch.float32"
    ):
        post(a, 1, size=5)
    with pytest.raises(ValueError, match=r"got 4 x torch.float64"):
        a.post(0, 0, part(0).double(), send_to=1, recv_from=1)


def test_settings_are_checked():
    transport = Hub(2).transport(0)
    with pytest.raises(ValueError, match=r"run must be 16 bytes, got 3: use secrets.token_bytes"):
        Channel(transport, run=b"abc", plan=[])
    with pytest.raises(ValueError, match="credits must be at least 1, got 0"):
        Channel(transport, run=bytes(16), plan=[], credits=0)
    with pytest.raises(ValueError, match=r"rank must lie in 0\.\.1, got 2"):
        Hub(2).transport(2)


def test_two_threads_may_take_at_once(channels):
    """The one that does not listen is woken by the one that does, and its deadline holds."""
    a, b, c = channels(3)
    from_b, rounds = post(a, 1), itertools.count()

    def take(exchange, deadline, outcomes, seconds):
        start = time.perf_counter()
        outcomes.append(a.take(exchange, deadline))
        seconds.append(time.perf_counter() - start)

    def both_in_time():
        round, outcomes, seconds = next(rounds), ([], []), ([], [])
        from_c = post(a, 2, round=round)
        threads = [
            threading.Thread(target=take, args=(from_b, 0.8, outcomes[0], seconds[0])),
            threading.Thread(target=take, args=(from_c, 60.0, outcomes[1], seconds[1])),
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        posted = post(c, 0, round=round)
        for thread in threads:
            thread.join()
        assert outcomes == ([L], [D])
        assert seconds[0][0] >= 0.8
        assert c.take(posted, 30.0) is D
        return seconds[0][0] < 1.1 and seconds[1][0] < 0.4

    until(both_in_time)  # at the first time, unless a busy machine holds a thread up
    post(b, 0)
    assert a.take(from_b, 30.0) is D


@pytest.mark.parametrize("kind", ["in-process"])
def test_memory_does_not_grow_over_many_exchanges(channels):
    a, b = channels()
    for round in range(1_000):
        if round % 7 == 0:
            a.void(round, 1)
        x, y = post(a, 1, round=round), post(b, 0, round=round)
        if round % 5 == 0:
            a.cancel(x)
        a.take(x, 30.0)
        b.take(y, 30.0)
    for channel in (a, b):
        ledger = channel._ledgers[1 - channel.rank]
        kept = ledger.open, ledger.early, ledger.cancelled, ledger.voided
        assert sum(map(len, kept)) < 10
        assert len(channel._outbox._tickets) < 10


def test_channels_that_nobody_closed_are_collected_without_waiting():
    before = set(ours())

    def collected():
        ends = [
            Channel(end, run=bytes(16), plan=[Part(torch.float32, 4)])
            for end in make_transports("zeromq", 2)
        ]
        pair = post(ends[0], 1), post(ends[1], 0)
        assert (ends[0].take(pair[0], 30.0), ends[1].take(pair[1], 30.0)) == (D, D)
        for end in ends:
            end.itself = end
        start = time.perf_counter()
        del ends, pair, end
        gc.collect()
        return time.perf_counter() - start

    quick(collected, 2.0)
    until_none_but(before)


@pytest.mark.parametrize("kind", ["in-process"])
def test_a_forked_copy_leaves_the_links_alone(channels):
    a, b = channels()
    a._process = -1
    a.close()
    pair = post(a, 1), post(b, 0)
    assert a.take(pair[0], 30.0) is D


def test_early_parts_of_a_peer_that_left_are_freed_with_its_generation(channels, leave):
    a, b = channels()
    b.post(5, 0, part(1), send_to=0, recv_from=None)
    until(lambda: a.poll() or a.early_bytes == 16)
    leave(b)
    until(lambda: a.poll() or a.gone)
    assert a.gone == {1: "left"}
    assert a.early_bytes == 16  # a directed round may still want it
    a.enter(1, 1, [0])
    assert a.early_bytes == 0


def test_an_interrupted_close_leaves_no_thread_and_no_link(monkeypatch):
    before = {*ours()}
    ends = make_transports("in-process", 2)
    a = Channel(ends[0], run=bytes(16), plan=[Part(torch.float32, 4)])
    post(a, 1, ready=lambda: None)  # a thread sends it
    assert {*ours()} > before

    def interrupted(timeout_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(a, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        a.close()
    until_none_but(before)
    until(lambda: any(isinstance(event, Lost) for event in ends[1].receive(0.0)))


def give_and_await(channel, round):
    """To one peer, from the other."""
    return channel.post(round, 0, part(round), send_to=2, recv_from=1)


def test_rounds_of_a_silent_source_are_forgotten_and_its_old_parts_are_dropped(channels):
    a, b, c = channels(3)
    first = give_and_await(a, 0)
    for round in range(1, 200):
        assert give_and_await(a, round).outcome is V
        c.poll()
    ledger = a._ledgers[1]
    assert len(ledger.cancelled) == 1
    # It speaks after all: what is open counts, what was given up on does not come back.
    for round in (0, 1, 199):
        b.post(round, 0, part(-round), send_to=0, recv_from=None)
    assert a.take(first, 30.0) is D
    until(lambda: a.poll() or ledger.latest == 199)
    assert not ledger.early
    b.post(200, 0, part(7), send_to=0, recv_from=None)
    next_one = give_and_await(a, 200)
    assert a.take(next_one, 30.0) is D
    assert next_one.received.tolist() == [7.0] * 4
