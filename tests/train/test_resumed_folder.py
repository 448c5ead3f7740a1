"""The folder of a run that is resumed: what stays, what goes, and what is put aside."""

import dataclasses
import os

import pytest

from gossipgrad import checkpoint
from gossipgrad.train import GossipConfig, TrainConfig, config_of_run
from gossipgrad.train._folder import claim
from gossipgrad.train._state import begin_resumed, reopen


@pytest.fixture
def run_dir(tmp_path):
    """Of a run of three ranks, of which rank 1 was lost before the checkpoint."""
    run_dir = claim(tmp_path, name="", overwrite=False)
    for rank in (0, 2):
        checkpoint.save(
            run_dir.checkpoints, {}, rank=rank, world_size=3, members=(0, 2), step=10, run="it"
        )
    write(run_dir)
    run_dir.remove_partial()
    return run_dir


def write(run_dir, **options):
    config = TrainConfig(run_name="it", checkpoint_every=5, quiet=True, **options)
    config.resolved(nproc=3, out=run_dir.path).write(run_dir.config)


def test_options_are_whole_whenever_their_writer_is_killed(run_dir, monkeypatch):
    before = run_dir.config.read_text()

    def killed(handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            write(run_dir, epochs=50)
    assert run_dir.config.read_text() == before
    write(run_dir, epochs=50)
    assert config_of_run(run_dir.path).epochs == 50


def test_a_run_goes_on_without_its_faults(run_dir):
    """A script that kills a rank would kill it there again."""
    write(run_dir, options={"gossip": GossipConfig(faults="kill rank=1 round=7")})
    saved = config_of_run(run_dir.path)
    assert saved.options["gossip"].faults is not None
    reopen(dataclasses.replace(saved, options={"gossip": GossipConfig()}))


def test_metrics_of_ranks_that_the_run_goes_on_without_are_put_aside(run_dir):
    """Theirs would be shown as if they were in it; of one that was lost its own begins anew."""
    for rank in range(5):
        run_dir.metrics(rank).write_text(f"of rank {rank}")
    config, run_dir = reopen(dataclasses.replace(config_of_run(run_dir.path), nproc=2))
    config = config.resolved(nproc=2, out=run_dir.path)
    for rank in (1, 0):
        begin_resumed(config, run_dir, rank=rank, is_new=rank == 1)
    assert run_dir.metrics_ranks() == [0]
    former = {path.name: path.read_text() for path in (run_dir.path / "former").iterdir()}
    assert former == {f"metrics-rank{rank}.jsonl": f"of rank {rank}" for rank in (1, 2, 3, 4)}
    run_dir.metrics(1).write_text("again")
    begin_resumed(config, run_dir, rank=1, is_new=True)
    assert (run_dir.path / "former" / "metrics-rank1-2.jsonl").read_text() == "again"
    claim(run_dir.path, name="", overwrite=True)
    assert not list(run_dir.path.rglob("*.jsonl")), "of a run that is replaced, nothing stays"
