"""Gossip of the largest differences: as the reference says; the mean is kept; links mend."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Outcome
from gossipgrad.compression import SparseFormat
from gossipgrad.decentralized._difference_section import DifferenceSection
from gossipgrad.decentralized._link_copies import LinkCopies
from gossipgrad.decentralized._reference_differences import DifferenceReference
from gossipgrad.decentralized._rounds import Rounds
from gossipgrad.decentralized._section import Meeting
from gossipgrad.decentralized._tensors import weight_entries
from gossipgrad.topology import Peers, by_name, complete, hypercube
from support.deaths import run_mortals
from support.ranks import run_ranks
from support.replicas import (
    adam,
    assert_same_bits,
    flat,
    set_gradients,
    sgd,
    train,
    transport_by_name,
)
from support.waiting import until

STEPS = 14


def network(seed=0, dtype=torch.float32):
    """Of two messages of 200 bytes or more."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def both(world_size, schedule, compress, *, optimizer=sgd, dtype=torch.float32, **settings):
    """What a session and the reference hold after some steps."""
    ours = train(
        world_size,
        STEPS,
        optimizer=optimizer,
        dtype=dtype,
        gradients=set_gradients,
        make=network,
        topology=schedule,
        bucket_bytes=200,
        compress=compress,
        **settings,
    )
    models = [network(dtype=dtype) for _ in range(world_size)]
    narrow = dtype.itemsize < 4 or "wire_dtype" in settings
    reference = DifferenceReference(
        models,
        [optimizer(list(model.parameters())) for model in models],
        schedule,
        compress.density,
        compress.step,
        groups=[[3, 2, 1, 0]] if narrow else [[3, 2], [1, 0]],
        **settings,
    )
    for step in range(STEPS):
        for rank, model in enumerate(models):
            set_gradients(model, rank, step)
        reference.step()
    return ours, reference.w


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("world_size", [2, 5])
def test_a_session_does_what_the_reference_says(world_size, mode):
    assert_same_bits(*both(world_size, by_name("ring", world_size), gg.TopK(0.1), mode=mode))


@pytest.mark.parametrize(
    "schedule", [complete(4), hypercube(4, rotate=False)], ids=["complete", "hypercube"]
)
def test_on_other_schedules_with_fixed_partners(schedule):
    assert_same_bits(*both(4, schedule, gg.TopK(0.2, consensus_step=0.3), optimizer=adam))


def test_on_a_narrow_wire():
    assert_same_bits(*both(4, by_name("ring", 4), gg.TopK(0.1), wire_dtype=torch.bfloat16))


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_narrow_parameters_with_their_residuals(mode):
    ours = both(4, by_name("ring", 4), gg.TopK(0.1), mode=mode, dtype=torch.bfloat16)
    assert_same_bits(*ours)


def pull_apart(session, model, rank):
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * rank + place)))
    session.accept_changes()


def rest(model, optimizer, steps):
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()


def on_a_ring(world_size, function, **settings):
    """What `function(rank, session, model, optimizer)` returns on ranks that make no updates."""
    link = transport_by_name("in-process", world_size)

    def rank_main(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gg.gossip(
            model, optimizer, topology="ring", process_group=group, transport=link, **settings
        ) as session:
            found = function(rank, session, model, optimizer)
            group.barrier()
        return found

    return run_ranks(world_size, rank_main)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_the_mean_is_kept_and_replicas_meet(mode):
    """Also behind an average, from which on all links begin anew."""

    def main(rank, session, model, optimizer):
        found = []
        for _ in range(2):
            session.average_()
            pull_apart(session, model, rank)
            before = flat(model).double()
            first = session.consensus_distance()
            rest(model, optimizer, 50)
            last = session.consensus_distance()
            with session.consensus():
                found.append((before, flat(model).double(), first, last))
        return found

    settings = {"mode": mode, "compress": gg.TopK(0.25), "bucket_bytes": 200}
    for found in zip(*on_a_ring(3, main, **settings), strict=True):
        before = torch.stack([each[0] for each in found])
        for _, mean, first, last in found:
            assert (mean - before.mean(0)).abs().sum() <= 2e-6 * before.abs().sum()
            assert last < first / 20


def test_what_it_sends_and_keeps():
    """Of two neighbours four copies of all weights; a message is values, indices and a tag."""

    def main(rank, session, model, optimizer):
        rest(model, optimizer, 6)
        return session.stats()

    (stats, *_) = on_a_ring(4, main, mode="sync", compress=gg.TopK(0.1))
    elements = sum(p.numel() for p in network().parameters())
    message = 8 + SparseFormat(elements, round(0.1 * elements)).size_bytes
    assert stats.bytes_sent == 6 * message
    assert stats.extra_memory_bytes == 2 * 2 * 4 * elements + message


FORM = SparseFormat(10, 4)


def message(at, values):
    packed = torch.empty(FORM.size_bytes, dtype=torch.uint8)
    FORM.pack(torch.tensor(at), torch.tensor(values), packed)
    return packed


def exchange(a, b, of_a, of_b):
    """Both ends of a link exchange their next slices of two vectors; the difference at a."""
    packed = []
    for end, vector in ((a, of_a), (b, of_b)):
        at = end.next_slice(FORM.count)
        packed.append(message(at.tolist(), (vector - end.mine)[at].tolist()))
    d, opposite = a.difference_after(FORM, *packed), b.difference_after(FORM, *packed[::-1])
    assert torch.equal(d, -opposite)
    a.count(FORM, *packed)
    b.count(FORM, *packed[::-1])
    return d


def test_a_new_link_is_sent_the_weights_whole_and_mixes_what_was_sent():
    of_a, of_b = torch.arange(10.0), torch.full((10,), 2.0)
    a, b = (LinkCopies(10, torch.float32, torch.device("cpu")) for _ in range(2))
    for known in (4, 8, 10):
        d = exchange(a, b, of_a, of_b)
        assert torch.equal(d[:known], (of_b - of_a)[:known])
        assert not d[known:].any()
        assert a.tag == b.tag
    assert a.next_slice(4) is None
    assert torch.equal(a.mine, of_a)
    assert torch.equal(b.mine, a.theirs)


def test_copies_that_have_counted_unlike_exchanges_have_unlike_tags():
    ends = [LinkCopies(10, torch.float32, torch.device("cpu")) for _ in range(3)]
    x, y = message([0, 1, 2, 3], [1.0] * 4), message([0, 1, 2, 3], [2.0] * 4)
    for end in ends:
        end.become(torch.ones(10), occasion=3)
    ends[0].count(FORM, x, y)
    ends[1].count(FORM, y, x)
    assert ends[0].tag == ends[1].tag
    ends[1].count(FORM, x, y)
    ends[2].count(FORM, x, x)
    assert len({end.tag for end in ends}) == 3


def test_a_link_one_end_of_which_missed_an_exchange_begins_anew(caplog):
    """As after a connection that broke one way; from then on the mean is kept again."""

    def main(rank, session, model, optimizer):
        pull_apart(session, model, rank)
        rest(model, optimizer, 3)
        if rank == 0:
            copies = session._sections.weights[0]._links[1][0]
            copies.mine.add_(1.0)
            copies.tag ^= 2
        before = flat(model).double()
        rest(model, optimizer, 60)
        return before, flat(model).double()

    (a, c), (b, d) = on_a_ring(2, main, mode="sync", compress=gg.TopK(0.25))
    assert (a + b - c - d).abs().max() < 1e-5
    assert (c - d).norm() < (a - b).norm() / 20
    assert "begins anew, and is sent the weights whole: its ends had not counted" in caplog.text


class End:
    """One end of a link, whose exchanges come and are mixed when a test says."""

    def __init__(self, rank):
        self.model = network(seed=rank)
        self.section = DifferenceSection(
            weight_entries(dict(self.model.named_parameters())),
            first_bucket=0,
            bucket_bytes=1 << 20,
            wire_dtype=None,
            snapshots=4,
            largest=gg.TopK(0.25),
        )
        self._peers = Peers(send_to=1 - rank, recv_from=1 - rank)
        self.sent, self.deltas = {}, {}

    def fill(self, round):
        snapshot = self.section.pool.acquire(lambda: None, 0.0)
        self.section.fill(snapshot, 0, Meeting(round, self._peers))
        self.sent[round] = snapshot.flats[0].clone()
        self.section.pool.release(snapshot)

    def receive(self, round, other):
        if round not in self.deltas:
            received, meeting = other.sent[round].clone(), Meeting(round, self._peers)
            self.deltas[round] = self.section.receive(
                0, received, self.sent[round], meeting, keep=False, taken=False
            )

    def mix(self, round, other):
        self.receive(round, other)
        self.section.mix(0, self.deltas[round], 0.5 * self.section.share)


@pytest.mark.parametrize(("late", "taken_early"), [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_late_exchanges_count_at_both_ends_or_at_neither(late, taken_early, caplog):
    """One end takes in the next messages before it has mixed the first, the other one by one."""
    ends = a, b = End(0), End(1)

    def exchange(round):
        for end in ends:
            end.fill(round)
        a.mix(round, b)
        b.mix(round, a)

    for round in range(8):
        exchange(round)
    before = (flat(a.model) + flat(b.model)).double()
    rounds = range(8, 8 + late)
    for end in ends:
        for round in rounds:
            end.fill(round)
    for round in [*rounds][:taken_early]:
        a.receive(round, b)
    for round in rounds:
        a.mix(round, b)
        b.mix(round, a)
        after = (flat(a.model) + flat(b.model)).double()
        assert (after - before).abs().max() < 1e-6
    assert caplog.text.count("was filled before an earlier exchange of the link had") == 2 * (
        late - 1
    )
    apart = (flat(a.model) - flat(b.model)).norm()
    for round in range(20, 80):
        exchange(round)
    assert (flat(a.model) + flat(b.model) - before).abs().max() < 1e-5
    assert (flat(a.model) - flat(b.model)).norm() < apart / 20


def test_the_exchanges_of_a_link_count_in_the_order_of_its_rounds(monkeypatch):
    """One that is late, and comes before the wait for the next is over, is mixed before that."""
    real, came = Rounds.take, []

    def take(self, transfer, bucket, deadline):
        if self.channel.rank == 0 and transfer.round == 5 and not came:
            # Come, but not seen to have: while it is open no other is posted.
            until(lambda: self.channel.poll() or not transfer.exchanges[bucket].open)
            return Outcome.LATE
        outcome = real(self, transfer, bucket, deadline)
        if self.channel.rank == 0 and transfer.round == 6:
            came.append(outcome)
        return outcome

    def main(rank, session, model, optimizer):
        pull_apart(session, model, rank)
        rest(model, optimizer, 5)
        before = flat(model).double()
        rest(model, optimizer, 30)
        return before, flat(model).double(), [round for round, _ in session._rounds.mixed]

    monkeypatch.setattr(Rounds, "take", take)
    (a, c, mixed), (b, d, _) = on_a_ring(2, main, mode="sync", compress=gg.TopK(0.25))
    assert came[0] is Outcome.DELIVERED
    assert mixed[:8] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (a + b - c - d).abs().max() < 1e-5


def test_a_ring_closes_over_a_dead_rank():
    """The new link begins with nothing, and the mean of the living is kept."""

    def main(me):
        model = me.session._model
        pull_apart(me.session, model, me.rank)
        me.train(1)
        me.session.group.barrier()
        if me.rank == 3:
            me.die()
        me.train_until(lambda: 3 in me.session._rounds.channel.gone)
        held, first = me.mean().double(), me.session.consensus_distance()
        me.train_without(3)
        me.train(50)
        links = {*me.session._sections.weights[0]._links}
        last = me.session.consensus_distance()
        return held, me.mean().double(), first, last, links

    def still(model, rank, step):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    settings = {"topology": "ring", "compress": gg.TopK(0.3), "gradients": still}
    found = [each for each in run_mortals(4, main, **settings) if each]
    assert len(found) == 3
    for rank, (held, mean, first, last, links) in enumerate(found):
        torch.testing.assert_close(mean, held, rtol=0, atol=1e-5)
        assert last < first / 10
        assert links == {0, 1, 2} - {rank}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"topology": None}, r"'dissemination': the two ends of a link.*SharedMask\(density\)"),
        ({"topology": "matching"}, r"which rotates: each partner costs.*rotate=False"),
        (
            {"topology": "ring", "mode": "stale"},
            r"filled while another is late counts.*Use mode='overlap'",
        ),
        ({"topology": "ring", "mode": "lagged"}, r"sends all weights"),
        ({"topology": "ring", "payload": "weights+state"}, r"Use payload='weights'"),
        ({"compress": "top-k:0.1:2"}, r"consensus_step is 2.0"),
        ({"compress": "top-k"}, r"'top-k:0.01'"),
    ],
)
def test_what_it_does_not_go_with_is_refused(settings, why):
    model = network()
    with pytest.raises(ValueError, match=rf"(?s){why}"):
        gg.gossip(model, sgd(list(model.parameters())), **{"compress": "top-k:0.1", **settings})
