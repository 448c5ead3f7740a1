"""The report: well-formed, self-contained, safe, and right about the run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gossipgrad.trace import write_report

VOID = {"meta", "link", "path", "br"}


class Page(HTMLParser):
    """Checks that elements close in order, and keeps text, attributes and table rows."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.contents: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
            self.contents.setdefault(tag, []).append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open:
            return
        self.contents[self.open[-1]][-1] += data
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def data(self) -> dict[str, Any]:
        (text,) = (text for text in self.contents["script"] if text.startswith("{"))
        return json.loads(text)

    def row(self, name: str) -> list[str]:
        return next(row for row in self.rows if row[0] == name)


def report(directory: Path) -> Page:
    path = write_report(directory)
    assert path == directory / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_shows_the_headline_of_a_run(write_run):
    page = report(write_run())
    cards = dict(zip(page.contents["dt"], page.contents["span"][::2], strict=True))
    assert cards == {
        "Strategy": "gossip",
        "Accuracy": "91.2%",
        "Consensus distance": "0.25",
        "Throughput": "1,234/s",
        "Time": "3 s",
        "Sent per step": "1 kB",
        "Exposed share": "5.0%",
    }
    assert page.contents["span"][1::2] == [
        "hypercube, overlap, weights, 4 workers",
        "of the average; single replicas 90.0% to 90.3%",
        "RMS over ranks of the distance to their mean",
        "samples, all workers together",
        "30 steps, 3 epochs",
        "by each worker; 67% of ring all-reduce (1.5 kB)",
        "5 ms of a step's 100 ms not hidden by compute",
    ]
    assert "mlp, digits" in page.contents["p"]


def test_says_whose_accuracy_it_is_when_there_is_no_average(write_run):
    directory = write_run()
    change(directory / "summary.json", model_is_consensus=False, model_from_rank=3)
    notes = report(directory).contents["span"][1::2]
    assert notes[1] == "of rank 3's replica; single replicas 90.0% to 90.3%"


def test_ranks_that_disagree_on_the_accuracy_are_drawn_apart(write_run):
    directory = write_run(world_size=2)
    path = directory / "metrics-rank1.jsonl"
    path.write_text(path.read_text().replace('"accuracy": 0.75', '"accuracy": 0.25'))
    page = report(directory)
    accuracy = page.data()["charts"][1]["series"]
    assert [series["label"] for series in accuracy] == ["rank 0", "rank 1", "mean"]
    assert accuracy[-1]["points"][-1] == [3, 0.5]
    assert "as each worker found it" in page.html


def test_embeds_the_curves(write_run):
    loss, accuracy, consensus = report(write_run()).data()["charts"]
    labels = [series["label"] for series in loss["series"]]
    assert labels == ["rank 0", "rank 1", "rank 2", "rank 3", "mean"]
    assert len(loss["series"][0]["points"]) == 30
    mean = dict(loss["series"][-1]["points"])
    assert mean[10] == pytest.approx(0.3678794 + 0.015)
    assert accuracy["series"][0]["points"] == [[1, 0.5], [2, pytest.approx(2 / 3)], [3, 0.75]]
    assert [series["role"] for series in consensus["series"]] == ["rank"] * 4 + ["mean", "exact"]
    assert consensus["series"][-1]["points"][0] == [10, pytest.approx(0.11)]


def test_thins_long_curves_without_moving_them(write_run):
    directory = write_run(world_size=1)
    records = [{"event": "step", "step": step, "loss": float(step)} for step in range(1, 5001)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics-rank0.jsonl").write_text(lines)
    page = report(directory)
    points = page.data()["charts"][0]["series"][0]["points"]
    assert len(points) == 500
    assert all(x == y for x, y in points)
    assert "Each point of a line is the mean of 10 records." in page.html


def test_curves_have_tables_with_the_same_values(write_run):
    page = report(write_run())
    assert page.row("Step") == ["Step", *(f"rank {i}" for i in range(4)), "mean"]
    assert page.row("Epoch") == ["Epoch", "average of all replicas"]
    accuracies = [row for row in page.rows if row[1:] == ["66.7%"]]
    assert [row[0] for row in accuracies] == ["2"]
    exact = [row for row in page.rows if row[0] == "20" and len(row) == 7]
    assert exact[0][-1] == "0.055"


def test_draws_three_ordinary_steps(write_run):
    page = report(write_run())
    timeline = page.data()["timeline"]
    assert timeline["length"] == pytest.approx(300_000)
    assert [rank["rank"] for rank in timeline["ranks"]] == [0, 1, 2, 3]
    lanes = {lane["name"]: lane["spans"] for lane in timeline["ranks"][0]["lanes"]}
    names = ["compute", "communication", "exchange, bucket 0", "exchange, bucket 1"]
    assert list(lanes) == names
    forward = [span for span in lanes["compute"] if span[2] == "forward"]
    assert [span[3]["step"] for span in forward] == [14, 15, 16]
    assert "evaluate" not in {span[2] for span in lanes["compute"]}
    assert "Steps 14 to 16 of rank 0" in page.html
    assert page.row("Rank")[:4] == ["Rank", "forward", "backward", "optimizer"]
    spent = next(row for row in page.rows if row[0] == "rank 0" and row[1] == "90")
    assert spent[1:4] == ["90", "150", "30"]


def test_shows_ranks_and_exchanges(write_run):
    page = report(write_run())
    ranks = [row for row in page.rows if row[0] == "rank 2" and row[1] == "finished"]
    assert ranks == [["rank 2", "finished", "90.2%", "0.06979", "30", "960", "320", "5.0%"]]
    assert page.row("delivered")[:3] == ["delivered", "118", "98.3%"]
    assert page.row("late")[:3] == ["late", "2", "1.7%"]


def test_tells_of_lost_ranks_and_of_an_interruption(write_run):
    directory = write_run()
    change(
        directory / "summary.json",
        lost_ranks=[2],
        interrupted=True,
        lost_because={"2": "killed by SIGKILL"},
        notes=["rank 0: waited for nobody"],
    )
    page = report(directory)
    assert page.contents["li"] == [
        "Rank 2 was lost during the run: killed by SIGKILL.",
        "The run was interrupted before its last step; the figures are those of that moment.",
        "rank 0: waited for nobody",
    ]
    assert {row[0]: row[1] for row in page.rows if row[1:2] in (["lost"], ["unfinished"])} == {
        "rank 0": "unfinished",
        "rank 1": "unfinished",
        "rank 2": "lost",
        "rank 3": "unfinished",
    }


def test_a_whole_run_has_no_notice(write_run):
    assert 'class="notices"' not in report(write_run()).html


def test_takes_the_figures_from_the_metrics_where_there_is_no_summary(write_run):
    directory = write_run()
    (directory / "summary.json").unlink()
    page = report(directory)
    cards = dict(zip(page.contents["dt"], page.contents["span"][::2], strict=True))
    assert cards == {
        "Strategy": "gossip",
        "Accuracy": "75.0%",
        "Consensus distance": "0.03667",
        "Throughput": "1,280/s",
        "Time": "3 s",
        "Sent per step": "n/a",
        "Exposed share": "5.0%",
    }
    assert any("left no summary.json" in text for text in page.contents["li"])


@pytest.mark.parametrize("kept", ["config.json", "summary.json", "metrics-rank1.jsonl"])
def test_makes_do_with_a_single_file(write_run, kept):
    directory = write_run()
    for path in directory.iterdir():
        if path.name != kept:
            path.unlink()
    page = report(directory)
    assert page.data()["timeline"] is None
    assert bool(page.data()["charts"]) == (kept == "metrics-rank1.jsonl")


def test_makes_do_with_empty_files_and_values_that_are_null(write_run):
    directory = write_run()
    (directory / "config.json").write_text("{}")
    summary = json.loads((directory / "summary.json").read_text())
    (directory / "summary.json").write_text(json.dumps(dict.fromkeys(summary)))
    (directory / "metrics-rank0.jsonl").write_text("")
    (directory / "metrics-rank1.jsonl").write_text(
        '{"event": "step", "step": 1, "loss": NaN, "seconds": null}\n{"event": "epoch"}\n{}\n'
    )
    page = report(directory)
    assert len(page.data()["charts"][0]["series"]) == 3


def test_values_cannot_leave_their_place(write_run):
    nasty = "</script><script>alert('1')</script>\"<!-- & \u2028"
    directory = write_run(name="a<b>&\"'", model=nasty, strategy=nasty)
    change(directory / "summary.json", strategy=nasty, outcomes={nasty: 1})
    events = json.loads((directory / "trace.json").read_text())
    for event in events["traceEvents"]:
        if event["ph"] == "X":
            event["args"]["note"] = nasty
    (directory / "trace.json").write_text(json.dumps(events))
    page = report(directory)
    assert len(page.contents["script"]) == 2
    assert "alert('1')" not in "".join(page.contents["script"][1:])
    assert page.data()["timeline"]["ranks"][0]["lanes"][0]["spans"][0][3]["note"] == nasty
    assert page.contents["h1"] == ["a<b>&\"'"]
    assert json.loads(page.contents["pre"][0])["model"] == nasty
    assert nasty in [row[0] for row in page.rows]


def test_loads_nothing_from_anywhere(write_run):
    page = report(write_run())
    assert not re.search(r"https?:|//[a-z]+\.", page.html.lower())
    loading = {"src", "href", "srcset", "action", "data", "style"}
    assert [a for a in page.attributes if a[1] in loading] == [("link", "href", "data:,")]
    assert "@import" not in page.html
    assert "url(" not in page.html


def test_the_content_policy_admits_its_own_script_and_style_only(write_run):
    page = report(write_run())
    (policy,) = (v for t, n, v in page.attributes if (t, n) == ("meta", "content") and "-src" in v)
    hashes = re.findall(r"(style|script)-src '(sha256-[^']+)'", policy)
    (style,) = page.contents["style"]
    script = page.contents["script"][-1]
    for kind, expected in hashes:
        text = style if kind == "style" else script
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert expected == f"sha256-{digest}"
    assert [kind for kind, _ in hashes] == ["style", "script"]
    assert policy.startswith("default-src 'none';")


def test_is_the_same_page_each_time(write_run):
    directory = write_run()
    first = report(directory).html
    assert report(directory).html == first
    assert not list(directory.glob("*.partial"))


def test_baselines_are_not_described_by_gossip_options(write_run):
    directory = write_run(strategy="allreduce")
    change(directory / "summary.json", strategy="allreduce", outcomes={})
    page = report(directory)
    assert page.contents["span"][1] == "4 workers"
    assert "Exchanges" not in page.html
