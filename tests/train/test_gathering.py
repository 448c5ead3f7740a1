"""The start of a run in a given world: who comes, who is not awaited, and who starts again."""

import re
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gossipgrad.comm import AskedStore, Heartbeats, MemberWatch
from gossipgrad.errors import EvictedError, GossipError
from gossipgrad.train import RunFailedError, TrainConfig, World, _gathering, _worker
from gossipgrad.train._files import check_shared, leave_token
from gossipgrad.train._gathering import Gathering, StartAgainError
from gossipgrad.train._layout import RunDir, claim
from gossipgrad.train._signals import Stops
from support.hanging_store import Hanging
from support.results import result
from support.waiting import until

QUICK = Heartbeats(interval_seconds=0.03, lease_seconds=0.2, silent_seconds=0.3)


class Clock:
    """Goes on when two ranks or more have come, and all have beaten since that are not gone.

    So none is late, however long its thread was held up.
    """

    def __init__(self):
        self.seconds, self.watches = 0.0, []
        self._beaten, self._lock = set(), threading.Lock()

    def __call__(self):
        return self.seconds

    def note_beat(self, watch):
        with self._lock:
            self._beaten.add(watch)
            here = {watch for watch in self.watches if not watch._stopped}
            if len(self.watches) > 1 and here <= self._beaten:
                self.seconds += QUICK.interval_seconds
                self._beaten.clear()


@pytest.fixture
def come(monkeypatch):
    """Has ranks of a world of three come to the start."""
    store, come, clock = dist.HashStore(), [], Clock()

    class Watch(MemberWatch):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings, now=clock)
            clock.watches.append(self)

        def beat(self):
            super().beat()
            clock.note_beat(self)

    monkeypatch.setattr(_gathering, "MemberWatch", Watch)

    def gathering(rank, start_seconds=1000.0):
        come.append(
            Gathering(store, rank, 3, start_seconds=start_seconds, heartbeats=QUICK),
        )
        return come[-1]

    gathering.store = store
    yield gathering
    for each in come:
        each.close()


def together(*functions):
    """What they return, each called in a thread of its own; what one raises is told, too."""
    found = [None] * len(functions)

    def call(number):
        try:
            found[number] = functions[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def never(again):
    raise AssertionError("another rank opens the run")


def test_the_lowest_opens_the_run_and_all_begin_with_the_same_members(come):
    ranks = [come(rank) for rank in range(3)]
    opened = together(
        lambda: ranks[0].open(lambda again: {"again": again}),
        *(lambda rank=rank: rank.open(never) for rank in ranks[1:]),
    )
    assert opened == [{"again": False}] * 3
    met = together(*(rank.meet for rank in ranks))
    assert [(m.generation, m.living) for m in met] == [(0, (0, 1, 2))] * 3


def test_what_is_refused_is_told_by_one_alone(come):
    ranks = [come(0), come(1)]

    def refuse(again):
        raise ValueError("no such model")

    refused, other = together(lambda: ranks[0].open(refuse), lambda: ranks[1].open(never))
    assert str(refused) == "no such model"
    assert other is None


def test_one_that_never_comes_is_awaited_for_so_long_and_is_told_when_it_comes(come, monkeypatch):
    ranks = [come(0, 0.1), come(2, 0.1)]
    met = together(*(rank.meet for rank in ranks))
    assert [m.living for m in met] == [(0, 2)] * 2
    assert met[0].gone[1].why == "no sign of life for 0.3 s"
    monkeypatch.setattr(MemberWatch, "start", lambda watch: None)  # its thread has not run yet
    late = come(1)
    with pytest.raises(EvictedError, match=r"rank 1 was given up by rank \d before the start \(no"):
        late.meet()


def test_one_that_is_late_and_lives_is_awaited(come):
    ranks = [come(rank) for rank in range(3)]
    met = []
    waits = threading.Thread(target=lambda: met.extend(together(ranks[0].meet, ranks[1].meet)))
    waits.start()
    waits.join(2 * QUICK.silent_seconds)
    assert not met
    ranks[2].meet()
    waits.join(60)
    assert [m.living for m in met] == [(0, 1, 2)] * 2


def test_when_the_opener_dies_over_it_the_next_one_takes_its_place(come):
    ranks = [come(rank) for rank in range(3)]
    dying = threading.Event()

    def hang(again):
        ranks[0].close()
        dying.wait()

    opener = threading.Thread(target=lambda: ranks[0].open(hang), daemon=True)
    opener.start()
    opened = together(
        lambda: ranks[1].open(lambda again: {"again": again}), lambda: ranks[2].open(never)
    )
    assert opened == [{"again": True}] * 2
    met = together(ranks[1].meet, ranks[2].meet)
    assert [m.living for m in met] == [(1, 2)] * 2
    dying.set()
    opener.join()


@pytest.mark.parametrize("refuses", [False, True])
def test_an_opener_that_was_given_up_does_not_undo_what_its_successor_opened(come, refuses):
    ranks = [come(rank) for rank in range(3)]
    goes_on = threading.Event()

    def stand_still(again):
        ranks[0].close()
        goes_on.wait(60)
        if refuses:
            raise ValueError("no such model")
        return {"out": "first"}

    found = []
    opener = threading.Thread(
        target=lambda: found.extend(together(lambda: ranks[0].open(stand_still)))
    )
    opener.start()
    until(lambda: ranks[1].gone(), timeout_seconds=60)
    assert ranks[1].open(lambda again: {"out": "second"}) == {"out": "second"}
    # As one that was stopped, and looks again.
    ranks[0]._watch = ranks[1]._watch
    goes_on.set()
    opener.join(60)
    assert isinstance(found[0], ValueError if refuses else EvictedError)
    assert ranks[2].open(never) == {"out": "second"}


def worker_of(come, gathering, rank):
    worker = _worker._Worker(World(rank=rank, world_size=3, launcher="torchrun"))
    worker.store = worker.mailbox = come.store
    worker.gathering = gathering
    return worker


@pytest.mark.parametrize("error", [EvictedError("given up"), GossipError("no such data")])
def test_who_was_given_up_leaves_the_folder_to_the_others(come, tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(_worker, "load_job", fail)
    run_dir = RunDir(tmp_path)
    run_dir.partial.mkdir()
    worker = worker_of(come, come(0), 0)
    worker.run_dir = run_dir
    config = TrainConfig(nproc=3, quiet=True)
    with pytest.raises(RunFailedError, match=f"rank 0 failed: {error}"):
        worker.run(config, run_dir, None, Stops())
    assert run_dir.partial.exists() == isinstance(error, EvictedError)


def test_checkpoints_in_a_folder_that_ranks_do_not_share_are_refused(come, tmp_path, monkeypatch):
    """They would never be complete. Whoever sees another folder ends the start for all."""
    token = leave_token(claim(tmp_path / "here", name="", overwrite=False))
    check_shared(RunDir(tmp_path / "here"), token, wait_seconds=0.0)
    there = claim(tmp_path / "there", name="", overwrite=False)
    leave_token(there)  # of an earlier start
    monkeypatch.setattr(_worker, "check_shared", partial(check_shared, wait_seconds=0.0))
    ranks = [come(rank) for rank in (0, 1)]
    config = TrainConfig(nproc=3, quiet=True, checkpoint_every=5)
    with pytest.raises(RunFailedError, match="there is not the same folder as on the machine that"):
        worker_of(come, ranks[1], 1).run(config, there, token, Stops())
    with pytest.raises(
        GossipError, match=r"rank 1 failed: .* name a folder that all machines share"
    ):
        ranks[0].meet()


def test_one_that_has_failed_ends_those_who_wait(come):
    ranks = [come(rank) for rank in range(3)]
    ranks[2].fail("failed: no such data")
    with pytest.raises(GossipError, match=r"^rank 2 failed: no such data$"):
        ranks[0].meet()


def test_one_that_lives_and_is_never_ready_is_named(come, monkeypatch):
    monkeypatch.setattr(_gathering, "_LIVING_SECONDS", 0.1)
    ranks = [come(rank) for rank in range(3)]
    with pytest.raises(GossipError, match=r"rank 0 waited 0\.1 s for ranks 1, 2 to be ready"):
        ranks[0].meet()
    with pytest.raises(GossipError, match=r"rank 1 waited 0\.1 s for rank 0 to say what is run"):
        ranks[1].open(never)


def test_those_who_begin_and_those_who_start_again_do_not_part(come, monkeypatch):
    ranks = [come(rank) for rank in range(3)]
    ranks[2].close()
    assert together(ranks[0].meet, ranks[1].meet)  # rank 2 has not come, and is given up
    assert ranks[0].starts_again(0)
    with pytest.raises(StartAgainError):
        ranks[1].begin(0)
    ranks[1].begin(1)
    monkeypatch.setattr(ranks[0], "_known_seconds", 0.1)
    assert not ranks[0].starts_again(1), "others have begun, or nobody was lost"


def test_a_store_that_hangs_ends_the_start(monkeypatch):
    store = Hanging()
    monkeypatch.setattr(
        _gathering, "AskedStore", lambda store: AskedStore(store, timeout_seconds=0.1)
    )
    with pytest.raises(GossipError, match=r"rank 1 cannot reach the rendezvous store any more.* 0"):
        Gathering(store, 1, 2, start_seconds=1.0, heartbeats=QUICK)
    store.answers.set()


def test_one_that_dies_before_the_first_step_makes_the_others_start_again(
    come, monkeypatch, tmp_path
):
    ranks = [come(rank) for rank in range(3)]
    config = TrainConfig(nproc=3)
    ready, connected = [], threading.Barrier(2, timeout=60)

    def train(config, dataset, run_dir, *, rank, world_size, stop, emit, groups, members):
        if rank == 2:
            ranks[2].close()  # as one that dies: it never comes to its group
            return None
        group = groups("gossip")
        connected.wait()  # who has begun shows no sign of life here any more
        emit({"event": "ready"})
        group.barrier()
        ready.append(rank)
        group.close()
        return result(rank, notes=tuple(map(str, group.members)))

    monkeypatch.setattr(_worker, "train_rank", train)
    missed = {rank: [] for rank in range(3)}

    def start(rank):
        ending = SimpleNamespace(miss=missed[rank].append)
        events = SimpleNamespace(take=lambda event: None)
        worker = worker_of(come, ranks[rank], rank)
        return worker._train(config, RunDir(tmp_path), ending, events)

    answers = together(*(lambda rank=rank: start(rank) for rank in range(3)))
    assert [answer.notes for answer in answers[:2]] == [("0", "1")] * 2, answers
    assert sorted(ready) == [0, 1]
    for rank in (0, 1):
        assert [[*losses] for losses in missed[rank]] == [[], [2]]
        assert missed[rank][1][2].why == "no sign of life for 0.3 s"
    until(lambda: not ranks[0].gone())


def test_what_needs_every_rank_ends_and_names_who_was_lost(come, tmp_path):
    ranks = [come(0, 0.1), come(2, 0.1)]
    config = TrainConfig(strategy="allreduce", nproc=3)
    ending, events = SimpleNamespace(miss=lambda losses: None), SimpleNamespace(take=never)
    train = partial(worker_of(come, ranks[0], 0)._train, config, RunDir(tmp_path), ending, events)
    refused, _ = together(train, ranks[1].meet)
    told = r"rank 1 was lost before the start \(no sign .*strategy allreduce needs every rank"
    assert re.match(told, str(refused))
