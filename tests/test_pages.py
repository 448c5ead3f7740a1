"""The pages of docs/: they build without a warning, cover all names, and their code runs."""

import contextlib
import doctest
import importlib
import io
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.topology import analyse, by_name
from gossipgrad.train import GossipConfig, TrainConfig, find_world
from support.agents import run_torchrun
from support.commands import run_here
from support.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ROOMS = (
    *("", ".topology", ".planning", ".comm", ".compression", ".engine", ".data"),
    *(".checkpoint", ".simulate", ".sparsification", ".apoptosis", ".report", ".train"),
)
QUICK = ("predict",)  # its commands take no time
NUMBER = re.compile(r"[-+]?\d[\d,.e+-]*")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def ids(page):
    return page.stem


def public_names():
    """Every public name, with all names of the same object: one page is enough for it."""
    names = {}
    for room in ROOMS:
        module = importlib.import_module(f"gossipgrad{room}")
        for name, value in vars(module).items():
            if not name.startswith("_") and not isinstance(value, type(sys)):
                key = id(value) if callable(value) else f"{module.__name__}.{name}"
                names.setdefault(key, set()).add(f"{module.__name__}.{name}")
    return list(names.values())


def test_every_room_has_a_page_that_is_listed():
    """What each page has to hold, the build of the pages shows: `make check`, `make docs`."""
    api = ROOT / "docs" / "api"
    listed = re.search(r"```{toctree}\n(.*?)```", (api / "index.md").read_text(), re.DOTALL)[1]
    for room in ROOMS:
        name = room.removeprefix(".") or "gossipgrad"
        assert name in listed.split()
        assert f".. room:: gossipgrad{room}\n" in (api / f"{name}.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sphinx") is None, reason="Sphinx is not installed")
def test_pages_build_without_a_warning_and_cover_all_public_names(tmp_path):
    from sphinx.util.inventory import InventoryFile

    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", tmp_path / "html"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    inventory = InventoryFile.loads((tmp_path / "html" / "objects.inv").read_bytes(), uri="")
    described = {
        name for kind, found in inventory.data.items() if kind.startswith("py:") for name in found
    }
    missing = [names for names in public_names() if not names & described]
    assert not missing, "not in docs/api"
    pictures = re.findall(r"!\[.*?\]\(pictures/", "".join(page.read_text() for page in PAGES))
    html = "".join(path.read_text() for path in (tmp_path / "html").glob("*.html"))
    assert html.count("<svg role") == len(pictures)
    assert "http" not in "".join(re.findall(r"<(?:script|link|img)[^>]*>", html))


@pytest.mark.slow
def test_pictures_are_what_the_script_draws(tmp_path):
    done = subprocess.run(
        [sys.executable, "figures.py", "--into", tmp_path],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for drawn in tmp_path.glob("*.svg"):
        assert drawn.read_text() == (ROOT / "docs" / "pictures" / drawn.name).read_text(), (
            drawn.name
        )


def rows_below(page, heading):
    """The rows of the first table whose heading starts so, as lists of cells."""
    text = (ROOT / "docs" / page).read_text()
    lines = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
def test_topology_table_is_what_analyse_finds():
    rows = rows_below("choosing.md", "| ranks | topology | to a tenth")
    assert rows
    for ranks, name, *figures in rows:
        found = analyse(by_name(name, int(ranks)), max_rounds=5_000)
        assert [int(figure) for figure in figures] == [
            found.rounds_to_contract_10x,
            found.rounds_to_contract_1000x,
            found.rounds_until_all_know_all,
        ], (ranks, name)


def test_every_choice_of_an_option_is_described():
    """Of the options that the pages name; `--help` has them all."""
    text = "".join(page.read_text() for page in PAGES)
    described = 0
    for config in (TrainConfig, GossipConfig):
        for name, hint in get_type_hints(config).items():
            if f"--{name.replace('_', '-')}" not in text and f"{name}=" not in text:
                continue
            for part in (hint, *get_args(hint)):
                for choice in get_args(part) if get_origin(part) is Literal else ():
                    assert f"`{choice}`" in text or f'"{choice}"' in text, (name, choice)
                    described += 1
    assert described > 30


def test_every_guarantee_names_tests_that_exist():
    sections = tomllib.loads((ROOT / "tests" / "guarantees.toml").read_text())
    promises = {k: v for rows in sections.values() for k, v in rows.items()}
    assert len(promises) >= 50
    for promise, tests in promises.items():
        assert tests, f"no test for: {promise}"
        for test in tests:
            file, name = test.split("::")
            there = (ROOT / "tests" / file).read_text()
            assert f"\ndef {name}(" in there, f"there is no {test}"


def test_settings_are_what_predict_recommends():
    rows = rows_below("settings.md", "| workers | link |")
    assert len(rows) > 10
    for workers, link, optimizer, most_loss, use, lost in rows:
        rate, unit, _ = re.split(r"\s|bit", link)
        network = gg.simulate.Network.from_rate(float(rate) * {"G": 1e9, "M": 1e6}[unit])
        found = gg.advise(
            "resnet50",
            optimizer.lower(),
            network=network,
            world_size=int(workers),
            most_loss=float(most_loss),
        ).best
        assert f"`{found.settings}`" == use, (workers, link, optimizer)
        assert found.loss == float(lost.split()[0]), (workers, link, optimizer)


def test_the_script_for_slurm_and_the_manifest_have_their_form(tmp_path):
    """Nobody runs them here: their syntax, the launched command, and the world that it finds."""
    page = ROOT / "docs" / "run.md"
    (script,) = blocks(page, "bash")
    (tmp_path / "gossip.sbatch").write_text(script)
    subprocess.run(["bash", "-n", tmp_path / "gossip.sbatch"], check=True)
    wanted = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, re.MULTILINE))
    assert {"nodes", "requeue", "signal", "time"} <= wanted.keys()
    assert script.count("#SBATCH") == len(wanted)
    assert script.index("--resume") < script.index("scontrol requeue")

    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(*blocks(page, "yaml"))
    pod = job["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    environ = {each["name"]: each["value"] for each in worker["env"]} | {"RANK": "3"}
    world = find_world(environ)
    assert (world.rank, world.world_size) == (3, job["spec"]["completions"])
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert environ["MASTER_ADDR"] == host
    assert pod["subdomain"] == service["metadata"]["name"]
    assert worker["args"][0].startswith("RANK=$JOB_COMPLETION_INDEX exec gossipgrad train")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=ids)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In order, with what the pages say that a reader has; alone, as one rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    names = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loader": [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)],
        "loss_function": nn.functional.cross_entropy,
    }
    for block in blocks(page, "python"):
        if not is_file(page, block):
            exec(compile(block, page.name, "exec"), names)
    if "session" in names:
        names["session"].close()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "pycon")], ids=ids)
def test_examples_at_the_prompt(page):
    text = "\n\n".join(blocks(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    output = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    with contextlib.redirect_stdout(output):
        runner.run(test, out=output.write)
    assert runner.summarize(verbose=False).failed == 0, output.getvalue()


def is_file(page, block):
    return file_of(page, block) is not None


def file_of(page, block):
    found = re.search(r"Save this as `([\w.]+)`:\s*```python\n\Z", page.read_text().split(block)[0])
    return found and found[1]


@pytest.mark.process
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.stem in QUICK else pytest.mark.slow, id=page.stem)
        for page in PAGES
        if blocks(page, "console")
    ],
)
def test_commands_run_and_print_what_the_page_shows(page, tmp_path, monkeypatch, capsys):
    """Numbers aside, every line shown is printed; other machines' commands are no `console`."""
    for block in blocks(page, "python"):
        if name := file_of(page, block):
            (tmp_path / name).write_text(block)
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = part.rstrip().split("\n")
            printed = lines_of(run(command, tmp_path, monkeypatch, capsys))
            for line in shown:
                if line != "...":
                    assert shape(line) in printed, f"{command}: {line!r} is not in\n{printed}"


def shape(text):
    return NUMBER.sub("#", " ".join(text.split()))


def lines_of(text):
    return "\n".join(shape(line) for line in text.splitlines())


def run(command, folder, monkeypatch, capsys):
    program, *arguments = shlex.split(command)
    if program in ("make", "pip", "source"):
        return ""
    if arguments[0] == "train":  # its workers print past `capsys`
        done = subprocess.run(
            [sys.executable, "-m", program, *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
    elif program == "torchrun":
        done = run_torchrun(arguments, folder)
    else:
        code = run_here([program, *arguments], folder, monkeypatch)
        said = capsys.readouterr()
        assert not code, f"{command}\n{said.err}"
        return said.out + said.err
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout + done.stderr
