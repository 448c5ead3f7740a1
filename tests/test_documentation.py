"""README's code runs as it stands; so do the examples in docstrings."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gossipgrad

ROOT = Path(__file__).parents[1]


def modules():
    for info in pkgutil.walk_packages(gossipgrad.__path__, "gossipgrad."):
        if not info.name.endswith("__main__"):
            yield info.name


@pytest.mark.parametrize("name", list(modules()))
def test_docstring_examples(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.process
def test_readme_script_runs_under_torchrun(tmp_path):
    (script,) = blocks("python")
    (tmp_path / "train.py").write_text(script)
    (command,) = [
        line.removeprefix("$ ")
        for block in blocks("console")
        for line in block.splitlines()
        if "torchrun" in line
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"accuracy of the consensus (\d+\.\d)%", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 85
    assert re.search(r"consensus distance 0\.[0-9]+", done.stdout)
    assert re.search(r"[\d,]+ bytes sent, blocked for \d", done.stdout)


@pytest.mark.process
def test_readme_script_runs_alone(tmp_path):
    (script,) = blocks("python")
    (tmp_path / "train.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 bytes sent" in done.stdout


def test_readme_holds_no_placeholder():
    assert not re.findall(r"^[A-Z]{4,}$", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_links_in_the_documents_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
