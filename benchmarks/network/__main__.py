"""Ways to keep replicas together, on shaped links, with a GPU's compute replayed.

One worker a host, kept alive from cell to cell; contestants take turns; bytes are those that the
switch has counted. Needs Linux and root. What is there is not measured again, unless it failed or
other programs disturbed it.

    python -m benchmarks.network                     # the quick grid, some 20 minutes
    python -m benchmarks.network --minutes 20        # begin nothing after so long
    python -m benchmarks.network --grid full         # hours; continues where it was stopped
    python -m benchmarks.network --grid sync         # gossip beside its mode sync
    python -m benchmarks.network --grid wire         # exchanges that are longer than the compute
    python -m benchmarks.network --grid sparse       # published merge rules and `gg.sparsify`
    python -m benchmarks.network --grid try          # two hosts, a minute
"""

import argparse
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path

from benchmarks._common import RESULTS, ends_as_ctrl_c, machine_name, once
from gossipgrad.planning import Profile

from ._contestants import ALONE, EXCHANGE, KINDS, REDUCE, SPARSE, Curve, measure_selection
from ._laboratory import Laboratory, WorkerError
from ._links import MOST_BITS_PER_SECOND, PAYLOAD_SHARE
from ._measure import Cells, Grid, Setting, measure_grid
from ._namespaces import NetworkError
from ._network import Network

_MOMENTUM = tuple(name for name in KINDS if "sync with momentum" in name)
ALL = tuple(name for name in KINDS if name not in {*SPARSE, *_MOMENTUM})
_SYNC = (EXCHANGE, REDUCE, ALONE, "gossip", "gossip, sync", *_MOMENTUM, "ddp")
_DENSE = ("ddp", "ddp, fp16 hook", "ddp, PowerSGD")
_WIRE = tuple(name for name in ALL if name not in ("agd", "local SGD, period 8"))
# A worker holds under 8 MB, so that 16 on 2 cores have the processors for it, and steps take 0.9 s,
# of which the replay's own cost is 1 %. Bare exchanges then take from a thirtieth of the compute to
# one and a half of it. Times are stretched by 100 and 200 times what sizes are.
_RESNET50, _GPT2 = ("resnet50", 3.0, 0.03), ("gpt2", 3.0, 0.015)
_OTHERS = (("resnet50", 3.0, 0.15), ("googlenet", 6.0, 0.15), ("vgg16", 2.0, 0.02))
_WIRE_BYTES, _WIRE_RATE, _WIRE_SHARE = 4e6, 1e8, 0.45


def _settings(
    budget: tuple[str, float, float],
    world_sizes: tuple[int, ...],
    rates: tuple[float, ...],
    names: tuple[str, ...] = ALL,
) -> tuple[Setting, ...]:
    return tuple(
        Setting(*budget, world_size, rate, names)
        for world_size, rate in product(world_sizes, rates)
        if world_size * rate <= MOST_BITS_PER_SECOND
    )


def _wire_budget(name: str) -> tuple[str, float, float]:
    """Sizes of 4 MB, and times so that the compute is 0.45 of what the link takes for them."""
    profile = Profile.load(name)
    wire_seconds = 8 * _WIRE_BYTES / (_WIRE_RATE * PAYLOAD_SHARE)
    time_factor = _WIRE_SHARE * wire_seconds / profile.compute_seconds
    return name, round(time_factor, 4), round(_WIRE_BYTES / profile.size_bytes, 5)


# Slow enough that what the workers do on two processors is little beside what they wait for.
_SPARSE_BUDGETS = (
    *(("resnet50", 8.0, 0.06), ("vgg16", 4.0, 0.012)),
    *(("gpt2", 8.0, 0.012), ("lstm", 8.0, 0.025)),
)
GRIDS = {
    "quick": Grid(
        (
            *_settings(_RESNET50, (4, 8, 16), (1e8, 1e9)),
            *_settings(_GPT2, (8,), (1e8,)),
        ),
        blocks=5,
        block_seconds=0.6,
    ),
    "full": Grid(
        tuple(
            setting
            for budget in (_RESNET50, _GPT2, *_OTHERS, ("gpt2", 8.0, 0.03))
            for setting in _settings(budget, (4, 8, 16), (1e8, 3e8, 1e9, 4e9))
        ),
        blocks=9,
        block_seconds=4.0,
    ),
    # What mode sync exposes: exchanges from a thirtieth of the compute to as long as the compute.
    "sync": Grid(
        _settings(_RESNET50, (4, 8), (3e7, 1e8, 3e8, 1e9), _SYNC), 5, 0.6, out="network_sync"
    ),
    "wire": Grid(
        tuple(
            setting
            for name in ("resnet50", "gpt2")
            for setting in _settings(_wire_budget(name), (4, 8), (_WIRE_RATE,), _WIRE)
        ),
        *(5, 6.0),
        out="network_wire",
    ),
    "sparse": Grid(
        tuple(  # the proportions of full size at 1 Gbit/s
            Setting(*b, 16, 1e9 * b[2] / b[1], (ALONE, *_DENSE, *SPARSE), 0.001)
            for b in _SPARSE_BUDGETS
        ),
        *(3, 0.5),
        out="sparse_network",
    ),
    "try": Grid(
        (
            Setting(
                "resnet50",
                0.05,
                0.0005,
                2,
                1e8,
                (EXCHANGE, REDUCE, ALONE, "gossip", "gossip, sync", "ddp", "agd"),
            ),
            Setting("resnet50", 0.05, 0.0005, 2, 1e8, (ALONE, "topk", "greedy"), 0.01),
        ),
        *(2, 0.1),
        out="raw/network_try",
    ),
}


@cache
def selection(density: float) -> Curve:
    """What selecting costs on this machine; measured once."""
    path = RESULTS / "raw" / f"selection_{density:g}.json"
    return once(path, {"machine": machine_name()}, lambda: measure_selection(density=density))


def main() -> int:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--grid", choices=sorted(GRIDS), default="quick")
    parser.add_argument("--again", action="store_true", help="measure once more what is there")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    grid = GRIDS[options.grid]
    out = options.out or RESULTS / f"{grid.out}.json"
    start = time.monotonic()
    try:
        cells = Cells(out, again=options.again)
        hosts = max(setting.world_size for setting in grid.settings)
        with (
            ends_as_ctrl_c(),
            Network(hosts=hosts, rate_bits_per_second=1e8) as network,
            Laboratory(network) as laboratory,
        ):
            measure_grid(
                laboratory,
                grid,
                cells,
                curve_of=selection,
                is_late=lambda: time.monotonic() - start > 60 * options.minutes,
            )
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", file=sys.stderr)
        return 130
    except (NetworkError, WorkerError, ValueError) as error:
        print(f"the laboratory cannot continue: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
