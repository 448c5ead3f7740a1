"""Whose a laboratory is, and that nobody else's is touched."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from benchmarks.netlab import NetlabError, _record, _sweep


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(_record, "DIRECTORY", tmp_path / "records")
    with _record.locked():  # makes it
        pass
    return tmp_path / "records"


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Namespaces as a set of names; `ip` takes from it, and refuses to do anything else."""
    names = set()

    def run(*command):
        assert command[:3] == ("ip", "netns", "del")
        names.remove(command[3])

    monkeypatch.setattr(_sweep, "namespaces", lambda: set(names))
    monkeypatch.setattr(_record, "namespaces", lambda: set(names))
    monkeypatch.setattr(_sweep, "run", run)
    return names


def rewritten(record, **changes):
    record = dataclasses.replace(record, **changes)
    record.path.write_text(json.dumps(dataclasses.asdict(record)))
    return record


def dead():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def test_each_has_a_name_and_a_network_of_its_own():
    first, second = _record.allocate(["a", "b"]), _record.allocate(["a", "b"])
    assert first.network != second.network
    assert not set(first.namespaces) & set(second.namespaces)
    assert first.namespaces == (f"{first.name}-a", f"{first.name}-b")
    assert _record.read(first.path) == first
    first.remove()
    assert _record.allocate(["a"]).network == first.network


def test_the_load_of_those_that_may_be_up():
    links = {"rates": [1e8, 2e8], "uplinks": [None, 1e7], "load": 3e8}
    own, other = _record.allocate(["a"], **links), _record.allocate(["a"], load=1e9)
    assert _record.read(own.path) == own
    assert own.uplinks == (None, 1e7)
    rewritten(_record.allocate(["a"], load=1e12), owner=dead())
    rewritten(_record.allocate(["a"], load=1e7), pid_namespace="pid:[1]", owner=dead())
    assert _record.others_load() == 1.31e9
    assert _record.others_load(own.name) == 1.01e9
    dataclasses.replace(other, load=2e9).write()
    assert _record.others_load(own.name) == 2.01e9


def test_no_more_networks(monkeypatch):
    monkeypatch.setattr(_record, "LABORATORIES", 2)
    for _ in range(2):
        _record.allocate(["a"])
    with pytest.raises(NetlabError, match=r"2 laboratories are up: end one, or run python -m"):
        _record.allocate(["a"])


def test_who_lives():
    own = _record.allocate(["a"])
    assert _record.alive(own) is True
    assert _record.alive(dataclasses.replace(own, owner=dead())) is False
    # The number has passed on to a process that began at another time.
    assert _record.alive(dataclasses.replace(own, started=own.started - 1)) is False
    assert _record.alive(dataclasses.replace(own, boot="an earlier one")) is False
    # Process numbers of another container say nothing here.
    assert _record.alive(dataclasses.replace(own, pid_namespace="pid:[1]")) is None


def test_only_the_dead_are_swept(made):
    living = _record.allocate(["a"])
    elsewhere = rewritten(_record.allocate(["a"]), pid_namespace="pid:[1]", owner=dead())
    gone = rewritten(_record.allocate(["a", "b"]), owner=dead())
    foreign = {"gglab-000000-host0", "somebody"}
    made |= {*living.namespaces, *elsewhere.namespaces, *gone.namespaces, *foreign}
    assert _sweep.sweep() == [gone.name]
    assert made == {*living.namespaces, *elsewhere.namespaces, *foreign}
    assert {record.name for record in _record.records()} == {living.name, elsewhere.name}
    assert _record.unrecorded() == ["gglab-000000-host0"]
    assert _sweep.sweep() == []


def test_what_does_not_go_stays_on_record(made, monkeypatch):
    gone = rewritten(_record.allocate(["a"]), owner=dead())
    made |= set(gone.namespaces)
    monkeypatch.setattr(_sweep, "run", lambda *command: None)
    with pytest.raises(NetlabError, match=rf"{gone.name} is not gone: .*netlab clean tries again"):
        _sweep.sweep()
    assert gone.path.exists()


def test_a_record_that_is_none(directory):
    (directory / "gglab-111111.json").write_text("{}")
    with pytest.raises(NetlabError, match=r"gglab-111111.json is no record .*; remove it"):
        _record.records()


def test_the_lock_is_waited_for_with_a_bound(monkeypatch):
    monkeypatch.setattr(_record, "_LOCK_SECONDS", 0.05)
    with (
        _record.locked(),
        pytest.raises(NetlabError, match=r"another process has held .*lock for 0.05 s"),
        _record.locked(),
    ):
        pass


def test_this_process_is_never_among_those_to_end(tmp_path, monkeypatch):
    (tmp_path / "mine").symlink_to("/proc/self/ns/net")
    monkeypatch.setattr(_sweep, "NAMESPACES", tmp_path)
    assert list(_sweep.inhabitants(["mine", "none"])) == []
    assert _sweep.end_processes(["mine"]) == []
    assert _record.started(os.getpid()) is not None
