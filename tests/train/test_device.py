"""Where ranks train; the GPU is faked but for the tests marked so."""

import os

import pytest
import torch

from gossipgrad.train import JobError, RunFailedError, TrainConfig, check
from gossipgrad.train._device import find_device
from support.alone import run_alone

TORCHRUN = {"RANK": "6", "WORLD_SIZE": "8"}
SRUN = {"SLURM_PROCID": "6", "SLURM_NTASKS": "8"}


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch believe that there are so many."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, "cuda:2"),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, "cuda:1"),
        ({**TORCHRUN, "LOCAL_RANK": "5"}, "cuda:1"),
        ({**SRUN, "SLURM_LOCALID": "3"}, "cuda:3"),
        (TORCHRUN, "cuda:2"),
        ({**TORCHRUN, **SRUN, "LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, "cuda:1"),
        # The shell of a batch job, and what another launcher has left: the ranks are our own.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, "cuda:2"),
        ({"LOCAL_RANK": "1"}, "cuda:2"),
    ],
)
def test_ranks_of_a_machine_share_out_its_gpus(gpus, environ, found):
    gpus(4)
    for device in ("cuda", "auto"):
        assert str(find_device(TrainConfig(device=device), rank=6, environ=environ)) == found
    assert find_device(TrainConfig(), rank=6, environ=environ).type == "cpu"


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused_before_the_start(gpus, tmp_path):
    gpus(0)
    assert run_alone(tmp_path, device="auto", max_steps=1).exit_code == 0
    with pytest.raises(ValueError, match=r"torch finds no GPU .*; use --device cpu, or a build of"):
        check(TrainConfig(device="cuda"), 2)


def test_a_gpu_that_is_not_used_is_told(gpus, capsys):
    gpus(1)
    check(TrainConfig(), 2)
    assert "a GPU is here and is not used: --device cuda" in capsys.readouterr().err
    for config in (TrainConfig(quiet=True), TrainConfig(device="cuda"), TrainConfig(device="auto")):
        check(config, 2)
    gpus(0)
    check(TrainConfig(), 2)
    assert capsys.readouterr().err == ""


def test_a_rank_trains_on_the_gpu_that_is_its_own(gpus, tmp_path, monkeypatch):
    def choose(device):
        raise OSError(f"here is no {device}")

    gpus(2)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(RunFailedError, match="here is no cuda:1"):
        run_alone(tmp_path, device="cuda")


@pytest.mark.gpu
def test_learns_on_a_gpu(tmp_path):
    assert run_alone(tmp_path, epochs=1, device="cuda").summary["accuracy"] > 0.8


@pytest.mark.process
def test_a_launcher_tries_a_job_on_a_gpu_in_another_process(gpus, tmp_path, monkeypatch):
    """That process finds no GPU here, and tries on the CPU."""
    (tmp_path / "tried.py").write_text(
        "import os, torch\n"
        "from torch.utils.data import TensorDataset\n"
        "from gossipgrad.train import Job\n"
        "def loss(output, target):\n"
        "    raise RuntimeError(f'tried in {os.getpid()} on {output.device.type}')\n"
        "def job():\n"
        "    points = TensorDataset(torch.randn(8, 4), torch.zeros(8))\n"
        "    return Job(model=torch.nn.Linear(4, 2), train=points, test=points, loss=loss)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    gpus(1)
    with pytest.raises(JobError, match=r"tried in \d+ on cpu") as caught:
        check(TrainConfig(job="tried:job", device="auto"), 2, is_launcher=True)
    assert f"tried in {os.getpid()}" not in str(caught.value)
