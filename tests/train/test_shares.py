"""What a run tells of samples that were dealt anew."""

import dataclasses

from gossipgrad.data import ElasticStats
from gossipgrad.train._config import TrainConfig
from gossipgrad.train._losses import notes_on_shares, summarize_losses, summarize_shares
from support.results import result


def shares(**figures):
    return dataclasses.asdict(ElasticStats(**figures))


def test_the_summary_has_the_figures_of_all_ranks():
    ranks = [
        result(0, shares=shares(samples_dealt_anew=5, samples_left=3, disturbed_epochs=1)),
        result(2, shares=shares(samples_dealt_anew=7, samples_left=3, store_requests=4)),
    ]
    assert summarize_shares(ranks) == {
        "samples_dealt_anew": 12,
        "samples_used_twice_at_most": 0,
        "samples_untold": 0,
        "store_requests": 4,
        "exposed_seconds": 0.0,
        "samples_left": 3,
        "disturbed_epochs": 1,
    }
    assert summarize_shares([result(0)]) is None


def test_a_loss_tells_what_became_of_the_share():
    told = shares(samples_used_twice_at_most=32, samples_left=16)
    losses = summarize_losses(TrainConfig(), {0: result(0, shares=told)}, {1: "died"}, None, {})
    assert losses["1"]["samples_not_seen"] == 16
    assert losses["1"]["data"] == (
        "what was left of its share of an epoch was dealt anew among the others, and it had none "
        "in the next; of all lost ranks together, 32 samples at most were used twice, and 16 of "
        "the last epoch by nobody"
    )


def test_a_note_tells_of_claims_that_could_not_be_made_where_that_matters():
    untold = ElasticStats(samples_untold=9)
    assert notes_on_shares(untold) == notes_on_shares(None) == []
    (note,) = notes_on_shares(dataclasses.replace(untold, disturbed_epochs=1))
    assert "of 9 samples some may have been used twice, and others not at all" in note
