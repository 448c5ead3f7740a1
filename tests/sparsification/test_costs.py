"""What costs are measured as: ways that are compared, ranks that begin together, what is kept."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Group
from gossipgrad.compression import SparseFormat
from gossipgrad.sparsification import Replan, _costs, _planner, deal_states
from gossipgrad.sparsification._costs import Costs, measure_costs
from gossipgrad.sparsification._settings import Settings
from support.ranks import run_ranks
from support.replicas import network
from support.sparse import backward_of, train

CPU = torch.device("cpu")
DEFAULT = 1024  # bytes that a group sends to all at once before anything is measured


def settings_of(select="per_group", methods=("sparse", "dense")):
    return Settings(
        density=1.0,
        plan="optimal",
        select=select,
        methods=methods,
        replan=None,
        value_dtype=None,
        momentum_correction=None,
    )


def measured_by(monkeypatch, timed, *, world_size=3, elements=4096):
    """The costs of sparse groups where `timed` says what each trial takes, of every rank."""

    def work(rank, group):
        (costs,) = measure_costs(
            settings_of(methods=("sparse",)),
            group,
            CPU,
            torch.float32,
            elements=elements,
            tensors=2,
            density=1.0,
        )
        return costs, group.at_once_bytes

    monkeypatch.setattr(_costs, "_timed", timed)
    return run_ranks(world_size, work)


def test_messages_go_to_all_at_once_as_far_as_that_is_faster(monkeypatch):
    def timed(trial, group):  # a ring takes 2 ms, all at once 1 us a byte
        return 1e-3, 2e-3 if group.at_once_bytes == 0 else 1e-6 * trial.message_bytes, 0.0

    for costs, left in measured_by(monkeypatch, timed):
        assert costs.elements == (256, 1024, 4096)
        # With a bitmap, a message of 256 values has 1,056 bytes, of 1,024 values 4,224.
        assert costs.communicate_seconds == pytest.approx((1.056e-3, 2e-3, 2e-3))
        assert costs.at_once_bytes == 1056
        assert left == DEFAULT


@pytest.mark.parametrize(
    ("lost", "at_once_bytes", "tries"),
    [
        ({}, 16896, (1, 1, 1)),
        ({1056: 1}, 16896, (2, 1, 1)),
        ({1056: 1, 16896: 1}, 16896, (2, 1, 2)),
        ({1056: 2}, 0, (2, 0, 0)),
        ({4224: 2}, 1056, (1, 2, 0)),
    ],
)
def test_larger_messages_are_given_up_after_a_second_loss(monkeypatch, lost, at_once_bytes, tries):
    tried = Counter()

    def timed(trial, group):
        if group.at_once_bytes == 0:
            return 1e-3, 2e-3, 0.0
        tried[group.rank, trial.message_bytes] += 1
        loses = tried[group.rank, trial.message_bytes] <= lost.get(trial.message_bytes, 0)
        return 1e-3, 3e-3 if loses else 1e-3, 0.0

    for rank, (costs, _) in enumerate(measured_by(monkeypatch, timed)):
        assert costs.at_once_bytes == at_once_bytes
        assert tuple(tried[rank, size] for size in (1056, 4224, 16896)) == tries
        expected = [1e-3 if size <= at_once_bytes else 2e-3 for size in (1056, 4224, 16896)]
        assert costs.communicate_seconds == pytest.approx(expected)


def test_two_ranks_have_one_way_and_dense_messages_none(monkeypatch):
    def timed(trial, group):
        assert group.at_once_bytes == 0
        return 1e-3, 2e-3, 0.0

    for costs, left in measured_by(monkeypatch, timed, world_size=2):
        assert costs.at_once_bytes == 0
        assert left == DEFAULT
    assert Costs("dense", (1, 2), (0.0, 0.0), (0.0, 0.0)).at_once_bytes is None


def test_a_measurement_that_breaks_off_leaves_the_group_as_it_was(monkeypatch):
    def timed(trial, group):
        if group.at_once_bytes == 4224:
            raise KeyboardInterrupt
        return 1e-3, 2e-3 if group.at_once_bytes == 0 else 1e-3, 0.0

    def work(rank, group):
        size = {"elements": 4096, "tensors": 2, "density": 1.0}
        with pytest.raises(KeyboardInterrupt):
            measure_costs(settings_of(), group, CPU, torch.float32, **size)
        return group.at_once_bytes

    monkeypatch.setattr(_costs, "_timed", timed)
    assert run_ranks(3, work) == [DEFAULT] * 3


def costs_at(seen):
    """Costs by which messages go to all at once up to a size that depends on the density."""

    def measured(settings, group, *_, density, **__):
        if group.rank == 0:
            seen.append(density)
        return [
            Costs("sparse", (1, 1000), (1e-9, 1e-9), (1e-9, density), round(5000 * density)),
            Costs("dense", (1, 1000), (1e-9, 1e-9), (1e-9, 0.5)),
        ]

    return measured


def test_messages_go_by_the_costs_that_hold(monkeypatch):
    seen = []
    monkeypatch.setattr(_planner, "measure_costs", costs_at(seen))

    def work(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told = []
        with gg.sparsify(
            model,
            optimizer,
            process_group=group,
            density=lambda step: 0.2 if 10 <= step < 15 else 0.01,
            replan=Replan(),
        ) as session:
            for step in range(20):
                backward_of(model, rank, step)
                optimizer.step()
                told.append(session.group.at_once_bytes)
            session.group.barrier()
        return told

    for told in run_ranks(2, work):
        assert [told[step] for step in (5, 6, 9, 10, 14, 19)] == [DEFAULT, 50, 50, 1000, 1000, 50]
    assert seen == [0.01, 0.2]  # what comes back is not measured again


def test_a_resumed_session_sends_as_the_one_before(monkeypatch):
    monkeypatch.setattr(_planner, "measure_costs", costs_at([]))
    settings = {"density": 0.01, "replan": None}
    states = [state for _, state in train(2, 9, look=lambda s: s.state_dict(), **settings)]
    session = states[1]["session"]
    planner = session["planner"] | {"at_once_bytes": 100}
    other = states[1] | {"session": session | {"planner": planner}}

    def resumed(states):
        def work(rank, group):
            model = network(1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with gg.sparsify(model, optimizer, process_group=group, **settings) as session:
                session.load_state_dict(states[rank])
                told = session.group.at_once_bytes
                backward_of(model, rank, 9)
                optimizer.step()
                session.group.barrier()
            return told

        return run_ranks(2, work)

    assert resumed(states) == [50, 50]
    with pytest.raises(ValueError, match="ranks 0 and 1 are not of the same plan"):
        resumed([states[0], other])
    with pytest.raises(ValueError, match="ranks 0 and 1 are not of the same plan"):
        deal_states([states[0], other], 3)


class Uneven(Group):
    """This rank, and another that waits for it in barriers; it looks every 40th of its wait."""

    def __init__(self, clock, others):
        self.clock, self.others = clock, others

    def barrier(self):
        arrived = max(self.clock.now, self.others)
        self.others = arrived + (arrived - self.others) / 40
        self.clock.now = arrived + (arrived - self.clock.now) / 40


def test_a_collective_is_timed_from_when_all_have_begun(monkeypatch):
    """Selection takes 400 ms longer here than on the other rank, which looks 10 ms late then."""
    clock = SimpleNamespace(now=0.0)

    class Made:
        bytes_sent = 100
        timing = SimpleNamespace(gather_seconds=1.0)

        def __init__(self, *_, **__):
            pass

        def use_counts(self, counts):
            pass

        def begin(self, grads):
            clock.now += 0.4

        def exchange(self, group):
            clock.now = max(clock.now, group.others) + 1e-3

        def accept(self):
            pass

    monkeypatch.setattr(_costs, "MergedGroup", Made)
    monkeypatch.setattr(_costs, "perf_counter", lambda: clock.now)
    trial = _costs._Trial("sparse", 8, 1, settings_of(), 2, CPU, torch.float32, 1.0)
    select, gather, add = trial.run(Uneven(clock, 0.0))
    assert select == pytest.approx(0.4)
    assert 1e-3 <= gather < 1.3e-3
    assert add == 0


@pytest.mark.parametrize(
    ("seconds", "sustained"),
    [
        ((1.0, 1.5, 9.0, 17.0), (1.0, 4.0, 9.0, 17.0)),  # 200 elements at 2 s a hundred
        ((5.0, 5.0, 6.0, 5.0), (5.0, 5.0, 6.0, 5.0)),  # no slope: all of it is start-up
        ((1.0, 1.0, 1.0, 8.0), (1.0, 2.0, 4.0, 8.0)),  # noise raises none above the last
    ],
)
def test_short_messages_count_no_less_than_at_the_rate_of_the_longest(seconds, sustained):
    assert _costs._sustained((50, 200, 400, 800), seconds) == pytest.approx(sustained)


def test_costs_of_own_coordinates_a_tensor_are_those_of_as_many_tensors(monkeypatch):
    seen = []

    def timed(trial, group):
        if group.rank == 0:
            seen.append((len(trial._made.sizes), sum(trial._made.counts)))
        return 1e-3, 1e-3, 0.0

    def work(rank, group):
        size = {"elements": 1024, "tensors": 8, "density": 1e-3}
        measure_costs(settings_of(select), group, CPU, torch.float32, **size)

    monkeypatch.setattr(_costs, "_timed", timed)
    select = "per_tensor"
    run_ranks(2, work)
    assert seen == [(2, 2), (8, 8), (2, 0), (8, 0)]
    seen.clear()
    select = "per_group"
    run_ranks(2, work)
    assert seen == [(1, 1), (1, 1), (1, 0), (1, 0)]


def test_another_density_asks_the_network_only_for_messages_larger_than_any_before(monkeypatch):
    """A collective takes 1 us a byte; selection and sum what they take at each density."""
    density, asked = 0.0, Counter()

    def timed(trial, group):
        asked[group.rank] += 1
        return 1e-3 * density, 1e-6 * trial.message_bytes, 1e-3 * density

    def measured(group, known):
        asked[group.rank] = 0
        found = measure_costs(
            settings_of(),
            group,
            CPU,
            torch.float32,
            elements=10_000,
            tensors=2,
            density=density,
            known=known,
        )
        return found, asked[group.rank]

    monkeypatch.setattr(_costs, "_timed", timed)
    monkeypatch.setattr(_costs, "_rehearsed", lambda trial: [1e-3 * density] * 2)
    density = 0.5
    known = run_ranks(2, lambda rank, group: measured(group, []))
    assert known[0] == known[1]
    sizes = (256, 1024, 4096, 10_000)
    (sparse, dense), times = known[0]
    assert (sparse.elements, times) == (sizes, 2 * len(sizes))
    density = 0.1
    (again, same), times = run_ranks(2, lambda rank, group: measured(group, known[rank][0]))[0]
    assert (same, times) == (dense, 0)
    assert again.message_bytes[-1] < sparse.message_bytes[-1]
    expected = [
        max(b, sparse.message_bytes[0]) * 1e-6 + 1e-3 * density for b in again.message_bytes
    ]
    assert again.communicate_seconds == pytest.approx(expected, rel=1e-3)
    assert again.select_seconds == (1e-3 * density,) * len(sizes)
    density = 1.0  # larger messages than known
    (_, same), times = run_ranks(2, lambda rank, group: measured(group, known[rank][0]))[0]
    assert (same, times) == (dense, len(sizes))


def test_costs_at_a_lower_density_go_past_the_size_that_ended_the_measurement(monkeypatch):
    """A slow network ended it at 4,096 elements; of a thousandth, 2^18 have a shorter message."""
    sizes = (256, 1024, 4096)
    sent = tuple(SparseFormat(size, size // 4).size_bytes for size in sizes)
    seconds = tuple(1.5e-3 + 12e-6 * each for each in sent)
    known = [Costs("sparse", sizes, (1e-6,) * 3, seconds, 0, sent, seconds)]
    monkeypatch.setattr(_costs, "_rehearsed", lambda trial: [1e-6, 0.0])

    def work(rank, group):
        size = {"elements": 1 << 20, "tensors": 1, "density": 0.001}
        settings = settings_of(methods=("sparse",))
        return measure_costs(settings, group, CPU, torch.float32, known=known, **size)

    ((costs,), _) = run_ranks(2, work)
    assert costs.elements[-1] == 1 << 18
    assert costs.message_bytes[-1] <= sent[-1]
    wanted = 1.5e-3 + 12e-6 * SparseFormat(1 << 20, (1 << 20) // 1000).size_bytes
    assert costs.method().communicate_seconds(1 << 20) == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize("select", ["per_group", "per_tensor"])
def test_a_rehearsal_adds_up_as_an_exchange_of_equal_ranks(select):
    trial = _costs._Trial("sparse", 512, 4, settings_of(select), 3, CPU, torch.float32, 0.1)
    assert min(trial.rehearse()) > 0
    made, grads = trial._made, trial._grads
    made.begin([2 * grad for grad in grads])
    made.rehearse()
    sent = made.total.clone()
    assert 0 < sent.count_nonzero() <= 52
    carried = 3 * torch.cat(grads) - made.residual  # of both rounds, less the first's message
    assert (carried - sent)[sent != 0].abs().max() < 4
    assert made.residual[sent != 0].eq(0).all()
