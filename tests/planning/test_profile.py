"""Profiles: what they refuse, how they are kept, and what the known ones hold."""

import json
from dataclasses import replace

import pytest

from gossipgrad.planning import PROFILES, Profile

SMALL = Profile(
    name="small",
    device="none",
    source="made up",
    batch_size=4,
    forward_seconds=0.5,
    optimizer_seconds=0.25,
    names=("b", "a"),
    elements=(3, 1000),
    backward_seconds=(0.0, 1.25),
)


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"names": (), "elements": (), "backward_seconds": ()},
        {"elements": (3,)},
        {"batch_size": 0},
        {"element_bytes": 2.5},
        {"state_copies": -1},
        {"elements": (3, 0)},
        {"elements": (3, 10.0)},
        {"forward_seconds": -1.0},
        {"backward_seconds": (0.0, float("nan"))},
        {"forward_seconds": 0, "optimizer_seconds": 0, "backward_seconds": (0, 0)},
    ],
)
def test_what_is_refused(change, unchecked_types):
    with pytest.raises(ValueError, match=r"profile|must be"):
        replace(SMALL, **change)


def test_scaled_to_a_budget():
    scaled = SMALL.scaled(time=0.5, size=0.01)
    assert (SMALL.size_bytes, scaled.compute_seconds) == (4012, 1.0)
    assert scaled.elements == (1, 10)
    assert scaled.names == SMALL.names
    assert scaled.source == "made up; scaled: times by 0.5, sizes by 0.01"
    assert SMALL.scaled() is SMALL
    with pytest.raises(ValueError, match=r"size must be a positive factor, got 0\.0"):
        SMALL.scaled(size=0.0)


def test_json_and_back(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(replace(SMALL, state_copies=2).to_json()))
    assert Profile.load(path).state_copies == 2
    without = {key: value for key, value in SMALL.to_json().items() if key != "state_copies"}
    path.write_text(json.dumps(without))
    assert Profile.load(path) == SMALL
    path.write_text(json.dumps(SMALL.to_json()))
    assert Profile.load(path) == SMALL
    assert Profile.load(str(path)) == SMALL
    path.write_text(json.dumps(SMALL.to_json() | {"forward_seconds": 1}))
    assert Profile.load(path).forward_seconds == 1.0


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"{",
        b"\x80\x81",
        b"[]",
        json.dumps(SMALL.to_json() | {"version": 9}).encode(),
        json.dumps(SMALL.to_json() | {"more": 1}).encode(),
        json.dumps(SMALL.to_json() | {"parameters": [["a", 1]]}).encode(),
        json.dumps(SMALL.to_json() | {"parameters": []}).encode(),
    ],
)
def test_files_that_are_no_profiles(content, tmp_path):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"profile\.json"):
        Profile.load(path)


def test_known_profiles_have_the_networks_sizes():
    parameters = {name: sum(Profile.load(name).elements) for name in PROFILES}
    assert parameters == {
        "resnet50": 25_557_032,
        "googlenet": 13_004_888,
        "vgg16": 138_357_544,
        "lstm": 66_034_000,
        "gpt2": 124_439_808,
    }
    assert [Profile.load(name).state_copies for name in PROFILES] == [1, 1, 1, 0, 2]
    # Backward ends where forward begins.
    assert Profile.load("resnet50").names[-1].startswith(("conv1.", "bn1."))
