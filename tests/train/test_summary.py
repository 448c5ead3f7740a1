import signal
from dataclasses import asdict

import pytest

from gossipgrad.data import ElasticStats
from gossipgrad.train import TrainConfig
from gossipgrad.train._result import RankResult
from gossipgrad.train._summary import compose
from gossipgrad.train.strategies import ring_bytes
from support.results import result


def composed(results, lost=None, stopped_by=None, strategy="gossip"):
    return compose(
        TrainConfig(strategy=strategy),
        {rank.rank: rank for rank in results},
        lost or {},
        world_size=len(results) + len(lost or {}),
        exported=results[0],
        stopped_by=stopped_by,
    )


def test_puts_ranks_together():
    summary = composed([result(0), result(1)])
    assert summary["accuracy"] == 0.9
    assert summary["accuracy_per_rank"] == [0.5, 0.625]
    assert summary["seconds"] == 4.0
    assert summary["samples_per_second"] == 1000.0
    assert summary["bytes_sent_per_step"] == 150.0
    assert summary["all_reduce_bytes_per_step"] == 100
    assert summary["exposed_seconds_per_step"] == pytest.approx(0.01)
    assert summary["mixing_seconds_per_step"] == pytest.approx(0.02)
    assert summary["outcomes"] == {"delivered": 18, "late": 1}
    assert summary["bytes_sent_are"].startswith("counted; what the last step sent ahead")
    assert summary["notes"] == ["rank 0: note 0", "rank 1: note 1"]


def test_notes_are_those_of_all_ranks_and_the_same_is_said_once():
    ranks = [result(2, notes=("a", "b")), result(0, notes=("a", "c")), result(1, notes=("c",))]
    assert composed(ranks)["notes"] == ["rank 2: a", "rank 2: b", "rank 0: c"]
    many = composed([result(rank) for rank in range(14)])["notes"]
    assert many[10:] == ["rank 10: note 10", "rank 11: note 11", "2 more notes of other ranks"]


def test_has_the_keys_that_are_promised():
    assert set(composed([result(0)])) >= {
        *("strategy", "world_size", "steps", "epochs", "seconds", "samples_per_second"),
        *("accuracy", "accuracy_per_rank", "consensus_distance", "model_is_consensus"),
        *("bytes_sent_per_step", "exposed_seconds_per_step", "outcomes"),
        *("interrupted", "lost_ranks", "model", "data", "optimizer", "machine", "versions"),
    }


def test_names_lost_ranks():
    summary = composed([result(1), result(2)], {0: "was killed by SIGKILL"})
    assert summary["lost_ranks"] == [0]
    assert summary["lost_because"] == {"0": "was killed by SIGKILL"}
    assert summary["accuracy_per_rank"] == [None, 0.625, 0.75]
    assert summary["steps_per_rank"] == [None, 10, 10]
    assert summary["model_from_rank"] == 1


def test_tells_when_a_rank_was_lost_by_the_membership_or_who_saw_it_go():
    known = {"2": {"why": "no sign of life", "generation": 1, "when_seconds": 5.0}}
    early = {"3": {"why": "it never started", "generation": 0, "when_seconds": 0.0}}
    ranks = {0: result(0, lost=known | early)}
    lost = dict.fromkeys((1, 2, 3, 4), "was killed by SIGKILL")
    seen = {1: 7.0, 2: 8.0, 3: 9.0}
    told = compose(
        TrainConfig(),
        ranks,
        lost,
        world_size=5,
        exported=ranks[0],
        stopped_by=None,
        when_seconds=seen,
    )["losses"]
    assert {rank: loss["when_seconds"] for rank, loss in told.items()} == {
        "1": 7.0,
        "2": 5.0,
        "3": 9.0,
        "4": None,
    }


def test_tells_in_one_line_what_became_of_samples_where_ranks_came_or_went():
    def shares(**figures):
        return asdict(ElasticStats(**figures))

    ranks = [result(0, notes=(), shares=shares()), result(1, notes=(), shares=shares())]
    assert composed(ranks)["notes"] == []
    (note,) = composed([*ranks, result(2, notes=(), shares=shares(disturbed_epochs=1))])["notes"]
    assert "assigned again" in note
    assert composed([result(0)])["shares"] is None


def test_interrupted_only_if_a_rank_stopped_before_its_end():
    late = composed([result(0)], stopped_by=signal.SIGINT)
    assert not late["interrupted"]
    early = composed([result(0), result(1, stopped=True)], stopped_by=signal.SIGINT)
    assert early["interrupted"]
    assert early["stopped_by"] == "SIGINT"


def test_all_reduce_says_that_its_bytes_are_computed():
    summary = composed([result(0)], strategy="allreduce")
    assert summary["bytes_sent_are"].startswith("computed: ring all-reduce")


def test_no_step_is_no_figure():
    summary = composed([result(0, steps=0, steps_counted=0, samples=0, train_seconds=0.0)])
    assert summary["bytes_sent_per_step"] is None
    assert summary["samples_per_second"] == 0.0


def test_results_travel_as_json():
    assert RankResult.from_json(result(3).to_json()) == result(3)


@pytest.mark.parametrize(("world_size", "sent"), [(1, 0), (2, 100), (4, 150), (100, 198)])
def test_ring_bytes(world_size, sent):
    assert ring_bytes(100, world_size) == sent
