"""Which steps there are, which are complete, and which are removed."""

import threading

import pytest
import torch

from gossipgrad import checkpoint
from gossipgrad.checkpoint import _save
from support.trees import assert_same, replica
from support.waiting import HANG_SECONDS


def save(directory, rank, step, *, world_size=2, **settings):
    return checkpoint.save(
        directory,
        replica(10 * step + rank),
        rank=rank,
        world_size=world_size,
        step=step,
        **settings,
    )


def save_all(directory, *steps, world_size=2, **settings):
    for step in steps:
        for rank in range(world_size):
            save(directory, rank, step, world_size=world_size, **settings)


def own(directory, world_size=2):
    return [checkpoint.steps(directory, rank=rank) for rank in range(world_size)]


def test_where_files_lie(tmp_path):
    path = save(tmp_path, 3, 120, world_size=5, run="red", attempt="1", members=(0, 3))
    assert path == tmp_path / "step-000000120" / "rank-0003"
    names = ["manifest.json", "state.json", "state.safetensors"]
    assert sorted(file.name for file in path.iterdir()) == names
    found = checkpoint.manifest(tmp_path, rank=3, step=120)
    told = (found.run, found.attempt, found.rank, found.world_size, found.members, found.step)
    assert told == ("red", "1", 3, 5, (0, 3), 120)
    for name, entry in found.files.items():
        assert entry.size_bytes == (path / name).stat().st_size


def test_the_newest_is_that_which_all_ranks_have(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    save_all(tmp_path, 1, 2)
    save(tmp_path, 1, 3)
    assert checkpoint.latest(tmp_path) == 2
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert own(tmp_path) == [[1, 2], [1, 2, 3]]
    assert_same(checkpoint.load(tmp_path, rank=1), replica(21))
    assert_same(checkpoint.load(tmp_path, rank=1, step=3), replica(31))
    save(tmp_path, 0, 3)
    assert checkpoint.latest(tmp_path) == 3
    assert_same(checkpoint.load(tmp_path, rank=1), replica(31))


def test_those_who_live_make_it_complete(tmp_path):
    save(tmp_path, 0, 1, world_size=3, members=(0, 2))
    save(tmp_path, 2, 1, world_size=3, members=(0, 1, 2))
    assert checkpoint.latest(tmp_path) is None
    save(tmp_path, 0, 2, world_size=3, members=(0, 2))
    save(tmp_path, 2, 2, world_size=3, members=(0, 2))
    assert checkpoint.latest(tmp_path) == 2
    with pytest.raises(ValueError, match=r"rank 1 .* step 2 of ranks 0, 2"):
        checkpoint.load(tmp_path, rank=1)


def test_of_a_step_that_some_ranks_died_in_those_count_who_completed_it(tmp_path):
    save(tmp_path, 0, 1, world_size=3)  # and died, before the others gave it up
    for rank in (1, 2):
        save(tmp_path, rank, 1, world_size=3, members=(1, 2))
    assert checkpoint.members(tmp_path) == (1, 2)
    assert checkpoint.members(tmp_path, step=1) == (1, 2)
    with pytest.raises(ValueError, match=r"step 2 .* there are 1"):
        checkpoint.members(tmp_path, step=2)


def test_of_two_that_are_complete_that_of_the_most_ranks_counts(tmp_path):
    save(tmp_path, 0, 1, world_size=3, members=(0,))
    for rank in (1, 2):
        save(tmp_path, rank, 1, world_size=3, members=(1, 2))
    assert checkpoint.members(tmp_path, step=1) == (1, 2)


def test_those_who_joined_have_numbers_beyond_the_start(tmp_path):
    for rank in (0, 1, 4):
        save(tmp_path, rank, 1, members=(0, 1, 4))
    assert checkpoint.latest(tmp_path) == 1
    assert_same(checkpoint.load(tmp_path, rank=4), replica(14))
    with checkpoint.Saver(tmp_path, rank=4, world_size=2) as saver:
        assert saver.save({}, step=2, members=(0, 1, 4))
    assert checkpoint.steps(tmp_path, rank=4) == [1, 2]


def test_removing_all_removes_nothing_else(tmp_path):
    save_all(tmp_path / "there", 1, 2)
    mine = tmp_path / "there" / "step-000000001" / "rank-0001" / "note.txt"
    others = tmp_path / "there" / "step-of-mine" / "note.txt"
    away = tmp_path / "away" / "step-000000007"
    save_all(tmp_path / "away", 7)
    (tmp_path / "there" / "step-000000007").symlink_to(away)
    (tmp_path / "there" / "step-000000008").write_text("mine")
    for path in (mine, others):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert checkpoint.remove_all(tmp_path / "there") == [2, 1]
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [
        *("step-000000001", "step-000000007", "step-000000008", "step-of-mine"),
    ]
    assert mine.read_text() == others.read_text() == "mine"
    assert checkpoint.steps(tmp_path / "away") == [7]


def test_all_folders_that_are_made_have_their_names_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(_save, "sync_folder", synced.append)
    save(tmp_path / "a" / "b", 0, 1, world_size=1)
    wanted = {tmp_path / "a" / "b" / "step-000000001" / "rank-0000", tmp_path / "a" / "b"}
    assert set(synced) == wanted | {
        tmp_path / "a" / "b" / "step-000000001",
        tmp_path / "a",
        tmp_path,
    }


def test_parts_of_unlike_starts_make_no_checkpoint(tmp_path):
    save(tmp_path, 0, 1, attempt="a")
    save(tmp_path, 1, 1, attempt="b")
    with pytest.raises(ValueError, match=r"step 1 lacks rank [01].* start"):
        checkpoint.load(tmp_path, rank=0)
    save(tmp_path, 0, 1, attempt="b")  # written anew where it was not complete
    assert checkpoint.latest(tmp_path) == 1
    assert_same(checkpoint.load(tmp_path, rank=0), replica(10))


def test_two_processes_that_are_one_rank_are_told(tmp_path):
    """As the shards of one replica may: the one would silently take the other's place."""
    save(tmp_path, 0, 1, attempt="a")
    with pytest.raises(ValueError, match="rank 0 has committed step 1"):
        checkpoint.save(tmp_path, replica(7), rank=0, world_size=2, step=1, attempt="a")
    assert_same(checkpoint.load(tmp_path, rank=0, step=1), replica(10))


def test_only_so_many_are_kept_and_none_before_a_newer_one_is_complete(tmp_path):
    save_all(tmp_path, 1, keep=1)
    save(tmp_path, 0, 2, keep=1)
    save(tmp_path, 0, 3, keep=1)
    assert checkpoint.steps(tmp_path) == [1], "rank 1 has no newer one"
    save(tmp_path, 1, 3, keep=1)
    assert own(tmp_path) == [[1, 2, 3], [3]]
    assert checkpoint.latest(tmp_path) == 3
    save(tmp_path, 0, 4, keep=1)
    assert own(tmp_path) == [[3, 4], [3]], "what will never be complete goes, too"
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-000000003",
        "step-000000004",
    ]


def test_several_are_kept(tmp_path):
    save_all(tmp_path, *range(1, 6), keep=3)
    assert checkpoint.steps(tmp_path) == [3, 4, 5]
    save_all(tmp_path, 6, 7)
    assert checkpoint.steps(tmp_path) == [3, 4, 5, 6, 7]


def test_where_nothing_is_shared_a_rank_counts_its_own(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, 1, step, keep=2, shared=False)
    assert checkpoint.steps(tmp_path, rank=1) == [2, 3]
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(ValueError, match="step 3 lacks rank 0"):
        checkpoint.load(tmp_path, rank=1)
    assert_same(checkpoint.load(tmp_path, rank=1, step=3), replica(31))


def test_files_of_others_stay(tmp_path):
    save_all(tmp_path, 1, keep=1)
    note = tmp_path / "step-000000001" / "rank-0000" / "note.txt"
    note.write_text("mine")
    (tmp_path / "step-000000001x").mkdir()
    (tmp_path / "step-0000000001").mkdir()
    (tmp_path / "step-2").write_text("no folder")
    save_all(tmp_path, 2, 3, keep=1)
    save_all(tmp_path, 4, keep=1)
    assert checkpoint.steps(tmp_path) == [4]
    assert note.read_text() == "mine"
    assert sorted(path.name for path in note.parent.iterdir()) == ["note.txt"]


def test_what_is_complete_is_not_written_again(tmp_path):
    save_all(tmp_path, 1, 2)
    with pytest.raises(ValueError, match="step 2"):
        save(tmp_path, 0, 2)
    with pytest.raises(ValueError, match=r"step 0 .*rewind"):
        save(tmp_path, 0, 0)
    assert_same(checkpoint.load(tmp_path, rank=0), replica(20))


def test_newer_parts_that_a_crash_left_make_way(tmp_path):
    save_all(tmp_path, 1)
    save(tmp_path, 0, 3)
    save_all(tmp_path, 2)
    assert own(tmp_path) == [[1, 2], [1, 2]]


def test_rewinding_removes_what_is_newer(tmp_path):
    save_all(tmp_path, 1, 2, 3)
    save(tmp_path, 1, 4)
    assert checkpoint.rewind(tmp_path, rank=1, step=1) == [4, 3, 2]
    assert own(tmp_path) == [[1, 2, 3], [1]]
    assert checkpoint.rewind(tmp_path, rank=0, step=1) == [3, 2]
    save_all(tmp_path, 2)
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_a_directory_holds_one_run(tmp_path):
    save_all(tmp_path, 1, run="red")
    with pytest.raises(ValueError, match=r"'red'.*'blue'"):
        save(tmp_path, 0, 2, run="blue")
    with pytest.raises(ValueError, match="'red'"):
        checkpoint.Saver(tmp_path, rank=0, world_size=2, run="blue")
    with pytest.raises(ValueError, match=r"'red'.*'blue'"):
        checkpoint.load(tmp_path, rank=0, step=1, run="blue")
    with pytest.raises(ValueError, match="'red'"):
        checkpoint.load(tmp_path, rank=0, run="blue")
    assert checkpoint.latest(tmp_path, run="blue") is None
    assert checkpoint.steps(tmp_path, run="blue", rank=0) == []
    assert checkpoint.latest(tmp_path, run="red") == 1


def test_ranks_save_at_the_same_time(tmp_path):
    ranks = 4

    def rank_main(rank):
        for step in range(1, 5):
            save(tmp_path, rank, step, world_size=ranks, keep=1)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert checkpoint.latest(tmp_path) == 4
    for rank in range(ranks):
        assert_same(checkpoint.load(tmp_path, rank=rank), replica(40 + rank))
    save_all(tmp_path, 5, world_size=ranks, keep=1)
    assert len(list(tmp_path.iterdir())) <= 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank": 2}, "rank 2"),
        ({"rank": -1}, "rank -1"),
        ({"world_size": 0}, "world_size 0"),
        ({"step": -1}, "step -1"),
        ({"keep": 0}, "keep=0"),
        ({"members": (1,)}, r"\[1\]"),
        (
            {"members": (1, 0)},
            r"\[1, 0\]",
        ),
        ({"members": (0, 0)}, r"\[0, 0\]"),
        ({"members": (-1, 0)}, r"\[-1, 0\]"),
    ],
)
def test_arguments_that_cannot_be(settings, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        checkpoint.save(
            tmp_path / "there",
            {"w": torch.ones(1)},
            **{"rank": 0, "world_size": 2, "step": 1, **settings},
        )
    assert not (tmp_path / "there").exists()


def test_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint"):
        checkpoint.load(tmp_path, rank=0)
    save_all(tmp_path, 1, 2)
    with pytest.raises(ValueError, match=r"step 7; .* 1, 2"):
        checkpoint.load(tmp_path, rank=0, step=7)
    with pytest.raises(ValueError, match="rank 5"):
        checkpoint.load(tmp_path, rank=5, step=2)
    with pytest.raises(ValueError, match="2 ranks, not of 3"):
        checkpoint.load(tmp_path, rank=0, world_size=3)
