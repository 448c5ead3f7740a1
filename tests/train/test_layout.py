"""Which folders a run takes, and what of them it replaces."""

import pytest
import torch

from gossipgrad import checkpoint
from gossipgrad.train import RunFailedError, TrainConfig
from support.alone import run_alone


def begin(out, **options):
    return run_alone(out, epochs=1, batch_size=500, **options)


def names_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name", ["config.json", "trace.json", "partial/notes.txt", "former/metrics-rank0.jsonl"]
)
def test_a_folder_that_is_no_run_is_never_cleaned(name, tmp_path, overwrite):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    with pytest.raises(ValueError, match=str(file)):
        begin(tmp_path, overwrite=overwrite)
    assert file.read_text() == "{}"


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_no_run_would_replace_stays_where_it_is(tmp_path, overwrite):
    names = (
        *("errors-of-mine.txt", "tensorboard/events.out", "former/old.txt"),
        *("config.json.mine", "model.safetensors.old"),
    )
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    begin(tmp_path, overwrite=overwrite)
    begin(tmp_path, overwrite=True)
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_takes_the_next_free_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        begin(None, overwrite=False)
    found = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert found == ["digits-mlp-local-1", "digits-mlp-local-2"]


def test_a_folder_that_holds_a_run_is_replaced_on_request_alone(tmp_path):
    begin(tmp_path, tensorboard=True)
    before = names_in(tmp_path)
    with pytest.raises(ValueError, match=r"holds a run already.*--out.*--overwrite"):
        begin(tmp_path, overwrite=False)
    assert names_in(tmp_path) == before
    for name in ("metrics-rank7.jsonl", "errors-rank3.txt", "config.json.partial"):
        (tmp_path / name).write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    begin(tmp_path)
    assert names_in(tmp_path) == {
        *(".lock", "config.json", "metrics-rank0.jsonl", "summary.json", "model.safetensors"),
        *("report.html", "notes.txt"),
    }


def test_a_start_that_failed_leaves_its_folder_free(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", _fail)
        with pytest.raises(RunFailedError, match="no GPU today"):
            begin(tmp_path, overwrite=False)
    assert begin(tmp_path, overwrite=False).exit_code == 0


def _fail(count):
    raise OSError("no GPU today")


def test_checkpoints_are_never_removed_unasked(tmp_path):
    """Of a loop of the user's own, or of a run that died before it had written a line."""
    for step in (10, 20):
        checkpoint.save(tmp_path / "checkpoints", {}, rank=0, world_size=1, step=step)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="step-0"):
            begin(tmp_path, overwrite=overwrite)
    TrainConfig().resolved(nproc=2, out=tmp_path).write(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"holds a run already; .* --resume"):
        begin(tmp_path, overwrite=False)
    assert checkpoint.steps(tmp_path / "checkpoints") == [10, 20]
    evicted = tmp_path / "other" / "evicted-rank2.safetensors"
    evicted.parent.mkdir()
    evicted.write_text("all that it had learned")
    with pytest.raises(ValueError, match=str(evicted)):
        begin(tmp_path / "other", overwrite=False)


def test_overwrite_removes_checkpoints_and_nothing_beside_them(tmp_path):
    begin(tmp_path, checkpoint_every=1)
    mine = ("step-000000003/note.txt", "step-1", "step-best/state.json")
    for name in mine:
        (tmp_path / "checkpoints" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "checkpoints" / name).write_text("mine")
    begin(tmp_path)
    assert names_in(tmp_path / "checkpoints") == {*mine}


def test_folder_that_cannot_be_made_names_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*file.*name another folder with --out"):
        begin(tmp_path / "file" / "run")
