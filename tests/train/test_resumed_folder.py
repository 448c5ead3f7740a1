"""The folder of a run that is resumed: what stays, what goes, and what is put aside."""

import os

import pytest

from gossipgrad.train import GossipConfig, TrainConfig, config_of_run, run
from support.alone import resume_alone, run_alone
from support.launched import config


def test_options_are_whole_whenever_their_writer_is_killed(tmp_path, monkeypatch):
    def killed(handle):
        raise KeyboardInterrupt

    path = tmp_path / "config.json"
    for epochs in (5, 50):
        TrainConfig(epochs=5).resolved(nproc=3, out=tmp_path).write(path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", killed)
            with pytest.raises(KeyboardInterrupt):
                TrainConfig(epochs=epochs).resolved(nproc=3, out=tmp_path).write(path)
        assert TrainConfig.from_file(path).epochs == 5


def test_a_run_continues_without_its_faults(tmp_path):
    """A script that kills a rank would kill it there again."""
    faults = {"gossip": GossipConfig(faults="delay rank=0 round=7 seconds=0.01")}
    run_alone(tmp_path, strategy="gossip", epochs=1, checkpoint_every=50, options=faults)
    assert config_of_run(tmp_path).options["gossip"].faults is not None
    resume_alone(tmp_path, options={"gossip": GossipConfig()})


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:the checkpoint of step")
def test_metrics_of_ranks_that_the_run_continues_without_are_put_aside(tmp_path):
    """Theirs would be shown as if they were in it; a run that replaces it leaves none."""
    run(config(tmp_path, nproc=2, epochs=1, batch_size=64, checkpoint_every=5, trace=0))
    of_rank_1 = (tmp_path / "metrics-rank1.jsonl").read_text()
    outcome = resume_alone(tmp_path, nproc=None, epochs=1)
    assert any("saved by 2 ranks, and 1 continued" in note for note in outcome.summary["notes"])
    former = tmp_path / "former" / "metrics-rank1.jsonl"
    assert former.read_text() == of_rank_1
    assert [path.name for path in tmp_path.glob("metrics-*")] == ["metrics-rank0.jsonl"]
    run_alone(tmp_path, epochs=1)
    assert not former.exists()
