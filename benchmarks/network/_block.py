"""A block: some steps of a contestant on one rank, timed."""

import time
from dataclasses import dataclass

from ._contestants import Contestant


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one rank has measured.

    Attributes:
        seconds: Of each step after the warm-up.
        cpu_seconds: Of this process in each of them.
        steps_run: How many of them were run.
        planned_seconds: Compute of the emulated device in those.
        late_seconds: By how much it was late.
        clocks: What the contestant has counted in them.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    steps_run: int
    planned_seconds: float
    late_seconds: float
    clocks: dict[str, float]


def run_block(contestant: Contestant, warm_up: int, steps: int, *, hurried: bool = False) -> Block:
    """Trains for some steps, the first `warm_up` of them unmeasured.

    Args:
        contestant: Who.
        warm_up: Steps before those that are measured.
        steps: Those.
        hurried: A step that is like the one before is not run, and takes what that one took.
    """
    for _ in range(warm_up):
        contestant.step()
    contestant.device.reset()
    before = contestant.clocks()
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    steps_run = 0
    for _ in range(steps):
        if hurried and seconds and contestant.skip():
            seconds.append(seconds[-1])
            cpu_seconds.append(cpu_seconds[-1])
            continue
        start, cpu = time.perf_counter(), time.process_time()
        contestant.step()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
        steps_run += 1
    return Block(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        steps_run=steps_run,
        planned_seconds=contestant.device.planned_seconds,
        late_seconds=contestant.device.late_seconds,
        clocks={what: value - before[what] for what, value in contestant.clocks().items()},
    )
