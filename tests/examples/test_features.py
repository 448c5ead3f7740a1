"""Each feature's example runs as its first lines say, and learns."""

import os
import re

import pytest
import torch
import torch.distributed as dist

from support.commands import run_here
from support.frameworks import EXAMPLES, run_example, torchrun_environment
from support.processes import run_processes
from support.waiting import until

pytestmark = pytest.mark.process

TOGETHER = (  # in the same processes, one after the other
    *("loop", "from_ddp", "full_loop", "evaluate_and_save", "resume", "resume", "local_steps"),
    *("gan", "muon", "soap", "sparse", "shrink"),
)


def accuracies(text):
    return [float(found) / 100 for found in re.findall(r"(\d+\.\d+)%", text)]


def in_one_process(rank, store, world_size, names, ports, folder):
    torch.set_num_threads(1)
    printed = []
    for name, port in zip(names, ports, strict=True):
        torchrun_environment(rank, port, world_size)
        printed.append(run_example(rank, store, f"{name}.py", folder))
        if dist.is_initialized():
            dist.destroy_process_group()
    return printed


def run_all(world_size, names, folder, may_die=()):
    """What rank 0 has printed in each example."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in names]
    ports = [store.port for store in stores]
    first, *others = run_processes(
        *(world_size, in_one_process, world_size, names, ports, folder),
        grouped=False,
        may_die=may_die,
    )
    assert not any(text for other in others for text in other or ()), "one rank prints"
    return first


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    found = run_all(2, TOGETHER, tmp_path_factory.mktemp("examples"))
    return dict(zip([f"{name}{n}" for n, name in enumerate(TOGETHER)], found, strict=True))


@pytest.mark.parametrize("name", [f"{name}{n}" for n, name in enumerate(TOGETHER)])
def test_an_example_learns(printed, name):
    if name.startswith("gan"):
        made, real = re.findall(r"\((-?\d\.?\d?), (-?\d\.?\d?)\)", printed[name])
        assert all(abs(float(a) - float(b)) < 1 for a, b in zip(made, real, strict=True))
    else:
        assert accuracies(printed[name])[0] > 0.8, printed[name]


def test_shards_and_islands_of_two_replicas_learn(tmp_path):
    for text in run_all(4, ["fsdp2", "islands"], tmp_path):
        assert accuracies(text)[0] > 0.8
    assert (tmp_path / "run" / "model.pt").exists()


def test_a_resumed_example_continues(printed):
    first, second = (text for name, text in printed.items() if name.startswith("resume"))
    assert "after 150 steps" in first
    assert "after 300 steps" in second


def test_the_others_survive_a_killed_worker(tmp_path):
    (said,) = run_all(4, ["survive"], tmp_path, may_die=(3,))
    assert "ranks (0, 1, 2)" in said
    assert accuracies(said)[0] > 0.8


def joined(rank, store, port, folder):
    torch.set_num_threads(1)
    if rank < 2:
        torchrun_environment(rank, port, world_size=2)
        return run_example(rank, store, "join.py", folder)
    until(lambda: (folder / "join.txt").exists() and (folder / "join.txt").read_text())
    return run_example(rank, store, "join.py", folder, "join.txt")


def test_a_worker_joins_from_a_second_terminal(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, text in enumerate(run_processes(3, joined, store.port, tmp_path, grouped=False)):
        assert f"rank {rank} begins at step " in text
        assert accuracies(text)[0] > 0.8


def test_the_job_is_trained_by_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([os.fspath(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
    )
    command = "gossipgrad train --job examples.job:job --nproc 2 --epochs 5 --out job"
    assert run_here(command.split(), tmp_path, monkeypatch) == 0
    assert accuracies(capfd.readouterr().out)[-1] > 0.8
