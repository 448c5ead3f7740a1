"""A step or a collective that is interrupted or fails: nothing trained is lost, no round is."""

import contextlib
import gc
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Header, Hub
from support.links import ours, until_none_but
from support.ranks import run_ranks
from support.replicas import (
    backward,
    flat,
    network,
    set_gradients,
    sgd,
    transport_by_name,
)
from support.waiting import until


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


def _interrupt(*_, **__):
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
            (bucket,) = session.flows[0].buckets
            show = bucket.show

            def half(flat, kept):
                show(flat, kept)
                raise KeyboardInterrupt

            bucket.show = half
            with contextlib.suppress(KeyboardInterrupt), session.consensus():
                pass
            bucket.show = show
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
            group.barrier()  # as long as it is in there, rounds with it are void
            for step in range(20):
                set_gradients(model, rank, step)
                optimizer.step()
            delivered = session.stats().outcomes["delivered"]
            group.barrier()
        return delivered

    assert min(run_ranks(2, rank_main)) >= 18


@pytest.mark.parametrize("where", ["in backward", "after backward"])
def test_a_batch_that_is_dropped_costs_no_later_step(where):
    """Out of memory, or a bad batch: zero_grad() and step() go on; no partner waits."""
    link = transport_by_name("in-process", 2)

    def fail(gradient):
        raise MemoryError

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        longest = 0.0
        with gg.gossip(
            model, optimizer, process_group=group, transport=link, payload="gradients+weights"
        ) as session:
            for step in range(6):
                start = time.perf_counter()
                dropped = rank == 0 and step == 2
                handle = model[0].weight.register_hook(fail) if dropped else None
                if handle is None or where == "in backward":
                    with contextlib.suppress(MemoryError):
                        backward(model, rank, step)
                else:
                    handle.remove()
                    backward(model, rank, step)
                if handle is not None:
                    handle.remove()
                    optimizer.zero_grad()
                optimizer.step()
                longest = max(longest, time.perf_counter() - start)
            outcomes = session.stats().outcomes
            group.barrier()
        return outcomes, longest

    for outcomes, longest in run_ranks(2, rank_main):
        assert outcomes["late"] == outcomes["void"] == 0
        assert longest < 10.0


def test_an_update_that_fails_keeps_no_partner_waiting():
    """Of eight ranks one fails after its gradients met: the partner of its weights is told."""
    link = transport_by_name("in-process", 8)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        fails, longest = False, 0.0

        def fail(*_):
            if fails:
                raise MemoryError

        with gg.gossip(
            model, optimizer, process_group=group, transport=link, payload="gradients+weights"
        ):
            optimizer.register_step_pre_hook(fail)
            for step in range(9):
                start = time.perf_counter()
                backward(model, rank, step)
                fails = rank == 0 and step in (2, 4, 5)
                with contextlib.suppress(MemoryError):
                    optimizer.step()
                longest = max(longest, time.perf_counter() - start)
            group.barrier()
        return longest

    assert max(run_ranks(8, rank_main)) < 10.0


def test_no_weights_are_mixed_while_gradients_are_made():
    """Late weights are there, and no snapshot for the gradients is free: backward goes on."""
    hub, held, waited = Hub(2), [], threading.Event()

    class Slow:
        """Never lets go of the gradients it was given, as a slow link does for a while."""

        def __init__(self, group):
            self._inner = hub.transport(group.rank)
            self.rank, self.world_size = self._inner.rank, self._inner.world_size
            self.gradients = set()

        def send(self, peer, header, payload=None):
            ticket = self._inner.send(peer, header, payload)
            if payload is not None and Header.unpack(header).bucket in self.gradients:
                ticket = SimpleNamespace(done=False, wait=lambda timeout_seconds: ticket.done)
                held.append(ticket)
            return ticket

        def __getattr__(self, name):
            return getattr(self._inner, name)

    def rank_main(rank, group):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = []

        def transport(group):
            made.append(Slow(group))
            return made[0]

        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=transport,
            payload="gradients+weights",
            mode=gg.Overlap(deadline_seconds=0.3),
        ) as session:
            gradients = next(flow for flow in session.flows if flow.name == "gradients")
            made[0].gradients = {b.number for b in gradients.buckets} if rank == 0 else set()
            group.barrier()
            for step in range(4):
                backward(model, rank, step)
                if rank == 1 and step == 1:
                    session.synchronize()
                    assert waited.wait(60)  # its weights come late to rank 0
                optimizer.step()
                if rank == 0 and step == 1:
                    waited.set()
            outcomes = session.stats().outcomes
            for ticket in held:
                ticket.done = True
        return outcomes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, _ = run_ranks(2, rank_main)
    assert first["late"] > 0
    assert first["void"] > 0


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_closure_with_gradients_in_the_payload_is_refused(as_keyword):
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))

        def closure():
            return backward(model, rank, 0)

        with gg.gossip(
            model, optimizer, process_group=group, transport=link, payload="gradients+weights"
        ):
            with pytest.raises(gg.GossipError, match=r"step\(closure\) computes gradients after"):
                optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
            optimizer.step(None)
            group.barrier()

    run_ranks(2, rank_main)


def test_a_collected_session_leaves_no_hook_on_the_gradients():
    links = [transport_by_name("in-process", 2) for _ in range(2)]

    def rank_main(rank, group):
        model = network()
        for link in links:
            optimizer = sgd(list(model.parameters()))
            gg.gossip(
                model, optimizer, process_group=group, transport=link, payload="gradients+weights"
            )
            backward(model, rank, 0)
            optimizer.step()
            group.barrier()
            del optimizer
            # While another thread collects, a call returns at once and has done nothing.
            until(lambda: gc.collect() >= 0 and not hooks(model))

    def hooks(model):
        return [p for p in model.parameters() if p._post_accumulate_grad_hooks]

    run_ranks(2, rank_main)


def test_an_interrupted_close_ends_the_membership_all_the_same():
    """Else the heartbeats of a rank that has gone would hold its place."""
    before = {*ours()}
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        session = gg.gossip(model, optimizer, process_group=group, transport=link)
        set_gradients(model, rank, 0)
        optimizer.step()
        group.barrier()
        if rank == 0:
            session._rounds.drain = _interrupt
        with contextlib.suppress(KeyboardInterrupt):
            session.close()
        session._rounds.channel.close(0.0)
        return group.broken

    assert all(run_ranks(2, rank_main))
    until_none_but(before)
