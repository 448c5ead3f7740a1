"""The comparison on shaped links: its replay, its book-keeping, and a cell of it on loopback."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.netlab import NetlabError, _envelope, _record
from benchmarks.network import _hosts, _replay
from benchmarks.network._block import run_block
from benchmarks.network._busy import CpuBusy
from benchmarks.network._contestants import Surroundings
from benchmarks.network._grid import FULL, QUICK
from benchmarks.network._hosts import Shaped
from benchmarks.network._kinds import BARE, CONTESTANTS, PAYLOADS
from benchmarks.network._replay import Device, ReplayModel, ReplayOptimizer, shape_of
from gossipgrad.planning import Profile

PROFILE = Profile(
    name="tiny",
    device="none",
    source="made up",
    batch_size=1,
    forward_seconds=0.01,
    optimizer_seconds=0.005,
    names=("head.weight", "head.bias", "body.weight"),
    elements=(5000, 10, 9000),
    backward_seconds=(0.004, 0.0, 0.016),
)


def test_a_step_takes_the_profiles_time_and_hooks_fire_in_its_order():
    device = Device()
    model = ReplayModel(PROFILE, device)
    optimizer = ReplayOptimizer(model.parameters(), device, PROFILE.optimizer_seconds)
    names = [name for name, _ in model.named_parameters()]
    assert names == ["body.weight", "head.weight", "head.bias"]
    seen = []
    start = time.perf_counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: seen.append((name, time.perf_counter() - start))
        )
    loss = model(torch.zeros(1, requires_grad=True)).sum()
    assert time.perf_counter() - start >= 0.01
    loss.backward()
    optimizer.step()
    assert time.perf_counter() - start >= PROFILE.compute_seconds - 1e-6
    assert {name for name, _ in seen[:2]} == {"head.weight", "head.bias"}
    assert seen[2][0] == "body.weight"
    assert 0.012 <= seen[0][1] < seen[2][1] >= 0.03
    assert device.planned_seconds == pytest.approx(PROFILE.compute_seconds)
    # No gradient is copied on its way.
    grads = [p.grad for p in model.parameters()]
    assert len({grad.data_ptr() for grad in grads if grad is not None}) == 1


def test_shapes_are_nearly_the_profiles_and_mostly_matrices():
    assert shape_of(100) == (100,)
    rows, columns = shape_of(2_359_296)
    assert rows * columns == 2_359_296
    for count in (4096, 5003, 123_457):
        rows, columns = shape_of(count)
        assert count - rows < rows * columns <= count


def test_host_work_delays_the_device_and_late_sleeps_do_not(monkeypatch):
    now = [100.0]
    slept = []

    def sleep(seconds):
        slept.append(round(seconds, 6))
        now[0] += seconds + 0.002  # too long

    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(_replay, "time", clock)  # that of all threads stays as it is
    device = Device()
    device.begin()
    device.run(0.010)  # until 10 ms; it is 12
    device.run(0.010)  # until 20; it is 22
    now[0] += 0.005  # a hook's mixing: 27
    device.run(0.010)  # until 35; it is 37
    device.run(0.0021)  # 0.1 ms left: not slept
    assert slept == [0.01, 0.008, 0.008]
    device.end()
    assert slept[3:] == [0.0001]
    assert now[0] == pytest.approx(100.0391)
    assert device.late_seconds == pytest.approx(0.002)
    assert device.planned_seconds == pytest.approx(0.0321)
    device.begin()  # the host has waited: what was late is not made up for
    device.run(0.010)
    assert slept[4:] == [0.01]


def test_buckets_are_as_many_as_at_full_size():
    surroundings = Surroundings(profile=PROFILE, size_factor=0.1)
    assert surroundings.bucket_bytes(25 << 20) == round(2.5 * (1 << 20))
    assert surroundings.bucket_bytes(1 << 20) == 1 << 18


def test_budgets_are_what_16_workers_can_hold():
    for grid in (QUICK, FULL):
        for budget in grid.budgets:
            assert budget.scaled().size_bytes < 16e6, budget
    assert "resnet50, times by 3, sizes by 0.03: 100 Mbit/s here are 10 Gbit/s" in str(
        QUICK.budgets[0]
    )
    everywhere = {replace(budget, world_sizes=None, rates=None) for budget in QUICK.budgets}
    assert everywhere <= set(FULL.budgets), "the full grid goes on from the quick one"


def test_a_place_that_is_not_carried_is_refused_by_what_is_used_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(_record, "DIRECTORY", tmp_path)
    network = Shaped(16)
    assert network.refusal(4, 4e9) is None
    assert "8 hosts at 10 Gbit/s on average can move 80 Gbit/s" in network.refusal(8, 1e10)
    changed = []
    monkeypatch.setattr(Shaped, "set_rates", lambda self, rates: changed.append(rates))
    monkeypatch.setattr(_hosts, "MOST_BITS_PER_SECOND", 8e9)
    monkeypatch.setattr(_envelope, "MOST_BITS_PER_SECOND", 8e9)
    network.shape(16, None)  # the fastest that this machine carries
    assert changed == [dict.fromkeys(range(16), 5e8)]
    with pytest.raises(NetlabError, match="16 hosts at 1 Gbit/s on average can move 16 Gbit/s"):
        network.shape(16, 1e9)
    assert len(changed) == 1
    # What is not used moves nothing; what others may move is theirs.
    network.shape(4, None)
    assert network._load([1e9] * 16) == 4e9
    _record.allocate(["a"], load=4e9)
    network.shape(16, None)
    assert changed[2:] == [dict.fromkeys(range(16), 2.5e8)]


def test_the_processors_of_others(monkeypatch):
    fields = iter([[0] * 8, [100, 20, 60, 170, 10, 5, 15, 20]])
    monkeypatch.setattr("benchmarks.network._busy._fields", lambda: next(fields))
    busy, others = CpuBusy().shares(0.9)  # of 1.2 s in user mode; 0.2 s were stolen
    assert busy == pytest.approx(220 / 400)
    assert others == pytest.approx(50 / 400)


class Periodic:
    """Counts its steps; of five, the second to fourth are alike."""

    def __init__(self):
        self.device, self.taken, self.skipped = Device(), 0, 0

    def step(self):
        self.taken += 1

    def skip(self):
        skips = 1 <= (self.taken + self.skipped) % 5 < 4
        self.skipped += skips
        return skips

    def clocks(self):
        return {}


def test_steps_that_are_alike_are_run_once_in_a_hurry():
    hurried = Periodic()
    block = run_block(hurried, 0, 10, hurried=True)
    assert len(block.seconds) == len(block.cpu_seconds) == 10
    assert block.steps_run == hurried.taken == 4
    assert block.seconds[0] == block.seconds[3]
    whole = Periodic()
    assert run_block(whole, 1, 9).steps_run == 9
    assert whole.taken == 10


def test_state_is_measured_where_the_grid_says():
    first, gpt2 = QUICK.budgets
    assert set(PAYLOADS) <= set(QUICK.names(8, 1e8, first))
    assert not set(PAYLOADS) & {*QUICK.names(8, 1e9, first), *QUICK.names(8, 1e8, gpt2)}
    assert set(FULL.names(4, 3e8, gpt2)) == {*BARE, *CONTESTANTS}


def test_every_bound_has_a_bare_transfer():
    assert {kind.bare for kind in CONTESTANTS.values()} - {None} == set(BARE)
