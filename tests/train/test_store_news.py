import logging

from gossipgrad.comm import MemberWatch
from gossipgrad.data._elastic_dealer import logger as shares
from gossipgrad.train._store_news import store_news


def test_a_lost_store_is_told_by_the_membership_alone(caplog):
    events = []
    watch = logging.getLogger(MemberWatch.__module__)
    with store_news(events.append) as losses:
        watch.warning("the store is lost", extra={"store_lost": "lost"})
        shares.warning("the store is lost", extra={"store_silent": "is lost"})
        shares.warning("something else")
    assert [record.getMessage() for record in caplog.records] == [
        "the store is lost",
        "something else",
    ]
    assert (len(losses), len(events)) == (1, 1)
    shares.warning("the store is lost", extra={"store_silent": "is lost"})
    assert len(caplog.records) == 3
