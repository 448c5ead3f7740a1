"""Where ranks train; the GPU is faked but for the tests marked so."""

import pytest
import torch

from gossipgrad import data
from gossipgrad.train import MLP, TrainConfig, check
from gossipgrad.train._device import check_device, find_device
from gossipgrad.train._evaluate import TestPart
from support.alone import begin_alone, train_alone
from support.jobs import job_on

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


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused_before_the_start(gpus):
    gpus(0)
    assert find_device(TrainConfig(device="auto"), rank=0).type == "cpu"
    with pytest.raises(ValueError, match=r"torch finds no GPU .*; use --device cpu, or a build of"):
        check(TrainConfig(device="cuda"), 2)


def test_a_gpu_that_is_not_used_is_told_once(gpus, capsys):
    gpus(1)
    check_device(TrainConfig())
    assert capsys.readouterr().err == ("gossipgrad: a GPU is here and is not used: --device cuda\n")
    for config in (TrainConfig(quiet=True), TrainConfig(device="cuda"), TrainConfig(device="auto")):
        check_device(config)
    gpus(0)
    check_device(TrainConfig())
    assert capsys.readouterr().err == ""


def test_threads_are_those_asked_for(tmp_path):
    threads = []
    config, run_dir = begin_alone(tmp_path, epochs=1, threads=2, batch_size=500)
    train_alone(config, run_dir, emit=lambda event: threads.append(torch.get_num_threads()))
    assert {*threads} == {2}


def test_model_batches_and_evaluation_go_to_the_device(tmp_path, monkeypatch):
    """The meta device stands for one that is not the CPU: a tensor left behind is refused."""
    seen = []

    def forward(model, x):
        seen.append((x.device.type, next(model.parameters()).device.type))
        raise InterruptedError

    monkeypatch.setattr(
        "gossipgrad.train._setup.find_device", lambda config, rank: torch.device("meta")
    )
    monkeypatch.setattr(MLP, "forward", forward)
    with pytest.raises(InterruptedError):
        train_alone(*begin_alone(tmp_path))
    test = TestPart(job_on(data.load("digits")), rank=0, world_size=1, device=torch.device("meta"))
    with pytest.raises(InterruptedError):
        test.accuracy(MLP(64, 10).to("meta"))
    assert seen == [("meta", "meta")] * 2


@pytest.mark.gpu
def test_learns_on_a_gpu(tmp_path):
    result = train_alone(*begin_alone(tmp_path, epochs=1, device="cuda"))
    assert result.accuracy > 0.8
