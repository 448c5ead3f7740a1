import pytest

from gossipgrad.train import TrainConfig
from gossipgrad.train._progress import LiveProgress, PlainProgress

EVENT = {"epoch": 11, "step": 7, "loss": 0.5, "samples_per_second": 20_000.0}


@pytest.mark.parametrize(
    ("columns", "figures"),
    [
        (140, "loss 0.5000  accuracy 97.5%  distance ~0.125  40,000 samples/s  exposed 12%"),
        (80, "loss 0.5000  acc 97.5%  dist ~0.125  40,000/s  exposed 12%"),
    ],
)
def test_live_line_shows_all_figures_whole(monkeypatch, capsys, columns, figures):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    progress = LiveProgress(TrainConfig(), 2)
    try:
        progress.take(0, {"event": "ready", "total_steps": 100})
        progress.take(0, EVENT | {"event": "epoch", "accuracy": 0.975, "consensus_distance": None})
        for rank in (1, 0):
            step = {"event": "progress", "consensus_distance": 0.125, "exposed_share": 0.12}
            progress.take(rank, EVENT | step)
        progress._bar.refresh()
    finally:
        progress.close()
    shown = capsys.readouterr().out
    assert "epoch 12/20" in shown
    assert figures in shown


def test_what_any_rank_could_not_save_is_told(capsys):
    progress = PlainProgress(TrainConfig(), 2)
    progress.take(1, {"event": "checkpoint", "text": "rank 1: a checkpoint could not be saved"})
    assert capsys.readouterr().err == "gossipgrad: rank 1: a checkpoint could not be saved\n"


def test_what_any_rank_knows_of_who_came_and_went_is_told_once(capsys):
    """Of the rank that tells of steps nothing may come any more."""
    progress = PlainProgress(TrainConfig(), 3)
    for rank, text in ((1, "rank 3 has joined"), (0, "rank 3 has joined"), (2, "rank 3 has left")):
        progress.take(rank, {"event": "members", "text": text})
    assert capsys.readouterr().err == "gossipgrad: rank 3 has joined\ngossipgrad: rank 3 has left\n"
