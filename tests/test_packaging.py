"""What is built can be installed, and runs README's script, away from this repository."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from support.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[1]
CHECK = "import gossipgrad, sys; sys.exit(not gossipgrad.__file__.startswith(sys.argv[1]))"


def run(*command, folder, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_extras_that_others_take_in_are_there():
    """An editable install of a fresh machine resolves all of them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    for needs in extras.values():
        for taken in (name for need in needs for name in re.findall(r"^gossipgrad\[(.*)\]$", need)):
            assert {*taken.split(",")} <= extras.keys()


@pytest.mark.slow
@pytest.mark.process
def test_the_wheel_runs_the_script_of_the_readme(tmp_path):
    pip = "-m", "pip", "--disable-pip-version-check", "--quiet"
    run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT, folder=tmp_path)
    (wheel,) = tmp_path.glob("gossipgrad-*.whl")
    held = zipfile.ZipFile(wheel).namelist()
    assert "gossipgrad/py.typed" in held
    assert not [name for name in held if not name.startswith("gossipgrad")]
    site = tmp_path / "site"
    run(*pip, "install", "--no-deps", "--target", site, wheel, folder=tmp_path)
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    elsewhere = {"PYTHONPATH": str(site)}
    run("-c", CHECK, site, folder=tmp_path, **elsewhere)
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", 2
    printed = run(*torchrun, "train.py", folder=tmp_path, **elsewhere)
    assert re.search(r"loss of the consensus 0\.\d+\n", printed)
