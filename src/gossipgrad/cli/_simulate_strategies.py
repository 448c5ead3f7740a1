"""The strategies that `gossipgrad simulate` is asked for, each payload and wire a row."""

import re
from dataclasses import replace

from gossipgrad.simulate import (
    STRATEGIES,
    AllReduce,
    Gossip,
    Strategy,
    Suda,
    strategy_by_name,
)

from ._simulate_options import SimulateOptions
from ._units import list_of

__all__ = ["curve_of", "strategies"]

_NARROW_BYTES = 2
_WIDTHS = {"float32": 4, "bfloat16": _NARROW_BYTES}


def strategies(options: SimulateOptions) -> list[Strategy]:
    """One for each strategy, and of some for each payload and wire that fits.

    Raises:
        ValueError: There is none of such a name, payload or wire.
    """
    given = options.strategy
    names = list(STRATEGIES) if given == "all" else list_of(given, "--strategy", "gossip,allreduce")
    payloads = [
        _payload(text) for text in list_of(options.payload, "--payload", "weights,weights+state")
    ]
    widths = (
        [None]
        if options.wire is None
        else [_width(w) for w in list_of(options.wire, "--wire", "float32,bfloat16")]
    )
    found: list[Strategy] = []
    for strategy in map(strategy_by_name, dict.fromkeys(names)):
        if isinstance(strategy, Gossip):
            found += [
                replace(
                    strategy,
                    name=strategy.name + _state(rounds, copies) + _wire(width),
                    topology=_topology_of(strategy, options),
                    state_every=rounds,
                    state_copies=copies,
                    element_bytes=width,
                    seed=options.seed,
                )
                for rounds, copies in dict.fromkeys(payloads)
                for width in dict.fromkeys(widths)
            ]
        elif isinstance(strategy, Suda):
            found += [
                replace(
                    strategy,
                    name=strategy.name + _wire(width),
                    topology=options.topology,
                    element_bytes=width,
                    seed=options.seed,
                )
                for width in dict.fromkeys(widths)
            ]
        elif isinstance(strategy, AllReduce):
            found += [
                replace(strategy, name=strategy.name + _wire(width), element_bytes=width)
                for width in dict.fromkeys(widths)
            ]
        else:
            found.append(strategy)
    return found


def _topology_of(strategy: Gossip, options: SimulateOptions) -> str:
    """The one that was asked for; mode stale needs symmetric pairs, and has its own default."""
    if strategy.mode == "stale" and options.topology == "dissemination":
        return strategy.topology
    return options.topology


def curve_of(strategy: Strategy) -> str:
    """What curves call the strategy: how its accuracy differs, not its time."""
    if isinstance(strategy, Gossip) and (strategy.mode, strategy.every, strategy.density) in (
        ("overlap", 1, 1.0),
        ("sync", 1, 1.0),
    ):
        sync = ", sync" * (strategy.mode == "sync")
        topology = f", {strategy.topology}" * (strategy.topology != "dissemination")
        wire = _wire(strategy.element_bytes)
        return f"gossip{sync}{topology}{_state(strategy.state_every, strategy.state_copies)}{wire}"
    if isinstance(strategy, AllReduce):  # by layers it is the same average
        return f"allreduce{_wire(strategy.element_bytes)}"
    return strategy.name


def _state(every: int, copies: int | None) -> str:
    if every == 0:
        return ""
    if copies == 1:
        return ", momentum"
    return ", state" if every == 1 else f", state every {every}"


def _wire(width: int | None) -> str:
    return ", bf16" * (width == _NARROW_BYTES)


def _payload(text: str) -> tuple[int, int | None]:
    """Rounds between exchanges of state, 0 for none, and how many tensors of it if not all."""
    if text == "weights+momentum":
        return 1, 1
    match = re.fullmatch(r"weights(?:(\+state)(?:/([1-9]\d?))?)?", text)
    if match is None:
        raise ValueError(
            f"no payload {text!r} is modelled: choose weights, weights+momentum, "
            "weights+state or weights+state/4, "
            "which sends state in every fourth round (1 to 99)"
        )
    return (0 if match[1] is None else int(match[2] or 1)), None


def _width(text: str) -> int:
    if text not in _WIDTHS:
        raise ValueError(f"no wire {text!r}: choose {' or '.join(_WIDTHS)}")
    return _WIDTHS[text]
