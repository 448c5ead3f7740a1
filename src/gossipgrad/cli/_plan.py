"""`gossipgrad plan`: which gradients to merge, which to compress, and what that gains."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gossipgrad.compression import SparseFormat, top_k
from gossipgrad.planning import (
    Method,
    PiecewiseCost,
    Profile,
    dense_all_reduce,
    sparse_all_gather,
)
from gossipgrad.simulate import CountCost, Network, collective_cost

from ._network import network_of
from ._output import check_figure, check_folder, new_table, parse, say, show, write_json
from ._plan_figures import FORMATS, draw, text_lanes
from ._plan_report import AS_IS, METHODS, NARROW, NARROW_BYTES, Comparison, compare
from ._units import list_of, percent_text, seconds_of, seconds_text

DECODE = "5ns"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Compute which gradients to merge and which to compress, and what that gains.

    Nothing is trained and nothing sent: the plan is the one that finishes first under a model of
    time, with proof. A session of sparse gradients measures costs alike on its own ranks.
    """

    profile: str = "resnet50"
    """What a step computes: a profile of the library (resnet50, googlenet, vgg16, lstm, gpt2), or
    a file that `gossipgrad profile` wrote."""
    world_size: Annotated[int, tyro.conf.arg(aliases=["--workers"])] = 16
    """The number of ranks, 2 or more."""
    bandwidth: Annotated[str | None, tyro.conf.arg(aliases=["--rate"])] = None
    """Rate of each host's link, each way; None: 1Gbit."""
    latency: str | None = None
    """What an empty hop of a ring takes; None: 50us."""
    network: Path | None = None
    """A file that `gossipgrad probe` wrote, in place of --bandwidth and --latency."""
    density: float = 0.001
    """The share of a group that is sent where it is compressed."""
    methods: str = "sparse,dense"
    """What the plan may choose among, with commas: sparse (the largest elements, gathered), dense
    (all-reduce), fp16 and bf16 (all-reduce of rounded gradients)."""
    values: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """What the values of sparse messages travel as; None: float32, float64 for such gradients."""
    select: str = "100us,2ns"
    """What selection takes, of a group and of each of its elements; `here`: measured on one thread
    of this machine, and --decode, too."""
    decode: str | None = None
    """What adding up takes, for each pair of value and index that comes in; None: 5ns, or as
    --select here measures it."""
    cast: str = "0.5ns"
    """What rounding an element for fp16 and bf16 takes; widening it again takes as long."""
    out: Path | None = None
    """Write the plan, with the names of the profile's tensors, to this JSON file, for
    gossipgrad.planning.Plan.from_json."""
    figure: Path | None = None
    """Draw the timeline into this file (svg, png, pdf or html)."""
    json: bool = False
    """Print JSON instead of tables."""


def check(options: PlanOptions) -> None:
    """Raise unless the options fit each other and what is to be written can be.

    Raises:
        ValueError: They do not.
    """
    if options.world_size < 2:
        raise ValueError(
            f"world size {options.world_size}: a plan is for 2 ranks or more, one alone sends "
            "nothing"
        )
    if not 0 < options.density <= 1:
        raise ValueError(
            f"density is {options.density}: it is a share, above 0 and at most 1 (0.001 sends one "
            "element in a thousand)"
        )
    if options.select == "here" and options.decode is not None:
        raise ValueError(
            f"--select here measures what adding up takes: leave out --decode {options.decode}, or "
            "give --select times, as 100us,2ns"
        )
    check_folder("--out", options.out)
    check_figure("--figure", options.figure, FORMATS)


Cost = Callable[[Any], Any]


_TYPICAL_ELEMENTS = 10_000_000  # for the bytes of a pair, which hardly depend on it
_MEASURED_ELEMENTS = (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)
_REPEATS = 5


def chosen(options: PlanOptions) -> list[str]:
    """The methods that the plan may choose among.

    Raises:
        ValueError: One is unknown, or named twice.
    """
    names = list_of(options.methods, "--methods", "sparse,dense")
    for name in names:
        if name not in METHODS:
            raise ValueError(f"no method {name!r}: choose among {', '.join(METHODS)}")
        if names.count(name) > 1:
            raise ValueError(f"--methods {options.methods!r} names {name} twice: name each once")
    return names


def all_methods(options: PlanOptions, profile: Profile, network: Network) -> dict[str, Method]:
    """Every method by its name, also those that the plan may not choose.

    Their bytes are those of a session, which adds gradients up in float32 at least. Where gradients
    are narrower there is `AS_IS`, too.

    Raises:
        ValueError: A time is none.
    """
    p, sums = options.world_size, _sums_of(profile)
    select, decode = _select_and_decode(options, sums)
    cast = CountCost(0.0, seconds_of(options.cast))
    largest = sum(profile.elements) * sums.itemsize
    all_reduce = collective_cost(
        partial(network.all_reduce_seconds, world_size=p), largest, network
    )
    all_gather = collective_cost(
        partial(network.all_gather_seconds, world_size=p), largest, network
    )
    sparse = sparse_all_gather(
        all_gather,
        density=options.density,
        world_size=p,
        select=select,
        pair_bytes=_pair_bytes(options, sums),
        scatter=decode,
    )
    widths = {"dense": sums.itemsize}
    if profile.element_bytes < sums.itemsize:
        widths[AS_IS] = profile.element_bytes
    whole = [
        dense_all_reduce(all_reduce, name=name, element_bytes=width)
        for name, width in widths.items()
    ]
    narrow = [
        dense_all_reduce(all_reduce, name=name, element_bytes=NARROW_BYTES, cast=cast)
        for name in NARROW
    ]
    return {method.name: method for method in (sparse, *whole, *narrow)}


def _sums_of(profile: Profile) -> torch.dtype:
    """The type in which a session adds these gradients up, and keeps what it has not sent."""
    return torch.float64 if profile.element_bytes > torch.float32.itemsize else torch.float32


def _values_of(options: PlanOptions, sums: torch.dtype) -> torch.dtype:
    """What values of sparse messages travel as."""
    return sums if options.values is None else getattr(torch, options.values)


def _pair_bytes(options: PlanOptions, sums: torch.dtype) -> float:
    count = max(1, int(options.density * _TYPICAL_ELEMENTS))
    form = SparseFormat(_TYPICAL_ELEMENTS, count, _values_of(options, sums))
    return form.size_bytes / count


def _select_and_decode(options: PlanOptions, sums: torch.dtype) -> tuple[Cost, Cost]:
    if options.select == "here":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _measured(options, sums)
        finally:
            torch.set_num_threads(threads)
    parts = list_of(options.select, "--select", "100us,2ns")
    if len(parts) != 2:
        raise ValueError(
            f"--select {options.select!r} is neither `here` nor a time for a group and one for an "
            "element, as 100us,2ns"
        )
    start_up, each = map(seconds_of, parts)
    return CountCost(start_up, each), CountCost(0.0, seconds_of(options.decode or DECODE))


def _measured(options: PlanOptions, sums: torch.dtype) -> tuple[Cost, Cost]:
    """Residual, selection and packing by elements; adding up by pairs: on this machine."""
    generator = torch.Generator().manual_seed(0)
    selects, decodes, pairs = [], [], []
    for place, elements in enumerate(_MEASURED_ELEMENTS):
        # However small the density, counts differ: start-up and time a pair follow from them.
        count = max(4**place, int(options.density * elements))
        form = SparseFormat(elements, count, _values_of(options, sums))
        gradient = torch.randn(elements, generator=generator, dtype=sums)
        residual, total = torch.zeros_like(gradient), torch.zeros_like(gradient)
        message = torch.empty(form.size_bytes, dtype=torch.uint8)
        times = []
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            places = top_k(residual.add_(gradient), count)
            form.pack(places, residual[places], message)
            residual[places] = 0.0
            packed = time.perf_counter()
            form.add_to(message, total)
            times.append((packed - begun, time.perf_counter() - packed))
        select, decode = (statistics.median(column) for column in zip(*times, strict=True))
        selects.append(select)
        decodes.append(decode)
        pairs.append(count)
    return PiecewiseCost.fit(_MEASURED_ELEMENTS, selects), PiecewiseCost.fit(pairs, decodes)


_GROUPS_SHOWN = 24
_MANY_TENSORS = 1000  # that are planned for within some seconds


def main(arguments: list[str]) -> int:
    """Compute the plan, print it, write what is asked for; returns the exit code."""
    options = parse(PlanOptions, arguments, "plan")
    check(options)
    profile = Profile.load(options.profile)
    names = chosen(options)
    called, network = network_of(
        options.bandwidth, options.latency, options.network, options.world_size, what="the plan"
    )
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
        write_json("--out", options.out, found.best.to_json())
    if options.figure is not None:
        draw(found, title, options.figure)
    if options.json:
        print(json.dumps({"title": title, **found.to_json()}, indent=2))
        return 0
    say(title)
    show(_groups(found))
    say(
        *text_lanes(found, min(100, Console().width) - 12),
        "backward -, selection +, a group the letter of its method; "
        f"{seconds_text(found.best.finish_seconds)} from left to right\n",
    )
    show(_alternatives(found))
    say(
        found.verdict,
        "Proved optimal under the model of time."
        if found.best.gap < 1e-9
        else f"Proved within {100 * found.best.gap:.2g} % of the optimum under the model of time.",
    )
    for what, path in (("plan", options.out), ("figure", options.figure)):
        if path is not None:
            say(f"{what} {path}")
    return 0


def _groups(found: Comparison) -> Table:
    groups = found.best.groups
    arrived = {s.group: s.end_seconds for s in found.spans if s.what == "communicate"}
    title = f"{len(groups)} group{'s' * (len(groups) != 1)}"
    shown = new_table("tensors", "first to last", "elements", "method", "arrived", title=title)
    # The names give way where it is narrow.
    shown.columns[1].justify, shown.columns[1].overflow = "left", "fold"
    shown.columns[0].no_wrap, shown.columns[1].no_wrap = True, False
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
    shown = new_table("plan", "method", "groups", "step", "longer by", title="and others")
    shown.columns[1].justify = "left"
    shown.columns[0].no_wrap, shown.columns[1].no_wrap = True, False
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
