"""What is not as it was saved is refused, with the name of the file and the reason."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gossipgrad import checkpoint
from support.trees import assert_same

PART = Path("step-000000002") / "rank-0000"


@pytest.fixture
def saved(tmp_path):
    for step in (1, 2):
        for rank in (0, 1):
            state = {"model": {"w": torch.full((8,), 10.0 * step + rank)}, "step": step}
            checkpoint.save(tmp_path, state, rank=rank, world_size=2, step=step)
    return tmp_path


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def edited(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def forged(path, **changes):
    """As somebody would edit a manifest who knows the format: its digest of itself fits."""
    value = json.loads(path.read_text()) | changes
    del value["sha256"]
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(value | {"sha256": hashlib.sha256(text.encode()).hexdigest()}))


def written_anew(part, content, name="state.json"):
    """The same for another file."""
    (part / name).write_bytes(content)
    files = json.loads((part / "manifest.json").read_text())["files"]
    files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forged(part / "manifest.json", files=files)


def in_place_of(path, make):
    path.unlink()
    make(path)


def copied(source, part, *names):
    for name in names or [path.name for path in source.iterdir()]:
        shutil.copy(source / name, part)


# What is done to a part, and the file and the reason that the error names.
DAMAGES = {
    "truncated": (
        lambda part: os.truncate(part / "state.safetensors", 50),
        "state.safetensors is truncated",
    ),
    "longer": (
        lambda part: (part / "state.json").write_bytes((part / "state.json").read_bytes() + b" "),
        "state.json",
    ),
    "flipped": (lambda part: flip(part / "state.safetensors", -3), "state.safetensors.*SHA-256"),
    "flipped tree": (lambda part: flip(part / "state.json", 20), "state.json.*SHA-256"),
    "missing": (lambda part: (part / "state.json").unlink(), "state.json.*No such file"),
    "of another rank": (
        lambda part: copied(part.with_name("rank-0001"), part),
        "manifest.json is foreign.*rank 1",
    ),
    "of another step": (
        lambda part: copied(part.parents[1] / "step-000000001" / "rank-0000", part),
        "manifest.json is foreign.*step 1",
    ),
    "another's tensors": (
        lambda part: copied(part.with_name("rank-0001"), part, "state.safetensors"),
        "state.safetensors.*SHA-256",
    ),
    "another format": (
        lambda part: (part / "manifest.json").write_text("{}"),
        "manifest.json is foreign",
    ),
    "no JSON": (lambda part: os.truncate(part / "manifest.json", 30), "manifest.json is damaged"),
    "nested": (
        lambda part: (part / "manifest.json").write_text("[" * 100_000),
        "manifest.json is damaged",
    ),
    "newer version": (
        lambda part: edited(part / "manifest.json", version=3),
        "manifest.json is of checkpoint format 3.*format 2",
    ),
    "older version": (
        lambda part: edited(part / "manifest.json", version=1),
        "manifest.json is of checkpoint format 1.*format 2.*0.1.*gossipgrad export",
    ),
    "edited": (
        lambda part: edited(part / "manifest.json", world_size=1, members=[0]),
        "manifest.json.*digest",
    ),
    "huge": (lambda part: os.truncate(part / "manifest.json", 2**24 + 1), "manifest.json"),
    "a tree that is none": (
        lambda part: written_anew(part, b'{"$call": "os.system"}'),
        r"state.json.*\$call",
    ),
    "a deep tree": (lambda part: written_anew(part, b"[" * 200_000), "state.json.*recursion"),
    "a tensor that is not there": (
        lambda part: written_anew(part, b'{"$tensor": "x"}'),
        "state.safetensors has no tensor 'x'",
    ),
    "no tensors": (
        lambda part: written_anew(part, b"garbage" * 10, "state.safetensors"),
        "state.safetensors",
    ),
    "a pipe": (lambda part: in_place_of(part / "manifest.json", os.mkfifo), "manifest.json"),
    "tensors from a pipe": (
        lambda part: in_place_of(part / "state.safetensors", os.mkfifo),
        "state.safetensors",
    ),
    "files elsewhere": (
        lambda part: forged(part / "manifest.json", files={"../../secret.json": {}}),
        "manifest.json",
    ),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_as_it_was_saved_is_refused(damage, named, saved):
    damage(saved / PART)
    with pytest.raises(ValueError, match=named):
        checkpoint.load(saved, rank=0, step=2)
    assert_same(checkpoint.load(saved, rank=1, step=2)["step"], 2)
    assert_same(checkpoint.load(saved, rank=0, step=1)["step"], 1)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "nowhere"},
        {"$tensor": "model/w", "stride": [10**12, 1]},
        {"$tensor": "model/w", "dtype": "float64", "shape": [7]},
        {"$tensor": "model/w", "dtype": "os", "shape": [1]},
        {"$array": "model/w"},
        {"$bytes": "?"},
        {"$dict": [1]},
        {"$dict": [[[], 1]]},
        {"$tuple": 3},
    ],
    ids=json.dumps,
)
def test_trees_that_nobody_has_written_are_refused(tree, saved):
    written_anew(saved / PART, json.dumps(tree).encode())
    with pytest.raises(ValueError, match=r"state.json"):
        checkpoint.load(saved, rank=0, step=2)


def test_other_steps_are_named(saved):
    flip(saved / PART / "state.json", 20)
    with pytest.raises(ValueError, match=r"complete are 1$"):
        checkpoint.load(saved, rank=0)


@pytest.mark.parametrize(
    "damage",
    [lambda path: edited(path, version=3), lambda path: in_place_of(path, os.mkfifo)],
    ids=["newer version", "pipe"],
)
def test_a_manifest_that_cannot_be_read_makes_no_checkpoint_and_is_left_alone(damage, saved):
    damage(saved / PART / "manifest.json")
    assert checkpoint.latest(saved) == 1
    assert checkpoint.steps(saved, rank=0) == [1]
    with pytest.raises(ValueError, match="step 2"):
        checkpoint.save(saved, {}, rank=0, world_size=2, step=2)
    for step in (3, 4, 5):
        for rank in (0, 1):
            checkpoint.save(saved, {}, rank=rank, world_size=2, step=step, keep=1)
    assert len(list((saved / PART).iterdir())) == 3


def test_a_newer_step_whose_manifest_cannot_be_read_is_not_passed_over(saved):
    """It may have been complete: whoever is not told goes on from an older one, and removes it."""
    path = saved / PART / "manifest.json"
    os.truncate(path, 0)
    for take in (
        lambda: checkpoint.load(saved, rank=1),
        lambda: checkpoint.manifest(saved, rank=1),
        lambda: checkpoint.members(saved),
        lambda: checkpoint.consensus(saved),
    ):
        with pytest.raises(ValueError, match=rf"{path}.* step 2, .* complete are 1$"):
            take()
    assert checkpoint.members(saved, step=1) == (0, 1)
    assert_same(checkpoint.load(saved, rank=1, step=1)["step"], 1)
    shutil.rmtree(path.parent)  # a part that is not there yet is another matter
    assert_same(checkpoint.load(saved, rank=1)["step"], 1)


def test_a_world_of_any_size_takes_no_memory(saved):
    """Whoever can write there can write a manifest that fits itself."""
    forged(saved / PART / "manifest.json", world_size=1 << 60)
    assert checkpoint.latest(saved) == 1
    assert checkpoint.manifest(saved, rank=0, step=2).world_size == 1 << 60


def test_files_are_those_of_safetensors(saved):
    found = load_file(saved / PART / "state.safetensors")
    assert_same(found, {"model/w": torch.full((8,), 20.0)})
