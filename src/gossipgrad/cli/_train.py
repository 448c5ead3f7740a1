"""`gossipgrad train`: one run from options, a saved configuration, or both."""

import argparse
import os
import signal
import warnings
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gossipgrad import train
from gossipgrad.train import (
    DEFAULT_LR,
    DEFAULT_NPROC,
    STRATEGIES,
    JoinConfig,
    JoinOutcome,
    Outcome,
    TrainConfig,
    config_of_run,
    find_world,
    options_by_section,
    sections_of,
    show_metric,
)

from . import _launch
from ._output import parse as parse_options
from ._train_help import short_help

_STRATEGY = tyro.conf.arg(
    metavar=f"{{{','.join(STRATEGIES)}}}",
    help="How replicas are kept together. "
    + " ".join(f"{one.name}: {one.help}." for one in STRATEGIES.values()),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions(TrainConfig):
    """Train a model on several workers.

    Starts the workers on this machine, or, inside torchrun or Slurm, takes part as one of them.
    With --checkpoint-every a run that was stopped, or died, continues with --resume DIR. With
    --join DIR one more worker comes into a run that is training and whose strategy allows it.
    Options of a section, such as --gossip.every, may be written short: --every. Where several
    sections have one of that name, it is that of the chosen strategy or optimizer.
    The run leaves in its folder config.json, metrics-rank*.jsonl, summary.json,
    model.safetensors, trace.json and report.html.
    """

    config: Path | None = None
    """Repeat the run of this config.json; other options replace what it says."""
    join: Path | None = None
    """Join the run of this folder, which is training, with one more worker: start the command once
    for each. Beside it there are --device, --data-dir, --threads and --quiet; all else is the
    run's."""
    nodes: int = 1
    """Machines; start the command on each. The folder of the run must be the same on all."""
    node_rank: int = 0
    """Which of the machines this is, from 0."""
    rendezvous: str | None = None
    """Where the workers of all machines meet: HOST:PORT, an address of machine 0 that the others
    reach and a free port. Given on one machine alone, workers of others can join its run."""
    strategy: Annotated[str, _STRATEGY] = "gossip"
    options: Annotated[dict[str, Any], tyro.conf.arg(name="")] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    """Parse, train, say where things are; returns the exit code."""
    if {"-h", "--help"} & {*arguments}:
        print(short_help(TrainOptions), end="")
        return 0
    if (joining := parse_join(arguments)) is not None:
        joined = train.join_run(joining)
        if not joining.quiet:
            print_joined(joined)
        return joined.exit_code
    if (launched := on_several_machines(arguments)) is not None:
        return _launch.main(launched, prefix=False)
    config = parse(arguments)
    outcome = train.run(config)
    if not config.quiet:
        print_outcome(outcome)
    return outcome.exit_code


def parse(arguments: list[str]) -> TrainConfig:
    """The configuration that a command line means."""
    # What follows from an option that is replaced does not stay: the learning rate of another
    # optimizer, and the number of processes where the world is given.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # A value that is missing is for the parser of all options to report.
    for name in ("--config", "--resume"):
        first.add_argument(name, type=Path, nargs="?")
    for name in ("--optimizer", "--lr"):
        first.add_argument(name, nargs="?")
    given = first.parse_known_args(arguments)[0]
    if given.config is not None and given.resume is not None:
        raise ValueError(
            f"--config {given.config} begins a new run, and --resume {given.resume} continues "
            "one, with its own options: leave --config out."
        )
    saved = TrainConfig() if given.config is None else TrainConfig.from_file(given.config)
    if given.resume is not None:
        saved = config_of_run(given.resume)
    if given.optimizer not in (None, saved.optimizer) and given.lr is None:
        if saved.lr not in (None, DEFAULT_LR[saved.optimizer]):
            source = given.config or given.resume
            warnings.warn(
                f"lr={saved.lr} of {source} is not used: it belongs to {saved.optimizer}; "
                "give --lr to keep it.",
                stacklevel=2,
            )
        saved = replace(saved, lr=None)
    if find_world(os.environ) is not None:
        saved = replace(saved, nproc=None)
    chosen = _parse(arguments, TrainOptions(config=given.config, **_values(saved)))
    return TrainConfig(**_values(chosen))


def on_several_machines(arguments: list[str]) -> list[str] | None:
    """What `gossipgrad launch` is given for a run over several machines; None for one on this."""
    given = _Parser(add_help=False, allow_abbrev=False)
    for name in ("--nodes", "--node-rank", "--rendezvous", "--nproc"):
        given.add_argument(name, f"--{name[2:].replace('-', '_')}")
    found, rest = given.parse_known_args(arguments)
    if not (found.nodes or found.node_rank or found.rendezvous) or {"-h", "--help"} & {*arguments}:
        return None
    if find_world(os.environ) is not None:
        raise ValueError(
            "--nodes, --node-rank and --rendezvous start workers, and this process is one that "
            "torchrun or Slurm has started: leave them out."
        )
    config = parse(rest)  # says what is wrong before a process is started
    options = {"nproc": found.nproc or config.nproc or DEFAULT_NPROC, "nodes": found.nodes}
    options |= {"node-rank": found.node_rank, "rendezvous": found.rendezvous}
    if config.island != 1:
        options["island"] = options["nproc"] if config.island == "node" else config.island
    words = [word for name, value in options.items() if value for word in (f"--{name}", str(value))]
    return [*words, "-m", "gossipgrad", "train", *rest]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # pyrefly: ignore[bad-override]
        raise ValueError(f"{message}; see `gossipgrad train --help`")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOptions:
    """What a worker that joins may have otherwise than the run."""

    join: Path
    device: Literal["cpu", "cuda", "auto"] | None = None
    data_dir: Path | None = None
    threads: int | None = None
    quiet: bool = False


def parse_join(arguments: list[str]) -> JoinConfig | None:
    """What a command line with `--join` means, None for one without."""
    if "--join" not in {argument.partition("=")[0] for argument in arguments}:
        return None
    if sum(argument.partition("=")[0] == "--join" for argument in arguments) > 1:
        raise ValueError(
            "--join is given more than once, but workers join one run: start the command once for "
            "each."
        )
    try:
        found = parse_options(JoinOptions, arguments, "train")
    except ValueError as error:
        raise ValueError(
            f"{error}. A worker that joins trains as the run does; its own options are --device, "
            "--data-dir, --threads and --quiet"
        ) from None
    own = {name: getattr(found, name) for name in ("device", "data_dir", "threads", "quiet")}
    return JoinConfig(run=found.join, **own)


def _parse(arguments: list[str], default: TrainOptions) -> TrainOptions:
    strategy = _last_given("--strategy", arguments) or default.strategy
    optimizer = _last_given("--optimizer", arguments) or default.optimizer
    own = sections_of(strategy=strategy, optimizer=optimizer)
    words = ["--help" if word == "--help-all" else _in_full(word, own) for word in arguments]
    return parse_options(TrainOptions, words, "train", default=default, config=())


def _last_given(name: str, arguments: list[str]) -> str | None:
    """The value of an option; the last one, if it is given several times."""
    chosen = None
    for argument, after in zip(arguments, [*arguments, ""][1:], strict=True):
        option, is_joined, value = argument.partition("=")
        if option == name:
            chosen = value if is_joined else after
    return chosen


def _in_full(argument: str, own: list[str]) -> str:
    """An option of a section, written short, in full: --gossip.every=2 for --every=2."""
    option = argument.partition("=")[0]
    name = option.removeprefix("--").replace("_", "-")
    negation = "no-" * name.startswith("no-")
    name = name.removeprefix("no-")
    owners = _sections_by_name().get(name, [])
    if not option.startswith("--") or not owners:
        return argument
    owners = [one for one in owners if one.replace("-", "_") in own] or owners
    full = [f"--{owner}.{negation}{name}" for owner in owners]
    if len(full) > 1:
        raise ValueError(f"{option} has several owners: write {' or '.join(full)}.")
    return full[0] + argument[len(option) :]


def _sections_by_name() -> dict[str, list[str]]:
    """The sections that have an option of a name, both as they are written on a command line."""
    found: dict[str, list[str]] = {}
    for section, kind in options_by_section().items():
        for name in _names(kind):
            found.setdefault(name, []).append(section.replace("_", "-"))
    return found


def _names(kind: type) -> list[str]:
    return [field.name.replace("_", "-") for field in fields(kind)]


def _values(config: TrainConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(TrainConfig)}


def print_joined(outcome: JoinOutcome) -> None:
    """What a worker that joined a run reached, in a few lines."""
    end = "and left the run, which continues" if outcome.left else "to the end of the run"
    samples = f"{outcome.steps:,} steps on {outcome.samples:,} samples"
    print(f"rank {outcome.rank} trained {samples}, {end}")
    if outcome.summary is not None:
        print(show_metric(outcome.summary))
        print(f"report {outcome.run_dir / 'report.html'}")


def print_outcome(outcome: Outcome) -> None:
    """What a run reached, in a few lines; nothing on ranks that did not put it together."""
    if outcome.run_dir is None:
        return
    if outcome.summary is None:
        stopped_by = signal.Signals(outcome.exit_code - 128).name
        if outcome.begun:
            print(f"stopped at once; metrics and checkpoints so far are kept in {outcome.run_dir}")
        else:
            print(f"stopped by {stopped_by} before all workers had started; nothing was learned")
        return
    summary = outcome.summary
    what = "consensus" if summary["model_is_consensus"] else f"rank {summary['model_from_rank']}"
    print(f"{show_metric(summary)} ({what}) after {summary['steps']} steps")
    if summary["interrupted"]:
        cause = summary["stopped_by"] or "the word that another rank was given"
        print(f"stopped by {cause}; what was reached is kept")
    for rank, cause in summary["lost_because"].items():
        print(f"rank {rank} {cause}")
    for note in summary["notes"]:
        print(note)
    if outcome.report is not None and outcome.report.exists():
        print(f"report {outcome.report}")
