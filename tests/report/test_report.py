"""The report of one run: well-formed, self-contained, safe, and right about broken runs, too."""

import base64
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from gossipgrad.report import write_report
from support.html_page import Page


def test_shows_the_headline_of_a_run(write_run, report):
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


def test_says_whose_accuracy_it_is_when_there_is_no_average(write_run, report, change):
    directory = write_run()
    change(directory / "summary.json", model_is_consensus=False, model_from_rank=3)
    notes = report(directory).contents["span"][1::2]
    assert notes[1] == "of rank 3's replica; single replicas 90.0% to 90.3%"


def test_ranks_that_disagree_on_the_accuracy_are_drawn_apart(write_run, report):
    directory = write_run(world_size=2)
    path = directory / "metrics-rank1.jsonl"
    path.write_text(path.read_text().replace('"accuracy": 0.75', '"accuracy": 0.25'))
    page = report(directory)
    accuracy = page.data()["charts"][1]["series"]
    assert [series["label"] for series in accuracy] == ["rank 0", "rank 1", "mean"]
    assert accuracy[-1]["points"][-1] == [3, 0.5, 3.0]
    assert "as each worker found it" in page.html


def test_embeds_the_curves(write_run, report):
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


def test_thins_long_curves_without_moving_them(write_run, report):
    directory = write_run(world_size=1)
    records = [{"event": "step", "step": step, "loss": float(step)} for step in range(1, 5001)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics-rank0.jsonl").write_text(lines)
    page = report(directory)
    points = page.data()["charts"][0]["series"][0]["points"]
    assert len(points) == 500
    assert all(x == y for x, y, _ in points)
    assert "Each point of a line is the mean of 10 records." in page.html


def test_many_workers_are_drawn_as_their_range(write_run, report):
    page = report(write_run(world_size=17))
    loss = page.data()["charts"][0]["series"]
    assert [series["role"] for series in loss] == ["range", "mean"]
    x, low, _, high = loss[0]["points"][9]
    assert (x, high - low) == (10, pytest.approx(0.16))
    assert "on its own batches (their range) and the mean (bold)" in page.html
    assert len(page.data()["timelines"][0]["ranks"]) == 16


def test_curves_have_tables_with_the_same_values(write_run, report):
    page = report(write_run())
    assert page.row("Step") == ["Step", *(f"rank {i}" for i in range(4)), "mean"]
    assert page.row("Epoch") == ["Epoch", "average of all replicas"]
    accuracies = [row for row in page.rows if row[1:] == ["66.7%"]]
    assert [row[0] for row in accuracies] == ["2"]
    exact = [row for row in page.rows if row[0] == "20" and len(row) == 7]
    assert exact[0][-1] == "0.055"


def test_shows_ranks_and_exchanges(write_run, report):
    page = report(write_run())
    ranks = [row for row in page.rows if row[0] == "rank 2" and row[1] == "finished"]
    assert ranks == [
        ["rank 2", "finished", "90.2%", "0.06979", "30", "960", "320", "5.0%", "n/a", "n/a"]
    ]
    assert page.row("delivered")[:3] == ["delivered", "118", "98.3%"]
    assert page.row("late")[:3] == ["late", "2", "1.7%"]


def test_tells_of_lost_ranks_and_of_an_interruption(write_run, report, change):
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


def test_a_whole_run_has_no_notice(write_run, report):
    assert 'class="notices"' not in report(write_run()).html


def test_takes_the_figures_from_the_metrics_where_there_is_no_summary(write_run, report):
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
def test_makes_do_with_a_single_file(write_run, report, kept):
    directory = write_run()
    for path in directory.iterdir():
        if path.name != kept:
            path.unlink()
    page = report(directory)
    assert page.data()["timelines"] == []
    assert any("trace.json is missing or empty" in text for text in page.contents["p"])
    assert bool(page.data()["charts"]) == (kept == "metrics-rank1.jsonl")
    if kept == "config.json":
        assert page.contents["span"][2:4] == ["n/a", "not measured"]


def test_makes_do_with_empty_files_and_values_that_are_null(write_run, report):
    directory = write_run()
    (directory / "config.json").write_text("{}")
    summary = json.loads((directory / "summary.json").read_text())
    (directory / "summary.json").write_text(json.dumps(dict.fromkeys(summary)))
    (directory / "metrics-rank0.jsonl").write_text("")
    (directory / "metrics-rank1.jsonl").write_text(
        '{"event": "step", "step": 1, "loss": NaN, "seconds": null}\n{"event": "epoch"}\n{}\n'
    )
    assert len(report(directory).data()["charts"][0]["series"]) == 3


def test_ranks_without_metrics_are_named(write_run, report):
    directory = write_run(world_size=11)
    for rank in (1, 3):
        (directory / f"metrics-rank{rank}.jsonl").unlink()
    page = report(directory)
    assert "There are no metrics of ranks 1, 3." in page.contents["li"]
    ranks = [row[0] for row in page.rows if row[1:2] == ["finished"]]
    assert ranks == [f"rank {rank}" for rank in range(11)]


@pytest.mark.parametrize(
    "tail",
    [
        b'{"event": "step", "note": "\xe2\x98',  # killed within a character
        b'{"event": "step", "step": ' + 5000 * b"9" + b"}\n",
        b"[" * 200_000 + b"\n",
    ],
)
def test_lines_that_cannot_be_read_are_left_out_and_counted(write_run, report, tail):
    directory = write_run(world_size=1)
    with (directory / "metrics-rank0.jsonl").open("ab") as file:
        file.write(tail)
    page = report(directory)
    assert any(text.startswith("1 line of metrics-rank0.jsonl") for text in page.contents["li"])
    assert len(page.data()["charts"][0]["series"][0]["points"]) == 30


@pytest.mark.parametrize("name", ["config.json", "summary.json", "trace.json"])
def test_a_broken_file_is_left_out_and_named(write_run, report, name):
    directory = write_run()
    (directory / name).write_text('{"half')
    assert f"{name} is no JSON object and was left out." in report(directory).contents["li"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=str(folder)):
            write_report(folder)


@pytest.mark.parametrize("digits", [400, 308])
def test_absurd_numbers_are_no_numbers(write_run, report, digits):
    directory = write_run(world_size=2)
    (directory / "summary.json").unlink()
    for path in directory.glob("metrics-rank*.jsonl"):
        step, epoch = (json.loads(line) for line in path.read_text().splitlines()[-2:])
        absurd = dict.fromkeys(step | epoch, int("9" * digits))
        absurd |= {"outcomes": {"delivered": int("9" * digits)}}
        with path.open("a") as file:
            file.writelines(json.dumps(absurd | {"event": k}) + "\n" for k in ("step", "epoch"))
    page = report(directory)
    assert page.data()["charts"][0]["series"][0]["points"][-1][0] == 30
    assert "n/a" in page.contents["span"], "the last step is not known"


def test_values_cannot_leave_their_place(write_run, report, change):
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


def test_loads_nothing_from_anywhere(write_run, report):
    page = report(write_run())
    assert not re.search(r"https?:|//[a-z]+\.", page.html.lower())
    loading = {"src", "href", "srcset", "action", "data", "style"}
    assert [a for a in page.attributes if a[1] in loading] == [("link", "href", "data:,")]
    assert "@import" not in page.html
    assert "url(" not in page.html


def test_the_content_policy_admits_its_own_script_and_style_only(write_run, report):
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


def test_is_the_same_page_each_time(write_run, report):
    directory = write_run()
    first = report(directory).html
    assert report(directory).html == first
    assert not list(directory.glob("*.partial"))


def test_baselines_are_not_described_by_gossip_options(write_run, report, change):
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
def test_rates_and_shares_are_of_all_the_time_in_steps(write_run, is_finished, report):
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


def test_rates_of_epochs_stand_in_for_steps_that_were_not_logged(write_run, report):
    directory = write_run(world_size=1)
    path = directory / "metrics-rank0.jsonl"
    write_uneven_epochs(path, exposed=0.1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"event": "epoch"' in line))
    (directory / "summary.json").unlink()
    page = report(directory)
    assert page.contents["span"][6] == "39.6/s", "40 steps: 10 at 10 samples/s, 30 at 3000"


def test_names_and_texts_that_are_no_utf8_are_written_with_escapes(write_run, report, change):
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
    with pytest.raises(ValueError, match=r"x\.html: No space left"):
        write_report(run, out=tmp_path / "x.html")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("out", [".", "..", "folder"])
def test_a_folder_is_no_file_to_write(write_run, tmp_path, monkeypatch, out):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(str(Path(out) / "report.html"))):
        write_report(write_run(world_size=1), out=out)
    assert not list(tmp_path.glob("*.partial"))


@pytest.fixture
def many(tmp_path):
    """A run of 20,000 ranks, every fourth lost, with one exchange of 1,100 in its trace."""
    ranks = 20_000
    directory = tmp_path / "many"
    directory.mkdir()
    summary = {
        "world_size": ranks,
        "accuracy_per_rank": [0.9] * ranks,
        "lost_ranks": list(range(0, ranks, 4)),
        "lost_because": {str(rank): "was killed by SIGKILL" for rank in range(0, ranks, 4)},
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    step = {"event": "step", "step": 1, "loss": 1.0, "samples": 4, "train_seconds": 1.0}
    (directory / "metrics-rank0.jsonl").write_text(json.dumps(step) + "\n")
    span = {"name": "exchange", "ph": "X", "tid": 0, "ts": 1.0, "dur": 2.0}
    meetings = [
        span | {"pid": rank, "args": {"round": 1, "recv_from": rank ^ 1}} for rank in range(1100)
    ]
    (directory / "trace.json").write_text(json.dumps({"traceEvents": meetings}))
    return directory


@pytest.mark.slow
def test_the_page_of_many_ranks_is_small_and_says_what_is_left_out(many, write_run, tmp_path):
    text = write_report(many).read_text()
    assert len(text) < 400_000
    page = Page(text)
    said = " ".join(page.contents["p"] + page.contents["li"] + page.contents["pre"])
    for left_out in (
        "16 and 19,983 more.",
        "4,984 more ranks were lost",
        "The first 256 of 20,000 ranks",
        "The 12 slowest of 20,000 are drawn; the table has these and others, 256 in all.",
        "many has 20,000 ranks: who met whom is drawn for up to 1,024.",
        '"19,744 more left out"',
        '"...": "4,744 more left out"',
    ):
        assert left_out in said
    assert "Rank 60 was killed" in said
    assert "Rank 64 was killed" not in text
    assert text.count('<th scope="row">rank ') <= 4 * 256
    assert page.data()["mixings"] == []
    both = Page(write_report(write_run(), many, out=tmp_path / "both.html").read_text())
    assert [each["run"] for each in both.data()["mixings"]] == ["small"]


def test_as_many_ranks_as_are_drawn_are_all_listed(write_run, report):
    text = report(write_run(world_size=32)).html
    for word in ("more left out", "more ranks", "who met whom is drawn for"):
        assert word not in text
