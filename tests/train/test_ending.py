"""The end of a run: the lowest rank that lives puts it together, once."""

import json
import threading

import pytest
import torch.distributed as dist

from gossipgrad.train import Outcome, RunFailedError, TrainConfig, _ending
from gossipgrad.train._ending import Ending
from gossipgrad.train._folder import RunDir
from support.hanging_store import Hanging
from support.results import result
from support.waiting import HANG_SECONDS, until

LOSS = {"why": "no sign of life for 10 s", "generation": 1, "when_seconds": 1.0}
HOW = {"from_rank": 1, "generation": 2, "when_seconds": 1e9}
RANKS = 4


class Gone(dist.Store):
    """A store whose host has died."""

    def fail(self, *_):
        raise dist.DistNetworkError("connection reset")

    set = get = add = check = compare_set = fail

    def clone(self):
        return self


class Dead(BaseException):
    """Ends the thread of a rank."""


@pytest.fixture(params=["store", "no store", "store that hangs"])
def store(request, monkeypatch):
    monkeypatch.setattr(_ending, "_STORE_SECONDS", 0.1 if request.param.endswith("hangs") else 60.0)
    made = {"store": dist.HashStore, "no store": Gone, "store that hangs": Hanging}[request.param]()
    yield made
    if isinstance(made, Hanging):
        made.answers.set()


class Run:
    """Ranks at their end, as threads."""

    def __init__(self, path, *, silent_seconds=60.0):
        self.run_dir = RunDir(path)
        self.run_dir.partial.mkdir()
        config = TrainConfig(epochs=1, lost_after_seconds=silent_seconds)
        self.config = config.resolved(nproc=RANKS, out=path)
        self.config.write(self.run_dir.config, {})
        self.ends = {}
        self._threads = []

    def come(self, store, rank):
        return Ending(self.config, self.run_dir, store, rank)

    def end(self, store, rank, **changes):
        """A rank reaches its end, and waits for what comes of the run."""

        def main():
            own = result(rank, **changes)
            self.run_dir.rank_model(rank).write_bytes(b"")
            ending = self.come(store, rank)
            ending.hand_in({"result": own.to_json()})
            try:
                self.ends[rank] = ending.finish()
            except RunFailedError as error:
                self.ends[rank] = error
            except Dead:
                pass
            finally:
                ending.close()

        self._threads.append(threading.Thread(target=main))
        self._threads[-1].start()

    def fail(self, store, rank, cause):
        ending = self.come(store, rank)
        ending.hand_in({"cause": cause})
        ending.close()

    def all(self):
        """What each came to: the summary if it put the run together."""
        for thread in self._threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()
        return {
            rank: None if not isinstance(end, Outcome) else end.summary
            for rank, end in sorted(self.ends.items())
        }


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(_ending, "_POLL_SECONDS", 0.005)
    return Run(tmp_path)


def test_the_lowest_rank_puts_it_together_and_the_others_go(run, store):
    for rank in range(RANKS):
        run.end(store, rank)
    summary, *others = run.all().values()
    assert others == [None] * 3
    assert json.loads(run.run_dir.summary.read_text()) == summary
    assert (summary["lost_ranks"], summary["steps_per_rank"]) == ([], [10] * 4)
    assert run.run_dir.model.exists()
    assert run.run_dir.report.exists()
    assert not run.run_dir.partial.exists()


def test_when_rank_0_is_lost_the_lowest_of_the_living_does(run, store):
    run.end(store, 3, lost={"0": LOSS})
    run.fail(store, 1, "failed: no memory")
    run.end(store, 2, lost={"0": LOSS})
    ends = run.all()
    assert ends[3] is None
    assert ends[2]["lost_because"] == {
        "0": "was taken for dead: no sign of life for 10 s",
        "1": "failed: no memory",
    }
    assert ends[2]["losses"]["1"]["when_seconds"] > 1e9
    assert ends[2]["model_from_rank"] == 2


def test_one_that_never_comes_is_lost_when_its_process_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(_ending, "_POLL_SECONDS", 0.05)
    run, store = Run(tmp_path, silent_seconds=2.0), dist.HashStore()
    evaluates = run.come(store, 0)
    for rank in (1, 2):
        run.end(store, rank)
    run._threads[0].join(4.0)
    assert not run.ends, "rank 0 lives, and is awaited"
    evaluates.close()  # as its process dies
    ends = run.all()
    assert ends[1]["lost_ranks"] == [0, 3]
    assert ends[2] is None


def test_when_it_dies_over_it_the_next_one_puts_it_together(run, monkeypatch):
    store, inner, dead = dist.HashStore(), _ending.finish, []

    def die(*arguments):
        if not dead:
            dead.append(True)
            raise Dead
        return inner(*arguments)

    monkeypatch.setattr(_ending, "finish", die)
    for rank in range(RANKS):
        run.end(store, rank)
    ends = run.all()
    assert 0 not in ends
    assert ends[1]["steps_per_rank"] == [10] * 4
    assert ends[2] is ends[3] is None
    assert run.run_dir.model.exists()


def knows(*joined, **changes):
    return {"joined": {str(rank): HOW for rank in joined}, **changes}


def test_those_who_joined_are_awaited_and_counted(run):
    store = dist.HashStore()
    run.end(store, 4, **knows(4, 5, 6, steps=5, left=True, stopped=True))
    run.fail(store, 5, "failed: no memory")
    lives = run.come(store, 6)
    for rank in range(RANKS):
        run.end(store, rank, **knows(4, 5, 6))
    run._threads[1].join(0.5)
    assert not run.ends.get(0), "rank 6 lives"
    run.end(store, 6, **knows(4, 5, 6))
    until(run.run_dir.rank_result(6).exists)
    lives.close()
    ends = run.all()
    assert [one["end"] for one in ends[0]["joined"]] == ["left", "lost", "finished"]
    assert ends[0]["lost_because"] == {"5": "failed: no memory"}
    assert not ends[0]["interrupted"], "the run went on without the one that left"
    assert ends[6] is None


def test_those_who_joined_put_it_together_when_all_others_are_lost(run, store):
    lost = {str(rank): LOSS for rank in range(RANKS)}
    for rank in (5, 4):
        run.end(store, rank, **knows(4, 5, lost=lost))
    ends = run.all()
    assert ends[5] is None
    assert ends[4]["lost_ranks"] == [0, 1, 2, 3]
    assert ends[4]["steps_per_rank"] == [None] * 4 + [10, 10]
