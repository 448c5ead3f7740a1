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
from importlib.util import find_spec
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from benchmarks._common import spread, write

ABOUT = {
    "seed": 0,
    "world_size": 4,
    "steps": 200,
    "compute_seconds": 0.02,
    "sleep_seconds": 6.0,
    "slower": 2.0,
    "batch_size": 32,
}
WORLD_SIZE, STEPS, BATCH_SIZE = 4, 200, 32
VICTIM, AT_STEP, WARM_UP = 3, 60, 3
SCENARIOS = ("nothing", "sleeps", "dies", "is slow")
_LIMIT_SECONDS = 120.0

# When each step began (`begins`), one more for the end of the last; `how` it ended; `outcomes` of
# the exchanges, where they are counted.
Ran = dict[str, Any]


class Contestant:
    """A replica in training, by DDP."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.wrap(nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 10)))

    def wrap(self, model: nn.Module) -> nn.Module:
        self.optimizer = _sgd(model.parameters())
        return DistributedDataParallel(model)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Forward, backward, update."""
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def continues(self, steps: int) -> bool:
        """Whether there is another step, after so many."""
        return steps < STEPS

    def end(self) -> dict[str, Any]:
        """Leaves; what it has counted."""
        return {}


class Gossip(Contestant):
    def __init__(self, **options: str) -> None:
        self.options = options
        super().__init__()

    def wrap(self, model: nn.Module) -> nn.Module:
        self.optimizer = _sgd(model.parameters())
        self.session = gg.gossip(model, self.optimizer, **self.options)
        return model

    def continues(self, steps: int) -> bool:
        # In mode stale a rank that was held up continues where the others are, and ends with them.
        if self.session.rank == VICTIM:
            return self.session.position < WARM_UP + STEPS
        return steps < STEPS

    def end(self) -> dict[str, Any]:
        self.session.close()
        return {"outcomes": self.session.stats().outcomes}


class DecentDP(Contestant):
    """Its wrapper updates during backward."""

    def wrap(self, model: nn.Module) -> nn.Module:
        from decent_dp.ddp import DecentralizedDataParallel
        from loguru import logger

        logger.remove()
        return DecentralizedDataParallel(
            model,
            optim_fn=lambda named: _sgd([parameter for _, parameter in named]),
            topology="one-peer-exp",
            _local_world_size=1,
        )

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.cross_entropy(self.model(x), y).backward()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


CONTESTANTS: dict[str, Callable[[], Contestant]] = {
    "gossip": Gossip,  # all defaults
    "gossip, stale": lambda: Gossip(topology="matching", mode="stale"),
    "gossip, overlap": lambda: Gossip(topology="matching", mode="overlap"),
    "Decent-DP, one-peer exponential": DecentDP,
    "DDP": Contestant,
}


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
    happens = scenario if rank == VICTIM else "nothing"
    compute_seconds = ABOUT["compute_seconds"] * (ABOUT["slower"] if happens == "is slow" else 1.0)
    for _ in range(WARM_UP):
        made.step(x, y)
    dist.barrier()
    ran: Ran = {"begins": [time.monotonic()], "how": "all steps", "outcomes": None}
    try:
        while made.continues(number := len(ran["begins"]) - 1):
            if number == AT_STEP and happens == "sleeps":
                time.sleep(ABOUT["sleep_seconds"])
            if number == AT_STEP and happens == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(compute_seconds)
            made.step(x, y)
            ran["begins"].append(time.monotonic())
        ran |= made.end()
    except Exception as error:
        # Of a Gloo error, without the line of its source and the address.
        said = re.sub(r"\[[^\]]*\](:\d+)?", "", str(error).strip().splitlines()[0]).split(". ")[0]
        ran["how"] = f"{type(error).__name__}: {' '.join(said.split())[:120]}"
    pipe.send(ran)
    os._exit(0)  # groups of the dead may hang in their own teardown


def run(contestant: str, scenario: str) -> dict[int, Ran]:
    """Trains once; what each rank did that lived to report it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "gossipgrad"])
    pipes, processes = [], []
    for rank in range(WORLD_SIZE):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, store.port, contestant, scenario, theirs)
        processes.append(context.Process(target=worker, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    ran = {}
    deadline = time.monotonic() + _LIMIT_SECONDS
    try:
        for rank, pipe in enumerate(pipes):
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    ran[rank] = pipe.recv()
            except EOFError:
                continue
    finally:
        for process in processes:
            process.kill()
            process.join()
    return ran


def cell_of(contestant: str, scenario: str, repeats: list[dict[int, Ran]]) -> dict[str, Any]:
    """The figures of a cell: of the ranks to which nothing happened, the worst of all repeats."""
    others = [[ran for rank, ran in repeat.items() if rank != VICTIM] for repeat in repeats]
    steps = [[_steps(ran) for ran in repeat] for repeat in others]
    return {
        "contestant": contestant,
        "scenario": scenario,
        "median_step_seconds": round(median(s for of in steps for own in of for s in own), 5),
        "p99_step_seconds": spread([s for of in steps for own in of for s in own])["p99"],
        "longest_step_seconds": [round(max(max(own) for own in of), 4) for of in steps],
        "steps_of_others": [[len(own) for own in of] for of in steps],
        "seconds_of_others": [
            round(max(ran["begins"][-1] - ran["begins"][0] for ran in repeat), 3)
            for repeat in others
        ],
        "ended": sorted({ran["how"] for repeat in others for ran in repeat}),
        "outcomes": [[ran["outcomes"] for ran in repeat.values()] for repeat in repeats],
    }


def _steps(ran: Ran) -> list[float]:
    return [end - begin for begin, end in zip(ran["begins"], ran["begins"][1:], strict=False)]


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    options = parser.parse_args()
    cells = []
    for contestant in options.only:
        if contestant.startswith("Decent") and find_spec("decent_dp") is None:
            print(f"{contestant} is not installed: make .venv/.decent-dp")
            continue
        for scenario in SCENARIOS:
            repeats = [run(contestant, scenario) for _ in range(options.repeats)]
            cells.append(cell_of(contestant, scenario, repeats))
            print({k: v for k, v in cells[-1].items() if k != "outcomes"}, flush=True)
    print(write("stall", ABOUT | {"cells": cells}))


if __name__ == "__main__":
    main()
