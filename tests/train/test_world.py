"""Worlds that torchrun or Slurm has started: how ranks find each other, start and stop."""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gossipgrad.errors import GossipError
from gossipgrad.train import (
    RunFailedError,
    TrainConfig,
    _folder,
    _start,
    _worker,
    find_world,
    open_store,
    run,
    slurm_rendezvous,
)
from gossipgrad.train.strategies import _stopping
from support.agents import run_torchrun
from support.launched import count
from support.processes import free_port, run_processes
from support.waiting import HANG_SECONDS, NEVER_SECONDS, until


def set_world(rank: int, world_size: int, port: int) -> None:
    """Has a process be a rank that torchrun has started."""
    # Blocked in a fork server that a launch of workers has started, and so in what it forks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def refused(rank: int, store: Any, port: int, out: str) -> str:
    """Takes part in a run that rank 0, which hosts the store, refuses; how this rank ends."""
    set_world(rank, 3, port)
    _start._SEEN_SECONDS = HANG_SECONDS  # however late the others come
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            outcome = run(TrainConfig(model="lenet", out=Path(out)))
        except Exception as error:
            if rank == 0:
                os._exit(2)  # and with it the store
            return f"{type(error).__name__}: {error}"
    return f"exit code {outcome.exit_code}"


def sees_another_folder(rank: int, store: Any, port: int, out: str) -> str:
    """Takes part in a run on a machine where the folder of that name is another; how it ends."""
    set_world(rank, 2, port)
    _folder._VISIBLE_SECONDS = 0.1
    if rank == 1:
        found = _worker.RunDir
        _worker.RunDir = lambda path: found(path.with_name("there"))
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(RunFailedError) as failed:
        run(TrainConfig(strategy="local", out=Path(out)))
    return str(failed.value)


def waits_alone(environ: dict[str, str], folder: str) -> None:
    """Begins a run whose other rank does not come; what it says goes to a file."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ |= environ
    with (Path(folder) / "errors").open("w") as errors, contextlib.redirect_stderr(errors):
        run(TrainConfig(out=Path(folder) / "run"))


def stopped_by_signal(
    rank: int, store: Any, port: int, out: str, strategy: str, first: int, skew_seconds: float
) -> tuple[int, dict | None]:
    """Trains until rank `first` gets a SIGINT, and the other one its own a little later.

    The exit code, and the summary on rank 0.
    """
    set_world(rank, 2, port)
    # None leaves without the other, nor waits for as long as one that is told alone.
    _stopping._GRACE_SECONDS = NEVER_SECONDS

    def tell() -> None:
        until(lambda: min(count(Path(out), each) for each in (0, 1)) > 0)
        if rank != first:
            time.sleep(skew_seconds)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=tell, daemon=True).start()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        outcome = run(
            TrainConfig(
                strategy=strategy,
                epochs=3000,
                log_every=1,
                trace=0,
                checkpoint_every=1000,
                out=Path(out),
            )
        )
    return outcome.exit_code, outcome.summary


BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}


@pytest.mark.parametrize(
    ("environ", "nproc", "found"),
    [
        ({"PATH": "/bin"}, None, None),
        (BATCH | {"RANK": "2", "WORLD_SIZE": "3"}, None, (2, 3, "torchrun")),
        (BATCH | {"SLURM_NTASKS": "1"}, None, None),
        # A batch script has the variables of a step that `srun` has not started.
        (BATCH, None, (0, 4, "Slurm")),
        (BATCH, 4, None),
        (BATCH | {"SLURM_STEP_ID": "0"}, 4, (0, 4, "Slurm")),
    ],
)
def test_the_world_is_that_of_the_launcher(environ, nproc, found):
    world = find_world(environ, nproc=nproc)
    assert (world and (world.rank, world.world_size, world.launcher)) == found


@pytest.mark.process
def test_ranks_that_rank_0_refuses_end_quietly_though_the_store_goes_with_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out = str(tmp_path / "run")
    ends = run_processes(3, refused, port, out, may_die=(0,), grouped=False)
    assert ends == [None, "exit code 2", "exit code 2"]


@pytest.mark.process
def test_a_batch_script_of_slurm_starts_the_workers_that_it_asks_for(tmp_path, monkeypatch):
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    options = {"start_seconds": HANG_SECONDS, "quiet": True}
    outcome = run(TrainConfig(nproc=2, epochs=1, out=tmp_path / "run", **options))
    assert outcome.exit_code == 0
    assert outcome.summary is not None
    assert outcome.summary["world_size"] == 2


def test_a_world_that_was_found_is_named_with_the_way_out(monkeypatch, capsys):
    for name, value in (BATCH | {"SLURM_JOB_ID": str(free_port() - 20_000)}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="model"):
        run(TrainConfig(model="lenet"))
    told = capsys.readouterr().err
    assert all(word in told for word in ("rank 0 of 4", "SLURM_NTASKS", "--nproc"))


@pytest.mark.process
def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path):
    """Nobody would find what each rank leaves in its own."""
    (tmp_path / "there").mkdir()
    out = str(tmp_path / "here")
    ends = run_processes(2, sees_another_folder, free_port(), out, grouped=False)
    assert all("not the same folder" in end for end in ends)


def test_a_rank_that_does_not_come_ends_the_start_and_is_named(tmp_path, monkeypatch, caplog):
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(RunFailedError, match=r"1, 2.* start again"):
        run(TrainConfig(out=tmp_path, quiet=True, start_seconds=0.1))
    assert not (tmp_path / "partial").exists(), "the folder is free"
    (told,) = caplog.messages
    assert "1, 2" in told, "before the end"


@pytest.mark.process
@pytest.mark.slow
def test_workers_that_torchrun_starts_again_do_not_read_the_first_attempt(tmp_path):
    (tmp_path / "flaky.py").write_text(
        "import os, torch\n"
        "from torch.utils.data import TensorDataset\n"
        "from gossipgrad.train import Job\n"
        "def job():\n"
        "    if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('1', '0'):\n"
        "        raise RuntimeError('a bad node')\n"
        "    points = TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))\n"
        "    loss = torch.nn.functional.cross_entropy\n"
        "    return Job(model=torch.nn.Linear(4, 2), train=points, test=points, loss=loss)\n"
    )
    start = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "gossipgrad"]
    words = ["train", "--job", "flaky:job", "--epochs", "1", "--out", tmp_path / "run"]
    done = run_torchrun([*start, *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1/1") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps_per_rank"], summary["model_is_consensus"]) == ([2, 2], True)
    assert not (tmp_path / "run" / "partial").exists()


@pytest.mark.parametrize(
    ("nodes", "given", "address", "port"),
    [
        ("n1", {}, "n1", "20001"),
        ("n1,n2", {}, "n1", "20001"),
        ("node[07-09,12]", {}, "node07", "20001"),
        ("gpu[3,5]-ib", {}, "gpu3-ib", "20001"),
        ("a-b[1-2],c[4-5]", {}, "a-b1", "20001"),
        ("n1", {"MASTER_ADDR": "head", "MASTER_PORT": "1"}, "head", "1"),
    ],
)
def test_slurm_rendezvous_is_at_the_first_node_unless_it_is_set(nodes, given, address, port):
    environ = {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "20001", **given}
    assert slurm_rendezvous(environ) == {"MASTER_ADDR": address, "MASTER_PORT": port}


def test_nproc_must_fit_the_world(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"nproc is 3, but torchrun has started 2 .*leave --nproc"):
        run(TrainConfig(nproc=3))


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
@pytest.mark.parametrize(("strategy", "first"), [("sparse", 0), ("allreduce", 1), ("gossip", 0)])
def test_ranks_that_get_the_signal_one_by_one_stop_after_as_many_steps(strategy, first, tmp_path):
    options = free_port(), str(tmp_path), strategy, first, 0.3
    ended = run_processes(2, stopped_by_signal, *options, grouped=False)
    assert ended[0][0] == ended[first][0] == 130, "the other may end before it has the signal"
    summary = ended[0][1]
    assert (summary["interrupted"], summary["stopped_by"]) == (True, "SIGINT")
    assert summary["steps_per_rank"] == [summary["steps"]] * 2
    assert summary["model_is_consensus"]
    assert summary["consensus_distance"] < (1 if strategy == "gossip" else 1e-9)
    assert summary["lost_ranks"] == []
    assert {path.name for path in tmp_path.iterdir()} >= {"model.safetensors", "report.html"}
    assert not (tmp_path / "partial").exists()


def test_another_program_that_listens_at_the_port_and_never_answers_ends_the_wait(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(stranger.getsockname()[1]))
        with pytest.raises(GossipError, match="no other program listens there"):
            open_store(1, 2, 0.5)
