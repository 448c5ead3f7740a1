"""How long a checkpoint holds training up: saved in the background, at once, and by torch.save.

One process trains an MLP while states of several sizes (float32 weights and two moments of AdamW)
are saved, each of the ways in turn, in an order that changes from turn to turn. Measured are the
call that the training loop waits for, and for the background how much longer steps take while the
write goes on, against steps just before. `torch.save` neither waits for the disk nor takes digests,
nor is a file of it whole or not there; it is timed as it is used, and with fsync.

    python -m benchmarks.checkpoint
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks._common import quartiles, write
from gossipgrad import checkpoint

SEED = 0
PARAMETERS = (1_000_000, 10_000_000, 25_000_000)
TENSORS = 100
ALONE_STEPS = 20


def state_of(parameters: int) -> dict[str, Any]:
    """As a model of 100 tensors and its AdamW would have it."""
    sizes = [parameters // TENSORS] * TENSORS
    model = {f"layer{i}.weight": torch.randn(size) for i, size in enumerate(sizes)}
    moments = {
        i: {"step": torch.tensor(7.0), "exp_avg": 0.1 * w, "exp_avg_sq": w * w}
        for i, w in enumerate(model.values())
    }
    return {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3}]}}


def training() -> Callable[[], float]:
    """A function that takes one step, and says how many seconds that took."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 512)

    def step() -> float:
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def seconds_of(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def torch_save(state: dict[str, Any], path: Path, *, to_the_disk: bool) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        if to_the_disk:
            file.flush()
            os.fsync(file.fileno())


class Background:
    """Saves while steps go on; the first save takes memory, the later ones use it again."""

    def __init__(self, folder: Path) -> None:
        self.saver = checkpoint.Saver(folder, rank=0, world_size=1, keep=1)
        self.step = training()
        for _ in range(5):
            self.step()

    def save(self, state: dict[str, Any], number: int) -> dict[str, float]:
        alone = statistics.median(self.step() for _ in range(ALONE_STEPS))
        written = self.saver.stats().write_seconds
        held = seconds_of(lambda: self.saver.save(state, step=number))
        meanwhile = []
        while not self.saver.wait(0.0):
            meanwhile.append(self.step())
        return {
            "held": held,
            "slowed": sum(meanwhile) - alone * len(meanwhile),
            "write": self.saver.stats().write_seconds - written,
            "step_alone": alone,
            **({"step_meanwhile": statistics.median(meanwhile)} if meanwhile else {}),
        }


def ways(state: dict[str, Any], folder: Path, background: Background) -> dict[str, Callable]:
    """What is compared; each takes the number of the turn, and gives seconds by name."""
    path, at_once = folder / "state.pt", folder / "at-once"
    timed: dict[str, Callable[[int], object]] = {
        "torch_save": lambda _: torch_save(state, path, to_the_disk=False),
        "torch_save_fsync": lambda _: torch_save(state, path, to_the_disk=True),
        "save": lambda number: checkpoint.save(
            at_once, state, rank=0, world_size=1, step=number, keep=1
        ),
        "load": lambda _: checkpoint.load(at_once, rank=0),
        "torch_load": lambda _: torch.load(path, weights_only=True),
    }
    return {
        "background": lambda number: background.save(state, number),
        **{
            name: lambda number, name=name, act=act: {name: seconds_of(lambda: act(number))}
            for name, act in timed.items()
        },
    }


def row(parameters: int, repeats: int, folder: Path, order: random.Random) -> dict[str, Any]:
    """All ways for one size, in turns, each turn in an order of its own; the first warms up."""
    state, load = state_of(parameters), os.getloadavg()[0]
    background = Background(folder / "background")
    compared = ways(state, folder, background)
    taken: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    for number in range(repeats + 1):
        names = list(compared)
        if number:  # what is read must have been written once
            order.shuffle(names)
        for name in names:
            seconds = compared[name](number)
            if number:
                for what, value in seconds.items():
                    taken.setdefault(what, []).append(value)
            else:
                first |= seconds
    background.saver.close()
    stats = background.saver.stats()
    if stats.saved != repeats + 1:
        raise SystemExit(f"of {repeats + 1} states {stats.saved} were saved")
    found = {
        "parameters": parameters,
        "state_bytes": sum(t.nbytes for t in tree_leaves(state) if isinstance(t, Tensor)),
        "file_bytes": stats.size_bytes,
        "load_average": load,  # of the machine just before, other work among it
        "held_first_seconds": first["held"],
    }
    found["quartiles_seconds"] = {name: quartiles(seconds) for name, seconds in taken.items()}
    # Turn by turn, since the machine may be another one in a minute.
    ratios = [by / held for by, held in zip(taken["torch_save"], taken["held"], strict=True)]
    found["times_shorter_than_torch_save"] = quartiles(ratios)
    print(
        f"{found['state_bytes'] / 1e6:6.0f} MB: "
        + ", ".join(f"{name} {1e3 * statistics.median(s):.3g} ms" for name, s in taken.items()),
        flush=True,
    )
    return found


def main() -> None:
    """Measures every size, and writes down what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    order = random.Random(SEED)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
    try:
        rows = []
        for parameters in PARAMETERS:
            rows.append(row(parameters, options.repeats, folder, order))
            shutil.rmtree(folder)
            folder.mkdir()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures = {"seed": SEED, "repeats": options.repeats, "threads": 1, "rows": rows}
    print(write("checkpoint", figures))


if __name__ == "__main__":
    main()
