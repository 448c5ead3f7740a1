"""Where data sets are looked for."""

from pathlib import Path

import pytest

from gossipgrad import data
from gossipgrad.data._places import place_to_fetch_to, places
from gossipgrad.errors import GossipError


@pytest.fixture
def homeless(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("GOSSIPGRAD_DATA", raising=False)


def test_a_user_without_a_home_has_the_folders_that_are_named(homeless, monkeypatch, tmp_path):
    assert places("set", tmp_path) == [tmp_path / "set"]
    assert place_to_fetch_to("set", tmp_path) == tmp_path / "set"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert places("set", None) == [Path("/cache/gossipgrad/set")]


def test_a_user_without_a_home_is_told_where_files_could_go(homeless):
    with pytest.raises(
        GossipError,
        match=r"fashion-mnist/ has to be fetched, but this user has no home folder .*; name a "
        r"folder with --data-dir or XDG_CACHE_HOME",
    ):
        data.load("fashion-mnist")
