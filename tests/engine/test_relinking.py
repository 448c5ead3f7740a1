"""A link that breaks while both its ends train: they meet again."""

import gossipgrad as gg
from gossipgrad.comm import TCPTransport
from support.links import cut
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd
from support.waiting import NEVER_SECONDS, until


def test_two_ranks_whose_link_broke_meet_again_in_the_next_generation():
    # Both live: neither is to be given up while a busy machine holds its signs of life up.
    quick = gg.Heartbeats(
        interval_seconds=0.02, lease_seconds=NEVER_SECONDS, silent_seconds=NEVER_SECONDS
    )

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            topology="matching",
            transport=TCPTransport,
            heartbeats=quick,
        ) as session:

            def step_until(condition):
                def met():
                    if condition():
                        return True
                    set_gradients(model, rank, 0)
                    optimizer.step()
                    return False

                until(met)

            def delivered():
                return session.stats().outcomes["delivered"]

            channel = session._rounds.channel
            step_until(lambda: delivered() >= 3)
            if rank == 0:
                cut(channel.transport, 1)
                step_until(lambda: channel.gone == {1: "was lost"})
            step_until(lambda: session.membership.generation == 1 and channel.gone == {})
            before = delivered()
            step_until(lambda: delivered() >= before + 3)
            with session.consensus():
                living = session.membership.living
            group.barrier()
        return living

    assert run_ranks(2, rank_main) == [(0, 1), (0, 1)]
