"""The plan beside its alternatives: what `gossipgrad plan` finds out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gossipgrad.planning import (
    LEAST_SAVING,
    Method,
    Plan,
    Profile,
    Span,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    threshold,
    wfbp,
)

from ._units import percent_text

NARROW = ("fp16", "bf16")
NARROW_BYTES = 2
METHODS = ("sparse", "dense", *NARROW)
"""What a plan may choose among."""


AS_IS = "dense as is"
"""DDP's all-reduce of gradients that a session widens before it adds them up."""


_DDP_BYTES, _DDP_FIRST_BYTES = 25 << 20, 1 << 20


Rule = Callable[[Sequence[float], Sequence[int], Method], Plan]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan, and what it is called."""

    name: str
    method: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Comparison:
    """The best plan for a profile, and others.

    Attributes:
        profile: What is computed.
        methods: What the best plan could choose among.
        best: The plan.
        spans: What happens when in it.
        alternatives: Other plans, each by one method; and the best without any compression, and
            with nothing but it, where the best plan could have been either.
    """

    profile: Profile
    methods: list[Method]
    best: Plan
    spans: tuple[Span, ...]
    alternatives: list[Alternative]

    def step_seconds(self, of: Plan) -> float:
        """A whole step with that plan, forward and update counted in."""
        return self.profile.forward_seconds + of.finish_seconds + self.profile.optimizer_seconds

    def longer(self, of: Plan) -> float:
        """By how much a step with that plan takes longer than with the best, relative to that."""
        return self.step_seconds(of) / self.step_seconds(self.best) - 1

    def elements(self, start: int, stop: int) -> int:
        """Of these tensors together."""
        return sum(self.profile.elements[start:stop])

    @property
    def verdict(self) -> str:
        """Whether compression pays, in words: by as much as a session asks of it."""
        groups = self.best.groups
        sparse = [group for group in groups if group.method == "sparse"]
        others = {alternative.name: alternative.plan for alternative in self.alternatives}
        count = f"{len(groups)} group{'s' * (len(groups) != 1)}"
        if not sparse:
            if _ONLY_SPARSE not in others:
                return f"Nothing is compressed: --methods has no sparse among them ({count})."
            share = percent_text(self.longer(others[_ONLY_SPARSE]))
            return (
                f"Dense wins, compression is refused: with every group compressed, a step would "
                f"take {share} longer."
            )
        share = sum(self.elements(g.start, g.stop) for g in sparse) / sum(self.profile.elements)
        what = (
            f"All of {count} compressed"
            if len(sparse) == len(groups)
            else f"{len(sparse)} of {count} compressed, {percent_text(share)} of all elements"
        )
        if _ONLY_DENSE not in others:
            return f"{what}; --methods has nothing else."
        whole_seconds, gain = self.step_seconds(others[_ONLY_DENSE]), LEAST_SAVING
        if self.step_seconds(self.best) < (1 - gain) * whole_seconds:
            more = percent_text(self.longer(others[_ONLY_DENSE]))
            return f"{what}: without compression a step would take {more} longer."
        saved = percent_text(1 - self.step_seconds(self.best) / whole_seconds)
        whole = ",".join(method.name for method in self.methods if method.name != "sparse")
        return (
            f"{what}: compression would save {saved}, less than the {percent_text(gain)} that a "
            f"session asks for: send all, as --methods {whole} plans it."
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "profile": self.profile.name,
            "forward_seconds": self.profile.forward_seconds,
            "optimizer_seconds": self.profile.optimizer_seconds,
            "plan": self.best.to_json(),
            "gap": self.best.gap,
            "step_seconds": self.step_seconds(self.best),
            "verdict": self.verdict,
            "groups": [
                {
                    "start": group.start,
                    "stop": group.stop,
                    "first": self.profile.names[group.start],
                    "last": self.profile.names[group.stop - 1],
                    "elements": self.elements(group.start, group.stop),
                    "method": group.method,
                }
                for group in self.best.groups
            ],
            "spans": [
                [span.what, span.group, span.start_seconds, span.end_seconds] for span in self.spans
            ],
            "alternatives": [
                {
                    "name": each.name,
                    "method": each.method,
                    "groups": len(each.plan.groups),
                    "finish_seconds": each.plan.finish_seconds,
                    "step_seconds": self.step_seconds(each.plan),
                    "longer": self.longer(each.plan),
                }
                for each in self.alternatives
            ],
        }


_ONLY_DENSE, _ONLY_SPARSE = "best, none compressed", "best, all compressed"


def compare(profile: Profile, known: dict[str, Method], names: Sequence[str]) -> Comparison:
    """The best plan by the named methods, and the usual ways for comparison.

    Args:
        profile: What is computed.
        known: All methods by name.
        names: Those that the best plan may choose among.
    """
    step = list(profile.backward_seconds), list(profile.elements)
    methods = [known[name] for name in names]
    best = replace(plan(*step, methods), names=profile.names)
    ddp = partial(
        threshold,
        size_bytes=_DDP_BYTES,
        first_size_bytes=_DDP_FIRST_BYTES,
        element_bytes=profile.element_bytes,
    )
    as_ddp_sends = [AS_IS] if AS_IS in known else ["dense", "fp16"]
    usual: list[tuple[str, Rule, str]] = [
        *(("DistributedDataParallel", ddp, method) for method in as_ddp_sends),
        ("wfbp, each tensor", wfbp, "dense"),
        ("mg-wfbp", mg_wfbp, "dense"),
        ("top-k, one group", single, "sparse"),
        ("lags, each tensor", wfbp, "sparse"),
        ("omgs, published rule", partial(omgs_greedy, as_published=True), "sparse"),
    ]
    alternatives = [
        Alternative(name, method, rule(*step, known[method])) for name, rule, method in usual
    ]
    whole = [method for method in methods if method.name != "sparse"]
    if whole and len(whole) < len(methods):
        alternatives += [
            Alternative(_ONLY_DENSE, ", ".join(m.name for m in whole), plan(*step, whole)),
            Alternative(_ONLY_SPARSE, "sparse", plan(*step, [known["sparse"]])),
        ]
    spans = best.timeline(*step, methods)
    return Comparison(profile, methods, best, spans, alternatives)
