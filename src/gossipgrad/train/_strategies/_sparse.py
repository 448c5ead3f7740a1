"""Merged gradient sparsification, as strategies of the loop."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.sparsification import Warmup, deal_states
from gossipgrad.train._evaluate import Evaluation, TestPart
from gossipgrad.train._spans import StepSpans
from gossipgrad.train._strategy_config import SparseConfig

from ._lockstep import Lockstep
from ._strategy import Traffic

# Of each: the plan, and what it chooses among.
_PLANS: dict[str, tuple[str, tuple[str, ...]]] = {
    "omgs": ("optimal", ("sparse", "dense")),
    "wfbp": ("wfbp", ("dense",)),
    "mg-wfbp": ("mg-wfbp", ("dense",)),
    "topk": ("single", ("sparse",)),
    "lags": ("layerwise", ("sparse",)),
}
_STAGES = len(Warmup(steps=1).densities)


def warmup_steps(options: SparseConfig, *, epochs: int, total_steps: int) -> int:
    """Of each stage of the density's warm-up.

    Example:
        >>> warmup_steps(SparseConfig(), epochs=3, total_steps=300)
        25
        >>> warmup_steps(SparseConfig(), epochs=1, total_steps=100)
        12
    """
    if options.density_warmup_steps is not None:
        return options.density_warmup_steps
    return total_steps // (_STAGES * max(epochs, 2))


class Sparse(Lockstep):
    """A session of `gg.sparsify`: OMGS-SGD, and what it is compared with.

    `omgs` has the plan that is optimal by what the run measures in its first steps; `wfbp` and
    `mg-wfbp` send dense gradients, each tensor alone or merged by the published rule; `topk` sends
    one sparse message of all gradients and `lags` one for each tensor.

    Exposed time is that of the waits at the end of backward. Bytes are those of rings: computed.
    A checkpoint holds what each rank carries over; another number of ranks shares it out.

    Args:
        name: Of the strategy.
        model: The replica.
        optimizers: Train it.
        options: What is sent.
        momentum: Of the optimizers, if they are SGD; else 0.
        epochs: Of the run.
        total_steps: Of the run.
        stop: Set when the run is told to stop.
        spans: Gets spans "select" and "exchange" a group, and "wait".
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: SparseConfig,
        *,
        momentum: float,
        epochs: int,
        total_steps: int,
        stop: threading.Event,
        spans: StepSpans,
    ) -> None:
        super().__init__(model, stop)
        plan, methods = _PLANS[name]
        if "sparse" in methods:
            self.against_divergence = "lower --lr, or give more --density-warmup-steps"
        density = options.density
        self._warmup: Warmup | None = None
        if stage_steps := warmup_steps(options, epochs=epochs, total_steps=total_steps):
            density = self._warmup = Warmup(steps=stage_steps, then=options.density)
        dtype = options.value_dtype
        correction = None
        if options.momentum_correction and momentum and "sparse" in methods:
            # One rank corrects none, and its optimizer may come from ranks whose had none.
            correction = momentum if dist.get_world_size() > 1 else None
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["momentum"] = momentum if correction is None else 0.0
        assert dist.group.WORLD is not None
        self._session = gg.sparsify(
            model,
            optimizers,
            density=density,
            plan=plan,
            select=options.select,
            methods=methods,
            replan=options.replan_every or None,
            value_dtype=None if dtype is None else getattr(torch, dtype),
            momentum_correction=correction,
            process_group=gg.Group.from_process_group(dist.group.WORLD),
            recorder=spans,
        )

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass and with it the exchange; see `Strategy.backward`."""
        try:
            loss.backward()
        except RuntimeError as error:
            raise self.explained(error, "an exchange of gradients") from error

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate as all in lockstep do; at the end, also say what was planned and starved."""
        if final:
            self.notes += self._told()
        return super().evaluate(test, final=final)

    def traffic(self) -> Traffic:
        """Exposed time measured, bytes computed."""
        stats = self._session.stats()
        return Traffic(
            bytes_sent=stats.bytes_sent,
            exposed_seconds=stats.exposed_seconds,
            mixing_seconds=stats.select_seconds,
            extra_memory_bytes=stats.extra_memory_bytes,
        )

    def place(self) -> dict[str, Any]:
        """What the session carries over, and has counted."""
        return {"session": self._session.own_state()}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Take up what `place` gave."""
        self._session.load_own_state(place["session"])

    def start_at(self, steps: int, former: Sequence[Mapping[str, Any]]) -> None:
        """Share out what the ranks of before carried over, and count their rounds on.

        A warm-up goes by rounds that were made, and not by `steps`, which are those of this start.
        """
        here = self._session
        dealt = deal_states([{"session": place["session"]} for place in former], here.world_size)
        here.load_own_state(dealt[here.rank]["session"])

    def close(self) -> None:
        """Take the hooks off, and leave the private group."""
        self._session.close()

    def _part(self) -> None:
        self._session.group.close()
        super()._part()

    def _told(self) -> list[str]:
        stats = self._session.stats()
        if not stats.groups:
            return []
        sparse = sum(group.method == "sparse" for group in stats.groups)
        told = [f"gradients travelled in {len(stats.groups)} groups, {sparse} of them sparse"]
        warmup = self._warmup
        if sparse and warmup is not None and warmup(0) > warmup.then:
            steps, last = _STAGES * warmup.steps, warmup(stats.rounds - 1)
            if stats.rounds > steps:
                told.append(f"the density fell to {last:g} over the first {steps:,} steps")
            else:
                told.append(f"the density was {last:g} at the end, in a warm-up of {steps:,} steps")
        if stats.predicted_seconds is not None and stats.measured_seconds is not None:
            told.append(
                f"from the first gradient to the last message: {1e3 * stats.measured_seconds:.3g} "
                f"ms, predicted were {1e3 * stats.predicted_seconds:.3g}"
            )
        if stats.contest_seconds:
            took = (f"{kind} {1e3 * s:.3g} ms" for kind, s in stats.contest_seconds.items())
            told.append(f"a step took, when plans competed: {', '.join(took)}")
        if stats.refused is not None:
            told.append(stats.refused)
        if stats.replans:
            told.append(
                f"the plan was changed {stats.replans} times, as costs or the density had changed"
            )
        if stats.starved_tensors:
            told.append(
                f"tensors of which nothing was sent for {stats.starved_after} steps: "
                f"{stats.starved_tensors}, {stats.starved_share:.1%} of all elements"
            )
        return told
