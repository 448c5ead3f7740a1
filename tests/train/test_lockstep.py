"""Replicas whose gradients are averaged in every step have statistics of their own samples."""

import json

import pytest
from safetensors.torch import load_file

from gossipgrad.cli import main
from gossipgrad.train import TrainConfig, load_job

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from gossipgrad.train import Job, cross_entropy

def job():
    x = torch.linspace(0, 20, 40).reshape(40, 1)
    points = TensorDataset(x, (x.flatten() > 10).long())
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5), nn.Linear(1, 2))
    return Job(model=model, train=points, test=points, loss=cross_entropy)
"""


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["allreduce", "sparse"])
def test_what_is_exported_has_the_mean_of_all_statistics_and_is_what_was_measured(
    tmp_path, monkeypatch, strategy
):
    (tmp_path / "statistics_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # By label the samples of rank 0 are around 5, and those of rank 1 around 15.
    how = ["--strategy", strategy, "--shuffle", "local", "--shards", "by-label", "--quiet"]
    how += ["--nproc", "2", "--epochs", "5", "--batch-size", "20", "--out", "run"]
    assert main(["train", "--job", "statistics_job:job", *how]) == 0
    exported = load_file("run/model.safetensors")
    steps = 5
    assert exported["0.num_batches_tracked"] == steps
    assert exported["0.running_mean"].item() == pytest.approx(10 * (1 - 0.5**steps), rel=1e-3)
    job = load_job(TrainConfig(job="statistics_job:job"))
    job.model.load_state_dict(exported)
    x, y = job.test.tensors
    right = (job.model.eval()(x).argmax(-1) == y).float().mean()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["accuracy"] == right
