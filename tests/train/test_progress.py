import sys

import pytest

from gossipgrad.train import TrainConfig
from gossipgrad.train._progress import Progress

EVENT = {"epoch": 11, "step": 7, "loss": 0.5, "samples_per_second": 40_000.0}
METRIC = {"accuracy": 0.975, "metric_name": "accuracy", "metric_format": ".2%"}


@pytest.mark.parametrize(
    ("columns", "figures"),
    [
        (140, "loss 0.5000  accuracy 97.50%  distance ~0.125  40,000 samples/s  exposed 12%"),
        (80, "loss 0.5000  acc 97.50%  dist ~0.125  40,000/s  exposed 12%"),
    ],
)
def test_live_line_shows_all_figures_whole(monkeypatch, capsys, columns, figures):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    progress = Progress(TrainConfig())
    try:
        progress.take({"event": "ready", "total_steps": 100})
        progress.take(EVENT | METRIC | {"event": "epoch", "consensus_distance": None})
        step = {"event": "progress", "consensus_distance": 0.125, "exposed_share": 0.12}
        progress.take(EVENT | step)
        progress._bar.refresh()
    finally:
        progress.close()
    shown = capsys.readouterr().out
    assert "epoch 12/20" in shown
    assert figures in shown


def test_what_happens_to_checkpoints_and_members_is_shown(capsys):
    progress = Progress(TrainConfig())
    progress.take({"event": "checkpoint", "text": "rank 1: a checkpoint could not be saved"})
    progress.take({"event": "members", "text": "rank 3 has joined"})
    shown = capsys.readouterr().err
    assert shown == (
        "gossipgrad: rank 1: a checkpoint could not be saved\ngossipgrad: rank 3 has joined\n"
    )
