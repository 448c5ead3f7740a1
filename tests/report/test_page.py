"""The page of a recorded run and of several: figures, curves, whatever is missing or hostile."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from gossipgrad.report import render_report, write_report
from gossipgrad.topology import by_name
from support.html_page import Page


def cards(page):
    return dict(zip(page.contents["dt"], page.contents["span"][::2], strict=True))


def curves(page):
    return {chart["id"]: chart["series"] for chart in page.data()["charts"]}


def rows_of(page, first, length):
    """The rows of ranks below the head that begins so."""
    start = next(n for n, row in enumerate(page.rows) if row[: len(first)] == first)
    return page.rows[start + 1 : start + 1 + length]


def test_the_page_shows_the_figures_of_the_run(golden, report):
    page = report(golden)
    assert cards(page) == {
        "Strategy": "gossip",
        "Accuracy": "95.56%",
        "Consensus distance": "0.0003242",
        "Throughput": "2,905/s",
        "Time": "4.02 s",
        "Sent per step": "103 kB",
        "Exposed share": "74.1%",
    }
    notes = page.contents["span"][1::2]
    assert "103 steps, 4 epochs" in notes
    assert any("66% of ring all-reduce (157 kB)" in note for note in notes)
    assert "Rank 2 failed: rank 2 was killed by script in round 60." in page.contents["li"]
    assert rows_of(page, ["Rank", "State"], 4)[1:3] == [
        ["rank 1", "finished", "95.56%", "0.01301", "103", "1,573", "964.3", "73.0%", "0", "0"],
        ["rank 2", "lost", "n/a", "0.07658", "60", "942", "1,658", "57.4%", "n/a", "n/a"],
    ]
    assert rows_of(page, ["", "Share delivered"], 3) == [
        ["all workers", "96.8%", "598", "0", "20", "0", "24"],
        ["rank 0", "96.0%", "192", "0", "8", "0", "8"],
        ["rank 1", "98.0%", "196", "0", "4", "0", "8"],
    ]
    assert json.loads(page.contents["pre"][1]) == json.loads((golden / "summary.json").read_text())


def test_curves_have_a_line_a_rank_their_mean_and_what_was_measured_exactly(golden, report):
    page = report(golden)
    found = curves(page)
    assert list(found) == [
        *("loss", "metric", "consensus"),
        *("disagreement", "exposed", "throughput"),
    ]
    ranks = [f"rank {rank}" for rank in range(4)]
    assert [one["label"] for one in found["loss"]] == [*ranks, "mean"]
    records = {
        rank: [
            record
            for line in (golden / f"metrics-rank{rank}.jsonl").read_text().splitlines()
            if (record := json.loads(line))["event"] == "step"
        ]
        for rank in range(4)
    }
    mean = {x: y for x, y, _ in found["loss"][-1]["points"]}
    for index, step in enumerate((10, 20, 30)):
        losses = [records[rank][index]["loss"] for rank in range(4)]
        assert mean[step] == pytest.approx(np.mean(losses), rel=1e-5)
    exposed = found["exposed"][0]["points"][1]
    before, now = records[0][:2]
    growth = [now[name] - before[name] for name in ("exposed_seconds", "train_seconds")]
    assert exposed[:2] == [20, pytest.approx(growth[0] / growth[1], rel=1e-4)]
    assert [x for x, *_ in found["metric"][0]["points"]] == [1, 2, 3, 4]
    assert [one["role"] for one in found["consensus"]] == ["rank"] * 4 + ["mean", "exact"]
    assert ["4", "95.56%"] in page.rows, "the same values as a table"


def test_who_met_whom_is_beside_the_schedule_until_ranks_change(golden, copy_run, report, tmp_path):
    def join(event):
        if event["name"] == "exchange" and event["args"]["round"] >= 8:
            event["args"] |= {"generation": 1}
        return event

    (found,) = report(golden).data()["mixings"]
    assert (found["worldSize"], found["silent"]) == (4, [2])
    assert "15 of 20" in found["about"], "the rank that was killed left no trace"
    schedule = by_name("dissemination", 4, seed=0)
    for index, row in enumerate(found["observed"]):
        planned = schedule.round_peers(found["firstRound"] + index).recv_from
        np.testing.assert_array_equal(found["expected"][index], planned)
        assert row[2] == -1
        assert [row[rank] for rank in (0, 1, 3)] == [planned[rank] for rank in (0, 1, 3)]
    joined = {"rank": 4, "from_rank": 0, "steps": 3, "samples": 40, "end": "left"}
    page = report(copy_run(tmp_path / "run", event=join, summary={"joined": [joined]}))
    (found,) = page.data()["mixings"]
    assert (found["worldSize"], found["expected"]) == (5, None)
    assert any(text.startswith("Rank 4 joined from rank 0") for text in page.contents["li"])


def test_the_timeline_holds_the_steps_of_the_trace(golden, report):
    (found,) = report(golden).data()["timelines"]
    assert [step for step, *_ in found["steps"]] == [6, 7, 8, 9, 10]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 3]
    assert {"forward", "backward", "optimizer", "exchange", "wait"} <= set(found["names"])
    lanes = [lane["name"] for lane in found["ranks"][0]["lanes"]]
    assert lanes[:2] == ["compute", "communication"]


@pytest.mark.parametrize("has_ended", [True, False])
@pytest.mark.parametrize(
    ("name", "specification", "values", "shown"),
    [
        ("mean error", ".3g", [25.0, 7.0, 5.0, 3.25], "3.25"),
        ("log likelihood", ".1f", [-9.0, -3.0, -2.0, -1.5], "-1.5"),
        ("growth", ".0%", [0.5, 1.5, 3.0, 2.0], "200%"),
        ("loss", ".4g", [1e-3, 1e-5, 1e-6, 3.706e-7], "3.706e-07"),
        ("metric", ".4g", [1.0, None, None, None], "n/a"),
        ("metric", "wrong", [0.0, 0.0, 0.0, 0.5], "0.5"),
    ],
)
def test_a_metric_has_the_name_and_the_format_that_the_job_gave_it(
    copy_run, report, tmp_path, has_ended, name, specification, values, shown
):
    metric = {"metric_name": name, "metric_format": specification}

    def measure(record):
        if record["event"] == "epoch":
            record |= metric | {"accuracy": values[record["epoch"]]}
        return record

    summary = metric | {"accuracy": values[-1]}
    without = "" if has_ended else "summary.json"
    run = copy_run(
        tmp_path / "run", summary=summary if has_ended else None, record=measure, without=without
    )
    page = report(run)
    title = name[0].upper() + name[1:]
    assert cards(page)[title] == shown
    assert title in page.contents["h2"]
    assert "Accuracy" not in page.contents["h2"] + page.contents["dt"] + page.contents["th"]
    chart = page.data()["charts"][1]
    assert chart["isShare"] == specification.endswith("%")
    known = [value for value in values if value is not None]
    assert [point[1] for point in chart["series"][0]["points"]] == pytest.approx(known)


def test_runs_are_measured_against_the_first(golden, copy_run, report, tmp_path):
    summary = {"accuracy": 0.5, "step_seconds": 1.0, "exposed_seconds_per_step": 0.5}
    config = {"lr": 0.5, "unused": ["momentum"], "run_name": "other"}
    other = copy_run(tmp_path / "other", summary=summary, config=config)
    page = report(golden, other)
    assert page.row("Accuracy") == ["Accuracy", "95.56%", "50.00%0.523x"]
    assert page.row("Exposed share") == ["Exposed share", "74.1%", "50.0%0.674x"]
    assert page.row("lr") == ["lr", "0.1", "0.5"]
    assert page.row("momentum") == ["momentum", "0.9", "not used"]
    assert page.contents["mark"] == ["0.5"]
    data = page.data()
    assert [one["run"] for one in data["timelines"]] == ["golden", "other"]
    labels = [(one["label"], one["run"]) for one in curves(page)["loss"]]
    assert labels == [("golden", 0), ("other", 1)]
    regression = copy_run(
        tmp_path / "regression", summary={"metric_name": "error", "metric_format": ".4g"}
    )
    titles = [chart["isShare"] for chart in report(golden, regression).data()["charts"]]
    assert not titles[1], "an error is no share"
    assert "No option differs." in report(golden, regression).contents["p"]


def test_runs_of_one_name_are_told_apart(golden, copy_run, report, tmp_path):
    same = copy_run(tmp_path / "golden")
    names = report(golden, same, same).data()["runs"]
    assert names[0] == "report/golden"
    assert len({*names}) == 3


def test_a_run_without_a_summary_shows_what_its_metrics_have(copy_run, report, tmp_path):
    page = report(copy_run(tmp_path / "run", without="summary.json"))
    assert cards(page)["Accuracy"] == "95.56%"
    assert cards(page)["Sent per step"] == "104 kB"
    assert any("summary.json" in text for text in page.contents["li"])
    assert {row[1] for row in rows_of(page, ["Rank", "State"], 4)} == {"unfinished"}


@pytest.mark.parametrize("kept", ["config.json", "summary.json", "metrics-rank1.jsonl"])
def test_makes_do_with_a_single_file(golden, report, tmp_path, kept):
    shutil.copy(golden / kept, tmp_path / kept)
    page = report(tmp_path)
    assert page.data()["timelines"] == []
    assert bool(page.data()["charts"]) == (kept == "metrics-rank1.jsonl")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics-rank0.jsonl", b'{"event": "step", "note": "\xe2\x98'),
        ("metrics-rank0.jsonl", b"[" * 200_000),
        ("metrics-rank0.jsonl", b'{"event": "step", "step": ' + 400 * b"9" + b', "loss": NaN}\n['),
        ("config.json", b'{"half'),
        ("summary.json", b"[]"),
        ("trace.json", b'{"traceEvents": [{"ph": "X", "name": "a", "ts": "soon"}, null, {}]}'),
        ("trace.json", b"7"),
    ],
)
def test_what_cannot_be_read_is_left_out_and_named(copy_run, report, tmp_path, name, content):
    run = copy_run(tmp_path / "run")
    before = (run / name).read_bytes() if name.endswith("l") else b""
    (run / name).write_bytes(before + content)
    page = report(run)
    assert any(name in text for text in page.contents["li"])
    assert len(curves(page)["loss"][0]["points"]) == 10


def test_text_of_a_run_stays_text(copy_run, tmp_path):
    nasty = "</script><script>alert('1')</script>\"<!-- & \u2028"

    def spoil(event):
        if event["ph"] == "X":
            event["args"]["note"] = nasty
        return event

    summary = {"strategy": nasty, "notes": [nasty, "\ud800"], "metric_name": nasty}
    summary |= {"outcomes": {nasty: 1}, "metric_format": nasty}
    run = copy_run(tmp_path / os.fsdecode(b"a<b>&\xff"), summary=summary, event=spoil)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert len(page.contents["script"]) == 2
    assert "alert('1')" not in page.contents["script"][1]
    lane = page.data()["timelines"][0]["ranks"][0]["lanes"][0]
    assert lane["spans"][0][3]["note"] == nasty
    assert page.contents["h1"] == ["a<b>&\\udcff"]
    assert nasty in page.contents["li"]


def test_the_page_needs_nothing_but_itself(golden):
    text = render_report(golden)
    assert text == render_report(golden)
    page = Page(text)
    loading = {"src", "href", "srcset", "action", "data", "style"}
    assert [one for one in page.attributes if one[1] in loading] == [("link", "href", "data:,")]
    assert not re.search(r"https?:|@import|url\(", text)


def test_the_page_of_many_ranks_is_small_and_says_what_is_left_out(report, tmp_path):
    ranks = 20_000
    summary = {"world_size": ranks, "accuracy_per_rank": [0.9] * ranks}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"lost_ranks": [*range(ranks)]}))
    meetings = [
        {"name": "exchange", "ph": "X", "tid": 0, "ts": 1.0, "dur": 2.0, "pid": rank}
        | {"args": {"round": 1, "recv_from": rank ^ 1}}
        for rank in range(1100)
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": meetings}))
    page = report(tmp_path)
    assert len(page.html) < 400_000
    assert page.data()["mixings"] == []
    said = " ".join(page.contents["p"] + page.contents["li"])
    for left_out in ("19,984 more ranks", "of 20,000 ranks", "drawn for up to 1,024"):
        assert left_out in said


def test_many_workers_are_drawn_as_their_range_and_long_curves_thinned(report, tmp_path):
    for rank in range(17):
        steps = [{"event": "step", "step": n, "loss": float(n + rank)} for n in range(1, 1001)]
        path = tmp_path / f"metrics-rank{rank}.jsonl"
        path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    spread, mean = curves(report(tmp_path))["loss"]
    assert (spread["role"], mean["role"]) == ("range", "mean")
    assert len(mean["points"]) == len(spread["points"]) == 500
    assert all(y == pytest.approx(x + 8) for x, y, _ in mean["points"])
    assert spread["points"][0] == [1.5, 1.0, None, 18.0]


def test_what_is_no_run_and_no_file_to_write_is_refused(golden, tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=str(folder)):
            write_report(folder)
    refused = [
        ((), {}),
        ((golden, golden), {}),
        ((golden,), {"out": tmp_path}),
        ((golden,), {"out": tmp_path / "none" / "x.html"}),
    ]
    for runs, options in refused:
        with pytest.raises(ValueError, match=r"out|run|file|write"):
            write_report(*runs, **options)
    assert not list(Path(tmp_path).iterdir())
