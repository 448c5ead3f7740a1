"""Where ranks train; the GPU is faked but for the tests marked so."""

import pytest
import torch

from gossipgrad.train import RunFailedError, TrainConfig, check
from support.alone import run_alone


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch believe that there are so many."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


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


@pytest.mark.parametrize("device", ["cuda", "auto"])
@pytest.mark.parametrize(
    ("environ", "gpu"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "1"}, 1),
        ({"LOCAL_RANK": "7"}, 3),  # ranks of a machine share out its four
        # The shell of a batch job, in which torchrun has started the ranks.
        ({"LOCAL_RANK": "2", "SLURM_PROCID": "6", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}, 2),
    ],
)
def test_a_rank_trains_on_the_gpu_that_is_its_own(
    gpus, tmp_path, monkeypatch, device, environ, gpu
):
    def choose(device):
        raise OSError(f"here is no {device}")

    gpus(4)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunFailedError, match=f"here is no cuda:{gpu}"):
        run_alone(tmp_path, device=device)


@pytest.mark.gpu
def test_learns_on_a_gpu(tmp_path):
    assert run_alone(tmp_path, epochs=1, device="cuda").summary["accuracy"] > 0.8
