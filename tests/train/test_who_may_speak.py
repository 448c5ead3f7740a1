"""What the command is told of secrets, and the links of a shuffle."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.train import TrainConfig, check
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS, until


def test_a_secret_that_is_no_good_is_told_before_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("GOSSIPGRAD_SECRET_FILE", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"cannot read GOSSIPGRAD_SECRET_FILE=.*missing"):
        check(TrainConfig(), 2)


def test_the_ring_shuffle_takes_no_more_than_a_batch_and_brings_all_of_it():
    width = 4096

    def shuffle(rank, group):
        rows = torch.zeros(10, width) + torch.arange(10.0)[:, None] + 100 * rank
        with gg.RingShuffle(rows, batch_size=5, process_group=group) as ring:
            until(lambda: sum(len(x) for (x,) in ring) == 10 and ring.stats().rows_received)
            transport = ring._ring.transport
            assert transport.max_payload_bytes == 5 * width * 4
            told = ring.stats()
            group.barrier()  # who leaves first is gone for the other
            ring.close(HANG_SECONDS)
            return told, ring.rows()[0]

    everyone = run_ranks(2, shuffle)
    for stats, _ in everyone:
        assert stats.rows_received > 0
        assert (stats.refused_messages, stats.rows_lost, stats.ranks_gone) == (0, 0, ())
    rows = torch.cat([rows for _, rows in everyone])
    assert sorted(rows[:, 0].tolist()) == [*range(10), *range(100, 110)]
