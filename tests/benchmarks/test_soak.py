"""The soak: what it looks at, its rule, a short one, and that the page shows what was measured."""

import gc
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

import gossipgrad as gg
from benchmarks._common import RESULTS
from benchmarks._pages import DOCS
from benchmarks.soak import _joins, _rank
from benchmarks.soak.__main__ import _part, growing, joins_table, page_table
from benchmarks.soak._flat import judge
from benchmarks.soak._sizes import MEASURES, entries
from gossipgrad.comm import Faults


class Holder:
    """Not of the library: nobody looks into it."""

    def __init__(self):
        self.many = [*range(100)]


def test_entries_are_those_of_the_librarys_containers():
    faults = Faults()
    faults.drops |= {(0, 1), (0, 2), (0, 3)}
    found = entries({"faults": faults, "holder": Holder()})
    assert found["[].drops"] == 3
    assert "[].many" not in found
    faults.drops.add((0, 4))
    assert entries([faults])["[].drops"] == 4


def samples(**rises):
    flat = {"rss_bytes": 300e6, "handles": 40, "threads": 9, "blocks": 1e6, "entries": 500}
    return [
        {"exchanges": 100 * at} | {m: flat[m] + at * rises.get(m, 0) for m in MEASURES}
        for at in range(100)
    ]


def test_what_grows_over_the_second_half_is_told():
    assert all(found["flat"] for found in judge(samples()).values())
    told = judge(samples(handles=0.02, blocks=1000, rss_bytes=1000))
    assert [measure for measure in MEASURES if not told[measure]["flat"]] == ["handles", "blocks"]
    assert told["handles"]["growth"] == 0.98
    figures = {"parts": [{"part": "stale", "found": {"3": told}}]}
    assert growing(figures)[0] == "stale: rank 3: handles grew by 1.0 (allowed 0.5) at 41.5"
    early = [one | {"entries": 900 - min(at, 40)} for at, one in enumerate(samples())]
    assert judge(early)["entries"]["flat"], "what comes to rest in the first half is flat"


def test_the_page_shows_what_was_measured_and_nothing_grew():
    figures = json.loads((RESULTS / "soak.json").read_text())
    assert page_table(figures) in (DOCS / "soak.md").read_text()
    assert growing(figures) == []
    assert figures["exchanges"] > 250_000
    assert joins_table(figures["joins"]) in (DOCS / "soak.md").read_text()
    assert abs(figures["joins"]["growth_per_join"]["record_bytes"]) < 1


def test_a_short_one(tmp_path, monkeypatch):
    """Ranks that are threads here; what they hold is then that of all of them."""
    short = [replace(part, sessions=min(4, part.sessions), share=0.4) for part in _rank.PARTS]
    monkeypatch.setattr(_rank, "PARTS", short)
    monkeypatch.setattr(_rank, "SAMPLES", 4)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # it takes long where so much is loaded
    names = [part.name for part in short]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        threading.Thread(target=_rank.rank_main, args=(rank, 2, store.port, tmp_path, 50, names))
        for rank in range(2)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    lines = {
        rank: [
            json.loads(line)
            for line in (tmp_path / f"samples-rank{rank}.jsonl").read_text().splitlines()
        ]
        for rank in range(2)
    }
    for part in short:
        found = _part(part.name, lines)
        assert found["exchanges"] > 0
        assert found["outcomes"]["dead_peer"] == 0
        assert len(found["samples"][0]["handles"]) == 4
        assert found["places"]["last"]


def test_a_few_come_and_go(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(_joins, "_CONSENSUS_EVERY", 2)
    patient = gg.Heartbeats(interval_seconds=0.05, lease_seconds=60.0, silent_seconds=60.0)
    monkeypatch.setattr(_joins, "_HEARTBEATS", patient)
    found = _joins.run_joins(3)
    assert found["samples"]["joins"] == [1, 2, 3]
    assert found["samples"]["record_bytes"][2] > found["samples"]["record_bytes"][0]
    assert joins_table(found).count("\n") == 6


OWN_SIZES = """
import json
from benchmarks.soak._sizes import sizes

before = sizes([])
with open(__file__):
    held = bytes(range(256)) * 200_000
    print(json.dumps([before, sizes([])]))
"""


def test_sizes_are_those_of_this_process(tmp_path):
    """One of its own: what other tests have left here may go at any moment."""
    script = tmp_path / "script.py"
    script.write_text(OWN_SIZES)
    command, path = [sys.executable, str(script)], os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    before, held = json.loads(done.stdout)
    assert held["handles"] == before["handles"] + 1
    assert held["rss_bytes"] - before["rss_bytes"] == pytest.approx(51.2e6, rel=0.1)
    assert held["threads"] == before["threads"] == 1
