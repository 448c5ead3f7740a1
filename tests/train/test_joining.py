"""Which runs can be joined, and what is said of others before anything is trained."""

import json
import socket

import pytest
import torch
import torch.distributed as dist

from gossipgrad import checkpoint, data
from gossipgrad.data import Dataset, DatasetInfo, TensorSamples
from gossipgrad.errors import GossipError
from gossipgrad.train import JoinConfig, RunFailedError, TrainConfig, join_run
from gossipgrad.train._folder import RunDir
from gossipgrad.train._join import fingerprint_of, invite
from support.jobs import job_of, job_on


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a gossip run that trains, as far as anyone can see from outside."""
    made = RunDir(tmp_path / "run")
    made.partial.mkdir(parents=True)
    describe(made)
    write_invitation(made)
    return made


def describe(run_dir, **options):
    config = TrainConfig(nproc=3, threads=2, **options).resolved(nproc=3, out=run_dir.path)
    config.write(run_dir.config)


def write_invitation(run_dir, **changes):
    found = {"address": "127.0.0.1:1/run/members/1", "refusal": None, "data": ""}
    run_dir.invitation.write_text(json.dumps(found | changes))


def refused(run_dir):
    with pytest.raises(ValueError, match=r".") as caught:
        join_run(JoinConfig(run=run_dir.path, quiet=True))
    return str(caught.value)


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert "holds no run: name the folder" in refused(RunDir(tmp_path))
    assert "holds no run: name the folder" in refused(RunDir(tmp_path / "none"))


@pytest.mark.parametrize(
    "options", [{"strategy": "allreduce"}, {"shuffle": "ring"}, {"shuffle": "local"}]
)
def test_a_run_whose_ranks_or_shares_are_fixed_is_refused(run_dir, options):
    describe(run_dir, **options)
    ((name, value),) = options.items()
    said = refused(run_dir)
    assert f"{name} {value}" in said
    assert "only runs of strategy gossip with --shuffle global can be joined" in said


def test_a_run_that_does_not_train_is_refused_with_the_way_out(run_dir):
    run_dir.invitation.unlink()
    assert f"gossipgrad train --config {run_dir.config}" in refused(run_dir)
    checkpoint.save(run_dir.checkpoints, {}, rank=0, world_size=1, step=10, run="it")
    assert f"gossipgrad train --resume {run_dir.path}" in refused(run_dir)


def test_a_run_that_invites_nobody_says_why(run_dir):
    write_invitation(run_dir, address=None, refusal="its links are scripted")
    assert refused(run_dir).endswith("cannot be joined: its links are scripted")


def test_a_dead_run_and_other_data_are_refused(run_dir):
    """What was killed leaves its invitation; the store is where nobody listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    job = job_of(TrainConfig.from_file(run_dir.config), data.load("digits"))
    address = f"127.0.0.1:{port}/run/members/1"
    write_invitation(run_dir, address=address, data=fingerprint_of(job))
    with pytest.raises(RunFailedError, match=r"if it was killed, begin another like it by"):
        join_run(JoinConfig(run=run_dir.path, quiet=True))
    write_invitation(run_dir, data="another")
    with pytest.raises(RunFailedError, match="data set digits is another here than where"):
        join_run(JoinConfig(run=run_dir.path, quiet=True))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1, "store": 3}'])
def test_what_is_no_invitation_is_refused(run_dir, content):
    run_dir.invitation.write_text(content)
    assert "is no invitation of a run" in refused(run_dir)


def test_a_secret_that_is_no_good_is_refused(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSIPGRAD_SECRET_FILE", str(tmp_path / "none"))
    assert refused(run_dir).startswith("cannot read GOSSIPGRAD_SECRET_FILE=")


def toy(y):
    x = torch.zeros(len(y), 3)
    info = DatasetInfo(
        name="toy", input_shape=(3,), num_classes=4, train_samples=len(y), test_samples=len(y)
    )
    return job_on(Dataset(info=info, train=TensorSamples(x, y), test=TensorSamples(x, y)))


def test_a_store_that_is_slow_to_answer_ends_no_run(run_dir):
    class Slow:
        class group:  # noqa: N801
            store = dist.HashStore()

        def join_address(self):
            raise GossipError("the store does not answer: it had 10 s")

    run_dir.invitation.unlink()
    assert invite(Slow(), toy(torch.arange(4)), run_dir) is None
    assert refused(run_dir).endswith("cannot be joined: the store does not answer: it had 10 s")
    assert run_dir.invitation.stat().st_mode & 0o777 == 0o600, "its owner's alone"


@pytest.mark.parametrize("shape", [(8,), (8, 3)])
def test_data_sets_are_told_apart_by_their_labels(shape):
    y = torch.arange(8) % 4
    y = y.expand(3, 8).T.contiguous() if len(shape) == 2 else y
    other = y.clone()
    other[3] = (other[3] + 1) % 4
    assert fingerprint_of(toy(y)) == fingerprint_of(toy(y.clone()))
    assert fingerprint_of(toy(y)) != fingerprint_of(toy(other))
