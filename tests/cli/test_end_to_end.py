"""The command as a user runs it: a terminal, Ctrl-C, torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def session_members(session: int) -> list[str]:
    """Processes of a session that are alive, zombies left out."""
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                command = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if int(state[3]) == session and state[0] != "Z":
                members.append(command)
    return members


def test_ctrl_c_in_a_terminal_keeps_the_run_and_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "gossipgrad", "train", "--out", str(tmp_path), "--nproc", "2"]
    process = subprocess.Popen(
        [*command, "--epochs", "10000"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 1/"):
            break
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "gossipgrad: stopping at the next step; once more to stop at once\n"
    assert "stopped by SIGINT; what was reached is kept" in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["model_is_consensus"]
    assert (tmp_path / "model.safetensors").exists()
    deadline = time.monotonic() + 30
    while (left := session_members(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_torchrun_joins_the_world_it_finds(tmp_path):
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["-m", "gossipgrad", "train", "--epochs", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1/1") == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["steps_per_rank"] == [45, 45]
    assert summary["model_is_consensus"]
    assert {file.name for file in tmp_path.iterdir()} >= {"metrics-rank1.jsonl", "report.html"}
    assert not (tmp_path / "partial").exists()


def test_a_folder_may_have_any_name(tmp_path):
    """Names are bytes on Linux; Python is strict about them in locales other than C."""
    out = os.fsencode(tmp_path) + b"/r\xffn"
    page = out + b"/report.html\n"
    for words, end in (
        (["train", "--nproc", "2", "--epochs", "1", "--out", out], b"\nreport " + page),
        (["report", out], page),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "gossipgrad", *words],
            env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
            capture_output=True,
            timeout=100,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.endswith(end)
    names = {path.name for path in Path(os.fsdecode(out)).iterdir()}
    assert names >= {"summary.json", "model.safetensors", "report.html"}
