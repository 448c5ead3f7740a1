"""Which runs can be joined, and what is said of others before anything is trained."""

import json
import socket

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from gossipgrad import checkpoint
from gossipgrad.train import Job, JoinConfig, RunFailedError, TrainConfig, join_run
from support.alone import run_alone
from support.jobs import name_job


@pytest.fixture
def run(tmp_path):
    """The folder of a gossip run that trains, as far as anyone can see from outside."""
    (tmp_path / "partial").mkdir()
    describe(tmp_path)
    write_invitation(tmp_path)
    return tmp_path


def describe(run, **options):
    config = TrainConfig(nproc=3, threads=2, **options).resolved(nproc=3, out=run)
    config.write(run / "config.json")


def write_invitation(run, **changes):
    found = {"address": "127.0.0.1:1/run/members/1", "refusal": None, "data": ""}
    found |= {"strategy": {"ahead": 0}, "checkpoint_base": 0, "began_seconds": 0.0}
    (run / "invitation.json").write_text(json.dumps(found | changes))


def refused(run, error=ValueError):
    with pytest.raises(error, match=r".") as caught:
        join_run(JoinConfig(run=run, quiet=True))
    return str(caught.value)


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert "holds no run: name the folder" in refused(tmp_path)
    assert "holds no run: name the folder" in refused(tmp_path / "none")


@pytest.mark.parametrize(
    "options", [{"strategy": "allreduce"}, {"shuffle": "ring"}, {"shuffle": "local"}]
)
def test_a_run_whose_ranks_or_shares_are_fixed_is_refused(run, options):
    describe(run, **options)
    ((name, value),) = options.items()
    assert f"{name} {value}" in refused(run)


def test_a_run_that_does_not_train_is_refused_with_the_way_out(run):
    (run / "invitation.json").unlink()
    assert f"gossipgrad train --config {run}/config.json" in refused(run)
    checkpoint.save(run / "checkpoints", {}, rank=0, world_size=1, step=10, run="it")
    assert f"gossipgrad train --resume {run}" in refused(run)


def test_a_run_that_invites_nobody_says_why(run):
    write_invitation(run, address=None, refusal="its links are scripted")
    assert refused(run).endswith("cannot be joined: its links are scripted")


def test_a_secret_that_is_no_good_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSIPGRAD_SECRET_FILE", str(tmp_path / "none"))
    assert refused(run).startswith("cannot read GOSSIPGRAD_SECRET_FILE=")


@pytest.mark.parametrize("shape", [(8,), (8, 3)])
def test_a_dead_run_and_other_data_are_told_apart_by_the_invitation(tmp_path, shape, monkeypatch):
    """What was killed leaves its invitation; the store is where nobody listens any more."""
    path, invitation = tmp_path / "invitation.json", {}
    y = torch.arange(8).reshape(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous() % 2

    def job(labels):
        def loss(output, target):
            if path.exists() and not invitation:
                invitation.update(json.loads(path.read_text()))
                assert path.stat().st_mode & 0o777 == 0o600, "its owner's alone"
            return output.square().mean()

        points = TensorDataset(torch.zeros(8, 3), labels)
        parts = {"train": points, "test": points, "metric": lambda output, target: target * 1.0}
        return lambda: Job(model=nn.Linear(3, 4), loss=loss, **parts)

    name = name_job(monkeypatch, job(y))
    run_alone(tmp_path, strategy="gossip", epochs=1, batch_size=2, job=name)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = f"127.0.0.1:{port}/run/members/1"
    write_invitation(tmp_path, address=address, data=invitation["data"])
    assert "or was killed, begin another like it by" in refused(tmp_path, RunFailedError)
    other = y.clone()
    other[3] = (other[3] + 1) % 2
    name_job(monkeypatch, job(other))
    assert "is another here than where" in refused(tmp_path, RunFailedError)
