"""The options of optimizers, by section."""

from dataclasses import dataclass

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

    refresh_every: int = 10
    """Steps from one root of a block to the next."""
    refresh_delay: int = 0
    """Steps from the copy of a factor to the use of its root; 0: the step computes it, else a
    thread, or the device beside training."""
    max_dim: int = 512
    """Rows and columns of a block, at most."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 1, "refresh_every", "max_dim")
        check_at_least(self, 0, "refresh_delay")
        check_rule(
            self,
            "at most refresh_every",
            lambda value: value <= self.refresh_every,
            "refresh_delay",
        )


SECTIONS: dict[str, type] = {"sgd": SGDConfig, "second_order": SecondOrderConfig}
SECTION_OF = {"sgd": "sgd", **dict.fromkeys(SECOND_ORDER, "second_order")}
