"""Replicas whose gradients are averaged in every step have statistics of their own samples."""

import json

import pytest
from safetensors.torch import load_file

from gossipgrad.cli import main
from gossipgrad.train import TrainConfig, load_job

JOB = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from gossipgrad.train import Job

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


MUON_JOB = """
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import gossipgrad as gg
from gossipgrad.train import Job

class Muon(gg.Muon):
    def step(self, closure=None):
        sharing = 1 if self.process_group is None else self.process_group.size()
        Path(f"sharing-{os.environ['RANK']}").write_text(str(sharing))
        return super().step(closure)

def job():
    x = torch.linspace(0, 20, 40).reshape(40, 1)
    points = TensorDataset(x, (x.flatten() > 10).long())
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    return Job(model=model, train=points, test=points, loss=cross_entropy, optimizer=Muon)
"""


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["allreduce", "sparse"])
def test_ranks_with_equal_gradients_share_the_work_of_muon(tmp_path, monkeypatch, strategy):
    (tmp_path / "muon_job.py").write_text(MUON_JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    how = ["--strategy", strategy, "--quiet", "--nproc", "2", "--epochs", "1"]
    how += ["--batch-size", "20", "--out", "run"]
    assert main(["train", "--job", "muon_job:job", *how]) == 0
    assert [(tmp_path / f"sharing-{rank}").read_text() for rank in range(2)] == ["2", "2"]
