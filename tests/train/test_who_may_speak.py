"""What the command is told of secrets and encryption."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.train import GossipConfig, TrainConfig
from gossipgrad.train._check import check
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd
from support.strategies import build
from support.waiting import HANG_SECONDS, until


def test_a_strategy_that_cannot_encrypt_is_refused_before_the_start(secret):
    with pytest.raises(
        ValueError, match=r"encrypt is on, and strategy allreduce talks through torch's.*WireGuard"
    ):
        check(TrainConfig(encrypt=True, strategy="allreduce"), 2)
    check(TrainConfig(encrypt=True), 2)


def test_encryption_that_has_nothing_to_encrypt_is_told():
    with pytest.warns(UserWarning, match="encrypt=True is not used: strategy is local, and shuf"):
        TrainConfig(encrypt=True, strategy="local").warn_of_unused()
    TrainConfig(encrypt=True, strategy="local", shuffle="ring").warn_of_unused()
    assert TrainConfig.from_json(TrainConfig(encrypt=True).to_json()).encrypt


def test_a_secret_that_is_no_good_is_told_before_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("GOSSIPGRAD_SECRET_FILE", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"cannot read GOSSIPGRAD_SECRET_FILE=.*missing"):
        check(TrainConfig(), 2)
    monkeypatch.delenv("GOSSIPGRAD_SECRET_FILE")
    with pytest.raises(ValueError, match="encrypt=True needs a file"):
        check(TrainConfig(encrypt=True), 2)


@pytest.mark.parametrize("faults", [None, "delay rank=1 round=1 seconds=0.01"])
def test_the_strategy_encrypts_its_links(faults, secret):
    config = TrainConfig(encrypt=True, options={"gossip": GossipConfig(faults=faults)})

    def train(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        strategy = build(config, model, optimizer, rank=rank, world_size=2, group=group)
        for step in range(3):
            set_gradients(model, rank, step)
            optimizer.step()
        transport = strategy._session._rounds.channel.transport
        delivered = strategy._session.stats().outcomes["delivered"]
        strategy.close()
        return transport.is_encrypted, delivered > 0

    assert run_ranks(2, train) == [(True, True)] * 2


@pytest.mark.parametrize("encrypt", [False, True])
def test_the_ring_shuffle_takes_no_more_than_a_batch_and_brings_all_of_it(encrypt, secret):
    """Above 16 kB, below which a message may have any size."""
    width = 4096

    def shuffle(rank, group):
        rows = torch.zeros(10, width) + torch.arange(10.0)[:, None] + 100 * rank
        with gg.RingShuffle(rows, batch_size=5, process_group=group, encrypt=encrypt) as ring:
            until(lambda: sum(len(x) for (x,) in ring) == 10 and ring.stats().rows_received)
            transport = ring._ring.transport
            assert transport.is_encrypted == encrypt
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
