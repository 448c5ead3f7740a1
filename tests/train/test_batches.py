"""Which samples a rank trains on."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad import data
from gossipgrad.data import TensorSamples
from gossipgrad.train import TrainConfig, check, run
from gossipgrad.train._batches import RingBatches, ShardBatches, deal, make_batches


def shift(rows, indices, draw):
    """An augmentation that shows which samples it was asked for, and in which epoch."""
    return rows + 1000 * indices.reshape(-1, 1) + 0.5 * draw[1]


def samples(count=11):
    x = torch.arange(float(count)).reshape(-1, 1)
    return TensorSamples(x, torch.arange(count) % 3, augmentation=shift)


def shards(labels, p, seed=0):
    return [
        deal(labels, num_samples=len(labels), rank=rank, world_size=p, seed=seed)
        for rank in range(p)
    ]


@given(st.lists(st.integers(0, 4), min_size=9, max_size=60), st.integers(1, 9))
def test_shards_by_label_are_equal_disjoint_and_in_the_order_of_classes(labels, p):
    labels = torch.tensor(labels)
    dealt = shards(labels, p)
    rows = torch.tensor([int(row) for shard in dealt for row in shard])
    assert {len(shard) for shard in dealt} == {len(labels) // p}
    assert len(set(rows.tolist())) == len(rows)
    assert labels[rows].diff().ge(0).all()


def test_random_shards_depend_on_the_seed_alone():
    def dealt(seed):
        return [
            deal(None, num_samples=20, rank=rank, world_size=3, seed=seed).tolist()
            for rank in range(3)
        ]

    assert dealt(1) == dealt(1) != dealt(2)
    assert len({row for shard in dealt(1) for row in shard}) == 18


def test_a_shard_stays_and_its_order_changes():
    shard = deal(None, num_samples=11, rank=1, world_size=2, seed=3)
    batches = ShardBatches(samples=samples(), shard=shard, batch_size=2, rank=1, seed=3)
    epochs = [[x.flatten().tolist() for x, _ in batches.epoch(epoch)] for epoch in (0, 1, 0)]
    assert [len(batch) for batch in epochs[0]] == [2, 3]  # no batch of a single sample
    assert len(batches) == 2
    assert epochs[0] == epochs[2] != epochs[1]
    for number, epoch in enumerate(epochs[:2]):
        expected = [row + 1000 * row + 0.5 * number for row in shard.tolist()]
        assert sorted(row for batch in epoch for row in batch) == sorted(expected)


def test_travelling_rows_are_augmented_by_their_place_in_the_data_set():
    shard = deal(None, num_samples=11, rank=0, world_size=1, seed=3)
    batches = RingBatches(samples(), shard, batch_size=4, seed=3)
    for epoch in range(2):
        for x, y in batches.epoch(epoch):
            index = ((x.flatten() - 0.5 * epoch) / 1001).round().long()
            again = samples().batch(index, augment=(3, epoch))
            assert torch.equal(x, again[0])
            assert torch.equal(y, again[1])
    assert batches.figures()["shuffle_bytes_sent"] == 0
    batches.close()


@pytest.mark.parametrize("shuffle", ["global", "local"])
def test_what_is_asked_for_is_made(shuffle):
    dataset = data.load("digits")
    config = TrainConfig(shuffle=shuffle, shards="by-label", batch_size=100)
    batches = make_batches(config, dataset.train, rank=1, world_size=4)
    classes = {int(label) for _, y in batches.epoch(0) for label in y}
    assert len(batches) == 4
    assert classes == ({2, 3, 4} if shuffle == "local" else set(range(10)))


@pytest.mark.parametrize(
    ("options", "nproc", "message"),
    [
        ({"shuffle": "ring"}, 800, "shuffle ring needs two samples on each of 800 processes"),
    ],
)
def test_shards_that_cannot_be_are_refused_before_the_start(options, nproc, message):
    with pytest.raises(ValueError, match=message):
        check(TrainConfig(**options), nproc)


@pytest.mark.process
def test_a_run_with_a_ring_tells_what_it_cost(tmp_path):
    config = TrainConfig(
        strategy="local",
        shuffle="ring",
        shards="by-label",
        nproc=2,
        epochs=2,
        batch_size=64,
        log_every=1,
        out=tmp_path / "run",
        quiet=True,
    )
    outcome = run(config)
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
        lines = (tmp_path / "run" / f"metrics-rank{rank}.jsonl").read_text().splitlines()
        steps = [step for step in map(json.loads, lines) if step["event"] == "step"]
        sent = [step["shuffle_bytes_sent"] for step in steps]
        assert len(sent) == 24
        assert sent == sorted(sent)
        assert not any(count % row_bytes for count in sent), "whole rows"
        last.append(sent[-1])
    assert summary["shuffle_bytes_sent_per_step"] == pytest.approx(sum(last) / 2 / 24)
