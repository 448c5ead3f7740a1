"""Whose turn it is to listen, and how that ends."""

import threading
import time

from gossipgrad.comm import _turn
from gossipgrad.comm._news import Unheard
from gossipgrad.comm._turn import Turn


def test_who_listens_does_not_wait_for_itself_to_end():
    turn, ended = Turn(), []

    def listen():
        with turn.take(lambda: False, 30.0) as mine:
            assert mine
            ended.append(turn.end())

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(30.0)
    assert ended == [True]
    with turn.take(lambda: False, 30.0) as mine:
        assert not mine


def test_the_end_waits_for_who_listens_and_not_for_ever(monkeypatch, caplog):
    monkeypatch.setattr(_turn, "_END_SECONDS", 0.1)
    turn, listens, over = Turn(), threading.Event(), threading.Event()

    def listen():
        with turn.take(lambda: False, 30.0):
            listens.set()
            over.wait(60.0)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert listens.wait(30.0)
    start = time.perf_counter()
    assert not turn.end()
    assert 0.1 <= time.perf_counter() - start < 30.0
    assert "a thread listens still after 0.1 s: its links stay open" in caplog.text
    over.set()
    thread.join(30.0)
    assert turn.end()


class Closing(Unheard):
    def ahead(self, generation):
        self.channel.close(0.0)


def test_a_channel_that_is_closed_in_its_own_listener_ends(channels):
    """As when a session that nobody closed is collected there."""
    news = Closing()
    a, b = channels(news=news)
    news.channel = a
    b.enter(1, 0, [0, 1])

    def listen():
        while not a.closed:
            a.poll(0.1)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(30.0)
    assert a.closed
    assert not thread.is_alive()
