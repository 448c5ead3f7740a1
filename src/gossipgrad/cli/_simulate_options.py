"""The options of `gossipgrad simulate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["SimulateOptions", "check"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """Predict step time and efficiency by strategy, number of ranks and bandwidth.

    Nothing is trained and nothing sent: all ranks are stepped through their schedule of computing,
    sending and waiting.
    """

    profile: str = "resnet50"
    """What a step computes: a profile that comes along (resnet50, googlenet, vgg16, lstm, gpt2), or
    a file that `gossipgrad profile` wrote."""
    world_size: str = "8,64,1024"
    """Numbers of ranks, with commas."""
    strategy: str = "all"
    """Names with commas, or all: gossip, gossip-sync, gossip-stale, gossip-mask (a tenth of the
    weights a round), local-steps (a round in 32 steps), allreduce, agd, every-log-p,
    post-local-sgd, local, suda, and, at density 0.01, omgs, topk, lags, wfbp, mg-wfbp."""
    bandwidth: str | None = None
    """Rates of each host's link, each way, with commas; None: 100Mbit,1Gbit,10Gbit."""
    latency: str | None = None
    """What an empty message takes; None: 50us."""
    hop_latency: str | None = None
    """What an empty hop of a ring all-reduce takes, which wakes more threads; None: as
    --latency."""
    network: Path | None = None
    """A file that `gossipgrad probe` wrote, in place of --bandwidth and the latencies."""
    collective: Literal["ring", "halving"] | None = None
    """How all-reduce goes: ring as Gloo does it, halving (recursive halving and doubling) as good
    MPI libraries do it for many ranks; None: as --network says, else ring."""
    rack_size: int | None = None
    """Ranks behind one uplink; None: no links are shared."""
    uplink: str | None = None
    """Rate of an uplink, each way."""
    topology: Literal["dissemination", "hypercube", "matching", "ring", "complete"] = (
        "dissemination"
    )
    """Who meets whom in gossip and suda."""
    payload: str = "weights"
    """What gossip sends, with commas: weights, weights+state, or weights+state/4 for state in every
    fourth round (1 to 99)."""
    wire: str | None = None
    """Number types on the wire of gossip, suda, allreduce and agd, with commas: float32, bfloat16;
    None: that of the parameters."""
    jitter: float = 0.1
    """Spread of a step's compute from step to step, relative to itself."""
    straggler: float = 1.0
    """How many times longer the stragglers compute."""
    stragglers: int | None = None
    """How many there are; None: 1 if --straggler is given."""
    stall_probability: float = 0.0
    """Of a rank to stall in a step."""
    stall: str | None = None
    """How long a stall is, for example 1s."""
    seed: int = 0
    """Of jitter, stragglers, stalls and partners."""
    steps: int | None = None
    """Steps to go through; None: as many as take a second or so."""
    curves: Path | None = None
    """Accuracy by epoch of virtual ranks (the JSON of `python -m benchmarks.virtual_ranks`): gives
    the time to accuracy, in steps of as many samples a rank as the curves were made with."""
    curves_model: str | None = None
    """Which model's curves; needed where there are several."""
    accuracy: float | None = None
    """The accuracy to reach, from 0 to 1; None: half a point below what allreduce ends with at as
    many ranks."""
    out: Path | None = None
    """Write the figures to this JSON file."""
    figure: Path | None = None
    """Draw efficiency over the number of ranks into this file (png, svg or pdf)."""


def check(options: SimulateOptions) -> None:
    """Raise unless the options fit each other and what is to be written can be.

    Raises:
        ValueError: They do not.
    """
    links = (options.bandwidth, options.latency, options.hop_latency)
    if options.network is not None and links != (None, None, None):
        raise ValueError(
            "--network says what links cost: leave out --bandwidth, --latency and --hop-latency, "
            "or --network"
        )
    if (options.rack_size is None) != (options.uplink is None):
        raise ValueError("racks need both --rack-size and --uplink")
    if options.stragglers is not None and options.straggler == 1.0:
        raise ValueError(
            "--stragglers says how many, --straggler how much slower: give --straggler 2 for "
            "twice the time"
        )
    if (options.stall is None) != (options.stall_probability == 0.0):
        raise ValueError("stalls need both --stall and --stall-probability")
    if options.curves is None and (options.curves_model, options.accuracy) != (None, None):
        raise ValueError("--accuracy and --curves-model need --curves")
    if options.accuracy is not None and not 0 < options.accuracy <= 1:
        raise ValueError(
            f"accuracy is {options.accuracy}: it is a share, above 0 and at most 1 (0.87 is 87 %)"
        )
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}")
    if options.figure is not None:
        from ._simulate_figure import check as check_figure

        check_figure(options.figure)
