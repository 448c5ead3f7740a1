"""The settings of `sparsify`, resolved and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad.comm import Recorder, is_sharded
from gossipgrad.compression import VALUE_DTYPES, check_density
from gossipgrad.engine import Mode, RoundSettings, Sync
from gossipgrad.planning import Plan
from gossipgrad.sparsification._density import Density, Warmup
from gossipgrad.sparsification._merged import DENSE_DTYPES

__all__ = [
    "MEASURED_RULES",
    "Settings",
    "check_listeners",
    "check_momentum",
    "check_parameters",
    "check_plan_fits",
    "in_order_of",
]

METHODS = ("sparse", *DENSE_DTYPES)
MEASURED_RULES = ("optimal", "greedy", "mg-wfbp")
RULES = (*MEASURED_RULES, "layerwise", "wfbp", "single")


@dataclass(frozen=True, kw_only=True)
class Settings(RoundSettings):
    """The settings of `sparsify()`, with density resolved."""

    mode: Mode = field(default=Sync(), init=False)
    every: int = field(default=1, init=False)
    average_every: int | None = field(default=None, init=False)
    wire_dtype: torch.dtype | None = field(default=None, init=False)
    bucket_bytes: int = field(default=1, init=False)
    density: Density
    plan: str | int | Plan
    methods: Sequence[str]
    value_dtype: torch.dtype | None
    momentum_correction: float | int | None
    clip_norm: float | int | None

    def __post_init__(self) -> None:
        plan, methods, momentum = self.plan, self.methods, self.momentum_correction
        if isinstance(plan, bool) or not isinstance(plan, str | int | Plan):
            raise ValueError(f"plan must be {_plans()}, got {plan!r}")
        if isinstance(plan, str) and plan not in RULES:
            raise ValueError(f"there is no plan {plan!r}: it is {_plans()}")
        if isinstance(plan, int) and plan < 1:
            raise ValueError(f"plan={plan} is a threshold in bytes, which is at least 1")
        if not isinstance(self.density, Warmup):
            check_density(self.density)
            object.__setattr__(self, "density", float(self.density))
        if self.value_dtype is not None and self.value_dtype not in VALUE_DTYPES:
            raise ValueError(
                f"value_dtype must be one of {', '.join(map(str, VALUE_DTYPES))}, or None for that "
                f"of the residuals, got {self.value_dtype!r}"
            )
        if (
            isinstance(methods, str)
            or not isinstance(methods, Sequence)
            or not methods
            or any(method not in METHODS for method in methods)
            or len(set(methods)) < len(methods)
        ):
            raise ValueError(
                f"methods must be some of {_named(METHODS)}, each once, such as "
                f"methods=('sparse', 'dense'), got {methods!r}"
            )
        if momentum is not None and not (_is_real(momentum) and 0 <= momentum < 1):
            raise ValueError(
                f"momentum_correction is {momentum!r}: it is the momentum itself, from 0 to below "
                "1, such as 0.9, or None for none"
            )
        if self.clip_norm is not None and not (_is_real(self.clip_norm) and self.clip_norm > 0):
            raise ValueError(
                f"clip_norm is {self.clip_norm!r}: it is a norm above 0, or None for no clipping"
            )
        object.__setattr__(self, "methods", tuple(methods))
        if momentum is not None:
            object.__setattr__(self, "momentum_correction", float(momentum))

    @property
    def measures(self) -> bool:
        """Whether the plan needs measurements of the first steps."""
        return isinstance(self.plan, str) and self.plan in MEASURED_RULES


def check_listeners(scaler: object, recorder: object) -> None:
    """Raise `ValueError` unless these are a scaler and a recorder, or None."""
    if not isinstance(scaler, torch.amp.GradScaler | None):
        raise ValueError(
            f"scaler must be the torch.amp.GradScaler that scales the loss, or None, got {scaler!r}"
        )
    if not isinstance(recorder, Recorder | None):
        raise ValueError(
            "recorder must have a method span(name, start_seconds, end_seconds, **attributes), as "
            f"gossipgrad.report.Trace has, or be None, got {recorder!r}"
        )


def check_momentum(optimizers: Sequence[Optimizer], momentum_correction: float | None) -> None:
    """Raise `ValueError` if momentum would be applied twice."""
    if momentum_correction is None:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("momentum") or "betas" in group:
                raise ValueError(
                    f"momentum_correction={momentum_correction} applies momentum before gradients "
                    f"are selected, and {type(optimizer).__name__} has one of its own: use "
                    "torch.optim.SGD(..., momentum=0), or leave momentum_correction out"
                )


def check_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise `ValueError` if the parameters' gradients cannot be merged."""
    if not parameters:
        raise ValueError(
            "the optimizers train no parameter that requires gradients: nothing is averaged"
        )
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            raise ValueError(
                f"{name!r} is sharded: each rank has a part of its gradient alone. Use gg.gossip "
                "with mesh= along the axis of the replicas, or replicas that are whole"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"{name!r} is of {parameter.dtype}: only real numbers have a largest")
    devices = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on {', '.join(devices)}: those of a session are on one device"
        )


def check_plan_fits(plan: Plan, tensors: int, methods: Sequence[str]) -> None:
    """Raise `ValueError` unless a plan has this number of tensors and uses these methods."""
    planned = plan.groups[-1].stop if plan.groups else 0
    if planned != tensors:
        raise ValueError(
            f"the plan is for {planned} tensors, the model trains {tensors}: make it from a "
            "profile of this model, one entry a parameter, in the order of backward"
        )
    unknown = sorted({merge.method for merge in plan.groups} - set(methods))
    if unknown:
        raise ValueError(
            f"the plan uses the methods {_named(unknown)}, and methods={tuple(methods)!r} are "
            "allowed: name its methods as these, or allow them"
        )


def in_order_of(plan: object, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters in the order of a plan's names; unchanged without names."""
    if not isinstance(plan, Plan) or not plan.names:
        return parameters
    for what, some, others in (
        ("names a tensor that the model does not train:", plan.names, parameters),
        ("does not name a tensor that the model trains:", parameters, plan.names),
    ):
        known = set(others)
        other = next((name for name in some if name not in known), None)
        if other is not None:
            raise ValueError(
                f"the plan {what} {other!r}. Make it from a profile of this model, or give it the "
                "names that the model has"
            )
    return {name: parameters[name] for name in plan.names}


def _is_real(value: object) -> bool:
    """Whether it is a number, and not a bool."""
    return isinstance(value, float | int) and not isinstance(value, bool)


def _plans() -> str:
    return f"one of {_named(RULES)}, a threshold in bytes, or a gossipgrad.planning.Plan"


def _named(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
