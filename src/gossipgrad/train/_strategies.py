"""The three ways to keep replicas together, behind one small interface for the loop."""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.errors import GossipError

from ._config import GossipConfig, TrainConfig
from ._evaluate import Evaluation, TestPart, copy_of
from ._result import PeerLostError, RunStopped
from ._ring_clock import RingClock
from ._spans import StepSpans

# The word to stop and the loss of a peer that heard it first arrive by different ways.
_STOP_GRACE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What communication has cost so far on this rank."""

    bytes_sent: int = 0
    exposed_seconds: float = 0.0
    mixing_seconds: float | None = None
    extra_memory_bytes: int | None = None
    consensus_distance_estimate: float | None = None
    outcomes: dict[str, int] = field(default_factory=dict)


class Strategy(ABC):
    """Keeps the replicas of one model together while the loop trains it.

    Attributes:
        model: What the loop calls in the forward pass.
        notes: What the user should know, in words.
    """

    model: nn.Module

    def __init__(self) -> None:
        self.notes: list[str] = []

    @abstractmethod
    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate the model that stands for all ranks; a collective but for `local`."""

    @abstractmethod
    def traffic(self) -> Traffic:
        """What communication has cost so far; local."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the model; local."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a step.

        Raises:
            RunStopped: A peer has left because the run was told to stop, and so was this rank.
        """
        loss.backward()


def _alone(model: nn.Module, test: TestPart, *, final: bool, is_consensus: bool) -> Evaluation:
    return Evaluation(
        accuracy=test.accuracy(model),
        is_consensus=is_consensus,
        consensus_distance=None,
        final=final,
        weights=copy_of(model) if final else {},
    )


class Local(Strategy):
    """Every rank trains on its own: the lower bound of cost and of what sharing gains."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate this rank's replica on the whole test part."""
        return _alone(self.model, test, final=final, is_consensus=False)

    def traffic(self) -> Traffic:
        """Nothing was sent."""
        return Traffic()

    def close(self) -> None:
        """Nothing to let go of."""


class AllReduce(Strategy):
    """DistributedDataParallel: gradients averaged over all ranks in every step.

    When a peer dies, the step it is missed in raises, and so the run ends. When the run is
    stopped, a rank caught inside an all-reduce finds its peer gone: for it, too, that is the stop.
    No rank can be a step ahead of another, so then the replicas are equal and nothing needs to be
    agreed on.

    Exposed time runs from the moment that the last gradients of a step were handed over to the
    return of the backward pass; the wait for slower ranks is in it. Bytes are those of a ring
    all-reduce, computed and not counted.
    """

    def __init__(self, model: nn.Module, stop: threading.Event) -> None:
        super().__init__()
        self._replica = model
        self._stop = stop
        self._world_size = dist.get_world_size()
        self._clock = RingClock(self._world_size)
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        parallel.register_comm_hook(self._clock, RingClock.hook)
        self.model = parallel

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate the replica, shared out over the ranks; alone after a stop."""
        if not self._stop.is_set():
            try:
                correct = test.count_share(self._replica)
                dist.all_reduce(correct)
                return Evaluation(
                    accuracy=int(correct) / test.num_labels,
                    is_consensus=True,
                    consensus_distance=self._consensus_distance(),
                    final=final,
                    weights=copy_of(self._replica) if final else {},
                )
            except RuntimeError as error:
                explained = self._explained(error)
                if not isinstance(explained, RunStopped):
                    raise explained from error
        return _alone(self._replica, test, final=True, is_consensus=True)

    def traffic(self) -> Traffic:
        """Exposed time measured, bytes computed."""
        return Traffic(
            bytes_sent=self._clock.bytes_sent, exposed_seconds=self._clock.exposed_seconds
        )

    def close(self) -> None:
        """Nothing to let go of: the process group is not this object's."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass and with it the all-reduce; see `Strategy.backward`."""
        try:
            loss.backward()
        except RuntimeError as error:
            raise self._explained(error) from error
        self._clock.backward_returned()

    def _explained(self, error: RuntimeError) -> RuntimeError:
        """A failed all-reduce is the stop if this rank, too, was told to stop."""
        if not _is_lost_peer(error):
            return error
        if self._stop.wait(_STOP_GRACE_SECONDS):
            return RunStopped("the run was told to stop")
        first_line = str(error).split("\n", 1)[0]
        return PeerLostError(f"an all-reduce failed because a rank is gone ({first_line})")

    def _consensus_distance(self) -> float:
        # Sums of equal float32 are exact in float64: equal replicas give 0, whatever their number.
        mine = nn.utils.parameters_to_vector(self._replica.parameters()).detach().double()
        mean = mine.clone()
        dist.all_reduce(mean)
        square = (mine - mean / self._world_size).square().sum()
        dist.all_reduce(square)
        return float(square / self._world_size) ** 0.5


class Gossip(Strategy):
    """A gossip session: one partner a step, in the background.

    When a rank dies the others train on. The consensus needs all ranks, so from then on each
    evaluates and exports its own replica.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        options: GossipConfig,
        *,
        seed: int,
        spans: StepSpans,
    ) -> None:
        super().__init__()
        self.model = model
        self._all_here = True
        self._session = gg.gossip(
            model,
            optimizer,
            topology=options.topology,
            mode=options.mode,
            payload=options.payload,
            every=options.every,
            average_every=options.average_every,
            wire_dtype=None if options.wire_dtype is None else getattr(torch, options.wire_dtype),
            seed=seed,
            recorder=spans,
        )

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate the consensus, shared out over the ranks; the own replica once one is gone.

        Ranks may come here after unequal steps, some for the last time and some not: all then take
        it for the last.
        """
        if self._all_here and self._session.stats().outcomes.get("dead_peer"):
            # Not even tried: partners would settle for it, and mix no more until it came about.
            self._all_here = False
            self.notes.append("no consensus: a partner has died, and the average needs all ranks")
        if self._all_here:
            try:
                with self._session.consensus():
                    group = self._session.group
                    final = any(group.all_gather_object(final))
                    correct = group.all_reduce_(test.count_share(self.model))
                    return Evaluation(
                        accuracy=int(correct) / test.num_labels,
                        is_consensus=True,
                        consensus_distance=self._session.stats().consensus_distance,
                        final=final,
                        weights=copy_of(self.model) if final else {},
                    )
            except GossipError as error:
                self._all_here = False
                self.notes.append(f"no consensus: {error}")
        return _alone(self.model, test, final=final, is_consensus=False)

    def traffic(self) -> Traffic:
        """What the session counted."""
        stats = self._session.stats()
        return Traffic(
            bytes_sent=stats.bytes_sent,
            exposed_seconds=stats.exposed_seconds,
            mixing_seconds=stats.mixing_seconds,
            extra_memory_bytes=stats.extra_memory_bytes,
            consensus_distance_estimate=stats.consensus_distance_estimate,
            outcomes=dict(stats.outcomes),
        )

    def close(self) -> None:
        """Leave the session; partners skip this rank from now on."""
        self._session.close()


def make_strategy(
    config: TrainConfig,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    stop: threading.Event,
    spans: StepSpans,
) -> Strategy:
    """The strategy that `config` names; a collective but for `local`."""
    if config.strategy == "local":
        return Local(model)
    if config.strategy == "allreduce":
        return AllReduce(model, stop)
    return Gossip(model, optimizer, config.gossip, seed=config.seed, spans=spans)


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether Gloo raised this: its errors are plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "Connection" in text
