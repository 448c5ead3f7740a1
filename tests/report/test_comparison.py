"""Several runs on one page."""

import json

import pytest

from gossipgrad.report import write_report
from support.html_page import Page


@pytest.fixture
def compare(write_run, change, tmp_path):
    """Writes two runs that differ in some ways, and the page on them."""

    def write(**summary):
        first = write_run("first")
        second = write_run(
            "second", world_size=2, strategy="allreduce", lr=0.5, unused=["gossip.topology"]
        )
        change(
            second / "summary.json",
            strategy="allreduce",
            accuracy=0.73,
            samples_per_second=617.0,
            consensus_distance=0.0,
            **summary,
        )
        out = tmp_path / "both.html"
        assert write_report(first, second, out=out) == out
        return Page(out.read_text())

    return write


def test_figures_stand_beside_those_of_the_first_run(compare):
    page = compare()
    assert page.contents["h1"] == ["2 runs"]
    assert page.row("Strategy") == ["Strategy", "gossip", "allreduce"]
    assert page.row("Workers") == ["Workers", "4", "2"]
    assert page.row("Accuracy") == ["Accuracy", "91.2%", "73.0%0.800x"]
    assert page.row("Samples per second, all workers")[1:] == ["1,234", "6170.500x"]
    assert page.row("Consensus distance")[1:] == ["0.25", "00.00x"]
    assert page.row("Exposed share")[1:] == ["5.0%", "5.0%1.00x"]
    assert page.row("Sent per step and worker")[1:] == ["1 kB", "1 kB1.00x"]
    assert "Beside each value: its ratio to that of first." in page.contents["p"]


def test_options_that_differ_are_marked(compare):
    page = compare()
    assert page.row("strategy") == ["strategy", "gossip", "allreduce"]
    assert page.row("lr") == ["lr", "n/a", "0.5"]
    assert page.contents["mark"] == ["allreduce", "0.5"]
    names = [row[0] for row in page.rows]
    assert names.index("lr") < names.index("model"), "what is the same comes after, folded"
    assert page.row("gossip.topology") == ["gossip.topology", "hypercube", "not used"]


def test_options_that_a_run_does_not_use_do_not_differ(write_run, change, tmp_path):
    gossip = {"topology": "ring", "mode": "sync"}
    runs = [
        write_run("a", lr_rule="none", momentum=0.9, lr_formula="x", unused=[]),
        write_run("b", lr_rule="linear", gossip=gossip, lr_formula="y", unused=["gossip.topology"]),
        write_run("c", lr_rule="none", gossip=gossip, momentum=0.1, unused=["momentum"]),
    ]
    for number, run in enumerate(runs):
        unused = json.loads((run / "config.json").read_text())["unused"]
        change(run / "config.json", lr_gamma=number, unused=[*unused, "lr_gamma", "no option"])
    page = Page(write_report(*runs, out=tmp_path / "x.html").read_text())
    assert page.row("lr_rule") == ["lr_rule", "none", "linear", "none"]
    assert page.row("gossip.topology") == ["gossip.topology", "hypercube", "not used", "ring"]
    assert page.row("momentum") == ["momentum", "0.9", "n/a", "not used"]
    assert "lr_gamma" not in [row[0] for row in page.rows], "none uses it"
    assert "lr_formula" not in [row[0] for row in page.rows], "it follows from the others"
    assert "not used" not in page.contents["mark"]
    assert "linear" in page.contents["mark"]


def test_runs_that_do_not_differ_are_said_not_to(write_run, tmp_path):
    runs = [write_run(name) for name in ("a", "b")]
    page = Page(write_report(*runs, out=tmp_path / "x.html").read_text())
    assert "No option differs." in page.contents["p"]


def test_curves_are_laid_over_each_other(compare):
    found = {chart["id"]: chart["series"] for chart in compare().data()["charts"]}
    labels = [(series["label"], series["role"], series["run"]) for series in found["loss"]]
    assert labels == [("first", "mean", 0), ("second", "mean", 1)]
    assert [series["label"] for series in found["consensus"]] == [
        "first",
        "second",
        "first, exact",
        "second, exact",
    ]


def test_each_run_has_its_timeline_and_its_tables(compare):
    page = compare()
    data = page.data()
    assert [timeline["run"] for timeline in data["timelines"]] == ["first", "second"]
    assert [mixing["worldSize"] for mixing in data["mixings"]] == [4, 2]
    assert {"Ranks, first", "Ranks, second"} <= set(page.contents["caption"])
    outcomes = next(each for each in data["bars"] if each["id"] == "outcomes")
    assert [bar["label"] for bar in outcomes["bars"]] == ["first", "second"]


def test_a_run_with_nothing_but_a_start_is_compared_all_the_same(compare, write_run, tmp_path):
    bare = write_run("bare")
    for path in bare.iterdir():
        if path.name != "config.json":
            path.unlink()
    page = Page(
        write_report(tmp_path / "bare", write_run("whole"), out=tmp_path / "x.html").read_text()
    )
    assert page.row("Accuracy") == ["Accuracy", "n/a", "91.2%"], "no ratio to what is not known"
    assert "There are no spans of bare: trace.json is missing or empty." in page.html
    assert any(
        text.startswith("bare: The run left no summary.json") for text in page.contents["li"]
    )


def test_runs_of_one_name_are_told_apart(write_run, tmp_path):
    runs = [write_run(f"{folder}/run") for folder in ("a", "b")]
    page = Page(write_report(*runs, runs[0], out=tmp_path / "x.html").read_text())
    assert page.data()["runs"] == ["a/run", "b/run", "a/run (2)"]


def test_a_run_name_is_no_markup(write_run, tmp_path):
    nasty = "<script>alert(1)<"
    runs = [write_run(nasty), write_run("b")]
    page = Page(write_report(*runs, out=tmp_path / "x.html").read_text())
    assert len(page.contents["script"]) == 2
    assert nasty in page.row("Strategy") or nasty in page.data()["runs"]
    assert "<script>alert" not in page.html


def test_a_comparison_without_a_file_of_its_own_is_refused(write_run, tmp_path):
    runs = [write_run(name) for name in ("a", "b")]
    for given, options in ((runs, {}), ([], {}), (runs, {"out": tmp_path / "none" / "x.html"})):
        with pytest.raises(ValueError, match=r"out|run|x\.html"):
            write_report(*given, **options)
