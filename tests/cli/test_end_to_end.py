"""The command as a user runs it: a terminal, and Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gossipgrad import cli
from support.waiting import HANG_SECONDS, until

pytestmark = [pytest.mark.process, pytest.mark.slow]


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


@dataclass
class Interrupted:
    out: bytes
    exit_code: int
    output: bytes
    errors: bytes


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that Ctrl-C has ended, in a folder whose name is no text."""
    out = os.fsencode(tmp_path_factory.mktemp("runs")) + b"/r\xffn"
    command = [sys.executable, "-m", "gossipgrad", "train", "--out", out, "--nproc", "2"]
    process = subprocess.Popen(
        [*command, "--epochs", "10000"],
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"epoch 1/"):
            break
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=HANG_SECONDS)
    until(lambda: not session_members(process.pid))  # it leaves no process
    return Interrupted(out, process.returncode, output, errors)


def test_ctrl_c_in_a_terminal_keeps_the_run_and_leaves_no_process(interrupted):
    assert interrupted.exit_code == 130
    assert interrupted.errors == (
        b"gossipgrad: stopping at the next step; once more to stop at once\n"
    )
    assert b"stopped by SIGINT; what was reached is kept" in interrupted.output
    folder = Path(os.fsdecode(interrupted.out))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["model_is_consensus"]
    assert (folder / "model.safetensors").exists()


def test_a_folder_may_have_any_name(interrupted, monkeypatch):
    """Names are bytes on Linux; Python is strict about them in locales other than C."""
    page = interrupted.out + b"/report.html\n"
    assert interrupted.output.endswith(b"\nreport " + page)
    folder = Path(os.fsdecode(interrupted.out))
    (folder / "report.html").unlink()
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "utf-8", errors="strict"))
    assert cli.main(["report", str(folder)]) == 0
    sys.stdout.flush()
    assert printed.getvalue() == page
    assert (folder / "report.html").exists()
