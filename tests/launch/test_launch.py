"""`gossipgrad launch` with real scripts: ends, deaths, signals, several nodes."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gossipgrad.cli import main
from support.launched import press_ctrl_c, when
from support.waiting import HANG_SECONDS, until

# Does not load torch, so that it starts at once; leaves what it sees in a file of its rank.
_PLAIN = """
import json, os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
seen = {"argv": sys.argv[2:], "pid": os.getpid(), **os.environ}
part = folder / f"part{rank}"
part.write_text(json.dumps(seen))
part.rename(folder / f"rank{rank}.json")
what = sys.argv[2].split(",")[int(rank)]
if what == "raise":
    raise ValueError(f"no data on rank {rank}")
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "wait":
    time.sleep(10_000)
if what == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / f"deaf{rank}").touch()
    time.sleep(10_000)
if what == "saves":
    asked = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.append(1))
    (folder / f"ready{rank}").touch()
    while not asked:
        time.sleep(0.05)
    (folder / f"saved{rank}").touch()
(folder / f"done{rank}").touch()
"""

_JOINS = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
import gossipgrad as gg
folder = pathlib.Path(sys.argv[1])
address, joined = folder / "address", folder / "joined"
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = {"mode": "stale", "topology": "matching"}
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    dist.init_process_group("gloo")
    session = gg.gossip(model, optimizer, **settings)
    if session.rank == 0:
        address.write_text(session.join_address())
else:
    session = gg.join(model, optimizer, address.read_text(), **settings)
while not joined.exists():
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if session.rank == 1 and address.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if session.rank == 2:
        joined.touch()
with session.consensus():
    living = session.membership.living
os.write(1, f"rank {session.rank} has finished with {living}\\n".encode())
session.close()
"""


_ISLANDS = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import gossipgrad as gg
folder = pathlib.Path(sys.argv[1])
address, joined = folder / "address", folder / "joined"
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dist.init_process_group("gloo")
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if is_first:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gossip", "node"))
    inside = mesh["node"].get_group()
    session = gg.gossip(model, optimizer, mesh=mesh["gossip"], island=inside)
    if dist.get_rank() == 0:
        address.write_text(session.join_address())
    dist.barrier()
else:
    inside = dist.group.WORLD
    session = gg.join(
        model, optimizer, address.read_text(), island=inside, timeout_seconds=100
    )
is_over = torch.zeros(1)
while not is_over:
    time.sleep(0.01)
    if is_first and dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if session.rank == 2 and session.stats().outcomes["delivered"]:
        joined.touch()
    is_over[0] = joined.exists()
    dist.all_reduce(is_over, dist.ReduceOp.MIN, group=inside)
with session.consensus():
    living = session.membership.living
os.write(1, f"island {session.rank} has finished with {living}\\n".encode())
session.close()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that ends as its arguments say."""
    path = tmp_path / "plain.py"
    path.write_text(_PLAIN)
    return path


def start(*arguments: object, **environ: str) -> subprocess.Popen[str]:
    """Start the command."""
    return subprocess.Popen(
        [sys.executable, "-m", "gossipgrad", "launch", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture) -> Run:
    """Run the command in this process, which has torch loaded.

    Returns the exit code, what was printed, and the errors.
    """

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["launch", *map(str, arguments)])
        return code, *capfd.readouterr()

    return run


def seen(folder: Path, rank: int) -> dict[str, str]:
    """What a worker saw, as soon as it has left it."""
    until((folder / f"rank{rank}.json").exists)
    return json.loads((folder / f"rank{rank}.json").read_text())


def is_running(pid: int) -> bool:
    """Whether a process runs; one that is only not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_get_the_environment_of_torchrun(run: Run, script: Path, tmp_path: Path):
    code, _, errors = run("--nproc", 2, script, tmp_path, "x,x", "--lr", 3)
    first, second = seen(tmp_path, 0), seen(tmp_path, 1)
    assert (code, errors) == (0, "")
    assert second["argv"] == ["x,x", "--lr", "3"]
    ours = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ours |= {"GROUP_RANK": "0", "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert {name: second[name] for name in ours} == ours
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


@pytest.mark.parametrize(
    ("ends", "code", "named"),
    [
        ("x,kill,x", 3, "rank 1 was killed by SIGKILL"),
        ("raise,x,x", 3, "rank 0 exited with code 1: ValueError: no data on rank 0"),
        ("raise,raise,raise", 1, "rank 2 exited with code 1: ValueError: no data on rank 2"),
    ],
)
def test_a_worker_that_fails_is_named_and_the_others_finish(
    run: Run, script: Path, tmp_path: Path, ends: str, code: int, named: str
):
    ended, _, errors = run("--nproc", 3, script, tmp_path, ends)
    assert ended == code
    assert sum(line.startswith(f"gossipgrad: {named}") for line in errors.splitlines()) == 1
    finished = [rank for rank, what in enumerate(ends.split(",")) if what == "x"]
    assert sorted(tmp_path.glob("done*")) == [tmp_path / f"done{rank}" for rank in finished]


def test_a_killed_worker_comes_back_as_a_joiner(run: Run, tmp_path: Path):
    script = tmp_path / "joins.py"
    script.write_text(_JOINS)
    code, out, errors = run("--nproc", 2, "--respawn", 1, script, tmp_path)
    assert (code, sorted(out.splitlines())) == (
        0,
        ["[rank 0] rank 0 has finished with (0, 2)", "[rank 1] rank 2 has finished with (0, 2)"],
    ), errors


@pytest.mark.slow
def test_an_island_of_a_killed_worker_comes_back_as_a_joiner(run: Run, tmp_path: Path):
    script = tmp_path / "islands.py"
    script.write_text(_ISLANDS)
    code, out, errors = run("--nproc", 4, "--island", 2, "--respawn", 1, script, tmp_path)
    assert (code, sorted(line.split("] ")[1] for line in out.splitlines())) == (
        0,
        [f"island {island} has finished with (0, 2)" for island in (0, 0, 2, 2)],
    ), errors
    assert sum("its island ends" in line for line in errors.splitlines()) == 1


def test_output_has_its_rank_or_goes_to_a_file_of_each_worker(run: Run, tmp_path: Path):
    script = tmp_path / "prints.py"
    script.write_text("import os, sys; print('out'); sys.stderr.write(os.environ['RANK'])")
    code, out, errors = run("--nproc", 2, script)
    assert (code, sorted(out.splitlines())) == (0, ["[rank 0] out", "[rank 1] out"])
    assert sorted(errors.splitlines()) == ["[rank 0] 0", "[rank 1] 1"]
    for _ in range(2):  # a second run replaces them
        code, out, errors = run("--nproc", 2, "--log-dir", tmp_path / "logs", script)
        assert (code, out, errors) == (0, "", "")
    logs = {log.name: sorted(log.read_text()) for log in (tmp_path / "logs").iterdir()}
    assert logs == {f"rank{rank}.log": sorted(f"out\n{rank}") for rank in (0, 1)}


def test_nproc_gpu_starts_a_worker_for_each_gpu(
    monkeypatch: pytest.MonkeyPatch, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["launch", "--nproc", "gpu", str(script), str(tmp_path), "x,x"]) == 0
    assert seen(tmp_path, 1)["WORLD_SIZE"] == "2"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["launch", "--nproc", "gpu", str(script)]) == 2
    assert "none" in capsys.readouterr().err


def test_ctrl_c_ends_all_and_kills_those_that_do_not_listen(run: Run, script: Path, tmp_path: Path):
    marks = tmp_path / "rank0.json", tmp_path / "deaf1"
    with when(lambda: all(mark.exists() for mark in marks), press_ctrl_c):
        code, _, said = run("--nproc", 2, "--grace-seconds", 0.5, script, tmp_path, "wait,deaf")
    assert code == 128 + signal.SIGINT
    assert said.splitlines()[-1] == "gossipgrad: stopped by SIGINT"
    assert not any(is_running(int(seen(tmp_path, rank)["pid"])) for rank in (0, 1))


def test_a_signal_that_comes_twice_at_once_is_one(run: Run, script: Path, tmp_path: Path):
    """`timeout` signals its child, and then the whole group: a worker saves all the same."""

    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)  # a second SIGTERM could merge with the first

    with when((tmp_path / "ready0").exists, terminate):
        run("--nproc", 1, script, tmp_path, "saves")
    assert (tmp_path / "saved0").exists()


def test_workers_do_not_outlive_a_launcher_that_is_killed(script: Path, tmp_path: Path):
    launcher = start("--nproc", 2, script, tmp_path, "wait,wait")
    pids = [int(seen(tmp_path, rank)["pid"]) for rank in (0, 1)]
    launcher.kill()
    launcher.communicate()
    until(lambda: not any(map(is_running, pids)))


def test_two_nodes_share_one_world(run: Run, script: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    shared = ("--nodes", 2, "--rendezvous", f"127.0.0.1:{port}")
    ends = "x,x,kill"
    other = start(*shared, "--node-rank", 1, "--nproc", 2, script, tmp_path, ends)
    code, *_ = run(*shared, "--node-rank", 0, "--nproc", 1, script, tmp_path, ends)
    other.communicate(timeout=HANG_SECONDS)
    assert (code, other.returncode) == (0, 3)
    world = [
        tuple(seen(tmp_path, rank)[name] for name in ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE"))
        for rank in range(3)
    ]
    assert world == [("0", "0", "3"), ("1", "0", "3"), ("1", "1", "3")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("script.py",),
        ("--nproc", "none", "script.py"),
        ("--nproc", "2", "missing.py"),
        ("--nproc", "2", "-m", "no_module_of_this_name"),
        ("--nproc", "2", "--nodes", "2", __file__),
        ("--nproc", "2", "--node-rank", "1", __file__),
        ("--nproc", "2", "--rendezvous", "nowhere", __file__),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], capsys: pytest.CaptureFixture):
    assert main(["launch", *arguments]) == 2
    assert capsys.readouterr().err.startswith("gossipgrad: error: ")
