"""Becoming a member while the store stands still: what was given up leaves nothing behind."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from gossipgrad.comm import AskedStore, Joinable, Membership, MemberWatch, Record
from gossipgrad.engine import _members
from gossipgrad.engine._rounds import Rounds
from gossipgrad.errors import GossipError
from support.deaths import QUICK
from support.waiting import until


class Standing(dist.Store):
    """Stands still in one kind of question until it is told to answer; then counts its answer."""

    def __init__(self, kept, still):
        super().__init__()
        self.kept, self.still = kept, still
        self.answers, self.asked = threading.Event(), threading.Event()

    def clone(self):
        self._stand("clone")
        return self

    def compare_set(self, key, expected, desired):
        self._stand("compare_set")
        return self.kept.compare_set(key, expected, desired)

    def set(self, key, value):
        self.kept.set(key, value)

    def get(self, key):
        return self.kept.get(key)

    def _stand(self, what):
        if what == self.still:
            self.asked.set()
            self.answers.wait()


class Hasty(AskedStore):
    """Gives a question up as soon as the store stands still in it."""

    def ask(self, question, **more):
        self.begin(question)
        assert self.store.asked.wait(60)
        return super().ask(question, **more)


@pytest.mark.parametrize("still", ["clone", "compare_set"])
def test_a_join_that_was_given_up_leaves_no_member_behind(still, monkeypatch):
    monkeypatch.setattr(_members, "AskedStore", Hasty)
    kept, first = dist.HashStore(), Membership.first(2)
    record, store = Record(kept, first), Standing(kept, None)
    members = object.__new__(_members.Members)
    members.watch = MemberWatch(store, 2, first, QUICK)
    members._group = SimpleNamespace(rank=2, store=store)
    rounds = Mock(spec=Rounds)
    rounds.channel = Mock(transport=Mock(spec=Joinable, introduction=()))
    monkeypatch.setattr(Hasty, "store", store, raising=False)
    store.still = still
    threads = {*threading.enumerate()}
    with pytest.raises(GossipError, match="could not be told that rank 2 joins"):
        members.enter(rounds, donor=0)
    store.answers.set()
    until(lambda: not {*threading.enumerate()} - threads, 60.0)
    assert record.read().living == (0, 1)
