"""How long a checkpoint holds training up: saved in the background, at once, and by torch.save.

One process trains an MLP while states of several sizes (float32 weights and two moments of AdamW)
are saved. Measured are the call that the training loop waits for, how long the write goes on behind
it, and what a step takes meanwhile. `torch.save` neither waits for the disk nor takes digests, nor
is a file of it whole or not there; it is timed as it is used, and with fsync.

Fills the table of `docs/checkpoint.md`, too.

    python -m benchmarks.checkpoint
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._common import RESULTS, write
from benchmarks._pages import DOCS, fill, table
from gossipgrad import checkpoint

PARAMETERS = (1_000_000, 10_000_000, 25_000_000)
TENSORS = 100
BYTES_PER_PARAMETER = 12
COLUMNS = {
    "`Saver.save`": "held_seconds",
    "the first one": "held_first_seconds",
    "written behind in": "write_seconds",
    "`checkpoint.save`": "save_seconds",
    "`torch.save`": "torch_save_seconds",
    "`torch.save` and fsync": "torch_save_fsync_seconds",
}
ALONE_STEPS = 60


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


def in_the_background(state: dict[str, Any], folder: Path, repeats: int) -> dict[str, Any]:
    """Steps go on while it writes; the first save takes memory, the later ones use it again."""
    step = training()
    for _ in range(5):
        step()
    alone = [step() for _ in range(ALONE_STEPS)]
    held, meanwhile = [], []
    with checkpoint.Saver(folder, rank=0, world_size=1, keep=1) as saver:
        for number in range(repeats + 1):
            # What the process allocates between two saves is its own affair.
            held.append(seconds_of(lambda: saver.save(state, step=number)))  # noqa: B023
            while not saver.wait(0.0):
                meanwhile.append(step())
        stats = saver.stats()
    if stats.saved != repeats + 1:
        raise SystemExit(f"of {repeats + 1} states {stats.saved} were saved: {saver.error}")
    return {
        "held_first_seconds": held[0],
        "held_seconds": held[1:],
        "write_seconds": stats.write_seconds / stats.saved,
        "step_alone_seconds": statistics.median(alone),
        "step_meanwhile_seconds": statistics.median(meanwhile) if meanwhile else None,
        "steps_meanwhile": len(meanwhile),
        "file_bytes": stats.size_bytes,
        "buffer_bytes": sum(tensor.nbytes for tensor in tensors_of(state)),
    }


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict | list):
        items = state.values() if isinstance(state, dict) else state
        return [tensor for item in items for tensor in tensors_of(item)]
    return []


def row(parameters: int, repeats: int, folder: Path) -> dict[str, Any]:
    """All ways for one size, in turns as far as that goes."""
    state = state_of(parameters)
    taken: dict[str, list[float]] = {"torch_save": [], "torch_save_fsync": [], "save": []}
    taken |= {"load": [], "torch_load": []}
    path = folder / "state.pt"
    for number in range(repeats + 1):
        now = {
            "torch_save": seconds_of(lambda: torch_save(state, path, to_the_disk=False)),
            "torch_save_fsync": seconds_of(lambda: torch_save(state, path, to_the_disk=True)),
            "save": seconds_of(
                lambda: checkpoint.save(
                    folder / "at-once",
                    state,
                    rank=0,
                    world_size=1,
                    step=number,  # noqa: B023
                    keep=1,
                )
            ),
            "load": seconds_of(lambda: checkpoint.load(folder / "at-once", rank=0)),
            "torch_load": seconds_of(lambda: torch.load(path, weights_only=True)),
        }
        if number:  # the first one warms up
            for name, seconds in now.items():
                taken[name].append(seconds)
    background = in_the_background(state, folder / "background", repeats)
    found = {
        "parameters": parameters,
        "state_bytes": sum(tensor.nbytes for tensor in tensors_of(state)),
        **{f"{name}_seconds": seconds for name, seconds in taken.items()},
        **background,
    }
    held, saved = (
        statistics.median(found[name]) for name in ("held_seconds", "torch_save_seconds")
    )
    found["times_shorter_than_torch_save"] = saved / held
    print(
        f"{found['state_bytes'] / 1e6:6.0f} MB: held up {1e3 * held:7.1f} ms (first "
        f"{1e3 * found['held_first_seconds']:.1f}), torch.save {1e3 * saved:7.1f} ms, at once "
        f"{1e3 * statistics.median(found['save_seconds']):7.1f} ms; written in "
        f"{1e3 * found['write_seconds']:.0f} ms",
        flush=True,
    )
    return found


def fill_page(page: Path = DOCS / "checkpoint.md", results: Path = RESULTS) -> None:
    """Writes the table of the page anew, of what was measured last."""
    path = results / "checkpoint.json"
    measured = json.loads(path.read_text())["rows"] if path.exists() else []
    lines = [
        [
            f"{BYTES_PER_PARAMETER * parameters / 1e6:.0f} MB",
            *(_cell(measured, parameters, key) for key in COLUMNS.values()),
        ]
        for parameters in PARAMETERS
    ]
    page.write_text(fill(page.read_text(), table(["state", *COLUMNS], lines)))


def _cell(measured: list[dict], parameters: int, key: str) -> str:
    for one in measured:
        if one["parameters"] == parameters:
            seconds = one[key] if isinstance(one[key], list) else [one[key]]
            found = 1e3 * statistics.median(seconds)
            return f"{found:,.0f} ms" if found >= 100 else f"{found:.3g} ms"
    return "not measured"


def main() -> None:
    """Measures every size, and writes down what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
    try:
        rows = []
        for parameters in PARAMETERS:
            rows.append(row(parameters, options.repeats, folder))
            shutil.rmtree(folder)
            folder.mkdir()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write("checkpoint", {"repeats": options.repeats, "threads": 1, "rows": rows})
    fill_page()


if __name__ == "__main__":
    main()
