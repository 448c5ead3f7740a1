import pytest
import torch

from gossipgrad import checkpoint
from gossipgrad.train import TrainConfig
from gossipgrad.train._folder import RunDir, claim


def write_config(run_dir):
    TrainConfig().resolved(nproc=2, out=run_dir.path).write(run_dir.config)


@pytest.fixture(
    params=["config.json", "trace.json", "partial/notes.txt", "former/metrics-rank0.jsonl"]
)
def users_file(request, tmp_path):
    file = tmp_path / request.param
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    return file


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_no_run_is_never_cleaned(users_file, tmp_path, overwrite):
    with pytest.raises(ValueError, match=str(users_file)):
        claim(tmp_path, name="", overwrite=overwrite)
    assert users_file.read_text() == "{}"


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_no_run_would_replace_stays_where_it_is(tmp_path, overwrite):
    names = ("errors-of-mine.txt", "tensorboard/events.out", "former/old.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    write_config(claim(tmp_path, name="", overwrite=overwrite))
    claim(tmp_path, name="", overwrite=True)
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_takes_the_next_free_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [claim(None, name="digits", overwrite=False).path for _ in range(2)]
    assert [str(folder) for folder in folders] == ["runs/digits-1", "runs/digits-2"]


def test_refuses_a_folder_that_holds_a_run(tmp_path):
    under_way = claim(tmp_path, name="", overwrite=False)
    write_config(under_way)
    with pytest.raises(ValueError, match=r"holds a run already.*--out.*--overwrite"):
        claim(tmp_path, name="", overwrite=False)
    under_way.remove_partial()
    under_way.metrics(1).write_text("{}")
    with pytest.raises(ValueError, match="holds a run already"):
        claim(tmp_path, name="", overwrite=False)


def test_a_start_that_failed_leaves_its_folder_free(tmp_path):
    failed = claim(tmp_path, name="", overwrite=False)
    write_config(failed)
    failed.errors(1).write_text("Traceback")
    failed.metrics(0).write_text("")
    failed.remove_partial()
    claim(tmp_path, name="", overwrite=False)
    assert [file.name for file in tmp_path.iterdir()] == ["partial"]


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
    run_dir = claim(tmp_path, name="", overwrite=False)
    write_config(run_dir)
    for file in (run_dir.summary, run_dir.metrics(7), run_dir.errors(3), run_dir.rank_result(2)):
        file.write_text("old")
    for name in ("config.json.partial", "summary.json.partial", "invitation.json.partial"):
        (tmp_path / name).write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    claim(tmp_path, name="", overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt", "partial"}
    assert not list(run_dir.partial.iterdir())


def test_checkpoints_are_never_removed_unasked(tmp_path):
    """Of a loop of the user's own, or of a run that died before it had written a line."""
    state = {"model": {"w": torch.ones(2)}}
    for step in (10, 20):
        checkpoint.save(tmp_path / "checkpoints", state, rank=0, world_size=1, step=step)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="step-0"):
            claim(tmp_path, name="", overwrite=overwrite)
    (tmp_path / "partial").mkdir()
    write_config(RunDir(tmp_path))
    with pytest.raises(ValueError, match=r"holds a run already; go on with it by --resume"):
        claim(tmp_path, name="", overwrite=False)
    assert checkpoint.steps(tmp_path / "checkpoints") == [10, 20]
    evicted = tmp_path / "other" / "evicted-rank2.safetensors"
    evicted.parent.mkdir()
    evicted.write_text("all that it had learned")
    with pytest.raises(ValueError, match=str(evicted)):
        claim(tmp_path / "other", name="", overwrite=False)


def test_overwrite_removes_checkpoints_and_nothing_beside_them(tmp_path):
    run_dir = claim(tmp_path, name="", overwrite=False)
    write_config(run_dir)
    checkpoint.save(run_dir.checkpoints, {}, rank=0, world_size=1, step=10)
    mine = [
        run_dir.checkpoints / "step-000000010" / "note.txt",
        run_dir.checkpoints / "step-1",
        run_dir.checkpoints / "step-best" / "state.json",
    ]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    claim(tmp_path, name="", overwrite=True)
    assert all(file.read_text() == "mine" for file in mine)
    assert checkpoint.steps(run_dir.checkpoints) == []
    assert len([path for path in run_dir.checkpoints.rglob("*") if path.is_file()]) == 3


def test_folder_that_cannot_be_made_names_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*file.*name another folder with --out"):
        claim(tmp_path / "file" / "run", name="", overwrite=False)
