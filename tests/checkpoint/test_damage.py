"""What is not as it was saved is refused, with the name of the file and the reason."""

import dataclasses
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


def written_anew(path, text, name="state.json"):
    """As somebody would who knows the format: digests fit."""
    from gossipgrad.checkpoint._files import FileEntry, write_file
    from gossipgrad.checkpoint._manifest import read_manifest

    (path / name).unlink()
    entry = write_file(path / name, [text])
    found = read_manifest(path / "manifest.json")
    assert isinstance(found.files, dict)
    assert isinstance(entry, FileEntry)
    found.files[name] = entry
    (path / "manifest.json").write_text(found.text())


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def edited(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def in_place_of(path, make):
    path.unlink()
    make(path)


DAMAGES = {
    "truncated": (
        lambda part: os.truncate(part / "state.safetensors", 50),
        r"state.safetensors is truncated: it has 50 bytes, [\d,]+ were written",
    ),
    "longer": (
        lambda part: (part / "state.json").write_bytes((part / "state.json").read_bytes() + b" "),
        r"state.json has \d+ bytes, \d+ were written",
    ),
    "flipped": (
        lambda part: flip(part / "state.safetensors", -3),
        r"state.safetensors was changed or damaged: it has SHA-256 \w{64}, written was \w{64}",
    ),
    "flipped tree": (
        lambda part: flip(part / "state.json", 20),
        "state.json was changed or damaged",
    ),
    "missing": (
        lambda part: (part / "state.json").unlink(),
        "state.json cannot be read: No such file or directory",
    ),
    "of another rank": (
        lambda part: shutil.copytree(part.with_name("rank-0001"), part, dirs_exist_ok=True),
        "manifest.json is foreign: it was written by rank 1 at step 2",
    ),
    "of another step": (
        lambda part: shutil.copytree(
            part.parents[1] / "step-000000001" / "rank-0000", part, dirs_exist_ok=True
        ),
        "manifest.json is foreign: it was written by rank 0 at step 1",
    ),
    "another's tensors": (
        lambda part: shutil.copy(part.with_name("rank-0001") / "state.safetensors", part),
        "state.safetensors was changed or damaged",
    ),
    "another format": (
        lambda part: (part / "manifest.json").write_text("{}"),
        "manifest.json is foreign: it is not of the format gossipgrad-checkpoint",
    ),
    "no JSON": (
        lambda part: os.truncate(part / "manifest.json", 30),
        "manifest.json is damaged: it is no JSON",
    ),
    "nested": (
        lambda part: (part / "manifest.json").write_text("[" * 100_000),
        "manifest.json is damaged: it is no JSON",
    ),
    "newer version": (
        lambda part: edited(part / "manifest.json", version=3),
        "manifest.json is of checkpoint format 3, which another gossipgrad writes",
    ),
    "older version": (
        lambda part: edited(part / "manifest.json", version=1),
        "manifest.json is of checkpoint format 1, which an earlier gossipgrad 0.1 writes",
    ),
    "edited": (
        lambda part: edited(part / "manifest.json", world_size=1, members=[0]),
        "manifest.json was changed or damaged: its digest of itself does not fit",
    ),
    "huge": (
        lambda part: os.truncate(part / "manifest.json", 2**24 + 1),
        "manifest.json has more than 16,777,216 bytes",
    ),
    "a tree that is none": (
        lambda part: written_anew(part, b'{"$call": "os.system"}'),
        r"state.json cannot be read: it is no tree of state \(KeyError: '\$call'\)",
    ),
    "a deep tree": (
        lambda part: written_anew(part, b"[" * 200_000),
        "state.json cannot be read: maximum recursion depth",
    ),
    "a tensor that is not there": (
        lambda part: written_anew(part, b'{"$tensor": "x"}'),
        "state.json cannot be read: .*state.safetensors has no tensor 'x'",
    ),
    "no tensors": (
        lambda part: written_anew(part, b"garbage" * 10, "state.safetensors"),
        "state.safetensors is no safetensors file",
    ),
}


DAMAGES |= {
    "a pipe": (
        lambda part: in_place_of(part / "manifest.json", os.mkfifo),
        "manifest.json cannot be read: it is no regular file",
    ),
    "tensors from a pipe": (
        lambda part: in_place_of(part / "state.safetensors", os.mkfifo),
        "state.safetensors cannot be read: it is no regular file",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_as_it_was_saved_is_refused(damage, message, saved):
    damage(saved / PART)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(saved, rank=0, step=2)
    assert_same(checkpoint.load(saved, rank=1, step=2)["step"], 2)
    assert_same(checkpoint.load(saved, rank=0, step=1)["step"], 1)


def test_other_steps_are_named(saved):
    flip(saved / PART / "state.json", 20)
    with pytest.raises(ValueError, match=r"Load another step on every rank; complete are 1$"):
        checkpoint.load(saved, rank=0)
    shutil.rmtree(saved / "step-000000001")
    with pytest.raises(ValueError, match=r"There is no other complete checkpoint$"):
        checkpoint.load(saved, rank=0)


def test_a_manifest_that_cannot_be_read_makes_no_checkpoint_and_is_left_alone(saved):
    edited(saved / PART / "manifest.json", version=3)
    assert checkpoint.latest(saved) == 1
    assert checkpoint.steps(saved, rank=0) == [1]
    with pytest.raises(ValueError, match=r"step 2 cannot be saved .* it lies there already"):
        checkpoint.save(saved, {}, rank=0, world_size=2, step=2)
    for step in (3, 4, 5):
        for rank in (0, 1):
            checkpoint.save(saved, {}, rank=rank, world_size=2, step=step, keep=1)
    assert len(list((saved / PART).iterdir())) == 3


def test_a_newer_step_whose_manifest_cannot_be_read_is_not_passed_over(saved):
    """It may have been complete: whoever is not told goes on from an older one, and removes it."""
    path = saved / PART / "manifest.json"
    os.truncate(path, 0)
    reason = rf"{path} is damaged: .* of step 2, newer than any complete one: .* complete are 1$"
    for take in (
        lambda: checkpoint.load(saved, rank=1),
        lambda: checkpoint.manifest(saved, rank=1),
        lambda: checkpoint.members(saved),
        lambda: checkpoint.consensus(saved),
    ):
        with pytest.raises(ValueError, match=reason):
            take()
    assert checkpoint.members(saved, step=1) == (0, 1)
    assert_same(checkpoint.load(saved, rank=1, step=1)["step"], 1)
    shutil.rmtree(path.parent)  # a part that is not there yet is another matter
    assert_same(checkpoint.load(saved, rank=1)["step"], 1)


def test_a_pipe_for_a_manifest_holds_nobody_up(saved):
    in_place_of(saved / PART / "manifest.json", os.mkfifo)
    assert checkpoint.latest(saved) == 1
    with pytest.raises(ValueError, match=r"step 2 cannot be saved .* it lies there already"):
        checkpoint.save(saved, {}, rank=0, world_size=2, step=2)


def test_a_world_of_any_size_takes_no_memory(saved):
    """Whoever can write there can write a manifest that fits itself."""
    from gossipgrad.checkpoint._manifest import read_manifest

    path = saved / PART / "manifest.json"
    path.write_text(dataclasses.replace(read_manifest(path), world_size=1 << 60).text())
    assert checkpoint.latest(saved) == 1
    assert read_manifest(path).world_size == 1 << 60


def test_names_lead_nowhere_else(saved, tmp_path):
    from gossipgrad.checkpoint._manifest import read_manifest

    path = saved / PART / "manifest.json"
    found = read_manifest(path)
    assert isinstance(found.files, dict)
    entry = found.files.pop("state.json")
    found.files["../../secret.json"] = entry
    path.write_text(found.text())
    with pytest.raises(ValueError, match=r"is no manifest: it names the files "):
        checkpoint.load(saved, rank=0, step=2)


def test_files_are_those_of_safetensors(saved):
    found = load_file(saved / PART / "state.safetensors")
    assert_same(found, {"model/w": torch.full((8,), 20.0)})
