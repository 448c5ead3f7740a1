"""`gossipgrad predict`: how long a step will take on a network, and what to use there."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from rich.text import Text
from torch.optim import SGD, AdamW, Optimizer

from gossipgrad.planning import PROFILES, Plan, Profile
from gossipgrad.simulate import Advice, Network, Sparse, Workers, advise, record_profile
from gossipgrad.train import TrainConfig, load_job, to_device

from ._output import new_table, parse, say, show
from ._units import count_of, count_text, rate_of, rate_text, seconds_of, seconds_text

_GROUPS_SHOWN = 24
_PLAN_OPTIONS = "nothing is sent by one worker: give --world-size 2 or more with --plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictOptions:
    """Predict how long a step takes by each way to train, and recommend one.

    Nothing is trained and nothing sent, but for the steps of --job. Say what is trained by --job,
    --profile, or --parameters with --compute-seconds, and the network by --bandwidth, or by
    --network. Accuracy is that of measured runs of small models: try the two best on your own.
    """

    job: str | None = None
    """MODULE:FUNCTION as of `gossipgrad train --job`: 25 steps of it are measured on this
    device."""
    profile: Literal[PROFILES] | None = None  # pyrefly: ignore
    """A built-in model on the GPU that it was derived for."""
    parameters: str | None = None
    """How many parameters the model has, for example 124M or 1.5B."""
    compute_seconds: float | None = None
    """What a step of one worker takes without communication, with --parameters."""
    batch_size: int = 32
    """Samples of a worker in a step, with --job."""
    device: str = "cpu"
    """Where the steps of --job run, for example cuda."""
    optimizer: Literal["sgd", "adam", "other"] = "adam"
    """What trains the model, which decides what gossip costs in accuracy; an optimizer of --job
    itself goes before. other: the comparison has no known accuracy but that of all-reduce."""
    world_size: int = 8
    """The number of workers."""
    bandwidth: str | None = None
    """Rate of each worker's link, each way; None: 1Gbit."""
    latency: str | None = None
    """What an empty message takes; None: 50us."""
    network: Path | None = None
    """A file that `gossipgrad probe --out` wrote, instead of --bandwidth and --latency."""
    island: int = 1
    """Workers of a machine, which share its link. Those that gossip average gradients inside, and
    machines exchange one model."""
    inside: str = "100Gbit"
    """Rate between the workers of a machine, with --island."""
    jitter: float = 0.1
    """Spread of a step's compute from step to step, relative to itself."""
    stragglers: int = 0
    """How many workers are slow in every step."""
    straggler_factor: float = 2.0
    """How many times longer they compute."""
    most_loss: float = 0.5
    """Points of accuracy below all-reduce, after equal epochs, that are accepted."""
    plan: bool = False
    """Print the groups in which `gg.sparsify` would send gradients, too."""
    json: bool = False
    """Print JSON instead of tables."""


def main(arguments: list[str]) -> int:
    """Predict, print the table, the groups and the advice; returns the exit code."""
    options = parse(PredictOptions, arguments, "predict")
    if options.plan and options.world_size < 2:
        raise ValueError(f"world_size is {options.world_size}: {_PLAN_OPTIONS}")
    network, links = _network(options)
    profile, optimizer = _model(options)
    found = advise(
        profile,
        optimizer,
        network=network,
        world_size=options.world_size,
        most_loss=options.most_loss,
        workers=Workers(
            jitter=options.jitter,
            stragglers=options.stragglers,
            straggler_factor=options.straggler_factor,
        ),
        island=options.island,
        inside=Network.from_rate(rate_of(options.inside)),
    )
    model = "a model" if options.parameters else f"{profile.name} on {profile.device}"
    title = (
        f"{model}: {count_text(sum(profile.elements))} parameters, "
        f"{seconds_text(profile.compute_seconds)} of compute a step; {options.world_size:,} "
        f"worker{'s' * (options.world_size != 1)}"
        f"{f' in islands of {options.island}' * (options.island > 1)}, {links}"
    )
    plan = None
    if options.plan:
        plan, _ = Sparse().plan(profile, network, options.world_size)
    if options.json:
        value: dict[str, Any] = {"title": title, "profile": profile.to_json()}
        value |= {"network": network.to_json(), "advice": found.to_json()}
        print(json.dumps(value | ({} if plan is None else {"plan": plan.to_json()}), indent=2))
        return 0
    say(title)
    show(_table(found))
    if plan is not None:
        show(_groups(plan, profile))
        say(_verdict(plan, profile))
    say("", str(found))
    return 0


def _network(options: PredictOptions) -> tuple[Network, str]:
    """The network, and what to call it."""
    if options.network is not None:
        if (options.bandwidth, options.latency) != (None, None):
            raise ValueError(
                "--network says what links cost: leave out --bandwidth and --latency, or --network"
            )
        return Network.load(options.network), f"links as in {options.network}"
    rate, latency = rate_of(options.bandwidth or "1Gbit"), options.latency or "50us"
    network = Network.from_rate(rate, latency_seconds=seconds_of(latency))
    return network, f"{rate_text(rate)}, {latency}"


def _model(options: PredictOptions) -> tuple[Profile, str | Optimizer]:
    """What a step computes, and the optimizer or its kind."""
    given = [
        name for name in ("job", "profile", "parameters") if getattr(options, name) is not None
    ]
    if len(given) != 1 or (given == ["parameters"]) != (options.compute_seconds is not None):
        raise ValueError(
            "say what is trained, in one way: --job MODULE:FUNCTION, measured on this device; "
            f"--profile with one of {', '.join(PROFILES)}; or --parameters 124M "
            "--compute-seconds 0.3"
        )
    if options.job is not None:
        return _record(options)
    if options.parameters is not None and options.compute_seconds is not None:
        parameters = count_of(options.parameters)
        return Profile.of_size(parameters, options.compute_seconds), options.optimizer
    return Profile.load(str(options.profile)), options.optimizer


def _record(options: PredictOptions) -> tuple[Profile, str | Optimizer]:
    """Measures steps of a job, with its optimizer, or one of the kind that --optimizer names."""
    if options.batch_size < 1:
        raise ValueError(f"batch_size is {options.batch_size}: a step has 1 sample or more")
    job = load_job(TrainConfig(job=options.job))
    try:
        device = torch.device(options.device)
        model = job.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {options.device} cannot be used: {error}") from error
    optimizers = job.make_optimizers()
    if optimizers is None:
        of = model.parameters()
        sgd = options.optimizer == "sgd"
        optimizers = [SGD(of, lr=0.01, momentum=0.9) if sgd else AdamW(of)]
    if len(optimizers) > 1:
        raise ValueError(
            f"--job {options.job} has {len(optimizers)} optimizers, and one is measured: give "
            "--parameters and --compute-seconds instead"
        )
    if job.train_loader is not None:
        x, y = next(iter(job.make_loader(0, options.world_size)))
    else:
        samples = job.train_samples()
        x, y = samples.batch(torch.arange(min(options.batch_size, len(samples))))
    x, y = to_device(x, device), y.to(device)
    profile = record_profile(
        model.train(), optimizers[0], [y], lambda model, y: job.loss(model(x), y)
    )
    return profile, options.optimizer if job.optimizer is None else optimizers[0]


def _table(found: Advice) -> Table:
    table = new_table("", "step", "compute", "sent", "points lost")
    for choice in found.choices:
        step = choice.prediction
        table.add_row(
            Text(choice.prediction.strategy, style="bold" if choice is found.best else ""),
            seconds_text(step.step_seconds),
            f"{100 * step.efficiency:.0f} %",
            f"{step.bytes_sent_per_step / 1e6:,.4g} MB",
            "?" if choice.loss is None else f"{'~' * choice.is_assumed}{choice.loss:.1f}",
        )
    table.caption = "points lost: by other models; ? not measured, ~ if 16 bits cost nothing"
    return table


def _groups(plan: Plan, profile: Profile) -> Table:
    count = len(plan.groups)
    shown = new_table("tensors", "first to last", "elements", "sent", title=_count(count))
    # The names give way where it is narrow.
    shown.columns[1].justify, shown.columns[1].overflow = "left", "fold"
    shown.columns[0].no_wrap, shown.columns[1].no_wrap = True, False
    for group in plan.groups[:_GROUPS_SHOWN]:
        start, last = group.start, group.stop - 1
        names = dict.fromkeys((profile.names[start], profile.names[last]))
        shown.add_row(
            f"{start}" if start == last else f"{start}-{last}",
            Text(" to ".join(names)),  # names may look like markup
            f"{_elements(profile, [group]):,}",
            group.method,
        )
    if count > _GROUPS_SHOWN:
        shown.caption = f"the first {_GROUPS_SHOWN} of {count}; --json has all"
    return shown


def _verdict(plan: Plan, profile: Profile) -> str:
    sparse = [group for group in plan.groups if group.method == "sparse"]
    share = _elements(profile, sparse) / sum(profile.elements)
    proved = (
        "no other groups finish earlier"
        if plan.gap < 1e-9
        else f"no other groups finish earlier by more than {100 * plan.gap:.2g} %"
    )
    return (
        f"gg.sparsify would compress {len(sparse)} of {_count(len(plan.groups))}, "
        f"{100 * share:.3g} % of all elements; under the model of time, {proved}."
    )


def _elements(profile: Profile, groups: Sequence[Any]) -> int:
    return sum(sum(profile.elements[group.start : group.stop]) for group in groups)


def _count(groups: int) -> str:
    return f"{groups} group{'s' * (groups != 1)}"
