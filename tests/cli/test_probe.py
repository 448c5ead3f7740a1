"""`gossipgrad probe`."""

import json
import subprocess

import pytest

from gossipgrad import cli
from gossipgrad.cli import _probe


@pytest.mark.process
def test_two_workers_here_measure_what_predict_reads(tmp_path, capfd):
    out = tmp_path / "network.json"
    arguments = ["--nproc", "2", "--seconds", "0.5", "--sizes", "4096,65536", "--out", str(out)]
    assert cli.main(["probe", *arguments]) == 0
    shown = capfd.readouterr().out
    assert "exchange, usual pair" in shown
    assert "all-reduce of 2" in shown
    assert "0 and 1" in shown
    held = json.loads(out.read_text())
    assert held["world_size"] == 2
    assert "hosts" not in held
    assert cli.main(["predict", "--profile", "resnet50", "--network", str(out)]) == 0
    assert "Use " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nproc", "1"], "nproc is 1"),
        (["--seconds", "0"], "seconds is 0.0"),
        (["--seconds", "inf"], "seconds is inf"),
        (["--timeout", "-1"], "timeout is -1.0"),
        (["--sizes", "4096"], "rise"),
        (["--sizes", "4kB,8kB"], "'4kB,8kB'"),
        (["--sizes", "4096,8191"], "multiples of 4"),
        (["--out", "nowhere/network.json"], "no folder nowhere"),
        (["--out", "/proc/network.json"], "cannot write --out /proc/network.json"),
        (["--out", "."], "cannot write --out ."),
    ],
)
def test_mistakes_are_one_kind_line_and_start_nothing(
    arguments, named, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", None)
    assert cli.main(["probe", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gossipgrad: error: ")
    assert err.count("\n") == 1
    assert named in err


SAYS = """\
#!/bin/sh
case $RANK in
{ranks}
esac
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            {0: "echo gossipgrad: error: a rank has died or left >&2; exit 2"}
            | {2: "echo warning >&2; echo gossipgrad: error: rank 1 did not answer >&2; exit 2"},
            "rank 2 failed: rank 1 did not answer",
        ),
        (
            {0: "until [ -e $0.dead ]; do sleep 0.01; done; echo Connection closed >&2; exit 2"}
            | {1: "touch $0.dead; kill -9 $$", 2: "exec sleep 100"},
            None,
        ),
        ({0: "exit 0", 2: "exit 1"}, "rank 2 failed: without a word"),
        # More than a pipe holds.
        ({1: "head -c 200000 /dev/zero | tr '\\0' x >&2; echo >&2; echo last >&2; exit 1"}, "last"),
    ],
)
def test_the_first_to_fail_is_named_and_the_others_are_ended(
    ranks, message, tmp_path, monkeypatch, capsys
):
    worker = tmp_path / "worker"
    lines = [f"{rank}) {does} ;;" for rank, does in ranks.items()]
    worker.write_text(SAYS.format(ranks="\n".join(lines)))
    worker.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(worker))
    # However late it fails; but where one goes on for ever, nobody is awaited for long.
    monkeypatch.setattr(_probe, "_GRACE_SECONDS", 50.0 if message else 1.0)
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr("subprocess.Popen", Popen)
    assert cli.main(["probe", "--nproc", "3"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert (message or "rank 1 was killed by SIGKILL") in err
    assert all(process.returncode is not None for process in started)
