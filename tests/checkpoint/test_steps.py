"""What is saved comes back; which steps are complete, kept and refused."""

import hashlib
import json
import math
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from gossipgrad import checkpoint
from support.trees import assert_same, replica


def save(directory, rank, *, step, world_size=2, state=None, **settings):
    state = replica(step) if state is None else state
    return checkpoint.save(
        directory, state, rank=rank, world_size=world_size, step=step, **settings
    )


def names(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.*"))


@pytest.fixture
def saved(tmp_path):
    """Two ranks, steps 1 and 2."""
    for step in (1, 2):
        for rank in (0, 1):
            save(tmp_path, rank, step=step, state={"w": torch.full((8,), 10.0 * step + rank)})
    return tmp_path


# ----- what is saved


def test_a_state_comes_back_with_its_types_layout_and_shared_memory(tmp_path):
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    large = torch.randn(1_000_000)
    nan = torch.tensor([math.nan, -0.0, 1e-40])
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "tied": [weight, weight],
        "a view of something large": large[5:8],
        "nan": nan,
        "kinds": {str(kind): torch.ones(2, dtype=kind) for kind in (torch.bfloat16, torch.int8)},
        "empty": torch.zeros(0, 3),
        "optimizer": optimizer.state_dict(),
        "random": random.getstate(),
        3: (1, 2.5, None, True, b"bytes", "text"),
    }
    save(tmp_path, 0, step=1, world_size=1, state=state)
    found = checkpoint.load(tmp_path, rank=0)
    assert_same(found, state)
    first, second = found["tied"]
    assert first.data_ptr() == second.data_ptr()
    assert first.stride() == weight.stride()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.pt")) < 200_000


@pytest.mark.parametrize(
    "leaf", [{1, 2}, 1j, object(), torch.Generator(), torch.ones(2).to_sparse(), {(1,): 2}]
)
def test_what_could_not_be_read_back_is_refused_with_its_path(leaf, tmp_path):
    with pytest.raises(ValueError, match=r"state\['deep'\]\[1\]"):
        save(tmp_path, 0, step=1, state={"deep": [0, leaf]})
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="itself"):
        save(tmp_path, 0, step=1, state=loop)
    assert names(tmp_path) == []


# ----- which steps are complete


def test_a_step_is_complete_when_all_members_have_committed_it(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    save(tmp_path, 0, step=1)
    assert checkpoint.steps(tmp_path) == []
    with pytest.raises(ValueError, match="lacks rank 1"):
        checkpoint.load(tmp_path, rank=0)
    assert_same(checkpoint.load(tmp_path, rank=0, step=1), replica(1))
    save(tmp_path, 1, step=1)
    save(tmp_path, 0, step=2, members=[0, 5])  # rank 1 died, another one joined
    save(tmp_path, 5, step=2, members=[0, 5])
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert checkpoint.find(tmp_path).members == (0, 5)
    assert checkpoint.find(tmp_path, step=1).members == (0, 1)
    with pytest.raises(ValueError, match="rank 1 has no part"):
        checkpoint.load(tmp_path, rank=1)


def test_ranks_that_disagree_on_who_lives_make_no_checkpoint(tmp_path):
    save(tmp_path, 0, step=1, world_size=3, members=[0, 1])
    save(tmp_path, 1, step=1, world_size=3)
    save(tmp_path, 2, step=1, world_size=3)
    assert checkpoint.steps(tmp_path) == []
    with pytest.raises(ValueError, match="step 1"):
        checkpoint.find(tmp_path)


def test_a_directory_holds_one_run(tmp_path):
    save(tmp_path, 0, step=1, world_size=1, run="mine")
    assert checkpoint.steps(tmp_path, run="mine") == [1]
    assert checkpoint.steps(tmp_path, run="other") == []
    with pytest.raises(ValueError, match="'mine'"):
        save(tmp_path, 0, step=2, world_size=1, run="other")
    with pytest.raises(ValueError, match="'mine'"):
        checkpoint.load(tmp_path, rank=0, step=1, run="other")
    with pytest.raises(ValueError, match="1 ranks, not of 2"):
        checkpoint.load(tmp_path, rank=0, world_size=2)


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_complete_ones_stay_and_leave_nothing_behind(keep, tmp_path):
    """The slower rank commits each step last, and skips one."""
    for step in range(1, 8):
        for rank in (0, 1):
            if (rank, step) != (1, 4):
                save(tmp_path, rank, step=step, keep=keep)
        assert checkpoint.latest(tmp_path) == (3 if step == 4 else step)
    save(tmp_path, 0, step=8, keep=keep)
    kept = {str(path.parent.name) for path in tmp_path.rglob("*.pt")}
    assert kept == {f"step-{step:09d}" for step in range(8 - keep, 9)}


def test_files_of_others_and_links_stay(tmp_path):
    directory, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    mine = [directory / "notes.txt", directory / "step-000000001" / "rank-0000.txt"]
    save(directory, 0, step=1, world_size=1)
    for path in mine:
        path.write_text("mine")
    (directory / "step-000000002").symlink_to(other)
    with pytest.raises(ValueError, match="symbolic link"):
        save(directory, 0, step=2, world_size=1)
    target = other / "precious"
    target.write_text("mine")
    (directory / "step-000000003").mkdir()
    for name in ("rank-0000.pt", "rank-0000.json", "rank-0000.pt.partial"):
        (directory / "step-000000003" / name).symlink_to(target)
    with pytest.raises(ValueError, match="step-000000003"):
        save(directory, 0, step=3, world_size=1)
    assert checkpoint.rewind(directory, rank=0, step=2) == [3]
    save(directory, 0, step=3, world_size=1)
    assert checkpoint.remove_all(directory) == [3, 1]
    assert [path.read_text() for path in (*mine, target)] == ["mine"] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 2},
        {"rank": -1},
        {"world_size": 0, "rank": 0},
        {"step": -1},
        {"keep": 0},
        {"members": [1]},
        {"members": [0, 0]},
        {"members": [1, 0]},
    ],
)
def test_impossible_arguments_are_refused(settings, tmp_path):
    with pytest.raises(ValueError, match=r"rank|step|keep|members"):
        checkpoint.save(tmp_path, {}, **{"rank": 0, "world_size": 2, "step": 1} | settings)
    assert names(tmp_path) == []


# ----- what is not as it was saved


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


STATE, MANIFEST = "step-000000002/rank-0000.pt", "step-000000002/rank-0000.json"
DAMAGES = {
    "a bit": (STATE, lambda path: flip(path, path.stat().st_size // 2)),
    "cut short": (STATE, lambda path: os.truncate(path, path.stat().st_size - 1)),
    "removed": (STATE, Path.unlink),
    "of another rank": (STATE, lambda p: p.write_bytes(p.with_name("rank-0001.pt").read_bytes())),
    "a manifest of another rank": (
        MANIFEST,
        lambda p: p.write_bytes(p.with_name("rank-0001.json").read_bytes()),
    ),
    "no manifest": (MANIFEST, lambda path: path.write_text("{}")),
    "no JSON": (MANIFEST, lambda path: path.write_text("{" * 100_000)),
    "impossible ranks": (MANIFEST, lambda path: edit(path, members=[1, 0])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_the_name_of_the_file(damage, saved):
    name, act = DAMAGES[damage]
    act(saved / name)
    for step in (2, None):  # a newer step that may have been complete is not passed over
        with pytest.raises(ValueError, match=Path(name).name):
            checkpoint.load(saved, rank=0, step=step)
    assert checkpoint.load(saved, rank=0, step=1)["w"][0] == 10


def test_nothing_is_executed(saved):
    """A pickle that somebody has put there, with a manifest that fits."""

    class Evil:
        def __reduce__(self):
            return (Path.touch, (saved / "executed",))

    torch.save({"evil": Evil()}, saved / STATE)
    content = (saved / STATE).read_bytes()
    value = json.loads((saved / MANIFEST).read_text())
    value |= {"sha256": hashlib.sha256(content).hexdigest()}
    (saved / MANIFEST).write_text(json.dumps(value))
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.load(saved, rank=0, step=2)
    assert not (saved / "executed").exists()


def test_what_is_not_there_is_named(saved):
    with pytest.raises(ValueError, match="no checkpoint of step 9"):
        checkpoint.find(saved, step=9)
    with pytest.raises(ValueError, match=r"rank-0007\.json does not exist"):
        checkpoint.load(saved, rank=7, step=2)
    with pytest.raises(ValueError, match="nowhere"):
        checkpoint.load(saved / "nowhere", rank=0)


def test_a_damaged_old_manifest_hides_no_newer_checkpoint_and_is_removed_with_its_step(saved):
    damaged = saved / "step-000000001" / "rank-0000.json"
    damaged.write_text("{")
    assert checkpoint.steps(saved) == [2]
    assert checkpoint.latest(saved) == 2
    for rank in (0, 1):
        save(saved, rank, step=3, keep=1)
    assert checkpoint.steps(saved) == [3]
    assert not damaged.exists()
