"""Merged gradient sparsification, as a strategy of the loop."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.compression import check_density
from gossipgrad.sparsification import Warmup
from gossipgrad.train._evaluate import Evaluation, TestPart
from gossipgrad.train._options import check_at_least, check_fields, make_plain

from ._lockstep import Lockstep, share_muon
from ._strategy import Replica, Setting, Strategy, Traffic, all_ranks

_STAGES = Warmup(steps=1).densities
# What each group of a plan may be sent as.
_METHODS = {
    **dict.fromkeys(("optimal", "greedy"), ("sparse", "dense")),
    **dict.fromkeys(("single", "layerwise"), ("sparse",)),
    **dict.fromkeys(("wfbp", "mg-wfbp"), ("dense",)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseConfig:
    """How gradients are merged and what is sent of them; used by `strategy` sparse alone."""

    plan: Literal["optimal", "greedy", "mg-wfbp", "wfbp", "single", "layerwise"] = "optimal"
    """How gradients are merged into messages. optimal: by what the run measures, sparse or dense
    each; greedy: by the published rule, sparse or dense each. Sparse: layerwise (each tensor
    alone), single (all in one). Dense: wfbp (each tensor alone), mg-wfbp (by the published
    rule)."""
    density: float = 0.01
    """Share of the coordinates of a gradient that is sent; the rest is added to the next."""
    density_warmup_steps: int | None = None
    """Steps of each of four stages at the start in which 0.25, 0.0625, 0.015625 and 0.004 are sent,
    if that is more than density. None: a quarter of an epoch each, of a run of one epoch an eighth;
    0: no stages."""
    momentum_correction: bool = False
    """Apply the momentum of sgd before selection, as Deep Gradient Compression does, not after."""
    value_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number type of sparse values on the wire; None: float32."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        check_at_least(self, 0, "density_warmup_steps")
        check_density(self.density)


class Sparse(Lockstep):
    """A session of `gg.sparsify`."""

    def __init__(self, replica: Replica, setting: Setting, options: SparseConfig) -> None:
        super().__init__(replica.model, replica.stop)
        methods = _METHODS[options.plan]
        if "sparse" in methods:
            self.against_divergence = "lower --lr, or give more --density-warmup-steps"
        density: float | Warmup = options.density
        stage_steps = options.density_warmup_steps
        if stage_steps is None:
            stage_steps = setting.total_steps // (len(_STAGES) * max(setting.epochs, 2))
        if stage_steps:
            density = Warmup(steps=stage_steps, then=options.density)
        dtype = options.value_dtype
        correction = None
        momentum = setting.momentum if setting.optimizer == "sgd" else 0.0
        if options.momentum_correction and momentum and "sparse" in methods:
            # One rank corrects none, and its optimizer may come from ranks whose had none.
            correction = momentum if dist.get_world_size() > 1 else None
            for group in (
                group for optimizer in replica.optimizers for group in optimizer.param_groups
            ):
                group["momentum"] = momentum if correction is None else 0.0
        self._session = gg.sparsify(
            replica.model,
            replica.optimizers,
            density=density,
            plan=options.plan,
            methods=methods,
            value_dtype=None if dtype is None else getattr(torch, dtype),
            momentum_correction=correction,
            process_group=all_ranks(),
            recorder=replica.spans,
        )

    def shrinking(self) -> dict[str, Any]:
        return {"session": self._session}

    def evaluate(self, test: TestPart, *, epoch: float, final: bool) -> Evaluation:
        """Evaluate as all in lockstep do; at the end, also note what was planned."""
        if final:
            self.notes += self._plan_notes()
        return super().evaluate(test, epoch=epoch, final=final)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._session.no_sync()

    def traffic(self) -> Traffic:
        stats = self._session.stats()
        return Traffic(
            bytes_sent=stats.bytes_sent,
            exposed_seconds=stats.exposed_seconds,
            mixing_seconds=stats.select_seconds,
            extra_memory_bytes=stats.extra_memory_bytes,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"session": self._session.own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._session.load_own_state(state["session"])

    def close(self) -> None:
        self._session.close()

    def _plan_notes(self) -> list[str]:
        stats = self._session.stats()
        if not stats.groups:
            return []
        sparse = sum(group.method == "sparse" for group in stats.groups)
        notes = [f"gradients travelled in {len(stats.groups)} groups, {sparse} of them sparse"]
        if len(stats.compared_seconds) > 1:
            took = (f"{name} {1e3 * s:.3g} ms" for name, s in stats.compared_seconds.items())
            notes.append(f"a step took, when compared: {', '.join(took)}")
        if stats.refused is not None:
            notes.append(stats.refused)
        return notes


class SparseStrategy(Strategy):
    """Gradients merged by a plan, and sent sparse or dense."""

    name = "sparse"
    help = (
        "sparse gradients, merged by the plan that is optimal by what the run measures (OMGS-SGD)"
    )
    bytes_are = "computed: of sparse messages, and of ring all-reduces of dense groups"
    section = "sparse"
    options_type = SparseConfig

    def unused(self, options: SparseConfig, setting: Setting) -> dict[str, str]:
        """What only momentum needs, and what dense messages have no use for."""
        found = {}
        if setting.optimizer != "sgd" or not setting.momentum:
            found["momentum_correction"] = (
                f"optimizer is {setting.optimizer}, and momentum is {setting.momentum}"
            )
        if "sparse" not in _METHODS[options.plan]:
            names = ("density", "density_warmup_steps", "momentum_correction")
            found |= dict.fromkeys((*names, "value_dtype"), f"plan {options.plan} sends dense")
        return found

    def build(self, replica: Replica, setting: Setting, options: SparseConfig) -> Sparse:
        share_muon(replica.optimizers)
        return Sparse(replica, setting, options)
