"""What the methods of `gossipgrad plan` cost: selection, the network, and what is done after."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gossipgrad.compression import SparseFormat, top_k
from gossipgrad.planning import (
    AffineCost,
    Method,
    PiecewiseCost,
    Profile,
    dense_all_reduce,
    sparse_all_gather,
)
from gossipgrad.simulate import CountCost, Network, collective_cost

from ._network_file import for_ranks
from ._plan_methods import AS_IS, METHODS, NARROW, NARROW_BYTES
from ._plan_options import DECODE, PlanOptions
from ._units import list_of, rate_of, rate_text, seconds_of

__all__ = ["all_methods", "chosen", "network_of"]

Cost = Callable[[Any], Any]

_TYPICAL_ELEMENTS = 10_000_000  # for the bytes of a pair, which hardly depend on it
_MEASURED_ELEMENTS = (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)
_REPEATS = 5


def network_of(options: PlanOptions) -> tuple[str, Network]:
    """The network that the options name, and what to call it.

    Raises:
        ValueError: It is none.
    """
    if options.network is not None:
        network = Network.load(options.network)
        p = options.world_size
        network = for_ranks(network, options.network, [p], what="the plan")[p]
        network.check(p)
        return str(options.network), network
    rate = rate_of(options.bandwidth or "1Gbit")
    latency = options.latency or "50us"
    hop = AffineCost.from_rate(rate_bits_per_second=rate, latency_seconds=seconds_of(latency))
    return f"{rate_text(rate)}, {latency}", Network(exchange=hop)


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
        # However small the density, counts differ: start-up and time a pair are told apart by them.
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
