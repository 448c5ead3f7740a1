"""`gossipgrad plan`."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gossipgrad import cli
from gossipgrad.cli import _plan
from gossipgrad.cli._plan import PlanOptions, all_methods, network_of
from gossipgrad.cli._plan_report import compare
from gossipgrad.cli._units import percent_text
from gossipgrad.compression import SparseFormat
from gossipgrad.planning import (
    LEAST_SAVING,
    AffineCost,
    PiecewiseCost,
    Plan,
    Profile,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    threshold,
    wfbp,
)
from gossipgrad.simulate import Network
from support.plan_command import SMALL, found, run, written
from support.unchecked import types_unchecked


@pytest.fixture
def profile(tmp_path):
    return written(tmp_path)


def test_tables_a_timeline_and_a_verdict(profile, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert run(profile, "--rate", "1Gbit/s", "--density", "0.001", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("small on none, 4 ranks, 1 Gbit/s, 50us, density 0.001\n")
    for text in (
        *("c.weight", "a.weight", "computes |", "travels  |", "this plan"),
        *("DistributedDataParallel", "fp16", "mg-wfbp", "lags, each tensor", "top-k, one group"),
        *("omgs, published rule", "% longer.", "model of time."),
    ):
        assert text in shown
    assert f"plan {out}" in shown.replace("\n", " ")
    best = Plan.from_json(json.loads(out.read_text()))
    assert best.groups[-1].stop == 4
    assert best.names == SMALL.names


@pytest.mark.slow
def test_tables_are_whole_in_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    gpt2 = Profile.load("gpt2")
    names = tuple(f"wrapped.transformer.{name}" for name in gpt2.names)  # up to 51 letters
    path = tmp_path / "gpt2.json"
    path.write_text(json.dumps(replace(gpt2, names=names).to_json()))
    options = ("--rate", "1Gbit", "--methods", "sparse,dense,fp16,bf16")
    told = found(capsys, str(path), *options)
    assert run(str(path), *options) == 0
    shown = capsys.readouterr().out
    tables = re.findall("\u250f.*?\u2518", shown, re.DOTALL)
    assert all(len(line) == 80 for table in tables for line in table.splitlines())
    groups, others = (
        [
            [cell.strip() for cell in line.split("\u2502")[1:-1]]
            for line in table.splitlines()
            if line.startswith("\u2502")
        ]
        for table in tables
    )
    starts = [at for at, row in enumerate(groups) if row[0]]
    assert len(starts) == len(told["groups"]) > 4
    for group, at, end in zip(told["groups"], starts, [*starts[1:], None], strict=True):
        first, last = group["start"], group["stop"] - 1
        which, _, elements, method, arrived = groups[at]
        assert which == (f"{first}" if first == last else f"{first}-{last}")
        assert (elements, method) == (f"{group['elements']:,}", group["method"])
        assert re.fullmatch(r"[\d.]+ m?s", arrived)
        ends = (group["first"], group["last"])[: 1 + (first < last)]
        assert "".join(row[1] for row in groups[at:end]).replace(" ", "") == "to".join(ends)
    rows = [row for row in others if row[0] and row[0] != "this plan"]
    assert [row[0] for row in rows] == [each["name"] for each in told["alternatives"]]
    for row, each in zip(rows, told["alternatives"], strict=True):
        assert row[2] == str(each["groups"])
        assert float(row[4].removesuffix(" %").replace(",", "")) == pytest.approx(
            100 * each["longer"], rel=6e-3
        )


def test_json_says_the_same(profile, capsys):
    told = found(capsys, profile, "--rate", "1Gbit")
    best = Plan.from_json(told["plan"])
    assert [group["elements"] for group in told["groups"]] == [
        sum(SMALL.elements[group.start : group.stop]) for group in best.groups
    ]
    assert told["step_seconds"] == pytest.approx(0.011 + best.finish_seconds)
    assert max(end for *_, end in told["spans"]) == pytest.approx(best.finish_seconds)
    by_name = {(each["name"], each["method"]): each for each in told["alternatives"]}
    assert len(by_name) == 9
    # A ring of 4 moves 6 quarters of each of the 32 MB, after the first bucket of 1 MiB.
    dense = by_name["DistributedDataParallel", "dense"]
    assert dense["groups"] == 2
    assert dense["finish_seconds"] == pytest.approx(0.01 + 2 * 6 * 50e-6 + 1.5 * 16_040_400 * 8e-9)
    for each in told["alternatives"]:
        assert each["longer"] == pytest.approx(each["step_seconds"] / told["step_seconds"] - 1)
        if each["method"] in ("dense", "sparse"):
            assert each["longer"] >= 0


def test_a_fast_network_refuses_compression(profile, capsys):
    fast = found(capsys, profile, "--rate", "400Gbit", "--latency", "1us")
    assert {group["method"] for group in fast["groups"]} == {"dense"}
    assert fast["verdict"].startswith("Dense wins, compression is refused: with every group")
    slow = found(capsys, profile, "--rate", "10Mbit", "--latency", "10us")
    assert "compressed" in slow["verdict"]
    assert "without compression a step would take" in slow["verdict"]
    alone = found(capsys, profile, "--rate", "10Mbit", "--methods", "sparse")
    assert alone["verdict"].endswith("compressed; --methods has nothing else.")
    dense = found(capsys, profile, "--rate", "10Mbit", "--methods", "dense")
    assert dense["verdict"].startswith("Nothing is compressed: --methods has no sparse")


def test_compression_has_to_save_what_it_has_to_in_a_session(profile, capsys):
    refused = set()
    for rate in ("8Gbit", "15Gbit", "15.9Gbit", "20Gbit"):
        told = found(capsys, profile, "--rate", rate, "--latency", "1us")
        assert "sparse" in {group["method"] for group in told["groups"]}
        rivals = {each["name"]: each for each in told["alternatives"]}
        whole = rivals["best, none compressed"]["step_seconds"]
        saved = 1 - told["step_seconds"] / whole
        refused.add(saved < LEAST_SAVING)
        if saved < LEAST_SAVING:
            assert percent_text(saved) in told["verdict"]
            assert told["verdict"].endswith("send all, as --methods dense plans it.")
        else:
            assert told["verdict"].endswith("% longer.")
    assert refused == {False, True}


def test_what_is_not_allowed_but_better_is_told(profile, capsys):
    options = ("--rate", "10Gbit", "--latency", "1us", "--select", "1ms,20ns")
    told = found(capsys, profile, *options)
    assert "DistributedDataParallel by fp16 would take" in told["advice"]
    assert told["advice"].endswith("--methods sparse,dense,fp16")
    allowed = found(capsys, profile, *options, "--methods", "sparse,dense,fp16")
    assert allowed["advice"] is None
    assert allowed["step_seconds"] < told["step_seconds"]


def test_a_measured_network(profile, tmp_path, capsys):
    hop = AffineCost(alpha_seconds=1e-4, beta_seconds_per_byte=8e-9)
    curve = PiecewiseCost(sizes=(0.0, 1e6, 2e7), seconds=(1e-3, 0.1, 0.5))
    path = tmp_path / "net.json"
    network = Network(exchange=hop, all_reduce=curve, world_size=4)
    path.write_text(json.dumps(network.to_json()))
    told = found(capsys, profile, "--network", str(path))
    dense = next(each for each in told["alternatives"] if each["name"].startswith("wfbp"))
    assert dense["finish_seconds"] == pytest.approx(0.01 + sum(map(curve, (4e6, 4e4, 400, 1.2e7))))
    assert run(profile, "--network", str(path), "--rate", "1Gbit") == 2
    assert "--network says what links cost" in capsys.readouterr().err


def test_a_measured_all_reduce_is_followed_around_its_knees():
    """Which lie between the sizes at which costs are asked for otherwise."""
    hop = AffineCost(alpha_seconds=1e-4, beta_seconds_per_byte=8e-9)
    curve = PiecewiseCost(sizes=(0.0, 7e5, 7.1e5, 1e6), seconds=(1e-3, 0.1, 0.5, 0.9))
    network = Network(exchange=hop, all_reduce=curve, world_size=4)
    dense = all_methods(PlanOptions(world_size=4), SMALL, network)["dense"]
    for elements in (1000, 174_000, 175_000, 176_000, 177_500, 240_000, 250_000, 1_000_000):
        assert dense.communicate_seconds(elements) == pytest.approx(curve(4 * elements))


@pytest.mark.slow
def test_others_are_planned_by_their_rules():
    profile, options = Profile.load("gpt2"), PlanOptions()
    methods = all_methods(options, profile, network_of(options)[1])
    alternatives = compare(profile, methods, ["sparse", "dense"]).alternatives
    found = {(each.name, each.method): each.plan for each in alternatives}
    step = profile.backward_seconds, profile.elements
    buckets = {"size_bytes": 25 << 20, "first_size_bytes": 1 << 20}
    sparse, dense, half = (methods[name] for name in ("sparse", "dense", "fp16"))
    expected = {
        ("DistributedDataParallel", "dense"): threshold(*step, dense, **buckets),
        ("DistributedDataParallel", "fp16"): threshold(*step, half, **buckets),
        ("wfbp, each tensor", "dense"): wfbp(*step, dense),
        ("mg-wfbp", "dense"): mg_wfbp(*step, dense),
        ("top-k, one group", "sparse"): single(*step, sparse),
        ("lags, each tensor", "sparse"): wfbp(*step, sparse),
        ("omgs, published rule", "sparse"): omgs_greedy(*step, sparse, as_published=True),
        ("best, none compressed", "dense"): plan(*step, [dense]),
        ("best, all compressed", "sparse"): plan(*step, [sparse]),
    }
    assert found == expected
    assert len({each.groups for each in found.values()}) == len(found)
    assert omgs_greedy(*step, sparse) not in found.values()


@pytest.mark.parametrize("density", [0.01, 1e-7])
def test_selection_is_measured_here(monkeypatch, density):
    """By a clock that goes on with what is selected and decoded, and with nothing else."""
    threads, before = set(), torch.get_num_threads()
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def select(tensor, count):
        threads.add(torch.get_num_threads())
        clock.now += 3e-3 + 4e-9 * tensor.numel()
        return torch.arange(count, dtype=torch.int32)

    class Format(SparseFormat):
        def add_to(self, message, total):
            clock.now += 5e-4 + 6e-8 * self.count

    monkeypatch.setattr(_plan, "time", clock)
    monkeypatch.setattr(_plan, "top_k", select)
    monkeypatch.setattr(_plan, "SparseFormat", Format)
    hop = Network(exchange=AffineCost(0.0, 0.0))
    options = PlanOptions(world_size=4, density=density, select="here")
    torch.set_num_threads(2)
    try:
        sparse = all_methods(options, SMALL, hop)["sparse"]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == {1}
    for elements in (1000, 3_000_000):
        assert sparse.select_seconds(elements) == pytest.approx(3e-3 + 4e-9 * elements)
        pairs = 4 * max(1, int(density * elements))
        assert sparse.communicate_seconds(elements) == pytest.approx(5e-4 + 6e-8 * pairs)


def test_selection_that_is_measured_here_is_in_the_plan(profile, capsys, monkeypatch):
    measured = AffineCost(7e-3, 0.0), AffineCost(0.0, 0.0)
    monkeypatch.setattr(_plan, "_measured", lambda *options: measured)
    told = found(capsys, profile, "--select", "here", "--methods", "sparse")
    selected = [end - begin for what, _, begin, end in told["spans"] if what == "select"]
    assert selected == pytest.approx([7e-3] * len(told["groups"]))


def test_costs_are_what_the_options_say():
    options = PlanOptions(world_size=4, density=0.01, values="bfloat16")
    _, network = network_of(options)
    methods = all_methods(options, SMALL, network)
    assert methods["sparse"].select_seconds(1000) == pytest.approx(100e-6 + 2e-6)
    # Three hops of 10,000 values of 2 bytes, an index of 2, and 16 blocks of indices for them.
    told = methods["sparse"].communicate_seconds(1_000_000)
    assert told == pytest.approx(3 * (50e-6 + 8e-9 * 40_064) + 4 * 10_000 * 5e-9, rel=1e-3)
    assert methods["fp16"].select_seconds(1000) == pytest.approx(0.5e-6)
    half = methods["fp16"].communicate_seconds(1_000_000) - 0.5e-3
    assert half == pytest.approx(6 * (50e-6 + 8e-9 * 0.5e6))


def test_a_network_of_other_ranks_is_said_to_be_one(tmp_path):
    hop = AffineCost(1e-4, 8e-9)
    path = tmp_path / "net.json"
    network = Network(exchange=hop, links={(0, 1): AffineCost(1.0, 1.0)}, world_size=8)
    path.write_text(json.dumps(network.to_json()))
    told = "measured with 8 ranks, and the plan is for 4: costs of single links are left out"
    with pytest.warns(UserWarning, match=told):
        _, here = network_of(PlanOptions(world_size=4, network=path))
    assert here == Network(exchange=hop, world_size=8)
    _, here = network_of(PlanOptions(world_size=8, network=path))
    assert here == network
    path.write_text(json.dumps(replace(network, links={}).to_json()))  # nothing to leave out
    network_of(PlanOptions(world_size=4, network=path))


def test_names_are_no_markup(tmp_path, capsys):
    path = tmp_path / "odd.json"
    names = ("c[/b]", "[red]b", "a.bias", "a[bold]")
    path.write_text(json.dumps(replace(SMALL, names=names).to_json()))
    assert run(str(path), "--methods", "sparse", "--rate", "1Mbit") == 0
    shown = capsys.readouterr().out
    assert "c[/b]" in shown
    assert "a[bold]" in shown


def test_names_that_are_none_are_refused(tmp_path, capsys):
    path = tmp_path / "odd.json"
    for names, message in (
        ((1, 2, 3, 4), "names are strings"),
        (("a", "b", "a", "c"), "4 names, 3 of them different"),
    ):
        rows = zip(names, SMALL.elements, SMALL.backward_seconds, strict=True)
        path.write_text(json.dumps(SMALL.to_json() | {"parameters": list(map(list, rows))}))
        with types_unchecked():
            assert run(str(path)) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "1"], "world size 1: a plan is for 2 ranks or more"),
        (["--density", "0"], "density is 0.0: it is a share"),
        (["--methods", "sparse,topk"], "no method 'topk': choose among sparse, dense, fp16, bf16"),
        (["--methods", "sparse,sparse"], "names sparse twice"),
        (["--methods", ""], "write a list with commas, as sparse,dense"),
        (
            ["--methods", "dense,"],
            "'dense,' has an empty part: write a list with commas, as sparse,",
        ),
        (["--select", "100us,"], "write a list with commas, as 100us,2ns"),
        (
            ["--rate", "1Gbit", "--bandwidth=10Gbit"],
            "--rate 1Gbit and --bandwidth 10Gbit are two values of one option: leave out one",
        ),
        (["--world_size=8"], "--workers 4 and --world-size 8 are two values of one option"),
        (["--rate", "1GB"], "'1GB' is no rate"),
        (["--latency", "1"], "'1' is no time"),
        (["--select", "2ns"], "--select '2ns' is neither `here` nor a time for a group"),
        (["--decode", "fast"], "'fast' is no time"),
        (
            ["--select", "here", "--decode", "5ns"],
            "--select here measures what adding up takes: leave out --decode 5ns",
        ),
        (["--cast", "fast"], "'fast' is no time"),
        (["--network", "none.json"], "no network 'none.json'"),
        (["--out", "nowhere/plan.json"], "there is no folder nowhere"),
        (["--figure", "figure.gif"], "must end in .svg, .png, .pdf, .html"),
        (["--figure", "nowhere/figure.svg"], "there is no folder nowhere"),
    ],
)
def test_wrong_options_tell_the_way_out(profile, options, message, capsys):
    assert run(profile, *options) == 2
    assert message in capsys.readouterr().err


def test_both_names_of_an_option_may_say_the_same(profile):
    assert run(profile, "--rate", "1Gbit", "--bandwidth", "1Gbit", "--world-size", "4") == 0


@pytest.mark.parametrize("tensors", [1000, 1001])
def test_many_tensors_are_said_to_take_a_while(tmp_path, capsys, monkeypatch, tensors):
    """Before they are planned for."""
    told = []

    def planned(profile, *_):
        told.append(capsys.readouterr().err)
        raise ValueError(f"{len(profile.names)} tensors")

    monkeypatch.setattr(_plan, "compare", planned)
    rows = [[f"{place}", 1, 0.001] for place in range(tensors)]
    assert run(written(tmp_path, parameters=rows)) == 2
    assert told[0].startswith("planning for 1,001 tensors, which may take" * (tensors > 1000))
    assert bool(told[0]) is (tensors > 1000)


def test_an_unknown_profile(capsys):
    assert cli.main(["plan", "--profile", "resnet51"]) == 2
    assert "give one of resnet50, googlenet, vgg16, lstm, gpt2" in capsys.readouterr().err
