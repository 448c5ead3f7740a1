"""Which runs can be joined, and what is said of others before a worker starts."""

import socket
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gossipgrad.data import Dataset, DatasetInfo, TensorSamples
from gossipgrad.decentralized import GossipSession
from gossipgrad.errors import GossipError
from gossipgrad.train import JoinConfig, TrainConfig, join_run
from gossipgrad.train._invitation import Invitation, fingerprint_of, invite, root_of
from gossipgrad.train._join import find_run
from gossipgrad.train._layout import RunDir
from support.jobs import job_on


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def run_dir(tmp_path, listener):
    """The folder of a gossip run that trains, as far as anyone can see from outside."""
    made = RunDir(tmp_path / "run")
    made.partial.mkdir(parents=True)
    describe(made)
    invitation(listener.getsockname()[1]).write(made)
    return made


def describe(run_dir, **options):
    config = TrainConfig(nproc=3, threads=2, **options).resolved(nproc=3, out=run_dir.path)
    config.write(run_dir.config, {})


def invitation(port, **changes):
    found = Invitation(
        address="127.0.0.1:1/run/members/1",
        refusal=None,
        store=("127.0.0.1", port),
        data="0" * 32,
        version=version("gossipgrad"),
    )
    return replace(found, **changes)


def refused(run_dir, **options):
    """What is said of it, without the name of the folder."""
    with pytest.raises(ValueError, match=r".") as caught:
        join_run(JoinConfig(run=run_dir.path, **options))
    return str(caught.value).replace(str(run_dir.path), "RUN")


def test_options_are_the_runs_but_for_those_of_this_machine(run_dir, tmp_path):
    own = JoinConfig(run=run_dir.path, nproc=4, threads=7, data_dir=tmp_path, quiet=True)
    config, found, told = find_run(own)
    assert (config.threads, config.data_dir, config.quiet) == (7, tmp_path, True)
    assert (config.nproc, config.out) == (3, run_dir.path), "ranks of the start decide rates"
    assert config.options["gossip"].topology is None
    assert (found.path, told.address) == (run_dir.path, "127.0.0.1:1/run/members/1")
    assert find_run(JoinConfig(run=run_dir.path))[0].threads == 2


def test_a_folder_without_a_run_is_refused(tmp_path):
    text = "name the folder that a run which is training writes to, its --out."
    assert refused(RunDir(tmp_path / "none")) == f"RUN is no folder: {text}"
    assert refused(RunDir(tmp_path)) == f"RUN holds no run: {text}"


def test_a_run_of_another_strategy_is_refused(run_dir):
    describe(run_dir, strategy="allreduce")
    run_dir.invitation.unlink()
    assert refused(run_dir) == (
        "the run in RUN has strategy allreduce, and its ranks are those it was started with: only "
        "runs of strategy gossip can be joined."
    )


@pytest.mark.parametrize(
    ("shuffle", "has"), [("ring", "moves around a ring of"), ("local", "belongs to one of")]
)
def test_a_run_whose_samples_are_dealt_for_good_is_refused(run_dir, shuffle, has):
    describe(run_dir, shuffle=shuffle)
    assert refused(run_dir) == (
        f"the run in RUN has shuffle {shuffle}: every sample {has} the ranks that were there at "
        "the start, and there is none for another. Only runs with --shuffle global can be joined."
    )


def test_a_run_that_is_over_is_refused(run_dir):
    run_dir.invitation.unlink()
    run_dir.summary.write_text("{}")
    run_dir.partial.rmdir()
    again = "begin another like it by `gossipgrad train --config RUN/config.json`."
    assert refused(run_dir) == f"the run in RUN is over: {again}"


def test_a_run_that_does_not_train_is_refused(run_dir):
    run_dir.invitation.unlink()
    again = "begin another like it by `gossipgrad train --config RUN/config.json`."
    why = refused(run_dir)
    assert why.startswith("the run in RUN is not training")
    assert why.endswith(f"after a kill {again}")
    run_dir.partial.rmdir()
    assert refused(run_dir) == f"the run in RUN has failed, or was stopped before it began: {again}"


def test_a_dead_run_is_refused_at_once(run_dir, listener, monkeypatch):
    port = listener.getsockname()[1]
    listener.close()
    monkeypatch.setattr("gossipgrad.checkpoint.steps", lambda directory: [40])
    assert refused(run_dir) == (
        f"nobody listens at 127.0.0.1:{port}, where the run in RUN has its store (Connection "
        "refused): it was killed, or is out of reach from this machine. If it was killed, go on "
        "with it by `gossipgrad train --resume RUN`."
    )


def test_a_run_of_another_version_is_refused_whatever_its_options(run_dir, listener):
    run_dir.config.write_text('{"an option of later": 1}')
    invitation(0, version="99.0").write(run_dir)
    assert refused(run_dir) == (
        f"the run in RUN is one of gossipgrad 99.0, and here is {version('gossipgrad')}: install "
        "the same."
    )


def test_a_run_that_invites_nobody_says_why(run_dir, listener):
    invitation(0, address=None, refusal="its links are scripted").write(run_dir)
    assert refused(run_dir) == "the run in RUN cannot be joined: its links are scripted"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1, "store": 3}'])
def test_what_is_no_invitation_is_refused(run_dir, content):
    run_dir.invitation.write_text(content)
    with pytest.raises(
        ValueError, match=r"invitation\.json is no invitation of a run|is one of go"
    ):
        find_run(JoinConfig(run=run_dir.path))


def test_a_secret_that_is_no_good_is_refused(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSIPGRAD_SECRET_FILE", str(tmp_path / "none"))
    assert refused(run_dir).startswith("cannot read GOSSIPGRAD_SECRET_FILE=")


def test_a_store_that_is_slow_to_answer_ends_no_run(run_dir):
    class Slow(GossipSession):
        group = SimpleNamespace(store=dist.HashStore())

        def __init__(self):
            pass

        def join_address(self):
            raise GossipError("the store does not answer: it had 10 s")

    x = torch.zeros(4, 1, 2, 3)
    samples = TensorSamples(x, torch.arange(4))
    info = DatasetInfo(
        name="toy", input_shape=(1, 2, 3), num_classes=4, train_samples=4, test_samples=4
    )
    assert invite(Slow(), job_on(Dataset(info=info, train=samples, test=samples)), run_dir) is None
    assert refused(run_dir) == (
        "the run in RUN cannot be joined: the store does not answer: it had 10 s"
    )


def test_options_of_a_joiner_are_checked():
    with pytest.raises(ValueError, match="nproc is 0, but must be at least 1"):
        JoinConfig(run=Path("run"), nproc=0)
    with pytest.raises(ValueError, match="threads is 0, but must be at least 1"):
        JoinConfig(run=Path("run"), threads=0)


def test_an_invitation_is_its_owners_alone(run_dir):
    assert run_dir.invitation.stat().st_mode & 0o777 == 0o600
    assert Invitation.read(run_dir) == invitation(Invitation.read(run_dir).store[1])
    run_dir.remove_partial()
    assert Invitation.read(run_dir) is None


def dataset(x, y):
    info = DatasetInfo(
        name="made", input_shape=(3,), num_classes=4, train_samples=len(y), test_samples=len(y)
    )
    return job_on(Dataset(info=info, train=TensorSamples(x, y), test=TensorSamples(x, y)))


@pytest.mark.parametrize("shape", [(8,), (8, 3)])
def test_data_sets_are_told_apart_by_their_labels(shape):
    x, y = torch.zeros(8, 3), torch.arange(8) % 4
    y = y.expand(3, 8).T.contiguous() if len(shape) == 2 else y
    other = y.clone()
    other[3] = (other[3] + 1) % 4
    assert fingerprint_of(dataset(x, y)) == fingerprint_of(dataset(x, y.clone()))
    assert fingerprint_of(dataset(x, y)) != fingerprint_of(dataset(x, other))


def test_the_store_below_all_prefixes_is_found():
    root = dist.HashStore()
    found = root_of(dist.PrefixStore("a", dist.PrefixStore("b", root)))
    found.set("key", "value")
    assert root.get("key") == b"value"
    assert root_of(root) is root
