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

# The private group in which the ranks of a strategy meet that goes on without lost ones.
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
    """The ranks and the run that a strategy serves; most of it are options of `TrainConfig`.

    Attributes:
        world_size: Number of ranks at the start.
        total_steps: Steps of the run on each rank.
    """

    world_size: int
    total_steps: int
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
    """What one rank trains, and what it trains with.

    Attributes:
        model: The replica.
        optimizers: Train it.
        stop: Set when the run is to stop.
        spans: Records times.
        groups: Makes private groups of the ranks by name, where there is no process group.
        session: That of a rank that joined the run: it has one already.
        joiner: Such a rank, which may leave before the others stop.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    stop: threading.Event
    spans: StepSpans
    groups: Callable[[str], Group] | None = None
    session: Session | None = None
    joiner: Joiner | None = None


class Strategy(ABC):
    """A way to keep replicas together: what the command has to know of it.

    A subclass and a line in `_registry.py` are all that a new one takes. What it builds may hold
    that of another strategy, which it finds there by name.

    Attributes:
        name: For `--strategy`.
        help: What it does, in a sentence without its end.
        bytes_are: How the bytes were found that a rank has sent; "computed: ..." if not counted.
        section: Where its options stand in `config.json` and on the command line; strategies that
            share an `options_type` share it.
        options_type: A frozen dataclass whose fields all have defaults; it checks what needs no
            other option. None: it has no options.
        may_change_on_resume: Options that a run may be resumed with another value of, since they
            decide no figure.
        communicates: Whether ranks ever come together. If not, each has a model of its own.
        needs_every_rank: Whether the run is over when a rank dies.
        can_grow: Whether ranks can join a run. Its `RunningStrategy` then has a session.
        can_shrink: Whether the replicas of its `RunningStrategy` can shrink together.
    """

    name: str
    help: str
    bytes_are: str
    section = ""
    options_type: type | None = None
    may_change_on_resume: frozenset[str] = frozenset()
    communicates = True
    needs_every_rank = True
    can_grow = False
    can_shrink = True

    def check(self, options: Any, setting: Setting) -> None:  # noqa: B027  (most need no check)
        """Refuse options that do not fit each other, or the run.

        Raises:
            ValueError: One does not; the message names the way out.
        """

    def unused(self, options: Any, setting: Setting) -> dict[str, str]:
        """Options that others leave without use, each with the reason; for runs of any length."""
        return {}

    def describe(self, options: Any) -> dict[str, str]:
        """What the report shows of the options; a "topology" is drawn beside who met whom."""
        return {}

    def make_optimizers(
        self, model: nn.Module, options: Any, *, lr: float, weight_decay: float
    ) -> list[Optimizer] | None:
        """The optimizers, of a strategy that has its own; None: those that `--optimizer` names."""
        return None

    def session_settings(self, options: Any, setting: Setting) -> dict[str, Any]:
        """What a rank that joins gives to `gg.join`; asked where the run can grow."""
        return {}

    @abstractmethod
    def build(self, replica: Replica, setting: Setting, options: Any) -> "RunningStrategy":
        """Begin to keep `replica` together with the others; a collective where they communicate.

        A rank that joins has its session already, and meets nobody here.
        """


class RunningStrategy(ABC):
    """Keeps the replicas of one model together while the loop trains it.

    Attributes:
        model: What the loop calls in the forward pass.
        notes: What the user should know, in words.
        replicas_differ: Whether a replica is another model than the one that stands for all.
        meets: Whether ranks ever come together.
        against_divergence: What to do where the loss is no number any more.
    """

    model: nn.Module
    replicas_differ = False
    meets = True
    against_divergence = "lower --lr"

    def __init__(self) -> None:
        self.notes: list[str] = []

    @property
    def session(self) -> Session | None:
        """The session that keeps the replicas together, if one does."""
        return None

    @property
    def is_stale(self) -> bool:
        """Whether ranks take steps of their own, and nobody waits."""
        return False

    @property
    def has_left(self) -> bool:
        """Whether this rank, which had joined the run, has left it before the others stopped."""
        return False

    @property
    def living(self) -> tuple[int, ...] | None:
        """The ranks that take part, None for all."""
        return None

    def shrinking(self) -> dict[str, Any]:
        """What `gg.shrink` has to be given for the replicas to shrink together."""
        return {"session": self.session}

    def agree(self, value: Any) -> list[Any]:
        """What every rank that lives has, values of JSON; a collective, but for `local`.

        Raises:
            GossipError: The ranks did not come together.
        """
        return [value]

    def checkpoint_label(self, steps: int) -> int:
        """What a checkpoint after this rank's `steps` is called.

        The same on all ranks for states that belong together: the steps, if all make as many.
        """
        return steps

    def checkpoint_due(self, steps: int, every: int) -> bool:
        """Whether one is due that has a new label."""
        return self.checkpoint_label(steps) % every == 0

    def state_dict(self) -> dict[str, Any]:
        """What this object needs to go on, beside the replica and the session."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (most have nothing to take up)
        """Load what `state_dict` gave; a collective, before the state of replica and session is."""

    def skip_steps(self, steps: int) -> None:  # noqa: B027  (most do not ask how far they are)
        """Go on behind so many steps, of a run that had other ranks; a collective."""

    def lost_ranks(self) -> dict[str, dict[str, Any]]:
        """Ranks that are taken for dead, and when and why, where others can go on; local."""
        return {}

    def joined_ranks(self) -> dict[str, dict[str, Any]]:
        """Ranks that joined the run under way, from whom and when; local."""
        return {}

    def membership_changes(self) -> list[str]:
        """Changes of the membership since the last call, in words; local."""
        return []

    @abstractmethod
    def evaluate(self, test: TestPart, *, epoch: float, final: bool) -> Evaluation | None:
        """Evaluate the model that stands for all ranks; a collective but for `local`.

        None on a rank that joined the others as they were at it already: it has no part in it.

        Args:
            test: What to evaluate on.
            epoch: Epochs that are over then; of a run that stops, the whole of the one it is in.
            final: Whether this rank evaluates for the last time.
        """

    @abstractmethod
    def traffic(self) -> Traffic:
        """What communication has cost so far; local."""

    @abstractmethod
    def close(self) -> None:
        """Release the model; local."""

    def begin_step(self) -> None:  # noqa: B027  (most have nothing to get ready)
        """Get ready for a step; called before its forward pass.

        Raises:
            PeerLostError: A peer that this strategy needs is gone.
        """

    def should_stop(self, step: int, *, is_asked: bool) -> bool:
        """Whether this rank stops before `step`; asked before each, a collective where all stop.

        Args:
            step: The step, counted from 1.
            is_asked: Whether this rank has the signal to stop.

        Raises:
            PeerLostError: A peer that this strategy needs is gone.
        """
        return is_asked

    def position(self, steps: int) -> int:
        """Where the run is, in steps, for a rank that has made `steps`: beyond them if it is slow.

        The length of the run, its epochs and its learning rate go by it.
        """
        return steps

    def no_sync(self) -> AbstractContextManager[None]:
        """Passes inside are not the last of their step, and exchange nothing."""
        return nullcontext()

    def forward(self, x: Any) -> Any:
        """Run the forward pass of a step: what the model returns for the inputs of a batch.

        Raises:
            PeerLostError: A peer that this strategy needs is gone.
        """
        return self.model(x)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a step, and what has to come between it and the update.

        Raises:
            PeerLostError: A peer that this strategy needs is gone.
        """
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
    """Refuse a script that names ranks beyond the run's.

    Raises:
        ValueError: It does.
    """
    named = max(Faults.parse(faults or "").ranks, default=0)
    if named >= world_size:
        raise ValueError(
            f"faults name rank {named}, but there are ranks 0 to {world_size - 1} alone; name one "
            "of these, or start more processes."
        )


def ring_bytes(size_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of `size_bytes`.

    Example:
        >>> ring_bytes(1000, 4)
        1500
    """
    return 2 * (world_size - 1) * size_bytes // world_size
