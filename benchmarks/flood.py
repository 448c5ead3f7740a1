"""What strangers at the doors of a live run cost it: time of its steps, and processor time.

Two processes train by gossip on loopback. A third comes to both of their ports, so and so many
times a second, in one way after the other, with plain links and with encrypted ones. The floods
and peace take turns.

    python -m benchmarks.flood
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from benchmarks._common import write
from benchmarks._strangers import KINDS
from benchmarks._two_ranks import WORLD_SIZE, in_two_processes
from gossipgrad.comm import Group

LINKS = {"plain": "PLAIN", "encrypted": "CURVE"}
PER_SECOND = 500.0  # at each port
STEPS = 100  # of a block
REPEATS = 3
HANDLES = 1024  # of a process, as most systems have it
_LOOK_SECONDS = 0.02
_CALM_SECONDS = 0.5  # until a door has closed what a flood has left
_PEACE = "in peace"

Blocks = list[list[dict[str, dict[str, float]]]]


class Training:
    """One rank of a run: a small network, of 4.2 MB."""

    def __init__(self, world: dist.ProcessGroup, *, encrypt: bool) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self.session = gg.gossip(
            self._model, self._optimizer, process_group=world, topology="matching", encrypt=encrypt
        )
        assert self.session._rounds is not None
        self._transport: Any = self.session._rounds.channel.transport
        self._x = torch.randn(64, 512)

    @property
    def port(self) -> int:
        """Where this rank listens."""
        return int(self._transport._endpoints[self.session.rank].rpartition(":")[2])

    @property
    def refused(self) -> int:
        """Connections that were not let in, so far."""
        return self._transport.refused_connections

    def block(self) -> dict[str, float]:
        """Steps, and what they took."""
        refused, cpu, begun = self.refused, time.process_time(), time.perf_counter()
        steps = []
        for _ in range(STEPS):
            start = time.perf_counter()
            self._model(self._x).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            steps.append(time.perf_counter() - start)
        return {
            "step_seconds": statistics.median(steps),
            "cpu_seconds": time.process_time() - cpu,
            "seconds": time.perf_counter() - begun,
            "refused": self.refused - refused,
        }


def live(world: dist.ProcessGroup, link: str) -> Blocks:
    """What blocks of steps took, in peace and in each flood: by repeat, rank and case."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (HANDLES, most))
    group = Group.from_process_group(world)
    training = Training(world, encrypt=link == "encrypted")
    ports = group.all_gather_object(training.port)
    training.block()
    found = []
    for _ in range(REPEATS):
        group.barrier()
        blocks = {_PEACE: training.block()}
        for kind in KINDS:
            with flood(ports if group.rank == 0 else [], kind, LINKS[link]):
                before = training.refused
                while not all(group.all_gather_object(training.refused > before)):
                    time.sleep(_LOOK_SECONDS)  # until as many wait as may
                blocks[kind] = training.block()
                group.barrier()
            time.sleep(_CALM_SECONDS)
        found.append(group.all_gather_object(blocks))
    outcomes = training.session.stats().outcomes
    assert outcomes["dead_peer"] == outcomes["void"] == 0, outcomes
    training.session.close()
    return found


@contextmanager
def flood(ports: list[int], kind: str, mechanism: str) -> Iterator[None]:
    """Strangers come to the ports, if there are any, until the block is left."""
    command = [sys.executable, "-m", "benchmarks._strangers", kind, mechanism, str(PER_SECOND)]
    strangers = (
        [subprocess.Popen([*command, *map(str, ports)], stdin=subprocess.PIPE)] if ports else []
    )
    try:
        yield
    finally:
        for one in strangers:
            one.kill()
            one.wait()


def row_of(link: str, kind: str, found: Blocks) -> dict[str, Any]:
    """The figures of one flood: medians over repeats, of the slower rank or of both together."""

    def of_ranks(name: str, combine: Callable[[list[float]], float], case: str) -> list[float]:
        return [combine([rank[case][name] for rank in ranks]) for ranks in found]

    peace, steps = (of_ranks("step_seconds", max, case) for case in (_PEACE, kind))
    less, more = (of_ranks("cpu_seconds", sum, case) for case in (_PEACE, kind))
    refused, seconds = of_ranks("refused", sum, kind), of_ranks("seconds", max, kind)
    ratios = [one / other for one, other in zip(steps, peace, strict=True)]
    costs = [(b - a) / n for a, b, n in zip(less, more, refused, strict=True)]
    rates = [n / s / WORLD_SIZE for n, s in zip(refused, seconds, strict=True)]
    return {
        "links": link,
        "strangers": kind,
        "refused_per_second_and_port": round(statistics.median(rates), 1),
        "step_milliseconds_in_peace": round(1e3 * statistics.median(peace), 3),
        "step_milliseconds": round(1e3 * statistics.median(steps), 3),
        "ratio_of_step_times": round(statistics.median(ratios), 3),
        "ratios_of_step_times": [round(ratio, 3) for ratio in ratios],
        "cpu_milliseconds_per_stranger": round(1e3 * statistics.median(costs), 4),
        "cpu_milliseconds_per_stranger_by_repeat": [round(1e3 * cost, 4) for cost in costs],
    }


def main() -> None:
    """Measures all floods and writes them down."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    rows = []
    for link in LINKS:
        found = in_two_processes(live, link)
        rows += [row_of(link, kind, found) for kind in KINDS]
    for row in rows:
        print(
            "{links:10}{strangers:20}{refused_per_second_and_port:6.0f} a second and port: steps "
            "of {step_milliseconds_in_peace:.2f} take {step_milliseconds:.2f} ms (x "
            "{ratio_of_step_times:.2f}), {cpu_milliseconds_per_stranger:.3f} ms CPU each".format(
                **row
            )
        )
    about = {
        "seed": 0,
        "world_size": WORLD_SIZE,
        "strangers_per_second_and_port": PER_SECOND,
        "steps": STEPS,
        "repeats": REPEATS,
        "handles": HANDLES,
    }
    print(write("flood", about | {"floods": rows}))


if __name__ == "__main__":
    main()
