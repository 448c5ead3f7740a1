import pytest

from gossipgrad.train._layout import claim


def test_takes_the_next_free_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [claim(None, name="digits", overwrite=False).path for _ in range(2)]
    assert [str(folder) for folder in folders] == ["runs/digits-1", "runs/digits-2"]


def test_refuses_a_folder_that_holds_a_run(tmp_path):
    under_way = claim(tmp_path, name="", overwrite=False)
    under_way.config.write_text("{}")
    with pytest.raises(ValueError, match=r"holds a run already.*--out.*--overwrite"):
        claim(tmp_path, name="", overwrite=False)
    under_way.remove_partial()
    under_way.metrics(1).write_text("{}")
    with pytest.raises(ValueError, match="holds a run already"):
        claim(tmp_path, name="", overwrite=False)


def test_a_start_that_failed_leaves_its_folder_free(tmp_path):
    failed = claim(tmp_path, name="", overwrite=False)
    failed.config.write_text("{}")
    failed.errors(1).write_text("Traceback")
    failed.metrics(0).write_text("")
    failed.remove_partial()
    claim(tmp_path, name="", overwrite=False)
    assert [file.name for file in tmp_path.iterdir()] == ["partial"]


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
    run_dir = claim(tmp_path, name="", overwrite=False)
    for file in (run_dir.config, run_dir.summary, run_dir.metrics(7), run_dir.errors(3)):
        file.write_text("old")
    (run_dir.partial / "x").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    claim(tmp_path, name="", overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt", "partial"}
    assert not list(run_dir.partial.iterdir())


def test_folder_that_cannot_be_made_names_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*file.*name another folder with --out"):
        claim(tmp_path / "file" / "run", name="", overwrite=False)
