"""The start of a run: all ranks come, or none begins."""

import socket
import threading

import pytest
import torch.distributed as dist

from gossipgrad.comm import AskedStore
from gossipgrad.errors import GossipError
from gossipgrad.train import RunFailedError, TrainConfig, World, _folder, _worker, run
from gossipgrad.train._folder import RunDir
from support.hanging_store import Hanging
from support.waiting import HANG_SECONDS


@pytest.fixture
def store(monkeypatch):
    made = dist.HashStore()
    monkeypatch.setattr(_worker, "open_store", lambda *_: made)
    return made


def take_part(*ranks, size=2, **options):
    """How each rank of a world ended, which all have the same store."""
    ends = {}

    def main(rank):
        world = World(rank=rank, world_size=size, launcher="torchrun")
        config = TrainConfig(quiet=True, epochs=1, **options)
        try:
            ends[rank] = _worker.run_in_world(config, world)
        except Exception as error:
            ends[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), name=str(rank)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    return [ends[rank] for rank in ranks]


def test_a_rank_that_does_not_come_ends_the_start_and_is_named(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RunFailedError, match=r"1, 2.* start again"):
        run(TrainConfig(out=tmp_path, quiet=True, start_seconds=0.1))
    assert not (tmp_path / "partial").exists(), "the folder is free"


def test_a_mistake_is_told_by_rank_0_alone(store, tmp_path):
    mistaken, other = take_part(0, 1, out=tmp_path, lr_rule="sqrt", model="lenet")
    assert isinstance(mistaken, ValueError)
    assert other.exit_code == 2


def test_rank_0_keeps_the_store_until_the_others_have_read_that_it_refuses(store, tmp_path):
    ended = threading.Event()

    def refuse():
        (end,) = take_part(0, out=tmp_path, lr_rule="sqrt", model="lenet")
        read.append(dist.PrefixStore(_worker.MAILBOX, store).add("seen", 0))
        assert isinstance(end, ValueError)
        ended.set()

    read = []
    thread = threading.Thread(target=refuse)
    thread.start()
    (other,) = take_part(1, out=tmp_path)
    thread.join(HANG_SECONDS)
    assert other.exit_code == 2
    assert ended.is_set()
    assert read == [1]


def test_a_rank_that_fails_ends_the_others_with_its_cause(store, tmp_path, monkeypatch):
    def fail_once(config):
        monkeypatch.setattr(_worker, "load_job", load_job)
        raise OSError("no such data")

    load_job = _worker.load_job
    monkeypatch.setattr(_worker, "load_job", fail_once)
    for end in take_part(0, 1, out=tmp_path, strategy="local"):
        assert isinstance(end, RunFailedError)
        assert "no such data" in str(end)
    assert not (tmp_path / "partial").exists()


def test_a_folder_that_ranks_do_not_share_is_refused(store, tmp_path, monkeypatch):
    """Nobody would find what each rank leaves in its own."""

    class Elsewhere(RunDir):
        def __init__(self, path):
            is_rank_1 = threading.current_thread().name == "1"
            super().__init__(tmp_path / "there" if is_rank_1 else path)

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(_worker, "RunDir", Elsewhere)
    monkeypatch.setattr(_folder, "_VISIBLE_SECONDS", 0.1)
    for end in take_part(0, 1, out=tmp_path / "here", strategy="local"):
        assert isinstance(end, RunFailedError)
        assert "not the same folder" in str(end)


def test_a_store_that_hangs_ends_the_start(monkeypatch, tmp_path):
    hanging = Hanging()
    monkeypatch.setattr(_worker, "open_store", lambda *_: hanging)
    monkeypatch.setattr(_worker, "AskedStore", lambda store: AskedStore(store, timeout_seconds=0.1))
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    (end,) = take_part(1, out=tmp_path)
    assert isinstance(end, GossipError)
    assert "store" in str(end)
    assert not [*tmp_path.iterdir()]
    hanging.answers.set()
