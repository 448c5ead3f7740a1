"""The comparison of sparse gradients on shaped links: its parts, and a place of it on loopback."""

import json
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.network._hosts import Loopback
from benchmarks.network._replay import Device
from benchmarks.sparse_network import _cell
from benchmarks.sparse_network._cell import SparseLaboratory, measure_place
from benchmarks.sparse_network._grid import GRIDS, Place
from benchmarks.sparse_network._kinds import ALONE, KINDS, OPTIMAL
from benchmarks.sparse_network._plans import Plans
from benchmarks.sparse_network._selection import (
    GAMMA,
    OURS,
    SELECTIONS,
    TORCH,
    ReplayedSelection,
    as_json,
    cost_of,
    measure,
)
from gossipgrad.planning import Plan, Profile

CURVES = {
    name: {"elements": [256, 1 << 20], "seconds": [1e-5, slope * (1 << 20)]}
    for name, slope in ((OURS, 1e-9), (TORCH, 4e-9), (GAMMA, 2e-9))
}
COSTS = {
    "elements": (256, 1024, 4096),
    "select_seconds": (1e-5, 4e-5, 16e-5),
    "communicate_seconds": (1e-3, 2e-3, 5e-3),
}
MEASURED = {
    "plan": {
        "format": "gossipgrad plan",
        "version": 1,
        "groups": [[0, 2, "sparse"], [2, 3, "dense"]],
        "finish_seconds": 0.02,
        "lower_bound_seconds": 0.02,
    },
    "backward_seconds": [0.0, 0.004, 0.01],
    "sizes": [1000, 10, 3000],
    "costs": dict.fromkeys(("sparse", "dense", "fp16"), COSTS),
}


def test_links_keep_the_proportions_of_full_size():
    for grid in GRIDS.values():
        for place in grid:
            whole, scaled = Profile.load(place.profile), place.scaled()
            at_full = whole.size_bytes / place.rate / whole.compute_seconds
            here = scaled.size_bytes / place.link_rate / scaled.compute_seconds
            assert here == pytest.approx(at_full, rel=1e-2), place


def test_selection_is_measured_for_sizes_that_grow_and_fits_a_file():
    curves = as_json(measure(5000, 0.01, seed=0))
    assert curves.keys() == set(SELECTIONS)
    for curve in curves.values():
        assert curve["elements"] == [256, 1024, 4096, 5000]
        assert min(curve["seconds"]) > 0
    assert curves[GAMMA]["seconds"][1] == pytest.approx(2.189e-10 * 1024 * 10, rel=1e-3)


def test_a_replayed_selection_takes_the_time_of_full_size_and_chooses_as_many():
    select = ReplayedSelection(Device(), cost_of(CURVES[TORCH]), time_factor=2.0, size_factor=0.01)
    values = torch.zeros(10_000)
    start = time.perf_counter()
    places = select(values, 7)
    took = time.perf_counter() - start
    assert select.seconds(10_000) == pytest.approx(2 * float(cost_of(CURVES[TORCH])(1_000_000)))
    assert took >= select.seconds(10_000) - 1e-6
    assert len(places.unique()) == 7
    assert int(places.max()) < 10_000


def test_plans_of_rivals_pay_for_their_own_selection():
    plans = Plans(MEASURED, CURVES, time_factor=2.0, size_factor=0.01, buckets_bytes=(400, 10_000))
    found = {name: plans.of(name) for name in KINDS}
    assert found[ALONE] is None
    assert found[OPTIMAL] == Plan.from_json(MEASURED["plan"])
    ddp = found["DDP fp32"]
    assert ddp is not None
    assert [group.stop for group in ddp.groups] == [1, 3]
    topk, slower = found["topk"], found[f"topk, {TORCH}"]
    assert topk is not None
    assert slower is not None
    ours, other = cost_of(CURVES[OURS]), cost_of(CURVES[TORCH])
    # Costs are pieces of lines between the sizes that were measured, and so is their difference.
    more = [2 * float(other(100 * n) - ours(100 * n)) for n in (1024, 4096)]
    between = more[0] + (4010 - 1024) / (4096 - 1024) * (more[1] - more[0])
    assert slower.finish_seconds - topk.finish_seconds == pytest.approx(between)


PLACE = Place(
    profile="vgg16",
    world_size=2,
    rate=1e9,
    density=0.001,
    time_factor=0.05,
    size_factor=0.0001,
    contestants=(ALONE, "DDP fp16", "wfbp", OPTIMAL, f"topk, {TORCH}"),
    blocks=2,
)


@pytest.fixture(scope="module")
def cells():
    """A place with all kinds of contestants, and one without a step that sends nothing."""
    swept = replace(PLACE, contestants=("DDP fp16", OPTIMAL))
    with pytest.MonkeyPatch.context() as patch, SparseLaboratory(Loopback(), 2) as laboratory:
        patch.setattr(_cell, "_BLOCK_SECONDS", 0.1)
        return [
            measure_place(laboratory, each, CURVES, say=lambda _: None) for each in (PLACE, swept)
        ]


@pytest.fixture
def cell(cells):
    return cells[0]


@pytest.mark.slow
@pytest.mark.process
def test_a_swept_place_is_measured_without_a_step_that_sends_nothing(cells):
    assert cells[1]["contestants"].keys() == {"DDP fp16", OPTIMAL}
    assert len(cells[1]["contestants"][OPTIMAL]["step_seconds"]) == 2


@pytest.mark.slow
@pytest.mark.process
def test_a_place_on_loopback_has_all_contestants_with_plans_and_figures(cell):
    json.dumps(cell)
    profile = PLACE.scaled()
    # What was measured of backward is shorter by what its first gradient was late.
    computed = profile.forward_seconds + profile.optimizer_seconds
    computed += sum(cell["measured"]["backward_seconds"])
    for name, of in cell["contestants"].items():
        assert of["error"] is None, name
        assert len(of["step_seconds"]) in (1, 2)  # one of those that are far behind
        if name == ALONE:
            assert of["predicted_seconds"] == cell["compute_seconds"]
        else:
            assert of["predicted_seconds"] > computed
        assert of["step_seconds_median"] > 0.9 * cell["compute_seconds"]
        assert (of["plan"] is None) == (name == ALONE)
    assert len(cell["contestants"][OPTIMAL]["step_seconds"]) == 2
    assert cell["contestants"]["wfbp"]["groups"] == 32
    # Selection of a hundredth of a second and more was slept.
    slept = cell["contestants"][f"topk, {TORCH}"]["step_seconds_median"] - cell["compute_seconds"]
    full = sum(cell["measured"]["sizes"]) / 0.0001
    assert slept >= 0.05 * float(cost_of(CURVES[TORCH])(full)) - 1e-3
