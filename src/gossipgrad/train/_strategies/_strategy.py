"""What keeps replicas together, as the loop sees it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from gossipgrad.decentralized import GossipSession
from gossipgrad.models import training_loss
from gossipgrad.train._evaluate import Evaluation, TestPart, copy_of


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
class Leaver(Protocol):
    """A rank that came later than the others, and may leave before them."""

    @property
    def leaves(self) -> bool:
        """Whether it does."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the run was put together already, without this rank."""
        ...

    def let_go(self) -> None:
        """Gives up what others could use, before it leaves."""

    def is_behind(self) -> bool:
        """Whether the others train on while this rank waits for them; asked again and again."""
        ...


class Strategy(ABC):
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
    def session(self) -> GossipSession | None:
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

    def agree(self, value: Any) -> list[Any]:
        """What every rank has, values of JSON; a collective, but for those who never meet."""
        return [value]

    def agree_at_end(self, value: Any) -> list[Any]:
        """What every rank that lives has, as `agree`; where one may be lost, the living try again.

        Raises:
            GossipError: The ranks did not come together.
        """
        return self.agree(value)

    def checkpoint_label(self, steps: int) -> int:
        """What a checkpoint after this rank's `steps` is called.

        The same on all ranks for states that belong together: the steps, if all make as many.
        """
        return steps

    def checkpoint_due(self, steps: int, every: int) -> bool:
        """Whether one is due that has a new label."""
        return self.checkpoint_label(steps) % every == 0

    def place(self) -> dict[str, Any]:
        """What this object needs to go on, beside the replica and the session."""
        return {}

    def go_to(self, place: Mapping[str, Any]) -> None:  # noqa: B027  (most have nothing to take up)
        """Take up what `place` gave; a collective, before the state of replica and session is."""

    def start_at(  # noqa: B027  (most do not ask how far they are)
        self, steps: int, former: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on behind so many steps of a run that had other ranks; a collective.

        Args:
            steps: In steps of this start.
            former: What `place` gave on each of those ranks, in their order.
        """

    def lost_ranks(self) -> dict[str, dict[str, Any]]:
        """Ranks that are taken for dead, and when and why, where others can go on; local."""
        return {}

    def joined_ranks(self) -> dict[str, dict[str, Any]]:
        """Ranks that joined the run under way, from whom and when; local."""
        return {}

    def news(self) -> list[str]:
        """What became of the members since this was last asked, for whoever watches; local."""
        return []

    @abstractmethod
    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation | None:
        """Evaluate the model that stands for all ranks; a collective but for `local`.

        None on a rank that joined the others as they were at it already: it has no part in it.
        """

    @abstractmethod
    def traffic(self) -> Traffic:
        """What communication has cost so far; local."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the model; local."""

    def begin_step(self) -> None:  # noqa: B027  (most have nothing to get ready)
        """Get ready for a step; called before its forward pass.

        Raises:
            RunStopped: A peer has left because the run was told to stop, and so was this rank.
            PeerLostError: A peer that this strategy needs is gone.
        """

    def stops_before(self, step: int) -> bool:
        """Whether a rank that has been told to stop does so before `step`; asked before each."""
        return True

    def position(self, steps: int) -> int:
        """Where the run is, in steps, for a rank that has made `steps`: beyond them if it is slow.

        The length of the run, its epochs and its learning rate go by it.
        """
        return steps

    def loss(
        self, x: Shaped[Tensor, "batch ..."], y: Int[Tensor, "batch ..."]
    ) -> Float[Tensor, ""]:
        """Run the forward pass of a step.

        Raises:
            RunStopped: A peer has left because the run was told to stop, and so was this rank.
            PeerLostError: A peer that this strategy needs is gone.
        """
        return training_loss(self.model, x, y)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a step, and what has to come between it and the update.

        Raises:
            RunStopped: A peer has left because the run was told to stop, and so was this rank.
            PeerLostError: A peer that this strategy needs is gone.
        """
        loss.backward()


def alone(model: nn.Module, test: TestPart, *, final: bool, is_consensus: bool) -> Evaluation:
    """Evaluate this rank's replica on the whole test part; local."""
    return Evaluation(
        accuracy=test.accuracy(model),
        is_consensus=is_consensus,
        consensus_distance=None,
        final=final,
        weights=copy_of(model) if final else {},
    )
