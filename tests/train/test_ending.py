"""The end of a run: the lowest rank that lives puts it together, once."""

import json
import threading
from contextlib import ExitStack
from dataclasses import asdict

import pytest
import torch.distributed as dist

from gossipgrad.comm import AskedStore
from gossipgrad.report import write_report
from gossipgrad.train import Outcome, RunFailedError, TrainConfig, _finish
from gossipgrad.train._finish import Ends, finish
from gossipgrad.train._folder import RunDir, held
from gossipgrad.train._result import RankResult
from support.hanging_store import Hanging
from support.waiting import HANG_SECONDS, until

HOW = {"from_rank": 1, "generation": 2, "when_seconds": 1e9}
RANKS = 4


def result(rank: int, **changes: object) -> RankResult:
    """The result of a rank, made up; any field changed."""
    values: dict = {
        "rank": rank,
        "steps": 10,
        "steps_counted": 10,
        "epochs": 1,
        "samples": 1000,
        "seconds": 3.0 + rank,
        "train_seconds": 2.0,
        "accuracy": 0.9,
        "own_accuracy": 0.5 + rank / 8,
        "is_consensus": True,
        "consensus_distance": 0.5,
        "stopped": False,
        "parameters": 25,
        "gradient_bytes": 100,
        "bytes_sent": 1000 * (rank + 1),
        "exposed_seconds": 0.1,
        "mixing_seconds": 0.2,
        "extra_memory_bytes": 200,
        "outcomes": {"delivered": 9, "late": rank},
        "notes": (f"note {rank}",),
    }
    return RankResult(**{**values, **changes})


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
def store(request):
    made = {"store": dist.HashStore, "no store": Gone, "store that hangs": Hanging}[request.param]()
    yield made
    if isinstance(made, Hanging):
        made.answers.set()


class Run:
    """Ranks at their end, as threads."""

    def __init__(self, path):
        self.run_dir = RunDir(path)
        self.run_dir.partial.mkdir()
        self.config = TrainConfig(epochs=1).resolved(nproc=RANKS, out=path)
        self.config.write(self.run_dir.config)
        self.ends = {}
        self._locks, self._threads = {}, []

    def come(self, *ranks):
        """They live from now on."""
        for rank in ranks:
            self._locks[rank] = ExitStack()
            self._locks[rank].enter_context(held(self.run_dir.rank_lock(rank)))

    def die(self, rank):
        self._locks[rank].close()

    def handed(self, store):
        seconds = 0.1 if isinstance(store, Hanging) else HANG_SECONDS
        return Ends(self.run_dir, AskedStore(store, timeout_seconds=seconds))

    def end(self, store, rank, **changes):
        """A rank reaches its end, and waits for what comes of the run."""

        def main():
            self.run_dir.rank_model(rank).write_bytes(b"")
            end = self.handed(store).hand_in(rank, {"result": asdict(result(rank, **changes))})
            try:
                self.ends[rank] = finish(self.config, self.handed(store), rank, end)
            except RunFailedError as error:
                self.ends[rank] = error
            except Dead:
                pass
            finally:
                self.die(rank)

        self._threads.append(threading.Thread(target=main))
        self._threads[-1].start()

    def fail(self, store, rank, cause):
        self.handed(store).hand_in(rank, {"cause": cause})
        self.die(rank)

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
def run(tmp_path):
    return Run(tmp_path)


def test_the_lowest_rank_puts_it_together_and_the_others_go(run, store):
    run.come(*range(RANKS))
    for rank in range(RANKS):
        run.end(store, rank)
    summary, *others = run.all().values()
    assert others == [None] * 3
    assert json.loads(run.run_dir.summary.read_text()) == summary
    assert (summary["lost_ranks"], summary["steps_per_rank"]) == ([], [10] * 4)
    assert summary["accuracy_per_rank"] == [0.5, 0.625, 0.75, 0.875]
    assert summary["bytes_sent_per_step"] == 250.0, "mean over ranks"
    assert summary["notes"] == [f"rank {rank}: note {rank}" for rank in range(RANKS)]
    assert run.run_dir.model.exists()
    assert run.run_dir.report.exists()
    assert not run.run_dir.partial.exists()


def test_when_it_dies_over_it_the_next_one_puts_it_together(run, monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(_finish, "summarize", _dying_once(_finish.summarize))
    run.come(*range(RANKS))
    for rank in range(RANKS):
        run.end(store, rank)
    ends = run.all()
    assert 0 not in ends
    assert ends[1]["steps_per_rank"] == [10] * 4
    assert ends[2] is ends[3] is None
    assert run.run_dir.model.exists()


def _dying_once(inner):
    dead = []

    def dies(*arguments, **options):
        if not dead:
            dead.append(True)
            raise Dead
        return inner(*arguments, **options)

    return dies


def test_those_who_joined_are_awaited_and_counted(run):
    store = dist.HashStore()
    run.come(*range(RANKS + 4))
    joined = {str(rank): HOW for rank in (4, 5, 6, 7)}
    run.end(store, 4, joined=joined, steps=5, left=True, stopped=True)
    run.fail(store, 5, "failed: no memory")
    run.run_dir.rank_joined(7).write_text('{"step": 40}')
    run.run_dir.metrics(7).write_text('{"event": "step", "step": 65, "samples": 400}\n')
    run.die(7)
    for rank in range(RANKS):
        run.end(store, rank, joined=joined)
    until(lambda: all(run.run_dir.rank_result(rank).exists() for rank in range(RANKS)))
    assert not run.ends.get(0), "rank 6 lives"
    run.end(store, 6, joined=joined)
    summary = run.all()[0]
    ends = [(one["rank"], one["end"], one["steps"]) for one in summary["joined"]]
    assert ends == [(4, "left", 5), (5, "lost", 0), (6, "finished", 10), (7, "lost", 25)]
    assert summary["world_size"] == RANKS
    assert summary["steps_per_rank"] == [10] * 4 + [5, None, 10, None]
    assert summary["lost_because"]["5"] == "failed: no memory"
    assert not summary["interrupted"], "the run went on without the one that left"
    assert run.ends[6] is None
    assert "Rank 7 joined from rank 1" in write_report(run.run_dir.path).read_text()
