"""Samples are dealt on when the store is lost or stands still, and nothing waits for it again."""

import logging
import threading
import time

import pytest
import torch.distributed as dist

from gossipgrad.data import ElasticBatches
from support.shares import Run
from support.shares import let_go as let_go
from support.waiting import until


class Store(dist.Store):
    """Answers, stands still or fails, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.fails = False
        self.inner = dist.HashStore()
        self.asked = 0

    def clone(self):
        return self

    def compare_set(self, key, expected, desired):
        self.asked += 1
        self.answers.wait()
        if self.fails:
            raise dist.DistNetworkError("Connection reset by peer")
        return self.inner.compare_set(key, expected, desired)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_lost_store_ends_no_epoch(caplog):
    store = Store()
    run = Run(60, 2, store)
    run.in_turn(0, 1, epoch=0, steps=4)
    store.fails = True
    for epoch in (0, 1, 2):
        run.in_turn(0, 1, epoch=epoch)
        assert run.times(epoch) == dict.fromkeys(range(60), 1)
    assert len(warnings_of(caplog)) == 2, "each rank says it once"
    assert "the rendezvous store is lost (Connection reset by peer)" in warnings_of(caplog)[0]
    assert run.total("samples_untold") >= 2 * 60
    for one in run.ranks.values():
        one.leave()


def test_a_store_that_stands_still_is_awaited_once(caplog):
    store = Store()
    run = Run(60, 2, store)
    run.in_turn(0, 1, epoch=0, steps=2)
    run.wait_for_store(0.1)
    store.answers.clear()
    asked = store.asked
    for epoch in (0, 1):
        run.in_turn(0, 1, epoch=epoch)
    assert store.asked <= asked + 4, "questions do not pile up"
    assert run.total("exposed_seconds") >= 2 * 0.1
    assert len(warnings_of(caplog)) == 2, "with each wait in vain comes one"
    assert "did not answer within 0.1 s" in warnings_of(caplog)[0]
    for epoch in (0, 1):
        assert run.times(epoch) == dict.fromkeys(range(60), 1)
    store.answers.set()


def test_claims_go_on_when_the_store_answers_again():
    store = Store()
    run = Run(120, 2, store)
    run.in_turn(0, 1, epoch=0, steps=2)
    run.wait_for_store(0.05)
    store.answers.clear()
    run.in_turn(0, 1, epoch=0, steps=10)  # without claims
    untold = run.total("samples_untold")
    assert untold > 0
    run.wait_for_store(60.0)
    store.answers.set()
    for one in run.ranks.values():
        until(one.batches._pieces._asked[1].done, timeout_seconds=60)
    run.in_turn(0, 1, epoch=0, steps=6)
    run.change(0, 1, 2)
    run.in_turn(0, 1, 2, epoch=0)
    assert run.times(0) == dict.fromkeys(range(120), 1), "what was used untold was told after all"
    assert run.total("samples_untold") == untold
    assert run.times(0, 2)


def test_closing_waits_for_a_silent_store_for_a_second(monkeypatch):
    monkeypatch.setattr("gossipgrad.data._elastic_pieces._FAREWELL_SECONDS", 0.05)
    store = Store()
    run = Run(60, 1, store)
    run.ranks[0].step(0)
    run.wait_for_store(0.05)
    store.answers.clear()
    start = time.monotonic()
    run.ranks[0].leave()
    assert time.monotonic() - start < 30, "it answers never"
    store.answers.set()


def test_what_others_keep_in_the_store_is_named():
    store = dist.HashStore()
    store.set("shares/0/0", "something else")
    run = Run(60, 1, store)
    with pytest.raises(ValueError, match="'something else' where claims of samples are kept"):
        run.ranks[0].step(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"world_size": 61}, "60 samples do not give one to each of 61 ranks"),
        ({"chunk_batches": 0}, "chunk_batches is 0"),
        ({"patience_seconds": -1.0}, "patience_seconds is -1.0, but must be at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    run = Run(60, 1)
    with pytest.raises(ValueError, match=message):
        ElasticBatches(
            samples=run.samples,
            member=run.ranks[0],
            store=run.store,
            **{**run.settings, **settings},
        )
