"""A step or a collective that is interrupted or fails: nothing trained is lost, no round is."""

import contextlib

import pytest
import torch

import gossipgrad as gg
from support.ranks import run_ranks
from support.replicas import (
    backward,
    flat,
    network,
    set_gradients,
    sgd,
    transport_by_name,
)


def test_an_interrupt_in_a_step_loses_no_round():
    """Ctrl-C while waiting, caught as in a notebook: the exchange is mixed in the next step."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            channel = session._rounds.channel
            for step in range(12):
                take = channel.take
                if rank == 0 and step in (3, 4, 5):
                    channel.take = _interrupt
                set_gradients(model, rank, step)
                with contextlib.suppress(KeyboardInterrupt):
                    optimizer.step()
                channel.take = take
            session.consensus_distance()  # rank 0 has had fewer rounds
            outcomes = session.stats().outcomes
            group.barrier()
        return outcomes

    for outcomes in run_ranks(2, rank_main):
        assert outcomes["delivered"] >= 9
        assert outcomes["void"] <= 3  # a round that one rank was late for, an interrupt


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_step_that_fails_with_its_gradients_mixed_breaks_no_later_round():
    """The update itself raises, the batch is dropped, training goes on."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model, optimizer, process_group=group, transport=link, payload="gradients+weights"
        ) as session:
            take = session._rounds.channel.take
            for step in range(10):
                backward(model, rank, step)
                if rank == 0 and step in (2, 3, 4):
                    session._rounds.channel.take = _interrupt
                with contextlib.suppress(KeyboardInterrupt):
                    optimizer.step()
                session._rounds.channel.take = take
            session.consensus_distance()
            outcomes = session.stats().outcomes
            group.barrier()
        return outcomes

    for outcomes in run_ranks(2, rank_main):
        assert outcomes["delivered"] >= 10


def test_an_average_that_fails_leaves_a_replica_to_train_on():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            set_gradients(model, rank, 0)
            optimizer.step()
            reduce, group.all_reduce_ = group.all_reduce_, _fail
            with pytest.raises(gg.GossipError, match="gone"):
                session.average_()
            group.all_reduce_ = reduce
            set_gradients(model, rank, 1)
            optimizer.step()
            group.barrier()

    run_ranks(2, rank_main)


def test_an_interrupt_while_the_consensus_is_shown_is_undone():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(model, optimizer, process_group=group, transport=link) as session:
            set_gradients(model, rank, 0)
            optimizer.step()
            before = flat(model)
            (section,) = session._sections.weights
            show = section.show

            def half(flats, kept):
                show(flats[:1], kept)
                raise KeyboardInterrupt

            section.show = half
            with contextlib.suppress(KeyboardInterrupt), session.consensus():
                pass
            section.show = show
            assert torch.equal(flat(model), before)
            group.barrier()

    run_ranks(2, rank_main)


def _fail(*_):
    raise gg.GossipError("a rank is gone")


def test_an_interrupted_collective_holds_up_no_round():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model, optimizer, process_group=group, transport=link, mode="sync"
        ) as session:
            if rank == 0:
                gather, group.all_gather_object = group.all_gather_object, _interrupt
                with contextlib.suppress(KeyboardInterrupt):
                    session.consensus_distance()
                group.all_gather_object = gather
            for step in range(20):
                set_gradients(model, rank, step)
                optimizer.step()
            delivered = session.stats().outcomes["delivered"]
            group.barrier()
        return delivered

    assert min(run_ranks(2, rank_main)) >= 18
