"""`gossipgrad report`: where the page goes, and who opens it."""

import json
import webbrowser

import pytest

from gossipgrad import cli


@pytest.fixture
def write_run(tmp_path):
    def write(name):
        (tmp_path / name).mkdir()
        summary = {"strategy": "local", "world_size": 1, "accuracy": 0.5}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
        return str(tmp_path / name)

    return write


def test_the_report_of_a_run_lies_in_its_folder_or_where_it_is_told(write_run, tmp_path, capsys):
    run = write_run("run")
    assert cli.main(["report", run]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'report.html'}\n"
    assert cli.main(["report", run, "--out", str(tmp_path / "mine.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine.html'}\n"
    assert "gossipgrad run report" in (tmp_path / "mine.html").read_text()


def test_a_comparison_lies_here(write_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", write_run("a"), write_run("b")]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    assert "<h1>2 runs</h1>" in (tmp_path / "comparison.html").read_text()


def test_a_run_is_served_until_ctrl_c(write_run, monkeypatch, capsys):
    """Test of the server itself: tests/report/test_serving.py."""
    run, seen = write_run("run"), []

    def serve(server):
        seen.append(server.run_dir)
        raise KeyboardInterrupt

    monkeypatch.setattr("gossipgrad.report.ReportServer.serve_forever", serve)
    assert cli.main(["report", run, "--serve"]) == 0
    assert [str(folder) for folder in seen] == [run]
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("more", [["other"], ["--out", "page.html"]])
def test_one_run_is_served_and_written_nowhere(write_run, more, capsys):
    assert cli.main(["report", "--serve", write_run("run"), *more]) == 2
    assert "one folder" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_not_served(tmp_path, monkeypatch, capsys):
    def serve(server):
        raise KeyboardInterrupt

    monkeypatch.setattr("gossipgrad.report.ReportServer.serve_forever", serve)
    assert cli.main(["report", "--serve", str(tmp_path / "missing")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"gossipgrad: error: {tmp_path / 'missing'} is no folder")


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.filterwarnings("default")
def test_a_browser_opens_the_page_or_the_page_is_named(write_run, monkeypatch, capsys, is_there):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda uri: opened.append(uri) or is_there)
    assert cli.main(["report", write_run("run"), "--open"]) == 0
    assert len(opened) == 1
    assert ("warning" in capsys.readouterr().err) != is_there
