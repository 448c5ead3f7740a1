"""`gossipgrad plan`: which gradients to merge, which to compress, and what that gains."""

import json
import sys

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gossipgrad.planning import Profile

from ._plan_costs import all_methods, chosen, network_of
from ._plan_figure import draw, text_lanes
from ._plan_options import PlanOptions, check, check_given
from ._plan_report import Comparison, compare
from ._units import percent_text, seconds_text

_GROUPS_SHOWN = 24
_MANY_TENSORS = 1000  # that are planned for within some seconds


def main(arguments: list[str]) -> int:
    """Compute the plan, print it, write what is asked for; returns the exit code."""
    options = tyro.cli(
        PlanOptions,
        args=arguments,
        prog="gossipgrad plan",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    check_given(arguments)
    check(options)
    profile = Profile.load(options.profile)
    names = chosen(options)
    called, network = network_of(options)
    if len(profile.names) > _MANY_TENSORS:
        print(
            f"planning for {len(profile.names):,} tensors, which may take a while: time grows with "
            "the square of their number",
            file=sys.stderr,
        )
    found = compare(profile, all_methods(options, profile, network), names)
    title = (
        f"{profile.name} on {profile.device}, {options.world_size} ranks, {called}, density "
        f"{options.density:g}"
    )
    if options.out is not None:
        _write(options, found)
    if options.figure is not None:
        draw(found, title, options.figure)
    if options.json:
        print(json.dumps({"title": title, **found.to_json()}, indent=2))
        return 0
    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    say(title)
    console.print(_groups(found))
    for lane in text_lanes(found, min(100, console.width) - 12):
        say(lane)
    say(
        "backward -, selection +, a group the letter of its method; "
        f"{seconds_text(found.best.finish_seconds)} from left to right\n"
    )
    console.print(_alternatives(found))
    say(found.verdict)
    if found.advice is not None:
        say(found.advice)
    say(
        "Proved optimal under the model of time."
        if found.best.gap < 1e-9
        else f"Proved within {100 * found.best.gap:.2g} % of the optimum under the model of time."
    )
    for what, path in (("plan", options.out), ("figure", options.figure)):
        if path is not None:
            say(f"{what} {path}")
    return 0


def _write(options: PlanOptions, found: Comparison) -> None:
    assert options.out is not None
    try:
        text = json.dumps(found.best.to_json(), indent=2) + "\n"
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write --out {options.out}: {error.strerror}") from error


def _groups(found: Comparison) -> Table:
    groups = found.best.groups
    arrived = {s.group: s.end_seconds for s in found.spans if s.what == "communicate"}
    shown = Table(title=f"{len(groups)} group{'s' * (len(groups) != 1)}", title_justify="left")
    shown.add_column("tensors", justify="right", no_wrap=True)
    shown.add_column("first to last", overflow="fold")  # the one that gives way where it is narrow
    shown.add_column("elements", justify="right", no_wrap=True)
    shown.add_column("method", no_wrap=True)
    shown.add_column("arrived", justify="right", no_wrap=True)
    names = found.profile.names
    for place, group in enumerate(groups[:_GROUPS_SHOWN]):
        start, last = group.start, group.stop - 1
        shown.add_row(
            f"{start}" if start == last else f"{start}-{last}",
            # As text: names may look like markup.
            Text(names[start] if start == last else f"{names[start]} to {names[last]}"),
            f"{found.elements(start, group.stop):,}",
            group.method,
            seconds_text(arrived.get(place, found.best.finish_seconds)),
        )
    if len(groups) > _GROUPS_SHOWN:
        shown.caption = f"the first {_GROUPS_SHOWN} of {len(groups)}; --json has all"
    return shown


def _alternatives(found: Comparison) -> Table:
    shown = Table(title="and others", title_justify="left")
    shown.add_column("plan", no_wrap=True)
    shown.add_column("method")
    for name in ("groups", "step", "longer by"):
        shown.add_column(name, justify="right", no_wrap=True)
    methods = ", ".join(method.name for method in found.methods)
    step = seconds_text(found.step_seconds(found.best))
    shown.add_row("this plan", methods, f"{len(found.best.groups)}", step, "")
    shown.add_section()
    for each in found.alternatives:
        shown.add_row(
            each.name,
            each.method,
            f"{len(each.plan.groups)}",
            seconds_text(found.step_seconds(each.plan)),
            _percent(found.longer(each.plan)),
        )
    return shown


def _percent(share: float) -> str:
    """Of what is no more than rounding, none."""
    return percent_text(share) if abs(share) >= 1e-5 else "0 %"
