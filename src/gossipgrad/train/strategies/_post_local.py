"""Post-local SGD: all-reduce first, local steps with averages later."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

import gossipgrad as gg
from gossipgrad.engine import Session
from gossipgrad.train._evaluate import Evaluation, TestPart
from gossipgrad.train._options import check_at_least, check_fields, check_rule, make_plain

from ._all_reduce import ALL_REDUCED, AllReduce
from ._averaged import AVERAGED, Averaged
from ._stopping import explain
from ._strategy import Replica, RunningStrategy, Setting, Strategy, Traffic, all_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class PostLocalConfig:
    """When and how often replicas are averaged; used by `strategy` post-local-sgd alone."""

    post_local_after: float = 0.5
    """Share of the run, from 0 to 1, in which gradients are all-reduced before local steps."""
    local_steps: int = 16
    """Local steps between two averages."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 1, "local_steps")
        share = "post_local_after"
        check_rule(self, "a share of the run, from 0 to 1", lambda value: 0 <= value <= 1, share)


class PostLocal(RunningStrategy):
    """All-reduce of gradients for the first part of the run, then weights averaged every H steps.

    Early steps are large and replicas would part; later local steps explore around one solution and
    save communication. Momentum stays each rank's own in the second part, and the statistics of
    BatchNorm in both.

    A peer that dies or stops means what it means to `AllReduce` in the first part, and to
    `Averaged` in the second.

    Args:
        replica: What this rank trains.
        after_steps: All-reduced steps before the first local one.
        every: Local steps between two averages, H.
        group: The ranks, in a group that becomes this object's. Made before training, so that the
            change to the second part waits for nobody who has stopped just before it.

    References:
        Lin et al., Don't use large mini-batches, use local SGD, arXiv:1808.07217. Deviation: (1)
        the second part begins at a step of the user's choice, not at the first drop of the rate.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        after_steps: int,
        every: int,
        group: gg.Group,
    ) -> None:
        super().__init__()
        self._replica = replica
        self._steps_left = after_steps
        self._every = every
        self._group = group
        self._first = AllReduce(replica.model, replica.stop)
        self._first.notes = self.notes
        self._part: RunningStrategy = self._first
        self._before = Traffic()
        self.model = self._part.model

    @property
    def session(self) -> Session | None:
        """That of the second part."""
        return self._part.session

    def agree(self, value: Any) -> list[Any]:
        """What every rank has; see `RunningStrategy.agree`."""
        return self._part.agree(value)

    def state_dict(self) -> dict[str, Any]:
        """Which part this is, and what was counted."""
        return {
            "steps_left": self._steps_left,
            "first": self._first.state_dict(),
            "before": asdict(self._before),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave; a collective where it is in the second part."""
        self._steps_left = state["steps_left"]
        self._first.load_state_dict(state["first"])
        if self._steps_left < 0:
            self._begin_local_steps()
            self._before = Traffic(**state["before"])

    def skip_steps(self, steps: int) -> None:
        """Count the steps that were made before, and go over to local steps if it is past time."""
        self._steps_left -= steps
        if self._steps_left < 0:
            self._begin_local_steps()

    def begin_step(self) -> None:
        """Go over to local steps when it is time; see `RunningStrategy.begin_step`."""
        if self._steps_left == 0:
            self._begin_local_steps()
        self._steps_left -= 1
        self._part.begin_step()

    def should_stop(self, step: int, *, is_asked: bool) -> bool:
        """As the part that made the last step decides; see `RunningStrategy.should_stop`."""
        return self._part.should_stop(step, is_asked=is_asked)

    def forward(self, x: Any) -> Any:
        """Run the forward pass; see `RunningStrategy.forward`."""
        return self._part.forward(x)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; see `RunningStrategy.backward`."""
        self._part.backward(loss)

    def evaluate(self, test: TestPart, *, epoch: int, final: bool) -> Evaluation | None:
        """Evaluate as the part under way does."""
        return self._part.evaluate(test, epoch=epoch, final=final)

    def traffic(self) -> Traffic:
        """What both parts have cost."""
        now = self._part.traffic()
        return replace(
            now,
            bytes_sent=now.bytes_sent + self._before.bytes_sent,
            exposed_seconds=now.exposed_seconds + self._before.exposed_seconds,
        )

    def close(self) -> None:
        """Release the model and the group."""
        self._part.close()
        self._group.close()

    def _begin_local_steps(self) -> None:
        own = [buffer.clone() for buffer in self._replica.model.buffers()]
        # DistributedDataParallel averages gradients as long as it lives.
        self._first.model = self.model = self._replica.model
        try:
            local = Averaged(
                self._replica,
                every=self._every,
                payload="weights",
                group=self._group,
            )
        except RuntimeError as error:
            raise explain(error, "the start of local steps") from error
        finally:
            # A session starts with rank 0's replica: weights were equal, but statistics were not.
            for buffer, value in zip(self._replica.model.buffers(), own, strict=True):
                buffer.copy_(value)
        self._before = self._part.traffic()
        self._part.close()
        self._part = local
        self.replicas_differ = True
        local.notes = self.notes


class PostLocalStrategy(Strategy):
    """Post-local SGD."""

    name = "post-local-sgd"
    help = "all-reduce first, then local steps with averages"
    bytes_are = f"{ALL_REDUCED}, then {AVERAGED}"
    section = "post_local"
    options_type = PostLocalConfig
    can_shrink = False  # the session that shrinks the first part would have no place in the second

    def build(self, replica: Replica, setting: Setting, options: PostLocalConfig) -> PostLocal:
        """Begin with all-reduced steps."""
        return PostLocal(
            replica,
            after_steps=round(options.post_local_after * setting.total_steps),
            every=options.local_steps,
            group=all_ranks(),
        )
