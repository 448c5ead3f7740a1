"""Which samples a rank trains on."""

import json
from pathlib import Path

import pytest

from gossipgrad.train import TrainConfig, check, run
from support.launched import config

pytestmark = pytest.mark.process
JOB = """
import os
from pathlib import Path
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from gossipgrad.train import Job

class Samples(torch.utils.data.Dataset):
    targets = [row % 3 for row in range(20)]

    def __init__(self, is_noted):
        self.is_noted = is_noted

    def __len__(self):
        return 20

    def __getitems__(self, rows):
        if self.is_noted and "RANK" in os.environ:
            with open(f"rows{os.environ['RANK']}", "a") as file:
                print(rows, file=file)
        return [(torch.ones(2), self.targets[row]) for row in rows]

def job():
    train, test = Samples(True), Samples(False)
    return Job(model=nn.Linear(2, 3), train=train, test=test, loss=cross_entropy)
"""


@pytest.fixture
def epochs(tmp_path, monkeypatch):
    """Trains for two epochs; the batches of each rank in each of them, as rows of the data set."""
    (tmp_path / "noting_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def train(nproc, **options):
        how = {"nproc": nproc, "epochs": 2, "batch_size": 2, "trace": 0, **options}
        assert run(config(Path("run"), job="noting_job:job", **how)).exit_code == 0
        found = []
        for rank in range(nproc):
            batches = [*map(json.loads, Path(f"rows{rank}").read_text().splitlines())]
            found.append([batches[: len(batches) // 2], batches[len(batches) // 2 :]])
        return found

    return train


def rows(batches):
    return [row for batch in batches for row in batch]


@pytest.mark.parametrize("shards", ["random", "by-label"])
def test_local_shards_are_equal_disjoint_and_stay_and_their_order_changes(epochs, shards):
    found = epochs(3, strategy="local", shuffle="local", shards=shards)
    shares = [rows(first) for first, _ in found]
    for (first, second), share in zip(found, shares, strict=True):
        assert [len(batch) for batch in first] == [2, 2, 2]
        assert rows(first) != rows(second)
        assert {*rows(second)} == {*share}
    assert len({*rows(shares)}) == 3 * 6
    if shards == "by-label":  # of 7, 7 and 6 samples
        labels = [{row % 3 for row in share} for share in shares]
        assert labels == [{0}, {0, 1}, {1, 2}]


def test_a_batch_is_never_a_single_sample(epochs):
    for first, _ in epochs(4, strategy="local", shuffle="local", batch_size=4):
        assert [len(batch) for batch in first] == [5]


def test_a_global_shuffle_gives_each_sample_to_one_rank_and_another_one_in_each_epoch(epochs):
    found = epochs(2, strategy="local", shuffle="global")
    for epoch in range(2):
        assert sorted(row for of_rank in found for row in rows(of_rank[epoch])) == [*range(20)]
    assert {*rows(found[0][0])} != {*rows(found[0][1])}


def test_shards_that_cannot_be_are_refused_before_the_start():
    with pytest.raises(ValueError, match="shuffle ring needs two samples on each of 800 processes"):
        check(TrainConfig(shuffle="ring"), 800)


def test_a_run_with_a_ring_tells_what_it_cost(tmp_path):
    options = {"strategy": "local", "shuffle": "ring", "shards": "by-label", "trace": 0}
    outcome = run(config(tmp_path, nproc=2, epochs=2, batch_size=64, **options))
    assert outcome.exit_code == 0
    summary = outcome.summary
    assert (summary["shuffle"], summary["shards"]) == ("ring", "by-label")
    row_bytes = 64 * 4 + 8 + 8
    most = 718 * row_bytes / 12  # 12 batches an epoch; a round that is late sends nothing
    # Rows that waited at a slow rank go back at once; the other one sends them after their turn.
    assert 0 < summary["shuffle_bytes_sent_per_step"] < 2 * most
    assert summary["bytes_sent_per_step"] == 0
    last = []
    for rank in range(2):
        lines = (tmp_path / f"metrics-rank{rank}.jsonl").read_text().splitlines()
        steps = [step for step in map(json.loads, lines) if step["event"] == "step"]
        sent = [step["shuffle_bytes_sent"] for step in steps]
        assert len(sent) == 24
        assert sent == sorted(sent)
        assert not any(count % row_bytes for count in sent), "whole rows"
        last.append(sent[-1])
    assert summary["shuffle_bytes_sent_per_step"] == pytest.approx(sum(last) / 2 / 24)
