"""Strategies by name, in the order that `--help` has them."""

from collections.abc import Mapping
from typing import Any

from gossipgrad.train._optimizer_options import SECTION_OF, SECTIONS
from gossipgrad.train._options import from_plain

from ._all_reduce import AllReduceStrategy
from ._gossip import GossipStrategy
from ._local import LocalStrategy
from ._sparse import SparseStrategy
from ._strategy import Strategy
from ._suda import SudaStrategy

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        GossipStrategy(),
        AllReduceStrategy(),
        SparseStrategy(),
        SudaStrategy(),
        LocalStrategy(),
    )
}


def find(name: str) -> Strategy:
    """The strategy of that name."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy is {name!r}, but must be one of {', '.join(STRATEGIES)}.")
    return STRATEGIES[name]


def options_by_section() -> dict[str, type]:
    """Return the types of options by section: those of strategies, and of the optimizers."""
    sections = {one.section: one.options_type for one in STRATEGIES.values() if one.options_type}
    return sections | SECTIONS


def sections_of(*, strategy: str, optimizer: str) -> list[str]:
    """Return the sections whose options a run uses; a strategy that is not known has none."""
    found = STRATEGIES.get(strategy)
    sections = [found.section] if found is not None and found.options_type else []
    return sections + ([SECTION_OF[optimizer]] if optimizer in SECTION_OF else [])


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of every section: those that are given, and the defaults of the others."""
    types = options_by_section()
    if unknown := options.keys() - types.keys():
        raise ValueError(
            f"options has {unknown.pop()!r}, but there is no such section; there are "
            f"{', '.join(types)}."
        )
    return {
        section: given
        if isinstance(given := options.get(section, {}), kind)
        else kind(**from_plain(kind, given, section))
        for section, kind in types.items()
    }
