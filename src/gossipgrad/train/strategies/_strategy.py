"""What a strategy says of itself before a run, and what keeps replicas together in one."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import Faults, Group, Heartbeats
from gossipgrad.engine import Session
from gossipgrad.train._evaluate import Evaluation, TestPart
from gossipgrad.train._spans import StepSpans

# The private group of the ranks of a strategy that continues without lost ones.
GROUP = "strategy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What communication has cost so far on this rank."""

    bytes_sent: int = 0
    exposed_seconds: float = 0.0
    mixing_seconds: float | None = None
    extra_memory_bytes: int | None = None
    consensus_distance_estimate: float | None = None
    outcomes: dict[str, int] = field(default_factory=dict)
    late_rounds: int = 0
    void_rounds: int = 0


@runtime_checkable
class Joiner(Protocol):
    """A rank that joined the run, and may leave it before the others stop."""

    @property
    def leaves(self) -> bool:
        """Whether it does."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the run was put together already, without this rank."""
        ...

    def flush(self) -> None:
        """Report which samples were used, before it leaves."""

    def is_behind(self) -> bool:
        """Whether the others train on while this rank waits for them; asked again and again."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The ranks and the run that a strategy serves; most of it are options of `TrainConfig`."""

    world_size: int  # replicas at the start
    island: int  # ranks of each
    total_steps: int  # of each rank
    epochs: int
    optimizer: str
    momentum: float
    seed: int
    checkpoint_every: int | None
    shuffle: str
    lost_after_seconds: float

    @property
    def heartbeats(self) -> Heartbeats:
        """How ranks watch over each other, so that one is given up after `lost_after_seconds`."""
        silent_seconds, usual = self.lost_after_seconds, Heartbeats()
        return Heartbeats(
            silent_seconds=silent_seconds,
            lease_seconds=min(usual.lease_seconds, silent_seconds),
            interval_seconds=min(usual.interval_seconds, silent_seconds / 4),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """What one rank trains, and what it trains with."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    stop: threading.Event
    spans: StepSpans
    groups: Callable[[str], Group] | None = None
    """Makes private groups of the ranks by name, where there is no process group of all; `GROUP` of
    those that exchange, which have the same number in their islands."""
    island: int = 1
    """Ranks that share the replica; if there are several, the process group is these."""
    session: Session | None = None
    """That of a rank that joined the run: it has one already."""
    joiner: Joiner | None = None


class Strategy(ABC):
    """What the command knows of a way to keep replicas together; listed in `_registry.py`."""

    name: str
    help: str  # what it does, in a sentence without its end
    bytes_are: str  # how the bytes were found that a rank has sent; "computed: ..." if not counted
    section = ""  # where its options stand in `config.json` and on the command line
    options_type: type | None = None  # a frozen dataclass whose fields all have defaults
    may_change_on_resume: frozenset[str] = frozenset()  # options that decide no figure
    communicates = True  # if not, each rank has a model of its own
    needs_every_rank = True  # whether the run is over when a rank dies
    has_islands = False  # whether several ranks may share a replica
    can_grow = False  # whether ranks can join a run; its `RunningStrategy` then has a session

    def check(self, options: Any, setting: Setting) -> None:  # noqa: B027  (most need no check)
        """Raise `ValueError` for options that do not fit each other, or the run."""

    def unused(self, options: Any, setting: Setting) -> dict[str, str]:
        """Options that others leave without use, each with the reason; for runs of any length."""
        return {}

    def describe(self, options: Any) -> dict[str, str]:
        """What the report shows of the options; a "topology" is drawn beside who met whom."""
        return {}

    def session_settings(self, options: Any, setting: Setting) -> dict[str, Any]:
        """What a rank that joins gives to `gg.join`; asked where the run can grow."""
        return {}

    @abstractmethod
    def build(self, replica: Replica, setting: Setting, options: Any) -> "RunningStrategy":
        """Begin to keep `replica` together with the others; a collective, but for a joiner."""


class RunningStrategy(ABC):
    """Keeps the replicas of one model together while the loop trains it."""

    model: nn.Module  # what the loop calls in the forward pass
    replicas_differ = False  # whether a replica is another model than the one that stands for all
    meets = True  # whether ranks ever come together
    against_divergence = "lower --lr"  # what to do where the loss is no number any more
    session: Session | None = None  # that keeps the replicas together, if one does
    is_stale = False  # whether ranks take steps of their own, and nobody waits
    has_left = False  # whether this rank had joined the run, and left it before the others stopped

    def __init__(self) -> None:
        self.notes: list[str] = []  # what the user should know, in words

    @property
    def living(self) -> tuple[int, ...] | None:
        """The ranks that take part, None for all."""
        return None

    def shrinking(self) -> dict[str, Any]:
        """What `gg.shrink` has to be given for the replicas to shrink together."""
        return {"session": self.session}

    def agree(self, value: Any) -> list[Any]:
        """What every rank that lives has, values of JSON; a collective, but for `local`."""
        return [value]

    def checkpoint_label(self, steps: int) -> int:
        """What a checkpoint after this rank's `steps` is called, the same on all ranks."""
        return steps

    def checkpoint_due(self, steps: int, every: int) -> bool:
        """Whether one is due that has a new label."""
        return self.checkpoint_label(steps) % every == 0

    def state_dict(self) -> dict[str, Any]:
        """What this object needs to continue, beside the replica and the session."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Load what `state_dict` gave; a collective, before the state of replica and session is."""

    def skip_steps(self, steps: int) -> None:  # noqa: B027  (most do not ask how far they are)
        """Continue after so many steps, of a run that had other ranks; a collective."""

    def lost_ranks(self) -> dict[str, dict[str, Any]]:
        """Ranks that are taken for dead, and when and why, where others can continue; local."""
        return {}

    def joined_ranks(self) -> dict[str, dict[str, Any]]:
        """Ranks that joined the run under way, from whom and when; local."""
        return {}

    def membership_changes(self) -> list[str]:
        """Changes of the membership since the last call, in words; local."""
        return []

    @abstractmethod
    def evaluate(self, test: TestPart, *, epoch: float, final: bool) -> Evaluation | None:
        """Evaluate the model that stands for all ranks, after `epoch` epochs; mostly a collective.

        None on a rank that joined the others as they were at it already: it has no part in it.
        """

    @abstractmethod
    def traffic(self) -> Traffic:
        """What communication has cost so far; local."""

    @abstractmethod
    def close(self) -> None:
        """Release the model; local."""

    # A peer that one of the following needs, and that is gone, raises PeerLostError.

    def should_stop(self, step: int, *, is_asked: bool) -> bool:
        """Whether this rank stops before `step`, counted from 1; asked before each by all ranks."""
        return is_asked

    def position(self, steps: int) -> int:
        """Where the run is, in steps, for a rank that has made `steps`: beyond if it is slow."""
        return steps

    def no_sync(self) -> AbstractContextManager[None]:
        """Passes inside are not the last of their step, and exchange nothing."""
        return nullcontext()

    def forward(self, x: Any) -> Any:
        """Run the forward pass of a step."""
        return self.model(x)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a step, and what has to come between it and the update."""
        loss.backward()


def all_ranks() -> Group:
    """The ranks of the process group, in a group that becomes the caller's; a collective."""
    assert dist.group.WORLD is not None
    return Group.from_process_group(dist.group.WORLD)


def alone(model: nn.Module, test: TestPart, *, final: bool, is_consensus: bool) -> Evaluation:
    """Evaluate this rank's replica on the whole test part; local."""
    accuracy = test.accuracy(model)
    return Evaluation(
        accuracy=accuracy,
        is_consensus=is_consensus,
        consensus_distance=None,
        final=final,
        weights=test.weights(model, accuracy, final=final),
    )


def check_ranks(faults: str | None, world_size: int) -> None:
    """Refuse a script that names ranks beyond the run's."""
    named = max(Faults.parse(faults or "").ranks, default=0)
    if named >= world_size:
        raise ValueError(
            f"faults name rank {named}, but there are ranks 0 to {world_size - 1} alone; name one "
            "of these, or start more processes."
        )


def ring_bytes(size_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of `size_bytes`."""
    return 2 * (world_size - 1) * size_bytes // world_size
