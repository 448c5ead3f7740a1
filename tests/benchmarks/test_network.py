"""The comparison on shaped links: its replay, its cells, and a few of them for real."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks._common import RESULTS, CpuBusy, machine_name
from benchmarks.network import Network, _namespaces, _replay
from benchmarks.network._cells import Cells, marks_of, read
from benchmarks.network._contestants import Surroundings
from benchmarks.network._grid import GRIDS, Grid, Place
from benchmarks.network._kinds import ALONE, KINDS
from benchmarks.network._laboratory import Laboratory, WorkerError
from benchmarks.network._measure import measure_grid
from benchmarks.network._replay import Device, ReplayModel, ReplayOptimizer, shape_of
from benchmarks.network._sparse import (
    OPTIMAL,
    RIVALS,
    ReplayedSelection,
    cost_of,
    measure_selection,
    plan_of,
)
from gossipgrad.planning import Plan, Profile

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
PLACE = Place(
    profile="resnet50",
    time_factor=0.05,
    size_factor=0.0005,
    world_size=2,
    rate=1e8,
    names=("bare exchange", ALONE, "gossip", "ddp"),
)
GRID = Grid(places=(PLACE,), blocks=2, block_seconds=0.01)
CURVE = {"elements": [256, 1 << 20], "seconds": [1e-5, 4e-9 * (1 << 20)]}


def test_a_step_takes_the_profiles_time_and_hooks_fire_in_its_order():
    device = Device()
    model = ReplayModel(PROFILE, device)
    optimizer = ReplayOptimizer(model.parameters(), device, PROFILE.optimizer_seconds)
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


def test_shapes_are_nearly_the_profiles_and_mostly_matrices():
    assert shape_of(100) == (100,)
    for count in (4096, 5003, 123_457, 2_359_296):
        rows, columns = shape_of(count)
        assert count - rows < rows * columns <= count


def test_host_work_delays_the_device_and_late_sleeps_do_not(monkeypatch):
    now = [100.0]

    def sleep(seconds):
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
    device.end()
    assert now[0] == pytest.approx(100.0391)
    assert device.late_seconds == pytest.approx(0.002)


def test_grids_are_what_16_workers_can_hold_and_keep_the_proportions_of_full_size():
    for grid in GRIDS.values():
        for place in grid.places:
            scaled, full = place.scaled(), Profile.load(place.profile)
            assert scaled.size_bytes < 20e6, place
            at_full = full.size_bytes / place.full_rate / full.compute_seconds
            here = scaled.size_bytes / place.rate / scaled.compute_seconds
            assert here == pytest.approx(at_full, rel=0.02), place
            bounds = {KINDS[name].bare for name in place.names} - {None}
            assert place.density or bounds <= set(place.names), place
    surroundings = Surroundings(profile=PROFILE, size_factor=0.1)
    assert surroundings.bucket_bytes(25 << 20) == round(2.5 * (1 << 20))


class FakeLaboratory:
    """Workers that answer at once; `errors` are raised by contestant, once each."""

    def __init__(self, **errors):
        self.errors, self.log, self.turns = errors, [], {}
        self.transfer, self.alone, self.others = 0.004, 0.0148, 0.1

    def __getattr__(self, method):
        return lambda *arguments: self.log.append(method)

    def settle(self, name, steps):
        return {"seconds": self.transfer, "memory_bytes": 1000}

    def run(self, name, warm_up, steps, *, spread_seconds, hurried):
        if name in self.errors:
            raise self.errors.pop(name)
        self.turns[name] = warm_up, steps, spread_seconds
        return {
            "seconds": {"bare exchange": 0.5, ALONE: self.alone}.get(name, 0.02),
            "late_share": 0.0,
            "uneven_share": 0.0,
            "cpu_seconds": 0.01,
            "cpu_busy": 0.8 if name == "gossip" else 0.2,
            "cpu_busy_by_others": self.others,
            "bytes_on_wire": 1_000_000,
        }


def measured(laboratory, path, grid=GRID, **options):
    cells = Cells(path, again=options.pop("again", False))
    measure_grid(laboratory, grid, cells, say=lambda _: None, **options)
    return {cell["contestant"]: cell for cell in cells.cells}


def test_a_contestant_that_fails_says_why_and_the_others_have_their_figures(tmp_path):
    laboratory = FakeLaboratory(ddp=WorkerError("it broke"))
    cells = measured(laboratory, tmp_path / "cells.json")
    assert laboratory.log.count("restart") == 1
    assert cells["ddp"]["error"] == "it broke"
    assert cells["ddp"]["marks"]
    gossip, alone = cells["gossip"], cells[ALONE]
    assert gossip["bare_seconds"] == cells["bare exchange"]["step_seconds_median"] == 0.5
    assert gossip["step_seconds"] == [0.02, 0.02]
    assert gossip["marks"] == ["CPUs 80 % busy"]
    assert alone["marks"] == []
    assert gossip["where"].startswith(machine_name())
    assert read(tmp_path / "cells.json") == [*cells.values()]


def test_what_is_missing_is_measured_and_nothing_else(tmp_path):
    path = tmp_path / "cells.json"
    measured(FakeLaboratory(gossip=WorkerError("it broke")), path)
    mended = FakeLaboratory()
    measured(mended, path)  # it failed: once more, with what it is compared with
    assert mended.turns.keys() == {"bare exchange", ALONE, "gossip"}
    nothing = FakeLaboratory()
    measured(nothing, path)
    measured(nothing, path, replace(GRID, blocks=9), is_late=lambda: True)
    assert nothing.log == []
    measured(nothing, path, again=True)
    assert len(nothing.turns) == 4
    held = json.loads(path.read_text())
    held["cells"][0]["where"] = "another machine"
    held["cells"][1]["cpu_busy_by_others"] = 0.5
    path.write_text(json.dumps(held))
    anew = FakeLaboratory()
    measured(anew, path)
    assert {cell["contestant"] for cell in held["cells"][:2]} <= anew.turns.keys()


def test_blocks_are_as_their_transfers_allow(tmp_path):
    hidden, exposed = FakeLaboratory(), FakeLaboratory()
    exposed.transfer = 0.02  # the compute is 0.0146
    for laboratory in (hidden, exposed):
        measured(laboratory, tmp_path / f"{laboratory.transfer}.json")
    assert hidden.turns["gossip"][:2] == (1, 2)
    assert exposed.turns["gossip"] == (2, 2, 0)  # they wait for each other
    assert hidden.turns["gossip"][2] == exposed.turns[ALONE][2] > 0
    names = ("bare exchange, state every 4", ALONE, "gossip, state every 4", "local SGD, period 8")
    grid = replace(GRID, places=(replace(PLACE, names=names),))
    measured(hidden, tmp_path / "periods.json", grid)
    whole = {name: hidden.turns[name][:2] for name in names}
    assert [whole[name] for name in names] == [(0, 4), (0, 1), (4, 4), (0, 8)]


def test_workers_that_end_again_and_again_do_not_hold_up_the_grid(tmp_path):
    dead = FakeLaboratory()

    def join(world_size):
        dead.log.append("join")
        raise WorkerError("worker 1 ended with -9")

    dead.join = join
    assert measured(dead, tmp_path / "cells.json") == {}
    assert dead.log == ["join", "restart"] * 3


def test_marks():
    calm = {"cpu_busy": 0.5, "cpu_busy_by_others": 0.1, "late_share": 0.01, "uneven_share": 0.01}
    calm |= {"compute_seconds": 0.4}
    assert marks_of(calm, 0.41) == []
    bare = {"marks": ["CPUs 90 % busy"], "step_seconds_median": 0.41}
    assert marks_of(calm, 0.4, bare | {"step_seconds_median": 0.39}) == [], "it is compute-bound"
    sent = {"compute_seconds": 0, "bytes_on_wire": 1e6, "rate_bits_per_second": 1e8}
    assert marks_of(calm | sent | {"step_seconds_median": 0.08}) == []
    for disturbed, alone, bound in (
        ({"cpu_busy": 0.71}, None, None),
        ({"cpu_busy_by_others": 0.21}, None, None),
        ({"late_share": 0.06}, None, None),
        ({"uneven_share": 0.3}, None, None),
        ({}, 0.43, None),
        ({}, 0.4, bare),
        (sent | {"step_seconds_median": 0.07}, None, None),
    ):
        assert len(marks_of(calm | disturbed, alone, bound)) == 1, disturbed


def test_the_processors_of_others(monkeypatch):
    ticks = iter([[0] * 8, [100, 20, 60, 170, 10, 5, 15, 20]])
    monkeypatch.setattr("benchmarks._common._ticks", lambda: next(ticks))
    busy, others = CpuBusy().shares(0.9)  # of 1.2 s in user mode; 0.2 s were stolen
    assert (busy, others) == (pytest.approx(220 / 400), pytest.approx(50 / 400))


def test_published_cells_are_of_known_contestants():
    for grid in GRIDS.values():
        for cell in read(RESULTS / f"{grid.out}.json"):
            assert cell["contestant"] in KINDS
            if cell["error"] is None:
                assert cell["step_seconds_median"] >= 0.9 * cell["compute_seconds"]


def test_selection_is_measured_for_sizes_that_grow():
    curve = measure_selection(5000, 0.01)
    assert curve["elements"] == [256, 1024, 4096, 5000]
    assert min(curve["seconds"]) > 0


def test_a_replayed_selection_takes_the_time_of_full_size_and_chooses_as_many():
    select = ReplayedSelection(Device(), cost_of(CURVE), time_factor=2.0, size_factor=0.01)
    start = time.perf_counter()
    places = select(torch.zeros(10_000), 7)
    took = time.perf_counter() - start
    assert select.seconds(10_000) == pytest.approx(2 * float(cost_of(CURVE)(1_000_000)))
    assert took >= select.seconds(10_000) - 1e-6
    assert len(places.unique()) == 7
    assert int(places.max()) < 10_000


def test_plans_of_rivals_are_of_what_a_session_has_measured():
    costs = {"elements": (256, 1024, 4096), "select_seconds": (1e-5, 4e-5, 16e-5)}
    costs["communicate_seconds"] = (1e-3, 2e-3, 5e-3)
    own = {"format": "gossipgrad plan", "version": 1, "finish_seconds": 0.02}
    own |= {"groups": [[0, 2, "sparse"], [2, 3, "dense"]], "lower_bound_seconds": 0.02}
    session = {"plan": own, "backward_seconds": [0.0, 0.004, 0.01], "sizes": [1000, 10, 3000]}
    session["costs"] = dict.fromkeys(("sparse", "dense", "fp16"), costs)
    found = {name: plan_of(rival, session, (400, 10_000)) for name, rival in RIVALS.items()}
    assert found[OPTIMAL] == Plan.from_json(own)
    assert len(found["topk"].groups) == 1
    assert len(found["lags"].groups) == len(found["wfbp"].groups) == 3
    ddp = plan_of(KINDS["ddp"].rival, session, (400, 10_000))
    assert [group.stop for group in ddp.groups] == [1, 3]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(bool(_namespaces.missing()), reason="needs root")
def test_cells_of_two_workers_for_real(tmp_path):
    names = ("bare exchange", ALONE, "gossip", "ddp", "local SGD, period 8")
    dense = replace(GRID, places=(replace(PLACE, names=names),), hurried=True)
    names = (ALONE, "ddp, fp16 hook", "wfbp", OPTIMAL, "topk")
    place = Place(
        profile="vgg16",
        time_factor=0.05,
        size_factor=0.0001,
        world_size=2,
        rate=2e6,
        names=names,
        density=0.001,
    )
    sparse = Grid(places=(place,), blocks=2, block_seconds=0.1)
    with (
        Network(hosts=2, rate_bits_per_second=1e8) as network,
        Laboratory(network) as laboratory,
    ):
        cells = measured(laboratory, tmp_path / "dense.json", dense)
        sparse_cells = measured(
            laboratory, tmp_path / "sparse.json", sparse, curve_of=lambda _: CURVE
        )
        laboratory.join(2)
        with pytest.raises(WorkerError, match="nobody"):
            laboratory.make("nobody", PROFILE.to_json(), 1.0)
        laboratory._workers[1].kill()
        laboratory._workers[1].wait()
        with pytest.raises(WorkerError, match="worker 1 ended"):
            laboratory.leave()
    for name, cell in (*cells.items(), *sparse_cells.items()):
        assert cell["error"] is None, name
        assert cell["step_seconds_median"] >= 0.999 * cell["compute_seconds"]
        if name != ALONE:
            assert cell["bytes_on_wire"] > 0
    assert cells["gossip"]["bare_seconds"] == cells["bare exchange"]["step_seconds_median"]
    assert sparse_cells["wfbp"]["groups"] == 32
    assert sparse_cells[ALONE]["groups"] == 0
    for name in names[1:]:
        assert sparse_cells[name]["predicted_seconds"] > sparse_cells[name]["compute_seconds"]
