"""What `gossipgrad plan` shows of a plan: lanes of letters, groups in a table, and figures."""

import re
from dataclasses import replace

import pytest

from gossipgrad.cli import _plan
from gossipgrad.cli._figures import text_lanes
from gossipgrad.cli._plan import PlanOptions, all_methods, network_of
from gossipgrad.cli._plan_report import compare
from gossipgrad.planning import Merge, Plan
from support.plan_command import SMALL, run, written


def compared(methods=("sparse", "dense"), profile=SMALL):
    options = PlanOptions(world_size=4)
    return compare(profile, all_methods(options, profile, network_of(options)[1]), methods)


def as_planned(found, groups):
    """As if the best plan had these groups."""
    best = Plan(groups=tuple(groups), finish_seconds=1.0, lower_bound_seconds=0.0)
    step = found.profile.backward_seconds, found.profile.elements
    spans = best.timeline(*step, found.methods)
    best = replace(best, finish_seconds=max(span.end_seconds for span in spans))
    return replace(found, best=best, spans=spans)


MIXED = [Merge(0, 1, "sparse"), Merge(1, 3, "dense"), Merge(3, 4, "sparse")]


def test_lanes_have_the_whole_time():
    lanes = text_lanes(compared(), 60)
    assert [len(lane) for lane in lanes] == [71, 71]
    assert lanes[0].startswith("computes |-")
    assert lanes[1][-2] in "sSdD"


def test_lanes_show_what_is_under_way_and_tell_groups_apart():
    found = as_planned(compared(), MIXED)
    columns = 4000
    computes, travels = (lane[10:-1] for lane in text_lanes(found, columns))
    shown = {
        ("backward", 0): "-",
        ("select", 0): "+",
        ("communicate", 0): "s",
        ("communicate", 1): "D",
        ("communicate", 2): "s",
    }
    for span in found.spans:
        if (letter := shown.get((span.what, span.group))) is None:
            continue
        at = columns * (span.start_seconds + span.end_seconds) / 2 / found.best.finish_seconds
        assert (travels if span.what == "communicate" else computes)[int(at)] == letter
    assert set(travels) == set("sD ")


@pytest.mark.parametrize("tensors", [24, 25])
def test_a_table_of_many_groups_is_cut(tmp_path, capsys, monkeypatch, tensors):
    names = [f"tensor{place}" for place in range(tensors)]
    path = written(tmp_path, parameters=[[name, 1000, 0.001] for name in names])
    alone = [Merge(place, place + 1, "dense") for place in range(tensors)]
    monkeypatch.setattr(_plan, "compare", lambda *of: as_planned(compare(*of), alone))
    assert run(path) == 0
    shown = capsys.readouterr().out
    assert f"{tensors} groups" in shown
    assert re.findall(r"tensor\d+", shown) == names[:24]
    assert ("the first 24 of 25; --json has all" in shown) is (tensors == 25)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf", ".html"])
def test_the_timeline_is_drawn(tmp_path, suffix, monkeypatch):
    to_hex = pytest.importorskip("matplotlib.colors").to_hex
    drawn = pytest.importorskip("matplotlib.figure").Figure
    figures, save = [], drawn.savefig
    monkeypatch.setattr(drawn, "savefig", lambda *a, **k: figures.append(a[0]) or save(*a, **k))
    found = as_planned(compared(), MIXED)
    monkeypatch.setattr(_plan, "compare", lambda *_: found)
    path = tmp_path / f"figure{suffix}"
    assert run(written(tmp_path), "--figure", str(path)) == 0
    assert path.stat().st_size > 1000
    if suffix == ".html":
        assert "<svg" in path.read_text()
    (figure,) = figures
    assert figure.get_suptitle() == "small on none, 4 ranks, 1 Gbit/s, 50us, density 0.001"
    above, below = figure.axes
    named = [text.get_text() for text in above.get_legend().get_texts()]
    colours = [to_hex(patch.get_facecolor()) for patch in above.get_legend().get_patches()]
    legend = dict(zip(named, colours, strict=True))
    assert legend.keys() == {"backward", "selection", "dense", "sparse"}
    assert len({*colours}) == len(colours)
    bars = [
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width())
        for bar in above.patches
    ]
    milliseconds = [
        (
            int(span.what != "communicate"),
            pytest.approx(1e3 * span.start_seconds),
            pytest.approx(1e3 * (span.end_seconds - span.start_seconds)),
        )
        for span in found.spans
    ]
    assert bars == milliseconds
    kinds = {"backward": "backward", "select": "selection"}
    assert [to_hex(bar.get_facecolor()) for bar in above.patches] == [
        legend[kinds.get(span.what, MIXED[span.group].method)] for span in found.spans
    ]
    steps = [
        found.step_seconds(found.best),
        *(found.step_seconds(a.plan) for a in found.alternatives),
    ]
    assert [bar.get_width() for bar in below.patches] == pytest.approx([1e3 * s for s in steps])
    rows = [label.get_text() for label in below.get_yticklabels()]
    assert rows == ["this plan", *(f"{a.name} ({a.method})" for a in found.alternatives)]
    assert [round(bar.get_y() + bar.get_height() / 2) for bar in below.patches] == [
        *range(len(rows))
    ]
