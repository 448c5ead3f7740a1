"""The comparison on shaped links: its replay, its book-keeping, and a cell of it on loopback."""

import json
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.network import _replay
from benchmarks.network._cells import Cells, marks_of, measure_group
from benchmarks.network._contestants import BARE, CONTESTANTS, Surroundings
from benchmarks.network._grid import FULL, QUICK, Budget, Grid
from benchmarks.network._laboratory import Laboratory, Loopback, WorkerError
from benchmarks.network._page import draw
from benchmarks.network._replay import Device, ReplayModel, ReplayOptimizer, shape_of
from benchmarks.network._table import print_table
from benchmarks.network._verdict import shortfalls
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

    monkeypatch.setattr(_replay.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(_replay.time, "sleep", sleep)
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


BUDGET = Budget(profile="resnet50", time_factor=0.05, size_factor=0.0005)
GRID = Grid(world_sizes=(2,), rates=(1e8, 1e9), budgets=(BUDGET,), blocks=2, block_seconds=0.01)


class FakeLaboratory:
    """Workers that answer at once; "ddp" breaks them, and 1 Gbit/s is too much for them."""

    def __init__(self):
        self.log = []
        self.cpu_busy = 0.2

    def join(self, world_size):
        self.log.append(f"join {world_size}")

    def set_rate(self, rate):
        if rate == 1e9:
            raise RuntimeError("more than it carries")

    def make(self, name, profile, size_factor):
        return 4 * sum(row[1] for row in profile["parameters"])

    def run(self, name, warm_up, steps, timeout_seconds):
        if name == "ddp":
            raise WorkerError("on rank 1: it broke")
        return {
            "seconds": 0.5 if name == "exchange" else 0.02,
            "late_share": 0.0,
            "uneven_share": 0.0,
            "cpu_seconds": 0.01,
            "cpu_busy": 0.8 if name == "gossip" else self.cpu_busy,
            "bytes_on_wire": 1_000_000,
            "clocks": {"waiting": 0.001} if name == "gossip" else {},
        }

    def leave(self):
        self.log.append("leave")

    def restart(self):
        self.log.append("restart")


def test_failures_refusals_and_what_is_there_already(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, laboratory, said = tmp_path / "network.json", FakeLaboratory(), []
    names = ("exchange", "no communication", "gossip", "ddp")
    measure_group(laboratory, 2, BUDGET, GRID, Cells(path), names, said.append)
    assert laboratory.log == ["join 2", "restart", "join 2", "leave"]
    assert said[0] == "ddp failed: on rank 1: it broke"
    assert said[1] == "p = 2, resnet50: 3 contestants made in 0 s"
    assert said[3] == "p = 2, 1000 Mbit/s: more than it carries"
    written = json.loads(path.read_text())
    cells = {(c["contestant"], c["rate_bits_per_second"]): c for c in written}
    assert len(cells) == 8
    assert len({frozenset(cell) for cell in written}) == 1  # the same keys in each
    failed, refused = cells["ddp", 1e8], cells["gossip", 1e9]
    assert (failed["error"], refused["error"]) == ("on rank 1: it broke", "more than it carries")
    for cell in (failed, refused):
        assert cell["marked"]
        assert cell["step_seconds_median"] is None
    gossip, alone = cells["gossip", 1e8], cells["no communication", 1e8]
    assert gossip["marks"] == ["CPUs 80 % busy"]
    assert not alone["marked"]
    assert gossip["exchange_bound_seconds"] == gossip["bare_seconds"] == 0.5
    assert gossip["bound_seconds"] == 0.08  # bytes / rate
    assert alone["exchange_bound_seconds"] == alone["compute_seconds"]
    assert alone["efficiency"] == pytest.approx(0.7298, abs=1e-3)
    assert cells["bare exchange", 1e8]["compute_seconds"] == 0
    print_table(written)
    out = capsys.readouterr().out
    assert "20 (20..20) 73 % 0.04x*" in out
    assert "it broke" in out
    assert draw(written, tmp_path / "page.png").stat().st_size > 10_000

    measure_group(laboratory, 2, BUDGET, GRID, Cells(path), names)  # nothing is left to do
    assert laboratory.log == ["join 2", "restart", "join 2", "leave"]
    busy = FakeLaboratory()
    busy.cpu_busy = 0.9
    measure_group(busy, 2, BUDGET, GRID, Cells(tmp_path / "busy.json"), names)
    assert busy.log == ["join 2", "restart", "join 2", "leave"]  # once, though it was too busy
    measure_group(laboratory, 2, BUDGET, GRID, Cells(tmp_path / "busy.json"), names)
    assert laboratory.log[4:] == ["join 2", "restart", "join 2", "leave"]  # and anew
    more = replace(GRID, blocks=3, rates=(1e8,))
    measure_group(laboratory, 2, BUDGET, more, Cells(path), ("gossip",), said.append)
    assert laboratory.log[-2:] == ["join 2", "leave"]
    after = json.loads(path.read_text())
    assert [len(c["step_seconds"]) for c in after if c["rate_bits_per_second"] == 1e8] == [3]


class FakeNetwork:
    """Refuses rates that add up to more than 16 Gbit/s, as the real one does."""

    def __init__(self, hosts):
        self.rates = [1e8] * hosts

    def set_rate(self, host, rate):
        if sum(self.rates) - self.rates[host] + rate > 16e9:
            raise RuntimeError("too much")
        self.rates[host] = rate


def test_rates_that_are_refused_leave_the_old_ones():
    laboratory = object.__new__(Laboratory)
    network = laboratory.network = FakeNetwork(16)
    laboratory._hosts, laboratory._joined, laboratory._rates = 16, 4, list(network.rates)
    laboratory.set_rate(None)
    assert network.rates == [1e9] * 16
    laboratory.set_rate(3e9)  # the others make room first
    assert network.rates == [3e9] * 4 + [1e6] * 12
    with pytest.raises(RuntimeError, match="too much"):
        laboratory.set_rate(1e10)
    assert network.rates == [3e9] * 4 + [1e6] * 12
    laboratory.set_rate(None)
    assert network.rates == [1e9] * 16


@pytest.mark.process
def test_a_cell_of_two_processes_on_loopback(tmp_path):
    path = tmp_path / "network.json"
    grid = replace(GRID, rates=(1e8,))
    names = ("exchange", "no communication", "gossip", "ddp")
    with Laboratory(Loopback(), 2) as laboratory:
        measure_group(laboratory, 2, BUDGET, grid, Cells(path), names, str)
        laboratory.join(2)
        with pytest.raises(WorkerError, match=r"^on rank \d: KeyError: 'nobody'"):
            laboratory.make("nobody", PROFILE.to_json(), 1.0)
    cells = {cell["contestant"]: cell for cell in json.loads(path.read_text())}
    assert list(cells) == ["no communication", "gossip", "ddp", "bare exchange"]
    for name in ("no communication", "gossip", "ddp"):
        cell = cells[name]
        assert cell["error"] is None
        assert cell["compute_seconds"] == pytest.approx(0.0146, rel=0.01)
        assert cell["step_seconds_median"] >= cell["compute_seconds"] * 0.999
        assert cell["cpu_seconds"] > 0
    assert cells["gossip"]["clocks"].keys() == {"waiting", "mixing"}
    assert cells["gossip"]["bare_seconds"] == cells["bare exchange"]["step_seconds_median"] > 0


def test_marks():
    calm = {"cpu_busy": 0.5, "late_share": 0.01, "uneven_share": 0.01}
    assert marks_of(calm) == []
    assert marks_of(calm | {"cpu_busy": 0.71}) == ["CPUs 71 % busy"]
    assert marks_of(calm | {"late_share": 0.06}) == ["emulated compute 6 % late"]
    assert marks_of(calm | {"uneven_share": 0.3}) == ["the last rank began 30 % late"]


def test_goals_that_are_missed_are_told():
    place = {
        "profile": "resnet50",
        "time_factor": 1.0,
        "size_factor": 0.1,
        "world_size": 4,
        "rate_bits_per_second": 1e8,
        "compute_seconds": 0.4,
        "marked": False,
    }

    def cell(name, step, bare=0.1, **more):
        return place | {
            "contestant": name,
            "step_seconds_median": step,
            "bare_seconds": bare,
            "exchange_bound_seconds": max(0.4, bare),
            "efficiency": 0.4 / step,
            "mixes_every_step": name != "local SGD, period 8",
            **more,
        }

    fine = [cell("gossip", 0.405), cell("ddp", 0.5), cell("local SGD, period 8", 0.402)]
    assert shortfalls(fine) == ["3 of 3 goals met in 3 cells that are not marked"]
    assert shortfalls([cell("gossip", 9.0, marked=True)])[0].startswith("0 of 0 goals")
    slow = [cell("gossip", 0.43), cell("ddp", 0.42), cell("agd", 0.41, marked=True)]
    assert shortfalls(slow) == [
        "0 of 3 goals met in 2 cells that are not marked",
        "missed: gossip, resnet50, p = 4, 100 Mbit/s: 1.075 of the bound",
        "missed: gossip, resnet50, p = 4, 100 Mbit/s: efficiency 0.930",
        "missed: gossip, resnet50, p = 4, 100 Mbit/s: 430.0 ms, ddp 420.0 ms",
    ]
    exposed = [cell("gossip, bf16 wire", 0.62, bare=0.6)]  # no efficiency is asked for
    assert shortfalls(exposed)[0].startswith("1 of 1")


def test_every_bound_has_a_bare_transfer():
    assert {kind.bare for kind in CONTESTANTS.values()} - {None} == set(BARE)
