"""What a session adds to a step on a GPU, and what roots take there.

* `step`: two processes that share one card train a GPT in bfloat16 autocast. Contestants take turns
  in the same two processes, block by block: no exchange, gossip, gossip with a bfloat16 wire,
  gossip in mode `sync`, DDP over Gloo. (NCCL refuses two ranks on one card.) Messages pass through
  host memory and loopback.
* `second_order`: a step of SOAP with roots computed in the step, and beside it.

    python -m benchmarks.gpu
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from benchmarks._common import in_processes, spread, tell, write
from benchmarks._tasks import GPT, loss

CONTESTANTS = ("no exchange", "gossip", "gossip, bf16 wire", "gossip, sync", "DDP over Gloo")
VOCABULARY, CONTEXT = 8192, 256


def gpt(layers: int, width: int) -> nn.Module:
    """A GPT on the card, from the same seed everywhere."""
    torch.manual_seed(0)
    return GPT(VOCABULARY, context=CONTEXT, layers=layers, width=width, heads=width // 64).cuda()


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    """Random characters."""
    tokens = torch.randint(VOCABULARY, (size, CONTEXT + 1), device="cuda")
    return tokens[:, :-1], tokens[:, 1:]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """One step, without reading its loss."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


def quartiles(values: list[float]) -> dict[str, Any]:
    """Median and quartiles, in milliseconds."""
    low, median, high = statistics.quantiles([1e3 * v for v in values], n=4, method="inclusive")
    return {"ms_median": round(median, 3), "ms_quartiles": [round(low, 3), round(high, 3)]}


class Contestant:
    """One way to keep two replicas together."""

    def __init__(self, name: str, sizes: tuple[int, int], group: dist.ProcessGroup) -> None:
        self.model = gpt(*sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.session = None
        if name.startswith("gossip"):
            self.session = gg.gossip(
                self.model,
                self.optimizer,
                process_group=group,
                wire_dtype=torch.bfloat16 if "bf16" in name else None,
                mode="sync" if "sync" in name else "overlap",
            )
        elif name == "DDP over Gloo":
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def block(self, batches: list[Any]) -> float:
        """Seconds a step over a block of steps."""
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for batch in batches:
            train_step(self.model, self.optimizer, batch)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / len(batches)


def take_turns(
    group: dist.ProcessGroup, sizes: tuple[int, int], batch: int, blocks: int, steps: int
) -> dict[str, Any]:
    """Times of all contestants on this rank, by turns; the first block warms up."""
    torch.cuda.set_device(0)
    batches = [batch_of(batch) for _ in range(steps)]
    made = {name: Contestant(name, sizes, group) for name in CONTESTANTS}
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(blocks + 1):
        for name, contestant in made.items():
            seconds = contestant.block(batches)
            if number:
                times[name].append(seconds)
    stats = {}
    for name, contestant in made.items():
        if contestant.session is not None:
            held = contestant.session.stats()
            stats[name] = {"rounds": held.rounds, "outcomes": dict(held.outcomes)}
            contestant.session.close()
    parameters = sum(p.numel() for p in made["no exchange"].model.parameters())
    return {"times": times, "stats": stats, "parameters": parameters}


def step(sizes: tuple[int, int], batch: int, blocks: int, steps: int) -> dict[str, Any]:
    """Medians of all contestants, and the ratio of each to no exchange, block by block."""
    held = in_processes(2, take_turns, sizes, batch, blocks, steps)[0]
    alone = held["times"]["no exchange"]
    return {
        "layers, width": list(sizes),
        "parameters": held["parameters"],
        "batch": batch,
        "blocks": blocks,
        "steps": steps,
        "contestants": {
            name: {
                **quartiles(times),
                "ratio_to_no_exchange": round(
                    statistics.median(a / b for a, b in zip(times, alone, strict=True)), 3
                ),
                **{k: str(v) for k, v in held["stats"].get(name, {}).items()},
            }
            for name, times in held["times"].items()
        },
    }


def second_order(steps: int) -> dict[str, Any]:
    """Wall time of steps of SOAP on a GPT: median, and the 99th percentile over it.

    Without refreshes after the first, too.
    """
    found: dict[str, Any] = {}
    ways = {
        "none": gg.Refresh(10**9),
        "in the step": gg.Refresh(10),
        "5 late": gg.Refresh(10, delay=5),
        "5 late, on the host": gg.Refresh(10, delay=5, where="host"),
    }
    made = {}
    for name, refresh in ways.items():
        torch.manual_seed(0)
        model = gpt(4, 256)
        optimizer = gg.SOAP(model, lr=1e-4, refresh=refresh, max_dim=1024)
        made[name] = (model, optimizer)
    times: dict[str, list[float]] = {name: [] for name in made}
    batch = batch_of(16)
    for number in range(4):
        for name, (model, optimizer) in made.items():
            for _ in range(steps):
                torch.cuda.synchronize()
                start = time.perf_counter()
                train_step(model, optimizer, batch)
                torch.cuda.synchronize()
                if number:
                    times[name].append(time.perf_counter() - start)
    for name, (_, optimizer) in made.items():
        of_steps = spread(times[name])
        found[name] = {
            **quartiles(times[name]),
            "ms_mean": round(1e3 * statistics.mean(times[name]), 3),
            "ms_longest": round(1e3 * of_steps["longest"], 3),
            "p99_over_median": round(of_steps["p99"] / of_steps["median"], 3),
            "roots": str(optimizer.refresh_stats),
        }
        optimizer.close()
    return found


def main() -> None:
    """Measures all parts, and writes them after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device, and torch finds none")
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "seed": 0}
    parts: dict[str, Callable[[], Any]] = {
        "second_order": lambda: second_order(5 * options.steps),
        "step": lambda: [
            step((8, 512), batch, options.blocks, options.steps) for batch in (16, 64, 256)
        ],
    }
    for name, part in parts.items():
        begun = time.perf_counter()
        figures[name] = part()
        tell(f"{name}: {time.perf_counter() - begun:.0f} s", figures[name])
        path = write("gpu", figures)
    print(path)


if __name__ == "__main__":
    main()
