"""A signal handler that raises cuts no exchange of rows in two."""

import contextlib
import signal
import sys
import threading
import time
from itertools import count

import pytest
import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import Group
from gossipgrad.data._ring_shuffle_worker import Worker
from support.links import make_transports
from support.waiting import until

SIZE, STEPS = 12, 12


class StopNowError(Exception):
    pass


def is_in(function, frame):
    """Whether a frame is that of a function, or of one that it has called."""
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def open_to_strikes(act):
    """Where one is caught, and nowhere else: it may come late."""
    act()


def stop_now(number, frame):
    if is_in(open_to_strikes, frame):
        raise StopNowError


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGUSR1, stop_now)
    yield
    signal.signal(signal.SIGUSR1, before)


def strike():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
    time.sleep(0.002)


def striking(function, where):
    def struck(*arguments, **options):
        if where == "before":
            strike()
        result = function(*arguments, **options)
        if where == "after":
            strike()
        return result

    return struck


@contextlib.contextmanager
def pair(*, other):
    """Rank 0's shuffle, for the main thread; `other` has rank 1's. Then both hold what is whose."""
    store, ends, held = dist.HashStore(), make_transports("in-process", 2), {}

    def make(rank):
        return gg.RingShuffle(
            torch.arange(SIZE) + SIZE * rank,
            batch_size=4,
            process_group=Group(store, rank, 2),
            transport=lambda group: ends[rank],
        )

    def neighbour():
        with make(1) as shuffle:
            other(shuffle)
        held[1] = shuffle.rows()[0].tolist()

    thread = threading.Thread(target=neighbour)
    thread.start()
    try:
        with make(0) as shuffle:
            yield shuffle
        held[0] = shuffle.rows()[0].tolist()
    finally:
        thread.join(100)
    assert sorted(held[0] + held[1]) == list(range(2 * SIZE))


@pytest.mark.parametrize(
    ("part", "name", "where"),
    [
        ("rows", "take_out", "after"),
        ("rows", "put_in", "before"),
        ("rows", "place", "before"),
        ("links", "_lay_down", "before"),
        ("links", "send_parcel", "before"),
    ],
)
def test_a_handler_that_raises_in_an_exchange_takes_no_row_along(part, name, where):
    def other(shuffle):
        for _ in range(STEPS // len(shuffle)):
            for _ in shuffle:
                time.sleep(0.005)
        shuffle.drain()

    struck = 0
    with pair(other=other) as shuffle:
        target = shuffle._ring.rows if part == "rows" else shuffle._ring.links
        function = getattr(target, name)
        setattr(target, name, striking(function, where))
        begun_seconds = time.monotonic()
        for made in count(1):  # the neighbour may be late
            try:
                open_to_strikes(lambda: (next(iter(shuffle)), time.sleep(0.005)))
            except StopNowError:
                struck += 1
            if made >= STEPS and struck:
                break
            assert time.monotonic() < begun_seconds + 50, "no strike"
        setattr(target, name, function)
        shuffle.drain()
        assert shuffle.stats().refused_messages == 0


def test_a_wait_ends_when_nobody_waits_for_it_any_more():
    done, main = threading.Event(), threading.main_thread().ident

    def strike_in_settlement():
        until(lambda: is_in(gg.RingShuffle.settle, sys._current_frames()[main]), 50)
        time.sleep(0.2)
        strike()

    with pair(other=lambda shuffle: done.wait(100)) as shuffle:
        threading.Thread(target=strike_in_settlement).start()
        with pytest.raises(StopNowError):
            open_to_strikes(lambda: shuffle.drain(100.0))
        start = time.perf_counter()
        assert shuffle.stats().rows_held == SIZE
        assert time.perf_counter() - start < 50
        done.set()


def test_a_worker_that_has_ended_leaves_the_work_to_its_caller():
    worker = Worker()
    assert worker.do(threading.current_thread) is not threading.current_thread()
    worker.end()
    assert worker.do(threading.current_thread) is threading.current_thread()
