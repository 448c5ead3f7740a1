"""README's code runs as it stands; so do the examples in docstrings."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tyro

import gossipgrad
from gossipgrad import cli, train
from gossipgrad.train import TrainConfig
from support.commands import given
from support.frameworks import torchrun_environment
from support.processes import run_processes

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def modules():
    for info in pkgutil.walk_packages(gossipgrad.__path__, "gossipgrad."):
        *_, room, name = info.name.split(".")
        is_door = room == "integrations" and not name.startswith("_")
        if name != "__main__" and (not is_door or find_spec(name) is not None):
            yield info.name  # a door needs its framework


MODULES = list(modules())
SHOWN = [name for name in MODULES if ">>>" in Path(find_spec(name).origin).read_text()]


def test_every_module_can_be_imported():
    for name in MODULES:
        importlib.import_module(name)


@pytest.mark.parametrize("name", SHOWN)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried
    assert failed == 0


def blocks(language, page="README.md"):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def readme_script(rank, store, port, script):
    """Runs it with what torchrun tells a worker; what it has printed."""
    torchrun_environment(rank, port, world_size=3)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.process
def test_readme_script_runs_on_three_ranks():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (script,) = blocks("python")
    printed = run_processes(3, readme_script, store.port, script, grouped=False)
    check_what_readme_script_prints("".join(printed))


def check_what_readme_script_prints(text):
    found = re.fullmatch(
        r"loss of the consensus (\d\.\d+)\nconsensus distance (0\.\d+) \(estimate\)\n"
        r"sent ([\d,]+) bytes, ring all-reduce would have sent ([\d,]+)\n"
        r"blocked on communication for \d+\.\d\d s\n",
        text,
    )
    assert found, text
    assert float(found[1]) < 0.6, "2.3 before training"
    sent, ring = (int(figure.replace(",", "")) for figure in found.groups()[2:])
    weights = 4 * (64 * 64 + 64 + 64 * 10 + 10)
    assert ring == 300 * weights * 4 // 3
    assert sent == pytest.approx(300 * weights * 2 / 3, rel=0.02), "one of three ranks pauses"


def shards_of_a_block(rank, store, block):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    names = {"torch": torch, "gg": gossipgrad, "model": model}
    exec(compile(block, "block", "exec"), names)
    session, optimizer = names["session"], names["optimizer"]
    for _ in range(3):
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = session.stats()
    session.group.barrier()
    session.close()
    return session.world_size, stats.outcomes, stats.bytes_sent


@pytest.mark.process
def test_the_block_for_four_ranks_runs():
    """It is marked `py`: it needs more ranks than one."""
    (block,) = blocks("py", "docs/your_loop.md")
    for world_size, outcomes, bytes_sent in run_processes(4, shards_of_a_block, block):
        assert (world_size, outcomes["delivered"] > 0) == (2, True)
        assert bytes_sent > 0


COMMANDS = [
    (page, line.removeprefix("$ "))
    for page in ("README.md", "examples/README.md", *(f"docs/{p.name}" for p in PAGES))
    for language in ("console", "sh")
    for block in blocks(language, page)
    for line in block.replace("\\\n", " ").splitlines()
    if re.match(r"(\$ )?((\w+=\S+ )*gossipgrad|torchrun|srun|python) ", line)
]

# Inside a sentence; a name alone, such as `gossipgrad launch`, is no command to type.
COMMANDS += [
    (page, command)
    for page in dict.fromkeys(
        ("README.md", "examples/README.md", *(f"docs/{p.name}" for p in PAGES))
    )
    for command in re.findall(
        r"`((?:srun [^`]*)?gossipgrad [a-z]+ [^`]+)`",
        re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL),
    )
]


class ParsedError(Exception):
    """The options of a command are known and have values of the right kind."""


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_can_be_given_as_they_stand(page, command, tmp_path, monkeypatch):
    """That their options are known and fit each other; test_pages runs those of the docs."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    if "gossipgrad" not in words or words[:2] == ["gossipgrad", "launch"]:
        assert words[0] in ("torchrun", "python", "gossipgrad"), command
        script = next(word for word in words if word.endswith(".py"))
        saved = any(
            f"Save this as `{script}`" in each.read_text() for each in (ROOT / "README.md", *PAGES)
        )
        assert saved or (ROOT / script).exists()
        return
    name, *options = words[words.index("gossipgrad") + 1 :]
    if options[-1] in ("--nproc", "--join", "--config"):  # a sentence about the option itself
        return
    if name != "train":

        def parse_alone(*arguments, parse=tyro.cli, **settings):
            parse(*arguments, **settings)
            raise ParsedError

        monkeypatch.setattr(tyro, "cli", parse_alone)
        with pytest.raises(ParsedError):
            cli.main([name, *options])
        return
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for option in {"--nodes", "--node-rank", "--rendezvous", "--island"} & {*options}:  # of several
        at = options.index(option)
        del options[at : at + 2]
    if "--resume" in options:
        folder = tmp_path / options[options.index("--resume") + 1]
        folder.mkdir(parents=True)
        TrainConfig().resolved(nproc=4, out=folder).write(folder / "config.json")
    config = given(*options)
    assert config is not None
    if not {"--join", "--resume", "--job"} & {*options}:  # test_job runs jobs
        (tmp_path / "no folder").touch()
        with pytest.raises(ValueError, match="no folder/run"):  # all else is checked before
            train.run(replace(config, out=tmp_path / "no folder" / "run"))


def anchors(page):
    """Of the headings of a page, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_in_the_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            if not target.startswith("http"):
                path = page.parent / target if target else page
                assert path.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(path), f"{page.name}: {target}#{anchor}"
