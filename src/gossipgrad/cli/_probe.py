"""`gossipgrad probe`: what messages cost between live workers."""

import math
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.table import Table

from gossipgrad.comm import Group, TCPTransport, check_secret
from gossipgrad.launch import Exit, Rendezvous, Worker, launch
from gossipgrad.planning import AffineCost
from gossipgrad.simulate import SIZES_BYTES, Probe, check_sizes, probe
from gossipgrad.train import (
    RunFailedError,
    World,
    find_world,
    open_store,
    slurm_rendezvous,
)

from ._output import check_writable, new_table, parse, say, show, write_json
from ._units import list_of, rate_text, seconds_text

_DEFAULT_NPROC = 4
_PAIRS_SHOWN = 16
_GRACE_SECONDS = 3.0  # for the others to end when one has failed
_CONSEQUENCE = "died or left"  # what the others say of the rank that failed first
_START_SECONDS = 120.0  # for processes to start and to find each other


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOptions:
    """Measure start-up time and time a byte of exchanges and all-reduces between live workers.

    Starts workers on this machine, or, inside torchrun or Slurm, takes part as one of them: that is
    how a cluster is measured. `gossipgrad predict --network` reads what --out writes.
    """

    nproc: int | None = None
    """Workers to start on this machine; None: 4. Under torchrun or Slurm the world is given, and
    this is left out."""
    sizes: str | None = None
    """Bytes of the messages, with commas, rising; None: 4096 to 16777216 in five."""
    seconds: float = 20.0
    """Roughly how long to measure; where it is short, large messages are left out, and it says
    so."""
    timeout: float = 30.0
    """Seconds to wait for one message before the worker is taken for late."""
    out: Path | None = None
    """Write the costs, and the figures behind them, to this JSON file."""
    host_names: bool = False
    """Write the names of the hosts, too."""


def sizes_of(options: ProbeOptions) -> tuple[int, ...]:
    """The sizes as numbers."""
    if options.sizes is None:
        return SIZES_BYTES
    try:
        return tuple(int(part) for part in list_of(options.sizes, "--sizes", "4096,1048576"))
    except ValueError as error:
        raise ValueError(
            f"--sizes {options.sizes!r}: give whole numbers of bytes with commas, as 4096,1048576"
        ) from error


def check(options: ProbeOptions) -> None:
    """Raise unless the options can work."""
    if options.nproc is not None and options.nproc < 2:
        raise ValueError(f"nproc is {options.nproc}: a link has two ends, so start 2 or more")
    for name in ("seconds", "timeout"):
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"{name} is {getattr(options, name)}: give a time above 0 that ends")
    check_writable("--out", options.out)
    check_sizes(sizes_of(options))
    check_secret()


def main(arguments: list[str]) -> int:
    """Start the workers, or be one of them; returns the exit code."""
    options = parse(ProbeOptions, arguments, "probe")
    check(options)
    world = find_world(os.environ, nproc=options.nproc)
    if world is None:
        return _start_workers(arguments, options)
    if options.nproc not in (None, world.world_size):
        raise ValueError(
            f"nproc is {options.nproc}, but {world.launcher} has started {world.world_size} "
            "processes; leave --nproc out."
        )
    return _take_part(options, world)


def _take_part(options: ProbeOptions, world: World) -> int:
    torch.set_num_threads(1)
    if world.launcher == "Slurm":
        os.environ.update(slurm_rendezvous(os.environ))
    store = open_store(world.rank, world.world_size)
    # A rank may lag behind by as long as others may measure.
    timeout_seconds = _START_SECONDS + options.seconds + options.timeout
    group = Group(
        dist.PrefixStore("gossipgrad/probe", store),
        world.rank,
        world.world_size,
        timeout_seconds=timeout_seconds,
    )
    found = probe(
        group,
        sizes_bytes=sizes_of(options),
        budget_seconds=options.seconds,
        timeout_seconds=options.timeout,
        transport=partial(
            TCPTransport,
            max_payload_bytes=max(sizes_of(options)),
        ),
    )
    hosts = group.all_gather_object(socket.gethostname()) if options.host_names else None
    if world.rank == 0:
        _tell(found, options, hosts)
    group.barrier()  # nobody leaves while others still receive
    group.close()
    return 0


def _tell(found: Probe, options: ProbeOptions, hosts: list[str] | None) -> None:
    show(table(found))
    say(*(f"{doubt[0].upper()}{doubt[1:]}." for doubt in found.doubts()))
    if options.out is not None:
        written = found.to_json() | ({} if hosts is None else {"hosts": hosts})
        write_json("--out", options.out, written)
        say(f"network {options.out}")


def table(found: Probe) -> Table:
    """Costs of the usual link, of all-reduce, and of the pairs, slowest first where many."""
    network = found.network
    p = network.world_size
    shown = new_table("", "start-up", "rate", "off by", title=f"{p} workers")
    exchanges = [(one.size_bytes, one.seconds) for one in found.measured if one.what == "exchange"]
    reduces = [(one.size_bytes, one.seconds) for one in found.measured if one.what == "all-reduce"]
    shown.add_row("exchange, usual pair", *_row(network.exchange, exchanges))
    shown.add_row(f"all-reduce of {p}", *_row(found.all_reduce, reduces))
    if network.hop is not None:
        shown.add_row("  one hop of it", *_row(network.hop, []))
    shown.add_section()
    largest = max(one.size_bytes for one in found.measured if one.what == "exchange")
    slowest = sorted(found.pairs.items(), key=lambda link: -link[1](largest))
    for (one, other), cost in sorted(slowest[:_PAIRS_SHOWN]):
        points = [(m.size_bytes, m.seconds) for m in found.measured if m.ranks == (one, other)]
        points = points if p != 2 else exchanges
        shown.add_row(f"{one} and {other}", *_row(cost, points))
    if len(slowest) > _PAIRS_SHOWN:
        shown.caption = f"the slowest {_PAIRS_SHOWN} of {len(slowest)} pairs"
    return shown


def _row(cost: AffineCost, points: list[tuple[int, float]]) -> tuple[str, str, str]:
    beta = cost.beta_seconds_per_byte
    off = [abs(cost(size) / seconds - 1) for size, seconds in points]
    return (
        seconds_text(cost.alpha_seconds),
        "-" if beta == 0 else rate_text(8 / beta),
        f"{100 * median(off):.2g} %" if off else "",
    )


def _start_workers(arguments: list[str], options: ProbeOptions) -> int:
    """Start workers, which all end when one fails."""
    limit = _START_SECONDS + 2 * options.seconds + 4 * options.timeout
    deadline = time.monotonic() + limit
    late: list[int] = []

    def supervise(workers: Sequence[Worker]) -> None:
        nonlocal deadline
        now = time.monotonic()
        if any(worker.exit is not None and worker.exit.code for worker in workers):
            deadline = min(deadline, now + _GRACE_SECONDS)
        if now > deadline:
            late.extend(worker.rank for worker in workers if worker.exit is None)
            for worker in workers:
                worker.kill()

    with Rendezvous(options.nproc or _DEFAULT_NPROC) as rendezvous:
        command = [sys.executable, "-m", "gossipgrad", "probe", *arguments]
        launched = launch(command, rendezvous, show=False, supervise=supervise)
    if launched.stopped_by is not None:
        print(f"gossipgrad: stopped by {launched.stopped_by.name}", file=sys.stderr)
        return launched.exit_code
    failures = [end for rank, end in launched.exits.items() if end.code and rank not in late]
    if failures:
        # Who was killed said nothing; what the others say then is its consequence.
        failures.sort(key=lambda end: (_CONSEQUENCE in _cause(end), end.code > 0))
        raise RunFailedError(_cause(failures[0]))
    if late:
        raise RunFailedError(
            f"rank {', '.join(map(str, late))} was not done after {limit:.0f} s; a shorter "
            "--seconds measures less"
        )
    return 0


def _cause(end: Exit) -> str:
    if end.code < 0:
        return f"rank {end.rank} {end.cause}"
    said = end.errors.strip().splitlines()
    last = said[-1].removeprefix("gossipgrad: error: ") if said else "without a word"
    return f"rank {end.rank} failed: {last}"
