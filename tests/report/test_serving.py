"""The live report: follows the run's files, reloads until the run has ended, writes nothing."""

import json
import os
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from gossipgrad.report import ReportServer
from support.waiting import HANG_SECONDS


@contextmanager
def serving(folder, **options):
    with ReportServer(folder, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def fetch(url):
    with urllib.request.urlopen(url, timeout=HANG_SECONDS) as answer:
        return answer.read().decode(), answer.headers


def test_the_page_follows_the_run_and_reloads_until_it_has_ended(tmp_path):
    folder = tmp_path / "run"
    with serving(folder, every_seconds=2) as server:
        text, headers = fetch(server.url)
        assert str(folder) in text
        assert headers["Refresh"] == "2"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model": "mlp", "seed": 3}))
        step = {"event": "step", "step": 1, "loss": 2.5, "seconds": 1.0}
        (folder / "metrics-rank0.jsonl").write_text(json.dumps(step) + "\n")
        text, headers = fetch(server.url)
        assert "mlp" in text
        assert "seed 3" in text
        assert headers["Refresh"] == "2"
        (folder / "summary.json").write_text(json.dumps({"accuracy": 0.5, "world_size": 1}))
        text, headers = fetch(server.url)
        assert "50" in text
        assert headers["Refresh"] is None
        with pytest.raises(urllib.error.HTTPError):
            fetch(f"{server.url}config.json")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "metrics-rank0.jsonl",
        "summary.json",
    }


def test_a_run_that_ends_while_the_page_is_made_is_shown_as_going_on(tmp_path):
    """The page waits for its metrics behind a pipe; until they come, the run ends."""
    (tmp_path / "config.json").write_text('{"nproc": 1}')
    metrics = tmp_path / "metrics-rank0.jsonl"
    os.mkfifo(metrics)
    with serving(tmp_path) as server:
        found = []
        asking = threading.Thread(target=lambda: found.append(fetch(server.url)))
        asking.start()
        with metrics.open("w") as pipe:  # opens as soon as the page reads it
            metrics.unlink()
            step = json.dumps({"event": "step", "step": 1, "loss": 2.5}) + "\n"
            metrics.write_text(step)
            (tmp_path / "summary.json").write_text('{"accuracy": 0.5, "world_size": 1}')
            pipe.write(step)
        asking.join()
        ((text, headers),) = found
        assert "summary.json" in text
        assert headers["Refresh"] is not None
        text, headers = fetch(server.url)
        assert "Accuracy" in text
        assert headers["Refresh"] is None


def test_a_port_in_use_and_a_pace_of_none_are_refused(tmp_path):
    with ReportServer(tmp_path) as server, pytest.raises(ValueError, match="port"):
        ReportServer(tmp_path, port=server.server_address[1])
    with pytest.raises(ValueError, match="every_seconds"):
        ReportServer(tmp_path, every_seconds=0)
