"""The report: well-formed, self-contained, safe, and right about the run."""

import base64
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from gossipgrad.trace import write_report
from support.html_page import Page


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
    assert any(text.startswith("mlp, digits, 4 workers, seed 0, ") for text in page.contents["p"])


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
    assert accuracy[-1]["points"][-1] == [3, 0.5, 3.0]
    assert "as each worker found it" in page.html


def test_embeds_the_curves(write_run):
    found = {chart["id"]: chart["series"] for chart in report(write_run()).data()["charts"]}
    assert list(found) == [
        *("loss", "accuracy", "consensus"),
        *("disagreement", "exposed", "throughput"),
    ]
    labels = [series["label"] for series in found["loss"]]
    assert labels == ["rank 0", "rank 1", "rank 2", "rank 3", "mean"]
    assert len(found["loss"][0]["points"]) == 30
    mean = {x: (y, seconds) for x, y, seconds in found["loss"][-1]["points"]}
    assert mean[10] == (pytest.approx(0.3678794 + 0.015, rel=1e-5), pytest.approx(1.0))
    assert [y for _, y, _ in found["accuracy"][0]["points"]] == [0.5, pytest.approx(2 / 3), 0.75]
    assert [series["role"] for series in found["consensus"]] == ["rank"] * 4 + ["mean", "exact"]
    assert found["consensus"][-1]["points"][0] == [10, pytest.approx(0.11), pytest.approx(1.0)]
    assert found["exposed"][-1]["points"][7] == [8, pytest.approx(0.05), pytest.approx(0.8)]
    assert [y for _, y, _ in found["throughput"][-1]["points"]] == [320.0] * 3


def test_thins_long_curves_without_moving_them(write_run):
    directory = write_run(world_size=1)
    records = [{"event": "step", "step": step, "loss": float(step)} for step in range(1, 5001)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics-rank0.jsonl").write_text(lines)
    page = report(directory)
    points = page.data()["charts"][0]["series"][0]["points"]
    assert len(points) == 500
    assert all(x == y for x, y, _ in points)
    assert "Each point of a line is the mean of 10 records." in page.html


def test_many_workers_are_drawn_as_their_range(write_run):
    page = report(write_run(world_size=17))
    loss = page.data()["charts"][0]["series"]
    assert [series["role"] for series in loss] == ["range", "mean"]
    x, low, _, high = loss[0]["points"][9]
    assert (x, high - low) == (10, pytest.approx(0.16))
    assert "on its own batches (their range) and the mean (bold)" in page.html
    assert len(page.data()["timelines"][0]["ranks"]) == 16


def test_curves_have_tables_with_the_same_values(write_run):
    page = report(write_run())
    assert page.row("Step") == ["Step", *(f"rank {i}" for i in range(4)), "mean"]
    assert page.row("Epoch") == ["Epoch", "average of all replicas"]
    accuracies = [row for row in page.rows if row[1:] == ["66.7%"]]
    assert [row[0] for row in accuracies] == ["2"]
    exact = [row for row in page.rows if row[0] == "20" and len(row) == 7]
    assert exact[0][-1] == "0.055"


def test_shows_ranks_and_exchanges(write_run):
    page = report(write_run())
    ranks = [row for row in page.rows if row[0] == "rank 2" and row[1] == "finished"]
    assert ranks == [
        ["rank 2", "finished", "90.2%", "0.06979", "30", "960", "320", "5.0%", "n/a", "n/a"]
    ]
    assert page.row("delivered")[:3] == ["delivered", "118", "98.3%"]
    assert page.row("late")[:3] == ["late", "2", "1.7%"]


def test_tells_of_lost_ranks_and_of_an_interruption(write_run):
    directory = write_run()
    change(
        directory / "summary.json",
        lost_ranks=[1, 2],
        interrupted=True,
        lost_because={"2": "was killed by SIGKILL"},
        notes=["rank 0: waited for nobody"],
    )
    page = report(directory)
    assert page.contents["li"] == [
        "Rank 1 was lost during the run.",
        "Rank 2 was killed by SIGKILL.",
        "The run was interrupted before its last step; the figures are those of that moment.",
        "rank 0: waited for nobody",
    ]
    assert {row[0]: row[1] for row in page.rows if row[1:2] in (["lost"], ["unfinished"])} == {
        "rank 0": "unfinished",
        "rank 1": "lost",
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
        "Sent per step": "1 kB",
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
    assert page.data()["timelines"] == []
    assert "There are no spans of this run: trace.json is missing or empty." in page.html
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
    (timeline,) = page.data()["timelines"]
    assert timeline["ranks"][0]["lanes"][0]["spans"][0][3]["note"] == nasty
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
    directory = write_run(strategy="allreduce", strategy_is={})
    change(directory / "summary.json", strategy="allreduce", outcomes={})
    (directory / "trace.json").unlink()
    for path in directory.glob("metrics-rank*.jsonl"):
        text = re.sub(r', "outcomes": \{.*?\}', "", path.read_text())
        path.write_text(re.sub(r'"consensus_distance_estimate": [\d.]+, ', "", text))
    page = report(directory)
    assert page.contents["span"][1] == "4 workers"
    assert "How exchanges ended" not in page.contents["h2"]
    assert "Exchanges" not in page.contents["caption"]
    assert "How far the replicas are from their mean: exact, after each epoch." in page.html


def write_uneven_epochs(path: Path, *, exposed: float) -> None:
    """100 samples in 10 s, then 300 in 0.1 s; the last step logged is one of the fast ones."""
    records = [
        {"event": "step", "step": 10, "samples": 100, "train_seconds": 10.0, "step_seconds": 0.1},
        {"event": "epoch", "epoch": 0, "step": 10, "samples_per_second": 10.0},
        {"event": "step", "step": 40, "samples": 400, "train_seconds": 10.1, "step_seconds": 0.01},
        {"event": "epoch", "epoch": 1, "step": 40, "samples_per_second": 3000.0},
    ]
    for record in records:
        if record["event"] == "step":
            record["exposed_seconds"] = exposed * record["train_seconds"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("is_finished", [True, False])
def test_rates_and_shares_are_of_all_the_time_in_steps(write_run, is_finished):
    directory = write_run(world_size=2)
    for rank, exposed in enumerate((0.1, 0.3)):
        write_uneven_epochs(directory / f"metrics-rank{rank}.jsonl", exposed=exposed)
    if not is_finished:
        (directory / "summary.json").unlink()
    page = report(directory)
    ranks = [row for row in page.rows if row[1:2] == ["finished" if is_finished else "unfinished"]]
    assert [row[-5:-2] for row in ranks] == [["400", "39.6", "10.0%"], ["400", "39.6", "30.0%"]]
    if not is_finished:
        cards = dict(zip(page.contents["dt"], page.contents["span"][::2], strict=True))
        assert cards["Throughput"] == "79.21/s"
        assert cards["Exposed share"] == "20.0%"
        assert "50.5 ms of a step's 252 ms not hidden by compute" in page.contents["span"]


def test_rates_of_epochs_stand_in_for_steps_that_were_not_logged(write_run):
    directory = write_run(world_size=1)
    path = directory / "metrics-rank0.jsonl"
    write_uneven_epochs(path, exposed=0.1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"event": "epoch"' in line))
    (directory / "summary.json").unlink()
    page = report(directory)
    assert page.contents["span"][6] == "39.6/s", "40 steps: 10 at 10 samples/s, 30 at 3000"


def test_traffic_of_a_killed_run_is_that_of_its_metrics(write_run):
    directory = write_run(world_size=1)
    path = directory / "metrics-rank0.jsonl"
    path.write_text(path.read_text().replace('"outcomes"', '"shuffle_bytes_sent": 60, "outcomes"'))
    (directory / "summary.json").unlink()
    traffic = next(bar for bar in report(directory).data()["bars"] if bar["id"] == "traffic")
    assert [bar["parts"] for bar in traffic["bars"]] == [{"exchanges": 1000.0, "shuffle": 2.0}]


def test_names_and_texts_that_are_no_utf8_are_written_with_escapes(write_run):
    directory = write_run(os.fsdecode(b"run-\xff"), world_size=1)
    change(directory / "summary.json", notes=["\ud800"])
    page = report(directory)
    assert page.contents["h1"] == ["run-\\udcff"]
    assert page.contents["li"] == ["\\ud800"]
    assert json.loads(page.contents["pre"][1])["notes"] == ["\ud800"]


def test_a_page_that_cannot_be_written_leaves_nothing(write_run, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    run = write_run(world_size=1)
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ValueError, match=r"cannot write .*x\.html: No space left on device"):
        write_report(run, out=tmp_path / "x.html")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("out", [".", "..", "folder"])
def test_a_folder_is_no_file_to_write(write_run, tmp_path, monkeypatch, out):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    advice = f"{out}: it is a folder; name a file in it, such as {Path(out) / 'report.html'}"
    with pytest.raises(ValueError, match=f"^cannot write {re.escape(advice)}$"):
        write_report(write_run(world_size=1), out=out)
    assert not list(tmp_path.glob("*.partial"))


def test_an_accuracy_that_is_not_there_is_of_nothing(write_run):
    directory = write_run(world_size=1)
    (directory / "summary.json").unlink()
    (directory / "metrics-rank0.jsonl").unlink()
    spans = report(directory).contents["span"]
    assert spans[2:4] == ["n/a", "not measured"]
