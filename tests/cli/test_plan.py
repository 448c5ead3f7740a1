"""`gossipgrad plan`: what it prints, draws and writes, and what it counts on the wire."""

import json
import re
import warnings
from dataclasses import replace

import pytest
import torch

from gossipgrad import cli
from gossipgrad.compression import VALUE_DTYPES, SparseFormat
from gossipgrad.planning import LEAST_SAVING, AffineCost, PiecewiseCost, Plan, Profile
from gossipgrad.simulate import Network
from support.plan_command import SMALL, found, run, written
from support.unchecked import types_unchecked

FREE = ("--latency", "0s", "--select", "0s,0s", "--decode", "0s", "--cast", "0s")


@pytest.fixture
def profile(tmp_path):
    return written(tmp_path)


def seconds_of(answer, name, method):
    """When the last gradient arrives with another plan."""
    (one,) = (e for e in answer["alternatives"] if (e["name"], e["method"]) == (name, method))
    return one["finish_seconds"]


def test_tables_a_timeline_and_a_verdict(profile, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert run(profile, "--rate", "1Gbit/s", "--density", "0.001", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("small on none, 4 ranks, 1 Gbit/s, 50us, density 0.001\n")
    for text in (
        *("c.weight", "a.weight", "computes |", "travels  |", "this plan"),
        *("DistributedDataParallel", "fp16", "mg-wfbp", "lags, each tensor", "top-k, one group"),
        *("omgs, published rule", "% longer.", "model of time.", str(out)),
    ):
        assert text in shown.replace(f"\n{out}", str(out))
    lanes = re.findall(r"^(?:computes |travels  )\|(.*)\|$", shown, re.MULTILINE)
    assert set(lanes[0]) <= set("-+ ")
    assert set(lanes[1]) <= set("sSdD ")
    assert lanes[0].startswith("-")
    assert lanes[1][-1] in "sSdD"  # the last gradient arrives at the end
    best = Plan.from_json(json.loads(out.read_text()))
    assert best.groups[-1].stop == 4
    assert best.names == SMALL.names


def test_tables_are_whole_in_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = tuple(f"wrapped.transformer.layer.of.a.long.name.{name}" for name in SMALL.names)
    path = written(tmp_path, parameters=[[n, 1000, 0.001] for n in names])
    answer = found(capsys, path, "--rate", "1Gbit", "--methods", "sparse,dense,fp16,bf16")
    assert run(path, "--rate", "1Gbit", "--methods", "sparse,dense,fp16,bf16") == 0
    shown = capsys.readouterr().out
    tables = re.findall("\u250f.*?\u2518", shown, re.DOTALL)
    assert all(len(line) == 80 for table in tables for line in table.splitlines())
    for each in answer["alternatives"]:
        assert each["name"] in tables[1]
    for group in answer["groups"]:
        assert f"{group['elements']:,}" in tables[0]


def test_json_says_the_same(profile, capsys):
    answer = found(capsys, profile, "--rate", "1Gbit")
    best = Plan.from_json(answer["plan"])
    assert [group["elements"] for group in answer["groups"]] == [
        sum(SMALL.elements[group.start : group.stop]) for group in best.groups
    ]
    assert answer["step_seconds"] == pytest.approx(0.011 + best.finish_seconds)
    assert max(end for *_, end in answer["spans"]) == pytest.approx(best.finish_seconds)
    assert len({(each["name"], each["method"]) for each in answer["alternatives"]}) == 9
    # A ring of 4 moves 6 quarters of each of the 32 MB, after the first bucket of 1 MiB.
    ddp = seconds_of(answer, "DistributedDataParallel", "dense")
    assert ddp == pytest.approx(0.01 + 2 * 6 * 50e-6 + 1.5 * 16_040_400 * 8e-9)
    for each in answer["alternatives"]:
        assert each["longer"] == pytest.approx(each["step_seconds"] / answer["step_seconds"] - 1)
        assert each["longer"] >= 0 or each["method"] not in ("dense", "sparse")


def test_the_verdict_goes_by_what_compression_saves(profile, capsys):
    fast = found(capsys, profile, "--rate", "400Gbit", "--latency", "1us")
    assert {group["method"] for group in fast["groups"]} == {"dense"}
    assert "Dense wins" in fast["verdict"]
    slow = found(capsys, profile, "--rate", "10Mbit", "--latency", "10us")
    assert "longer" in slow["verdict"]
    for method in ("sparse", "dense"):
        alone = found(capsys, profile, "--rate", "10Mbit", "--methods", method)
        assert "--methods has no" in alone["verdict"]


def test_compression_has_to_save_what_it_has_to_in_a_session(profile, capsys):
    refused = set()
    for rate in ("8Gbit", "15Gbit", "15.9Gbit", "20Gbit"):
        answer = found(capsys, profile, "--rate", rate, "--latency", "1us")
        assert "sparse" in {group["method"] for group in answer["groups"]}
        rivals = {each["name"]: each for each in answer["alternatives"]}
        saved = 1 - answer["step_seconds"] / rivals["best, none compressed"]["step_seconds"]
        refused.add(saved < LEAST_SAVING)
        assert ("--methods dense" in answer["verdict"]) is (saved < LEAST_SAVING)
    assert refused == {False, True}


def test_a_measured_network(profile, tmp_path, capsys):
    """Around its knees, too, which lie between the sizes at which costs are asked for otherwise."""
    path = tmp_path / "net.json"
    hop = AffineCost(alpha_seconds=1e-4, beta_seconds_per_byte=8e-9)
    for curve in (
        PiecewiseCost(sizes=(0.0, 1e6, 2e7), seconds=(1e-3, 0.1, 0.5)),
        PiecewiseCost(sizes=(0.0, 3.9e6, 4.1e6, 1.2e7), seconds=(1e-3, 0.1, 0.5, 0.9)),
    ):
        network = Network(exchange=hop, all_reduce=curve, world_size=4)
        path.write_text(json.dumps(network.to_json()))
        answer = found(capsys, profile, "--network", str(path))
        expected = 0.01 + sum(map(curve, (4e6, 4e4, 400, 1.2e7)))
        assert seconds_of(answer, "wfbp, each tensor", "dense") == pytest.approx(expected)
    assert run(profile, "--network", str(path), "--rate", "1Gbit") == 2
    assert "--network" in capsys.readouterr().err


def test_a_network_of_other_ranks_is_said_to_be_one(profile, tmp_path, capsys):
    slow, path = AffineCost(1.0, 1.0), tmp_path / "net.json"
    network = Network(exchange=AffineCost(1e-4, 8e-9), links={(0, 1): slow}, world_size=8)
    path.write_text(json.dumps(network.to_json()))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert run(profile, "--network", str(path)) == 0
    assert "costs of single links" in capsys.readouterr().err
    path.write_text(json.dumps(replace(network, links={}).to_json()))  # nothing to leave out
    assert run(profile, "--network", str(path)) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_bytes_are_those_of_a_session(dtype, tmp_path, capsys):
    """Which adds gradients up in float32 at least, and sends as many bytes as its wire has."""
    elements, width = 1_000_000, dtype.itemsize
    path = written(tmp_path, element_bytes=width, parameters=[["a", elements, 0.01]])
    answer = found(capsys, path, *FREE, "--density", "0.01", "--methods", "sparse,dense,fp16")
    sums = torch.float64 if width == 8 else torch.float32
    size_bytes = (seconds_of(answer, "wfbp, each tensor", "dense") - 0.01) / 8e-9
    assert size_bytes == pytest.approx(1.5 * sums.itemsize * elements)
    sparse_bytes = (seconds_of(answer, "top-k, one group", "sparse") - 0.01) / 8e-9
    form = SparseFormat(elements, 10_000, sums)
    assert sparse_bytes == pytest.approx(3 * form.size_bytes, rel=1e-2)
    # DistributedDataParallel sends gradients as they are.
    rivals = {e["method"] for e in answer["alternatives"] if e["name"].startswith("Distributed")}
    assert rivals == ({"dense as is"} if width == 2 else {"dense", "fp16"})
    if width == 2:
        ddp = seconds_of(answer, "DistributedDataParallel", "dense as is")
        assert (ddp - 0.01) / 8e-9 == pytest.approx(1.5 * width * elements)


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_values_travel_as_all_types_that_sessions_take(dtype, profile, capsys):
    values = str(dtype).removeprefix("torch.")
    answer = found(capsys, profile, *FREE, "--values", values, "--methods", "sparse")
    size_bytes = (seconds_of(answer, "top-k, one group", "sparse") - 0.04) / 8e-9
    form = SparseFormat(4_010_100, 4010, dtype)
    assert size_bytes == pytest.approx(3 * form.size_bytes, rel=0.02)


def test_what_selection_takes_counts(profile, capsys):
    at = {}
    for select in ("0s,0s", "1ms,0s", "0s,1ns"):
        options = (*FREE, "--rate", "100Gbit", "--select", select)
        at[select] = seconds_of(found(capsys, profile, *options), "top-k, one group", "sparse")
    assert at["1ms,0s"] - at["0s,0s"] == pytest.approx(1e-3)
    assert at["0s,1ns"] - at["0s,0s"] == pytest.approx(4_010_100e-9)
    threads = torch.get_num_threads()
    answer = found(capsys, profile, "--select", "here", "--rate", "1Mbit", "--latency", "0s")
    assert torch.get_num_threads() == threads
    assert seconds_of(answer, "top-k, one group", "sparse") > 0.04


def test_names_are_no_markup(tmp_path, capsys):
    rows = zip(("c[/b]", "[red]b", "a.bias", "a[bold]"), SMALL.elements, (0.1,) * 4, strict=True)
    path = written(tmp_path, parameters=list(map(list, rows)))
    assert run(path, "--methods", "sparse", "--rate", "1Mbit") == 0
    shown = capsys.readouterr().out
    assert "c[/b]" in shown
    assert "a[bold]" in shown


@pytest.mark.parametrize("names", [(1, 2, 3, 4), ("a", "b", "a", "c")])
def test_names_that_are_none_are_refused(names, tmp_path, capsys):
    rows = zip(names, SMALL.elements, SMALL.backward_seconds, strict=True)
    path = written(tmp_path, parameters=list(map(list, rows)))
    with types_unchecked():
        assert run(path) == 2
    assert "names" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--workers", "1"], "world size 1"),
        (["--density", "0"], "density is 0.0"),
        (["--methods", "sparse,topk"], "'topk'"),
        (["--methods", "sparse,sparse"], "sparse twice"),
        (["--methods", "dense,"], "'dense,'"),
        (["--rate", "1GB"], "'1GB'"),
        (["--latency", "1"], "'1'"),
        (["--select", "2ns"], "'2ns'"),
        (["--select", "100us,"], "'100us,'"),
        (["--select", "here", "--decode", "5ns"], "--decode 5ns"),
        (["--decode", "fast"], "'fast'"),
        (["--cast", "fast"], "'fast'"),
        (["--network", "none.json"], "'none.json'"),
        (["--out", "nowhere/plan.json"], "no folder nowhere"),
        (["--figure", "figure.gif"], ".svg, .png, .pdf, .html"),
        (["--figure", "nowhere/figure.svg"], "no folder nowhere"),
        (["--profile", "resnet51"], "resnet50, googlenet, vgg16, lstm, gpt2"),
    ],
)
def test_wrong_options_are_one_line_with_the_way_out(profile, options, named, capsys):
    assert run(profile, *options) == 2
    err = capsys.readouterr().err
    assert named in err
    assert err.count("\n") == 1


def test_a_table_of_many_groups_is_cut(capsys):
    """A fast link that costs nothing to start has many."""
    options = ("--rate", "3Gbit", "--latency", "0s", "--methods", "dense")
    groups = found(capsys, "resnet50", *options)["groups"]
    assert len(groups) > 30
    assert run("resnet50", *options) == 0
    shown = capsys.readouterr().out
    assert f"of {len(groups)}; --json has all" in shown
    assert f"{groups[0]['elements']:,}" in shown


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf", ".html"])
def test_the_timeline_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"figure{suffix}"
    assert run(written(tmp_path), "--figure", str(path)) == 0
    content = path.read_bytes()
    assert len(content) > 1000
    if suffix in (".svg", ".html"):
        assert b"<svg" in content


@pytest.mark.slow
def test_others_are_planned_for_a_whole_model(capsys):
    assert cli.main(["plan", "--profile", "gpt2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    names = Profile.load("gpt2").names
    groups = {each["name"]: each["groups"] for each in answer["alternatives"]}
    assert groups["top-k, one group"] == 1
    assert groups["wfbp, each tensor"] == groups["lags, each tensor"] == len(names)
    assert 1 < groups["DistributedDataParallel"] < groups["wfbp, each tensor"]
