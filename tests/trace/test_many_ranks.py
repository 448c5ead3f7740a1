"""A run of more ranks than one reads: the page stays small and says what it leaves out."""

import json

import pytest

from gossipgrad.trace import write_report
from support.html_page import Page

MANY = 20_000


@pytest.fixture
def many(tmp_path):
    directory = tmp_path / "many"
    directory.mkdir()
    summary = {
        "strategy": "gossip",
        "world_size": MANY,
        "accuracy": 0.9,
        "accuracy_per_rank": [0.9] * MANY,
        "steps_per_rank": [3] * MANY,
        "lost_ranks": list(range(0, MANY, 4)),
        "lost_because": {str(rank): "was killed by SIGKILL" for rank in range(0, MANY, 4)},
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    step = {"event": "step", "step": 1, "loss": 1.0, "samples": 4, "train_seconds": 1.0}
    (directory / "metrics-rank0.jsonl").write_text(json.dumps(step) + "\n")
    meetings = [
        {
            "name": "exchange",
            "ph": "X",
            "pid": rank,
            "tid": 0,
            "ts": 1.0,
            "dur": 2.0,
            "args": {"round": 1, "bucket": 0, "recv_from": rank ^ 1, "outcome": "delivered"},
        }
        for rank in range(1100)
    ]
    (directory / "trace.json").write_text(json.dumps({"traceEvents": meetings}))
    return directory


@pytest.mark.slow
def test_the_page_of_many_ranks_is_small_and_says_what_is_left_out(many):
    text = write_report(many).read_text()
    assert len(text) < 400_000
    page = Page(text)
    said = page.contents["p"] + page.contents["li"] + page.contents["pre"]
    for sentence in (
        "There are no metrics of ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and "
        "19,983 more.",
        "Rank 60 was killed by SIGKILL.",
        "4,984 more ranks were lost; summary.json names them.",
        "The first 256 of 20,000 ranks; those of the others are in summary.json and "
        "metrics-rank*.jsonl.",
        "The 12 slowest of 20,000 are drawn; the table has these and others, 256 in all.",
        "many has 20,000 ranks: who met whom is drawn for up to 1,024.",
        '"19,744 more left out"',
        '"...": "4,744 more left out"',
    ):
        assert any(sentence in each for each in said), sentence
    assert "Rank 64 was killed" not in text
    assert text.count('<th scope="row">rank ') <= 4 * 256
    assert page.data()["mixings"] == []
    (rates,) = [each for each in page.data()["bars"] if each["id"] == "rates"]
    assert rates["bars"][0]["label"] == "rank 0", "of the others nothing is known"


@pytest.mark.slow
def test_side_by_side_the_run_that_is_too_large_is_named(many, write_run, tmp_path):
    page = Page(write_report(write_run(), many, out=tmp_path / "both.html").read_text())
    assert [each["run"] for each in page.data()["mixings"]] == ["small"]
    assert any(text.startswith("many has 20,000 ranks: who met") for text in page.contents["p"])


def test_as_many_ranks_as_are_drawn_are_all_listed(write_run):
    text = write_report(write_run(world_size=32)).read_text()
    for word in ("more left out", "more ranks", "who met whom is drawn for"):
        assert word not in text
