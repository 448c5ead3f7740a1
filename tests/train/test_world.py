import errno
import multiprocessing
import os
import signal
import socket

import pytest
import torch.distributed as dist

from gossipgrad.errors import GossipError
from gossipgrad.train import RunFailedError, TrainConfig, run
from gossipgrad.train._layout import RunDir
from gossipgrad.train._worker import run_in_world
from gossipgrad.train._world import World, find_world, open_store, slurm_rendezvous
from support.processes import run_processes
from support.waiting import HANG_SECONDS, until
from support.world_rank import stopped_by_signal, waits_alone


def test_no_world_in_a_plain_shell():
    assert find_world({"PATH": "/bin"}) is None


def test_torchrun():
    environ = {"RANK": "2", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "9"}
    assert find_world(environ) == World(rank=2, world_size=4, launcher="torchrun")


def test_slurm_needs_more_than_one_task():
    assert find_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert find_world({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}) == World(
        rank=1, world_size=2, launcher="Slurm"
    )


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("node[07-09,12]", "node07"),
        ("gpu[3,5]-ib", "gpu3-ib"),
        ("a-b[1-2],c[4-5]", "a-b1"),
    ],
)
def test_slurm_rendezvous_is_at_the_first_node(nodes, first):
    environ = {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "20001"}
    assert slurm_rendezvous(environ) == {"MASTER_ADDR": first, "MASTER_PORT": "20001"}


def test_slurm_rendezvous_keeps_what_is_set():
    environ = {"SLURM_JOB_NODELIST": "n1", "MASTER_ADDR": "head", "MASTER_PORT": "1"}
    assert slurm_rendezvous(environ) == {"MASTER_ADDR": "head", "MASTER_PORT": "1"}


def test_nproc_must_fit_the_world(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"nproc is 3, but torchrun has started 2 .*leave --nproc"):
        run(TrainConfig(nproc=3))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def world_of_two(monkeypatch):
    """The environment of rank 0 of a world of two whose other rank does not come."""
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (environ | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.process
@pytest.mark.usefixtures("world_of_two")
def test_a_signal_ends_the_wait_for_a_rank_that_does_not_come(tmp_path):
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=waits_alone, args=(dict(os.environ), str(tmp_path)))
    process.start()
    until(lambda: is_listening(int(os.environ["MASTER_PORT"])))
    os.kill(process.pid, signal.SIGINT)
    process.join(HANG_SECONDS)
    assert process.exitcode == 130
    errors = (tmp_path / "errors").read_text()
    assert "gossipgrad: stopped by SIGINT before all ranks had started" in errors
    assert not (tmp_path / "run" / "partial").exists()


@pytest.mark.usefixtures("world_of_two")
def test_a_meeting_place_that_is_not_reached_is_named():
    with pytest.raises(
        GossipError, match=r"rank 1 found no store .* at 127\.0\..* within 0\.2 s; start rank 0"
    ):
        open_store(1, 2, 0.2)


def test_a_meeting_place_has_to_be_told(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(GossipError, match=r"rank 1 does not know .* MASTER_ADDR is not set"):
        open_store(1, 2)


@pytest.mark.process
@pytest.mark.parametrize(("strategy", "first"), [("agd", 0), ("allreduce", 1)])
def test_ranks_in_lockstep_that_hear_of_the_stop_one_by_one_stop_together(
    strategy, first, tmp_path
):
    options = free_port(), str(tmp_path), strategy, first, 0.3
    ended = run_processes(2, stopped_by_signal, *options, grouped=False)
    assert ended[0][0] == ended[first][0] == 130, "the other may end before it has the signal"
    summary = ended[0][1]
    assert (summary["interrupted"], summary["stopped_by"]) == (True, "SIGINT")
    assert summary["steps_per_rank"] == [summary["steps"]] * 2
    assert summary["model_is_consensus"]
    assert summary["consensus_distance"] == 0
    assert summary["lost_ranks"] == summary["notes"] == []
    assert {path.name for path in tmp_path.iterdir()} >= {"model.safetensors", "report.html"}
    assert not (tmp_path / "partial").exists()


def test_a_traceback_that_a_full_disk_does_not_take_is_not_referred_to(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path)

    def fail(*_, **__):
        run_dir.errors(0).symlink_to("/dev/full")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gossipgrad.train._worker.load_job", fail)
    monkeypatch.setattr("gossipgrad.train._worker.open_store", lambda *_: dist.HashStore())
    options = TrainConfig(strategy="local", out=tmp_path, quiet=True)
    with pytest.raises(RunFailedError) as failed:
        run_in_world(options, World(rank=0, world_size=1, launcher="torchrun"))
    assert "No space left on device" in str(failed.value)
    assert "traceback" not in str(failed.value)
    assert not run_dir.errors(0).is_symlink()
