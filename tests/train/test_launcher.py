"""Who is ended by the launcher for standing still, and who is only busy."""

import logging
import signal
import threading
from multiprocessing import Pipe
from multiprocessing.context import ForkServerProcess
from types import SimpleNamespace

import pytest

from gossipgrad.train import (
    TrainConfig,
    _launcher,
    _serving,
    _worker,
    _worker_handle,
)
from gossipgrad.train._layout import RunDir
from gossipgrad.train._progress import Progress
from gossipgrad.train._signals import Stops
from gossipgrad.train._worker_handle import WorkerHandle
from support.results import result

SIGNALS = {"SIGINT": signal.SIGINT, "SIG_IGN": signal.SIG_IGN}


class Killed(ForkServerProcess):
    """A process that was never started, and tells when it would be killed."""

    def __init__(self, killed, rank):
        super().__init__()
        self._killed, self._number = killed, rank

    def kill(self):
        self._killed.append(self._number)


class Workers:
    """Two workers of a run, by hand: who is not silent beats whenever the launcher looks."""

    def __init__(self, monkeypatch, **options):
        self.config = TrainConfig(nproc=2, **options)
        self.seconds = 0.0
        self.silent, self.stops = set(), Stops()
        self.killed = []
        self.befalls = {}
        clock = SimpleNamespace(monotonic=lambda: self.seconds, time=lambda: 1e9 + self.seconds)
        monkeypatch.setattr(_worker_handle, "time", clock)
        monkeypatch.setattr(_launcher, "time", clock)
        monkeypatch.setattr(_launcher, "wait", self._pass)
        self.pipes, self.handles = [], []
        for rank in range(2):
            ours, theirs = Pipe()
            self.handles.append(WorkerHandle(Killed(self.killed, rank), ours, rank))
            self.pipes.append(theirs)

    def say(self, rank, event, **more):
        self.pipes[rank].send({"event": event, **more})

    def end(self, rank, **lost):
        self.say(rank, "result", result=result(rank, **lost).to_json())

    def supervise(self, *, heard=True):
        """Until it is over; gives what the clock says then."""
        if heard:
            for rank in range(2):
                self.say(rank, "ready", total_steps=1)
        _launcher._supervise(self.handles, self.config, Progress(self.config, 2), self.stops)
        return self.seconds

    def _pass(self, pipes, timeout):
        self.seconds += 0.5
        assert self.seconds < 1000, "it never ends"
        if (befalls := self.befalls.pop(self.seconds, None)) is not None:
            befalls()
        for rank, worker in enumerate(self.handles):
            if not worker.over and rank not in self.silent:
                self.say(rank, "beat")


@pytest.fixture
def workers(monkeypatch):
    made = []

    def make(**options):
        made.append(Workers(monkeypatch, **options))
        return made[-1]

    yield make
    for each in made:
        for pipe in (*each.pipes, *(worker.pipe for worker in each.handles)):
            pipe.close()


def test_a_local_worker_that_stands_still_holds_up_nothing_but_the_end(workers, capfd):
    run = workers(strategy="local")
    run.befalls = {5.0: lambda: run.silent.add(1), 100.0: lambda: run.end(0)}
    assert 110 <= run.supervise() < 112
    assert run.killed == [1]
    failure = run.handles[1].failure
    assert failure.cause == "stood still for 10 s and was ended"
    assert failure.started
    assert failure.when_seconds == 1e9 + run.seconds
    assert run.handles[0].result is not None
    assert capfd.readouterr().err == "gossipgrad: rank 1 stood still for 10 s and was ended\n"


def test_a_local_worker_that_was_paused_goes_on(workers):
    run = workers(strategy="local")
    run.befalls = {
        5.0: lambda: run.silent.add(1),
        99.5: lambda: run.end(0),
        105.0: run.silent.clear,
        120.0: lambda: run.end(1),
    }
    assert run.supervise() == 120
    assert not run.killed


def test_where_rows_move_on_from_worker_to_worker_one_that_stands_still_is_ended(workers, capfd):
    run = workers(strategy="local", shuffle="ring")
    run.befalls = {5.0: lambda: run.silent.add(1), 100.0: lambda: run.end(0)}
    assert run.supervise() == 100
    assert run.killed == [1]
    told = "gossipgrad: rank 1 stood still for 10 s and was ended; the others go on\n"
    assert capfd.readouterr().err == told


def test_one_that_stands_still_when_the_others_are_over_is_ended(workers):
    """Nobody has called it lost, and nobody will."""
    run = workers(lost_after_seconds=20.0)
    run.befalls = {5.0: lambda: run.silent.add(1), 6.0: lambda: run.end(0)}
    assert 24 <= run.supervise() < 27
    assert run.handles[1].failure.cause == "stood still for 20 s and was ended"


def test_as_long_as_one_runs_that_can_tell_it_is_the_others_who_give_up(workers):
    run = workers()
    lost = {"1": {"why": "no sign of life", "generation": 1, "when_seconds": 3.0}}

    def end():
        assert not run.killed
        run.end(0, lost=lost)

    run.befalls = {5.0: lambda: run.silent.add(1), 100.0: end}
    assert run.supervise() >= 100
    assert run.killed == [1]


ALL_STAND_STILL = "all workers that are left stand still; they have 3 min to go on"


@pytest.fixture
def three_minutes(monkeypatch):
    assert _launcher._ALL_SILENT_SECONDS == 1800
    monkeypatch.setattr(_launcher, "_ALL_SILENT_SECONDS", 180.0)


@pytest.mark.parametrize("strategy", ["gossip", "allreduce", "local"])
def test_a_run_whose_workers_all_stand_still_goes_on_when_they_do(
    workers, capfd, three_minutes, strategy
):
    """One of them a moment before the other, which nobody has waited for meanwhile."""
    run = workers(strategy=strategy)
    run.befalls = {
        5.0: lambda: run.silent.update({0, 1}),
        170.0: lambda: run.silent.remove(1),
        175.0: run.silent.clear,
        190.0: lambda: [run.end(0), run.end(1)],
    }
    assert run.supervise() == 190
    assert not run.killed
    assert capfd.readouterr().err == f"gossipgrad: {ALL_STAND_STILL}\n"


def test_the_last_that_is_left_is_awaited_when_it_stands_still(workers, capfd, three_minutes):
    run = workers()
    run.befalls = {
        5.0: lambda: run.say(0, "failed", cause="no", is_consequence=False, is_fatal=False),
        8.0: lambda: run.silent.add(1),
        100.0: run.silent.clear,
        120.0: lambda: run.end(1),
    }
    assert run.supervise() == 120
    assert not run.killed
    told = capfd.readouterr().err.splitlines()
    assert told[0].endswith("; the others go on")
    assert told[1:] == [f"gossipgrad: {ALL_STAND_STILL}"]


@pytest.mark.parametrize("strategy", ["gossip", "allreduce"])
def test_a_run_whose_workers_all_stand_still_for_good_ends(workers, three_minutes, strategy):
    run = workers(strategy=strategy)
    run.befalls = {5.0: lambda: run.silent.update({0, 1})}
    assert 180 <= run.supervise() < 187
    assert sorted(run.killed) == [0, 1]


def test_a_stop_does_not_wait_for_workers_that_stand_still(workers, three_minutes):
    run = workers()
    run.befalls = {
        5.0: lambda: run.silent.update({0, 1}),
        60.0: lambda: run.stops.caught.append(signal.SIGTERM),
    }
    assert 70 <= run.supervise() < 75
    assert sorted(run.killed) == [0, 1]


def test_workers_that_were_never_heard_are_awaited_as_long_as_a_start_is(workers, capfd):
    run = workers(start_seconds=120.0)
    run.silent.update({0, 1})
    assert 120 <= run.supervise(heard=False) < 130
    assert ALL_STAND_STILL not in capfd.readouterr().err


def test_half_an_hour_counts_from_when_the_last_fell_silent(workers, three_minutes):
    run = workers(strategy="local")
    run.befalls = {
        5.0: lambda: run.silent.add(1),
        300.0: lambda: run.silent.add(0),
        400.0: run.silent.clear,
        410.0: lambda: [run.end(0), run.end(1)],
    }
    assert run.supervise() == 410
    assert not run.killed


@pytest.mark.parametrize("strategy", ["gossip", "local"])
def test_one_that_is_busy_for_long_is_not_ended(workers, strategy):
    run = workers(strategy=strategy)
    run.befalls = {5.0: lambda: run.end(0), 900.0: lambda: run.end(1)}
    assert run.supervise() == 900
    assert not run.killed


def test_a_worker_beats_whatever_it_is_busy_with_until_its_result(monkeypatch, tmp_path):
    monkeypatch.setattr(_serving, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(_worker, "load_job", lambda config: None)
    # Both would end this process.
    monkeypatch.setattr(_serving, "_listen", lambda pipe, stop: None)
    monkeypatch.setattr(_serving, "os", SimpleNamespace(_exit=lambda code: None))
    monkeypatch.setattr(_serving, "signal", SimpleNamespace(signal=lambda *_: None, **SIGNALS))
    monkeypatch.setattr(logging.getLogger("gossipgrad"), "propagate", True)
    ours, theirs = Pipe()
    heard, enough = [], threading.Event()

    def train(config, dataset, run_dir, *, emit, **rest):
        emit({"event": "ready", "total_steps": 1})
        enough.wait(30)
        return result(0)

    def listen():
        while not heard or heard[-1] not in ("result", "failed"):
            heard.append(ours.recv()["event"])
            if heard[-3:] == ["beat"] * 3 and "ready" in heard:
                enough.set()

    monkeypatch.setattr(_worker, "train_rank", train)
    listener = threading.Thread(target=listen)
    listener.start()
    spec = _worker.WorkerSpec(
        config=TrainConfig(nproc=1, strategy="local"),
        run_dir=RunDir(tmp_path),
        rank=0,
        world_size=1,
        store_port=0,
        members=(0,),
    )
    _worker.worker_main(spec, theirs)
    listener.join(30)
    assert enough.is_set(), "beats ended with the start"
    assert [event for event in heard if event != "beat"] == ["ready", "result"]
    ours.close()
    theirs.close()
