"""The options of `gossipgrad plan`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ._plan_figure import check as check_figure

__all__ = ["DECODE", "PlanOptions", "check", "check_given"]

DECODE = "5ns"
_SAME = (("--bandwidth", "--rate"), ("--world-size", "--workers"))
"""What each of these options is called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Compute which gradients to merge and which to compress, and what that gains.

    Nothing is trained and nothing sent: the plan is the one that finishes first under a model of
    time, with proof. A session of sparse gradients measures costs alike on its own ranks.
    """

    profile: str = "resnet50"
    """What a step computes: a profile that comes along (resnet50, googlenet, vgg16, lstm, gpt2), or
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
    if options.network is not None and (options.bandwidth, options.latency) != (None, None):
        raise ValueError(
            "--network says what links cost: leave out --bandwidth and --latency, or --network"
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
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}")
    if options.figure is not None:
        check_figure(options.figure)


def check_given(arguments: Sequence[str]) -> None:
    """Raise if an option is given by both its names, and with two values.

    Raises:
        ValueError: It is: the last would hold, and the other be ignored.
    """
    for names in _SAME:
        given = {}
        for place, argument in enumerate(arguments):
            word, equals, value = argument.partition("=")
            if (name := word.replace("_", "-")) in names:
                given[name] = value if equals else arguments[place + 1]
        if len(set(given.values())) > 1:
            told = " and ".join(f"{name} {value}" for name, value in given.items())
            raise ValueError(f"{told} are two values of one option: leave out one")
