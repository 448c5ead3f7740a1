"""A link that breaks while both its ends train: they meet again."""

import gossipgrad as gg
from support.links import cut
from support.sessions import run_sessions
from support.waiting import NEVER_SECONDS


def test_two_ranks_whose_link_broke_meet_again_in_the_next_generation():
    # Both live: neither is to be given up while a busy machine holds its signs of life up.
    quick = gg.Heartbeats(
        interval_seconds=0.02, lease_seconds=NEVER_SECONDS, silent_seconds=NEVER_SECONDS
    )

    def use(me):
        channel = me.session._rounds.channel
        me.train_until(lambda: me.outcomes["delivered"] >= 3)
        if me.rank == 0:
            cut(channel.transport, 1)
            me.train_until(lambda: channel.gone == {1: "was lost"})
        me.train_until(lambda: me.session.membership.generation == 1 and channel.gone == {})
        before = me.outcomes["delivered"]
        me.train_until(lambda: me.outcomes["delivered"] >= before + 3)
        me.mean()
        return me.session.membership.living

    settings = {"topology": "matching", "transport": "tcp", "heartbeats": quick}
    assert run_sessions(2, use, **settings) == [(0, 1), (0, 1)]
