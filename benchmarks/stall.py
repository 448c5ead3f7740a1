"""One worker sleeps, dies or is slow: what that does to the others, by gossip, Decent-DP and DDP.

Four processes on loopback; the compute of a step is slept, so that nothing but waiting is seen. In
every scenario something happens to the last rank:

* nothing: the steps as they are;
* sleeps: 6 s, once;
* dies: `kill -9`;
* is slow: its compute takes twice as long, in every step.

    python -m benchmarks.stall
"""

import argparse
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from benchmarks._common import write

WORLD_SIZE = 4
VICTIM = 3
STEPS = 200
AT_STEP = 60
COMPUTE_SECONDS = 0.02
SLEEP_SECONDS = 6.0
SLOWER = 2.0
WARM_UP = 3
BATCH_SIZE = 32
SCENARIOS = ("nothing", "sleeps", "dies", "is slow")
_LIMIT_SECONDS = 120.0

Step = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A replica in training.

    Attributes:
        step: Forward, backward, update.
        goes_on: Whether there is another step, after so many.
        end: Leaves; returns what it has counted.
    """

    step: Step
    goes_on: Callable[[int], bool] = lambda steps: steps < STEPS
    end: Callable[[], dict[str, Any]] = dict


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 10))


def _sgd(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _gossip(mode: str) -> Contestant:
    model = _model()
    optimizer = _sgd(list(model.parameters()))
    session = gg.gossip(model, optimizer, topology="matching", mode=mode)

    def end() -> dict[str, Any]:
        session.close()
        return {"outcomes": session.stats().outcomes}

    return Contestant(
        step=_plain_step(model, optimizer),
        # In mode stale a rank that was held up goes on where the others are, and ends with them.
        goes_on=lambda steps: (
            session.position < WARM_UP + STEPS if session.rank == VICTIM else steps < STEPS
        ),
        end=end,
    )


def _ddp() -> Contestant:
    model = DistributedDataParallel(_model())
    return Contestant(step=_plain_step(model, _sgd(list(model.parameters()))))


def _decent_dp() -> Contestant:
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    model = DecentralizedDataParallel(
        _model(),
        optim_fn=lambda named: _sgd([parameter for _, parameter in named]),
        topology="one-peer-exp",
        _local_world_size=1,
    )

    def step(x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x), y).backward()  # updates on its way

    return Contestant(step=step)


CONTESTANTS: dict[str, Callable[[], Contestant]] = {
    "gossip, stale": lambda: _gossip("stale"),
    "gossip, overlap": lambda: _gossip("overlap"),
    "Decent-DP, one-peer exponential": _decent_dp,
    "DDP": _ddp,
}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one rank did.

    Attributes:
        begins: When each step began (`time.monotonic`), one more for the end of the last.
        how: How it ended.
        outcomes: Of the exchanges, where they are counted.
    """

    begins: list[float]
    how: str
    outcomes: dict[str, int] | None = None


def worker(rank: int, port: int, contestant: str, scenario: str, pipe: Connection) -> None:
    """Trains and reports; never waits for the others at the end."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    made = CONTESTANTS[contestant]()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(BATCH_SIZE, 256, generator=generator)
    y = torch.randint(10, (BATCH_SIZE,), generator=generator)
    victim = rank == VICTIM
    slower = SLOWER if victim and scenario == "is slow" else 1.0
    for _ in range(WARM_UP):
        made.step(x, y)
    dist.barrier()
    begins = [time.monotonic()]
    how, more = "all steps", {}
    try:
        while made.goes_on(number := len(begins) - 1):
            if victim and number == AT_STEP and scenario == "sleeps":
                time.sleep(SLEEP_SECONDS)
            if victim and number == AT_STEP and scenario == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(COMPUTE_SECONDS * slower)
            made.step(x, y)
            begins.append(time.monotonic())
        more = made.end()
    except Exception as error:
        # Of a Gloo error, without the place in its source and the address.
        said = re.sub(r"\[[^\]]*\](:\d+)?", "", str(error).strip().splitlines()[0]).split(". ")[0]
        how = f"{type(error).__name__}: {' '.join(said.split())[:120]}"
    pipe.send(asdict(Ran(begins=begins, how=how, **more)))
    # Groups of the dead may hang in their own teardown.
    os._exit(0)


def run(contestant: str, scenario: str) -> dict[int, Ran]:
    """Trains once; what each rank that lived to tell did."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "gossipgrad"])
    pipes, processes = [], []
    for rank in range(WORLD_SIZE):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=worker, args=(rank, store.port, contestant, scenario, theirs)
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    ran = {}
    deadline = time.monotonic() + _LIMIT_SECONDS
    try:
        for rank, pipe in enumerate(pipes):
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    ran[rank] = Ran(**pipe.recv())
            except EOFError:
                continue
    finally:
        for process in processes:
            process.kill()
            process.join()
    return ran


def row_of(contestant: str, scenario: str, repeats: list[dict[int, Ran]]) -> dict[str, Any]:
    """The figures of a cell: of the ranks to which nothing happened, the worst of all repeats."""
    others = [{rank: ran for rank, ran in repeat.items() if rank != VICTIM} for repeat in repeats]
    steps = [_steps(ran) for repeat in others for ran in repeat.values()]
    return {
        "contestant": contestant,
        "scenario": scenario,
        "median_step_seconds": round(median([s for found in steps for s in found]), 5),
        "longest_step_seconds": [
            round(max(max(_steps(ran)) for ran in repeat.values()), 4) for repeat in others
        ],
        "steps_of_others": [[len(_steps(ran)) for ran in repeat.values()] for repeat in others],
        "seconds_of_others": [
            round(max(ran.begins[-1] - ran.begins[0] for ran in repeat.values()), 3)
            for repeat in others
        ],
        "samples_of_victim_by_then": [_samples_by_then(repeat) for repeat in repeats],
        "ended": sorted({ran.how for repeat in others for ran in repeat.values()}),
        "outcomes": [[ran.outcomes for ran in repeat.values()] for repeat in repeats],
    }


def _steps(ran: Ran) -> list[float]:
    return [end - begin for begin, end in zip(ran.begins, ran.begins[1:], strict=False)]


def _samples_by_then(repeat: dict[int, Ran]) -> int | None:
    """What the victim had trained on when the last of the others was done."""
    if VICTIM not in repeat:
        return None
    done = max(ran.begins[-1] for rank, ran in repeat.items() if rank != VICTIM)
    return BATCH_SIZE * sum(end <= done for end in repeat[VICTIM].begins[1:])


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cells = []
    for contestant in CONTESTANTS:
        if contestant.startswith("Decent") and find_spec("decent_dp") is None:
            print(f"{contestant} is not installed: make .venv/.decent-dp")
            continue
        for scenario in SCENARIOS:
            repeats = [run(contestant, scenario) for _ in range(options.repeats)]
            cell = row_of(contestant, scenario, repeats)
            cells.append(cell)
            print(
                f"{contestant:32} {scenario:8} median {1e3 * cell['median_step_seconds']:6.1f} ms, "
                f"longest {1e3 * max(cell['longest_step_seconds']):7.1f} ms, "
                f"steps {min(min(s) for s in cell['steps_of_others'])} of {STEPS} in "
                f"{max(cell['seconds_of_others']):.1f} s; {'; '.join(cell['ended'])}",
                flush=True,
            )
    about = {
        "world_size": WORLD_SIZE,
        "steps": STEPS,
        "compute_seconds": COMPUTE_SECONDS,
        "sleep_seconds": SLEEP_SECONDS,
        "slower": SLOWER,
        "batch_size": BATCH_SIZE,
    }
    print(write("stall", about | {"cells": cells}))


if __name__ == "__main__":
    main()
