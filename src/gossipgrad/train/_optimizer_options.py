"""The options of optimizers, by section."""

from dataclasses import dataclass
from typing import Literal

from ._options import check_at_least, check_fields, check_rule, make_plain

SECOND_ORDER = ("soap", "kl-shampoo", "shampoo")


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDConfig:
    """What optimizer sgd alone has."""

    momentum: float = 0.9
    """Momentum of sgd; others have their own, muon 0.95."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_rule(self, "at least 0 and below 1", lambda value: 0 <= value < 1, "momentum")


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondOrderConfig:
    """The roots of optimizer soap, kl-shampoo and shampoo."""

    refresh: Literal["synchronous", "staggered", "background"] = "staggered"
    """When roots are computed: all in one step, a share in each step, or in a thread during
    training."""
    refresh_every: int = 10
    """Steps from one root of a block to the next."""
    max_staleness: int = 5
    """Steps that a root may take to compute with refresh background."""
    max_dim: int = 512
    """Rows and columns of a block, at most."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 1, "refresh_every", "max_dim")
        check_at_least(self, 0, "max_staleness")

    def unused(self) -> dict[str, str]:
        """Options without effect, and why."""
        why = f"refresh is {self.refresh}"
        return {} if self.refresh == "background" else {"max_staleness": why}


SECTIONS: dict[str, type] = {"sgd": SGDConfig, "second_order": SecondOrderConfig}
SECTION_OF = {"sgd": "sgd", **dict.fromkeys(SECOND_ORDER, "second_order")}
