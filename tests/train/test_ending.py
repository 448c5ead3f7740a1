"""The end of a run in a given world: whoever is left puts it together, once."""

import errno
import fcntl
import os
import threading
import time

import pytest
import torch.distributed as dist

from gossipgrad.train import RunFailedError, _ending
from gossipgrad.train._ending import Ending, summary_lock
from gossipgrad.train._layout import RunDir
from support.hanging_store import Hanging
from support.results import result

LOSS = {"why": "no sign of life for 10 s", "generation": 1, "when_seconds": 1.0}


class Gone(dist.Store):
    """A store whose host has died."""

    def fail(self, *_):
        raise dist.DistNetworkError("connection reset")

    set = get = check = fail

    def clone(self):
        return self


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(_ending, "_POLL_SECONDS", 0.005)
    monkeypatch.setattr(_ending, "_TURN_SECONDS", 60.0)
    monkeypatch.setattr(_ending, "_REPORT_SECONDS", 60.0)
    folder = RunDir(tmp_path)
    folder.partial.mkdir()
    return folder


@pytest.fixture(params=["store", "no store", "store that hangs"])
def endings(run_dir, request, monkeypatch):
    monkeypatch.setattr(_ending, "_STORE_SECONDS", 0.1 if request.param.endswith("hangs") else 60.0)
    stores = {"store": dist.HashStore, "no store": Gone, "store that hangs": Hanging}
    store = stores[request.param]()
    yield [Ending(run_dir, store, rank, 4) for rank in range(4)]
    if isinstance(store, Hanging):
        store.answers.set()


def finish(run_dir, ending, came):
    with ending.turn() as mine:
        came.append(mine)
        if mine:
            results, lost = ending.collect()
            came.append((sorted(results), lost))
            run_dir.summary.write_text("{}")
            run_dir.remove_partial()
            ending.done()


def run_all(run_dir, endings):
    came = {rank: [] for rank in endings}
    threads = [
        threading.Thread(target=finish, args=(run_dir, ending, came[rank]))
        for rank, ending in endings.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return came


def test_the_lowest_rank_puts_it_together_and_the_others_go(run_dir, endings):
    for rank, ending in enumerate(endings):
        ending.hand_in({"result": result(rank).to_json()})
    came = run_all(run_dir, dict(enumerate(endings)))
    assert came == {0: [True, ([0, 1, 2, 3], {})], 1: [False], 2: [False], 3: [False]}


def test_a_file_system_without_locks_is_not_taken_for_a_lock_of_another(
    run_dir, endings, monkeypatch
):
    def flock(file, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(_ending, "_TURN_SECONDS", 0.0)  # all try at once
    for rank, ending in enumerate(endings):
        ending.hand_in({"result": result(rank).to_json()})
    came = run_all(run_dir, dict(enumerate(endings)))
    assert sorted(map(len, came.values())) == [1, 1, 1, 2]


def test_one_that_never_ends_over_it_is_not_awaited_for_ever(run_dir, monkeypatch):
    monkeypatch.setattr(_ending, "_LAST_SECONDS", 0.2)
    ending = Ending(run_dir, dist.HashStore(), 0, 2)
    ending.hand_in({"result": result(0).to_json()})
    with (
        summary_lock(run_dir),
        pytest.raises(RunFailedError, match=str(run_dir.partial)),
        ending.turn(),
    ):
        pass
    assert run_dir.rank_result(0).exists()


def test_when_rank_0_is_lost_the_lowest_of_the_living_does(run_dir, endings):
    for rank in (1, 2, 3):
        endings[rank].hand_in({"result": result(rank, lost={"0": LOSS}).to_json()})
    # Within a third of the time that one is awaited who is not known to be lost.
    came = run_all(run_dir, {rank: endings[rank] for rank in (1, 2, 3)})
    assert came[1] == [True, ([1, 2, 3], {0: "was taken for dead: no sign of life for 10 s"})]
    assert came[2] == came[3] == [False]


def test_when_it_dies_over_it_another_takes_its_place(run_dir, endings, monkeypatch):
    monkeypatch.setattr(_ending, "_TURN_SECONDS", 0.05)
    for rank, ending in enumerate(endings):
        ending.hand_in({"result": result(rank).to_json()})
    with endings[0].turn() as mine:
        assert mine  # its process ends here, and the lock goes with it
    came = run_all(run_dir, dict(enumerate(endings[1:], start=1)))
    assert sorted(came.values(), key=str) == [[False], [False], [True, ([0, 1, 2, 3], {})]]


def test_when_it_never_comes_another_takes_its_place(run_dir, endings, monkeypatch):
    monkeypatch.setattr(_ending, "_REPORT_SECONDS", 0.2)
    for rank in (1, 3):
        endings[rank].hand_in({"result": result(rank).to_json()})
    endings[2].hand_in({"cause": "failed: no memory"})
    came = run_all(run_dir, {rank: endings[rank] for rank in (1, 3)})
    did = [answer for answer in came.values() if answer[0]]
    assert len(did) == 1
    nothing = "handed nothing in within 0 s"
    assert did[0][1] == ([1, 3], {0: nothing, 2: "failed: no memory"})
    whose = next(rank for rank, answer in came.items() if answer[0])
    assert endings[whose].when_seconds.keys() == {2}, "of rank 0 nobody knows when"


def test_one_that_still_trains_is_awaited(run_dir, endings, monkeypatch):
    monkeypatch.setattr(_ending, "_REPORT_SECONDS", 0.2)
    endings[1].hand_in({"result": result(1).to_json()})
    endings[2].hand_in({"cause": "failed: a"})
    endings[3].hand_in({"cause": "failed: b"})
    # What it writes now is as new as ever, however long the machine takes to come to it.
    run_dir.metrics(0).write_text("{}")
    soon_seconds = time.time() + 3600
    os.utime(run_dir.metrics(0), (soon_seconds, soon_seconds))
    came = []
    other = threading.Thread(target=finish, args=(run_dir, endings[1], came))
    other.start()
    other.join(0.5)
    assert other.is_alive()
    assert came == []
    endings[0].hand_in({"result": result(0).to_json()})
    mine = []
    finish(run_dir, endings[0], mine)
    other.join(20)
    assert mine == [True, ([0, 1], {2: "failed: a", 3: "failed: b"})]
    assert came == [False]
