import fcntl
import hashlib
import io
import itertools
import sys
import threading
import time
from email.utils import formatdate
from functools import partial
from types import SimpleNamespace

import pytest

from gossipgrad.data import _fetch, _transfer
from gossipgrad.data._digest import check_sha256
from gossipgrad.data._fetch import fetch
from gossipgrad.errors import GossipError
from support.sites import served

CONTENT = bytes(range(256)) * 1000
RIGHT = partial(check_sha256, sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setattr(_fetch, "_PAUSE_SECONDS", 0.0)
    with served({"/file": CONTENT}) as site:
        yield site


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "file"


@pytest.fixture
def part(path):
    path.parent.mkdir()
    return path.parent / ".file.part"


def get(site, path, **options):
    options = {"timeout_seconds": 30.0, "way_out": "do it by hand", **options}
    fetch(f"{site.address}/file", path, RIGHT, **options)


def names(path):
    return [file.name for file in path.parent.iterdir()]


def test_fetches_and_leaves_nothing_else(site, path):
    get(site, path)
    assert path.read_bytes() == CONTENT
    assert names(path) == ["file"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_goes_on_with_what_an_earlier_process_left(site, path, part):
    part.write_bytes(CONTENT[:100_000])
    get(site, path)
    assert site.requests == [("/file", "bytes=100000-")]
    assert path.read_bytes() == CONTENT


def test_goes_on_after_a_lost_connection(site, path):
    site.cut = [70_000, 50_000]
    get(site, path)
    assert [asked for _, asked in site.requests] == [None, "bytes=70000-", "bytes=120000-"]
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("stall", [False, True])
def test_gives_up_after_three_tries_and_keeps_what_came(site, path, stall, monkeypatch):
    site.cut, site.stall = [1000, 10, 0], stall
    opened = _transfer._open

    def open_and_hurry(*arguments):
        response = opened(*arguments)  # however long it takes to begin
        response.fp.raw._sock.settimeout(0.3 if stall else 30.0)
        return response

    why = "timed out" if stall else r"ended after 1,010 of 256,000 bytes"
    told = (
        rf"could not fetch http://.*{why}.*; 1,010 bytes are kept, and the next try goes on from "
        r"there; do it by hand\."
    )
    with monkeypatch.context() as patch:
        patch.setattr(_transfer, "_open", open_and_hurry)
        with pytest.raises(GossipError, match=told):
            get(site, path)
    assert len(site.requests) == 3
    assert names(path) == [".file.part"]
    get(site, path)
    assert site.requests[3] == ("/file", "bytes=1010-")
    assert path.read_bytes() == CONTENT


def test_server_without_ranges_sends_all_again(site, path, part):
    part.write_bytes(CONTENT[:1000])
    site.ranges = False
    get(site, path)
    assert path.read_bytes() == CONTENT


def test_nothing_is_kept_of_a_part_that_had_to_be_given_up(site, path, part):
    part.write_bytes(CONTENT[:1000])
    site.ranges, site.cut = False, [0, 0, 0]
    with pytest.raises(GossipError, match=r"ended after 0 of 256,000 bytes\); do it by hand"):
        get(site, path)
    assert names(path) == []


def test_whole_part_needs_no_more_than_its_check(site, path, part):
    part.write_bytes(CONTENT)
    get(site, path)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("left", [b"older version", CONTENT + b"and more"])
def test_part_of_another_version_is_fetched_anew(site, path, part, left):
    part.write_bytes(left)
    get(site, path)
    assert path.read_bytes() == CONTENT
    assert len(site.requests) == 2


def test_wrong_content_is_deleted_and_both_digests_told(site, path):
    site.files["/file"] = b"wrong"
    found, expected = (hashlib.sha256(content).hexdigest() for content in (b"wrong", CONTENT))
    with pytest.raises(
        GossipError,
        match=rf"/file did not serve the expected file, and it was deleted: \S+ has SHA-256 "
        rf"{found}, expected {expected}; do it by hand\.",
    ):
        get(site, path)
    assert names(path) == []


def test_full_disk_is_found_before_the_transfer(site, path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(
        GossipError,
        match=r"no space in \S+folder for http://\S+ \(256,000 bytes are needed and 1,000 are free"
        r"\), and what had come was deleted; make room there, or do it by hand\.",
    ):
        get(site, path)
    assert names(path) == []


def test_disk_that_fills_up_on_the_way(site, path, part):
    part.symlink_to("/dev/full")  # every write fails for want of space
    with pytest.raises(GossipError, match=r"no space in .*\(No space left on device\)"):
        get(site, path)
    assert names(path) == []


def test_server_that_trickles_is_given_up(site, path, monkeypatch):
    monkeypatch.setattr(_fetch, "_TRIES", 1)
    monkeypatch.setattr(_transfer, "_LEAST_BYTES_PER_SECOND", 1e12)
    clock = SimpleNamespace(monotonic=itertools.count(step=100).__next__)
    monkeypatch.setattr(_transfer, "time", clock)
    with pytest.raises(
        GossipError, match=r"only ([\d,]+) bytes came in 100 s\); \1 bytes are kept"
    ):
        get(site, path)


def test_missing_file_is_told_at_once(site, path):
    del site.files["/file"]
    with pytest.raises(GossipError, match=r"could not fetch \S+ to \S+ \(.*404.*\); do it by hand"):
        get(site, path)
    assert len(site.requests) == 1
    assert names(path) == []


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that were made, none of which takes any time."""
    made = []
    monkeypatch.setattr(_fetch, "_PAUSE_SECONDS", 0.5)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=made.append)
    monkeypatch.setattr(_fetch, "time", clock)
    return made


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_busy_server_is_asked_again_after_longer_and_longer_pauses(site, path, pauses, status):
    site.refuse = [(status, None)] * 4
    get(site, path)
    assert path.read_bytes() == CONTENT
    assert pauses == [0.5, 1.0, 2.0, 4.0]


def test_busy_server_is_left_alone_for_as_long_as_it_asks(site, path, part, pauses):
    part.write_bytes(CONTENT[:1000])
    begun_seconds = time.time()
    in_the_past, soon = (formatdate(begun_seconds + seconds, usegmt=True) for seconds in (-100, 20))
    asks = ["7", in_the_past, "soon", soon]
    site.refuse = [(503, retry_after) for retry_after in asks]
    get(site, path)
    assert pauses[:3] == [7.0, 1.0, 2.0]
    took_seconds = time.time() - begun_seconds
    assert 19 - took_seconds <= pauses[3] <= 20
    assert site.requests == [("/file", "bytes=1000-")] * 5
    assert path.read_bytes() == CONTENT


def test_server_that_stays_busy_is_given_up_and_what_came_is_kept(site, path, part, pauses):
    part.write_bytes(CONTENT[:1000])
    site.refuse = [(503, None)] * 9
    with pytest.raises(
        GossipError,
        match=r"could not fetch http://\S+ to \S+ \(HTTP Error 503: Service Unavailable, 5 "
        r"times\); 1,000 bytes are kept, and the next try goes on from there; do it by hand\.",
    ):
        get(site, path)
    assert len(site.requests) == 5
    assert pauses == [0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("asks", "waited"), [(["3600"], []), (["20", "3600"], [20.0]), (["20", "11"], [20.0])]
)
def test_server_that_asks_for_too_long_is_given_up(site, path, pauses, asks, waited):
    site.refuse = [(429, ask) for ask in asks]
    with pytest.raises(
        GossipError,
        match=r"\(HTTP Error 429: Too Many Requests: it asks to be left alone for (3,600|11) s, "
        r"but at most 30 s are waited in all\); do it by hand\.",
    ):
        get(site, path)
    assert pauses == waited
    assert names(path) == []


def test_server_that_is_not_there(path):
    with pytest.raises(GossipError, match=r"\(.*Connection refused.*\); do it"):
        fetch("http://127.0.0.1:9/file", path, RIGHT, way_out="do it by hand")


def test_several_at_once_fetch_once(site, path):
    errors = []

    def one():
        try:
            get(site, path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(site.requests) == 1
    assert names(path) == ["file"]
    assert path.read_bytes() == CONTENT


def test_one_that_hangs_holds_up_the_others_for_bounded_time(site, path, part):
    part.write_bytes(b"begun")
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(
            GossipError, match=r"another process has had \S+part for 0.2 s and brought nothing"
        ):
            get(site, path, timeout_seconds=0.1)
    assert part.read_bytes() == b"begun"


def test_progress_is_for_terminals(site, path, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    get(site, path)
    assert shown.getvalue().endswith("/file: 0.3 of 0.3 MB\n")
    monkeypatch.setattr(sys, "stderr", silent := io.StringIO())
    get(site, tmp_path / "again")
    assert silent.getvalue() == ""
