"""Who is measured: rules that merge gradients, with a method and a way of selection."""

from dataclasses import dataclass

from ._selection import GAMMA, OURS, SELECTIONS, TORCH

ALONE = "no communication"
METHODS = ("sparse", "dense", "fp16")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A contestant.

    Attributes:
        rule: Of `gossipgrad.planning`: `"optimal"`, `"wfbp"`, `"mg_wfbp"`, `"omgs_greedy"` or
            `"single"`; `"ddp"` for DistributedDataParallel, None for no communication.
        methods: What the rule may use.
        selection: Whose cost is slept where something is selected.
        fixed: Whether it is one that a user may fix in place of ours, with our selection.
    """

    rule: str | None
    methods: tuple[str, ...] = ("sparse",)
    selection: str = OURS
    fixed: bool = False


OPTIMAL = "ours"
KINDS: dict[str, Kind] = {
    ALONE: Kind(rule=None, methods=()),
    "DDP fp32": Kind(rule="ddp", methods=("dense",), fixed=True),
    "DDP fp16": Kind(rule="ddp", methods=("fp16",), fixed=True),
    "wfbp": Kind(rule="wfbp", methods=("dense",), fixed=True),
    "mg-wfbp": Kind(rule="mg_wfbp", methods=("dense",), fixed=True),
    "topk": Kind(rule="single", fixed=True),
    "lags": Kind(rule="wfbp", fixed=True),
    "greedy": Kind(rule="omgs_greedy", fixed=True),
    OPTIMAL: Kind(rule="optimal", methods=METHODS),
    **{
        f"{name}, {selection}": Kind(rule=rule, methods=methods, selection=selection)
        for selection in (TORCH, GAMMA)
        for name, rule, methods in (
            ("topk", "single", ("sparse",)),
            ("greedy", "omgs_greedy", ("sparse",)),
            (OPTIMAL, "optimal", METHODS),
        )
    },
}
assert {kind.selection for kind in KINDS.values()} == set(SELECTIONS)
