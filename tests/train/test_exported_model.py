"""The exported model loads strictly into a fresh one, whatever the layout of its weights."""

import dataclasses
import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gossipgrad.cli import main
from gossipgrad.errors import EvictedError
from gossipgrad.train import RunFailedError
from support.alone import run_alone
from support.jobs import name_job

_JOBS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from gossipgrad.train import Job


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(7), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens) * self.mask[:, None]
        x = self.norm(self.conv(x.mT[..., None]))[..., 0].mT
        return self.head(x)


class Spectrum(nn.Module):
    def __init__(self, dtype=torch.complex64):
        super().__init__()
        self.w = nn.Parameter(torch.ones(5, dtype=dtype))

    def forward(self, tokens):
        return (tokens[..., None] * self.w).abs().float()


def job(model):
    tokens = torch.randint(5, (64, 7), generator=torch.Generator().manual_seed(0))
    points = TensorDataset(tokens, tokens)

    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, -2).float(), target.flatten())

    return Job(model=model, train=points, test=points, loss=loss)


def tied():
    return job(Tied())


def complex128():
    return job(Spectrum(torch.complex128))
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The module of the user, importable here and in workers."""
    (tmp_path / "exported_jobs.py").write_text(_JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "exported_jobs", raising=False)
    import exported_jobs  # pyrefly: ignore[missing-import]

    return exported_jobs


@pytest.mark.parametrize(
    "build",
    [
        lambda jobs: jobs.Tied(),
        lambda jobs: jobs.Tied().bfloat16(),
        lambda jobs: jobs.Spectrum(),
        lambda jobs: nn.Sequential(
            nn.Embedding(5, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
        ),
    ],
    ids=["tied, channels_last, buffers", "bfloat16", "complex", "parametrized"],
)
def test_the_model_loads_strictly_into_a_fresh_one(jobs, build, tmp_path, monkeypatch):
    trained, fresh = build(jobs), build(jobs)
    run_alone(tmp_path / "run", epochs=1, job=name_job(monkeypatch, lambda: jobs.job(trained)))
    fresh.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    for name, value in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name


def test_what_an_evicted_rank_has_learned_is_saved(jobs, tmp_path, monkeypatch):
    def evict(output, target):
        if is_out := (tmp_path / "run" / "metrics-rank0.jsonl").exists():
            raise EvictedError("given up")
        return torch.tensor([float(is_out)])

    def make():
        return dataclasses.replace(jobs.job(jobs.Tied()), metric=evict)

    with pytest.raises(RunFailedError, match=r"given up .*evicted-rank0.*safetensors"):
        run_alone(tmp_path / "run", epochs=1, job=name_job(monkeypatch, make))
    (saved,) = tmp_path.glob("run/evicted-rank0*.safetensors")
    jobs.Tied().load_state_dict(load_file(saved))


def test_a_model_that_cannot_be_exported_is_refused_before_training(jobs, tmp_path, capsys):
    arguments = ["train", "--job", "exported_jobs:complex128", "--nproc", "1", "--out", "run"]
    assert main(arguments) == 2
    assert "complex128" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.process
def test_a_run_of_the_command_exports_tied_weights(jobs, tmp_path):
    options = ["--nproc", "2", "--epochs", "1", "--out", "run", "--quiet"]
    assert main(["train", "--job", "exported_jobs:tied", *options]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["model_is_consensus"]
    jobs.Tied().load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
