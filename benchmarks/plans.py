"""Merge plans: how often each rule misses the optimum and by how much, and what a plan takes.

* Random cases of 2 to 10 tensors, by one method and by three: the plan beside all plans there are,
  and every published rule beside the best plan by its method. Backward times and sizes spread over
  orders of magnitude, costs are affine; computing, selecting and sending matter alike.
* Every profile that comes along, by number of ranks and bandwidth, as `gossipgrad plan` has it:
  the step with each alternative, and what of the gradient is compressed.

    python -m benchmarks.plans
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from benchmarks._common import write
from gossipgrad.cli._network import network_of
from gossipgrad.cli._plan import PlanOptions, all_methods
from gossipgrad.cli._plan_report import compare
from gossipgrad.planning import (
    PROFILES,
    AffineCost,
    Method,
    Plan,
    Profile,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    wfbp,
)

SEED = 0
RULES: dict[str, Callable[..., Plan]] = {
    "omgs_greedy, published": partial(omgs_greedy, as_published=True),
    "omgs_greedy": omgs_greedy,
    "mg_wfbp": mg_wfbp,
    "wfbp": wfbp,
    "single": single,
}
MISSED = 1e-9  # relative: more than rounding
WORLD_SIZE = 16
BANDWIDTHS = ("50Mbit", "100Mbit", "1Gbit", "10Gbit")
Step = tuple[list[float], list[int]]


def drawn(rng: random.Random, tensors: int, methods: int) -> tuple[Step, list[Method]]:
    """A case in which a group costs about as much to compute, to select and to send."""
    backward = [rng.expovariate(1.0) for _ in range(tensors)]
    sizes = [max(1, round(10 ** rng.uniform(0, 4))) for _ in range(tensors)]
    a_tensor, an_element = sum(backward) / tensors, sum(backward) / sum(sizes)

    def affine(most_alpha: float, most_beta: float) -> AffineCost:
        return AffineCost(
            alpha_seconds=rng.uniform(0, most_alpha) * a_tensor,
            beta_seconds_per_byte=rng.uniform(0, most_beta) * an_element,
        )

    made = [
        Method(name=f"{n}", select_seconds=affine(0.5, 0.5), communicate_seconds=affine(3.0, 1.5))
        for n in range(methods)
    ]
    return (backward, sizes), made


def least(step: Step, methods: Sequence[Method]) -> float:
    """When the best of all plans has finished: every partition, every method for every group."""
    backward, sizes = step

    def after(start: int, computing: float, sending: float) -> float:
        if start == len(sizes):
            return sending
        found, elements = float("inf"), 0
        for stop in range(start, len(sizes)):
            elements += sizes[stop]
            computing += backward[stop]
            for method in methods:
                ready = computing + method.select_seconds(elements)
                sent = max(sending, ready) + method.communicate_seconds(elements)
                if sent < found:
                    found = min(found, after(stop + 1, ready, sent))
        return found

    return after(0, 0.0, 0.0)


def random_cases(one: int, three: int) -> dict[str, Any]:
    """Plans against brute force, rules against plans."""
    rng = random.Random(SEED)
    ratios: dict[str, list[float]] = {name: [] for name in RULES}
    worst = 0.0
    for _ in range(one):
        step, methods = drawn(rng, rng.randint(2, 10), 1)
        best = plan(*step, methods).finish_seconds
        worst = max(worst, abs(best / least(step, methods) - 1))
        for name, rule in RULES.items():
            ratios[name].append(rule(*step, methods[0]).finish_seconds / best)
    worst_of_three = 0.0
    for _ in range(three):
        step, methods = drawn(rng, rng.randint(2, 7), 3)
        best = plan(*step, methods).finish_seconds
        worst_of_three = max(worst_of_three, abs(best / least(step, methods) - 1))
    return {
        "one_method": {"cases": one, "largest_difference": worst},
        "three_methods": {"cases": three, "largest_difference": worst_of_three},
        "rules": {
            name: {
                "missed_share": sum(ratio > 1 + MISSED for ratio in found) / one,
                "mean_ratio": statistics.fmean(found),
                "worst_ratio": max(found),
            }
            for name, found in ratios.items()
        },
    }


def grid() -> Iterator[dict[str, Any]]:
    """Every profile and bandwidth."""
    for name, bandwidth in product(PROFILES, BANDWIDTHS):
        profile = Profile.load(name)
        options = PlanOptions(profile=name, world_size=WORLD_SIZE, bandwidth=bandwidth)
        _, network = network_of(bandwidth, None, None, WORLD_SIZE, what="the plan")
        known = all_methods(options, profile, network)
        found = compare(profile, known, ("sparse", "dense"))
        sparse = [group for group in found.best.groups if group.method == "sparse"]
        elements = sum(found.elements(group.start, group.stop) for group in sparse)
        yield {
            "profile": name,
            "world_size": WORLD_SIZE,
            "bandwidth": bandwidth,
            "groups": len(found.best.groups),
            "sparse_groups": len(sparse),
            "sparse_share": elements / sum(profile.elements),
            "gap": found.best.gap,
            "step_seconds": found.step_seconds(found.best),
            "alternatives": [
                {
                    "name": each.name,
                    "method": each.method,
                    "groups": len(each.plan.groups),
                    "step_seconds": found.step_seconds(each.plan),
                }
                for each in found.alternatives
            ],
        }


def main() -> int:
    """Runs both parts and writes the results; fails if a plan was not the best."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", type=int, default=2000, help="random cases by one method")
    parser.add_argument("--three", type=int, default=1000, help="random cases by three methods")
    options = parser.parse_args()
    found = random_cases(options.one, options.three)
    print(write("plans", {"seed": SEED, "random": found, "grid": list(grid())}))
    worst = max(found[key]["largest_difference"] for key in ("one_method", "three_methods"))
    print(f"largest difference to brute force {worst:.1e}")
    return int(worst > MISSED)


if __name__ == "__main__":
    sys.exit(main())
